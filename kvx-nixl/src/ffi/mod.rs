//! NIXL's C++ interface: its objects with a layout declared by hand, the table of virtual
//! functions, and the functions in it.
//!
//! NIXL calls each function with pointers that are valid during the call, on any thread. No
//! function unwinds.

mod entries;
mod libstdcxx;
mod memory;

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{addr_of, addr_of_mut, null, null_mut};
use std::sync::OnceLock;

use crate::engine::{Descriptor, Engine};
use crate::installation::Installation;
use crate::log::warn;
use crate::vtable::TableRefusal;
use libstdcxx::{Map, Str, Vector};

/// `nixlBlobDesc`.
#[repr(C)]
struct Blob {
    address: u64,
    len: usize,
    device: u64,
    data: Str,
}

/// `nixl_meta_dlist_t`.
#[repr(C)]
struct Descriptors {
    table: *const c_void,
    kind: c_int,
    list: Vector<Descriptor>,
}

/// `nixl_opt_b_args_t`.
#[repr(C)]
struct BackendArgs {
    note: Str,
    has_note: bool,
    custom: Str,
}

/// `nixlBackendInitParams`.
#[repr(C)]
struct InitParams {
    agent: Str,
    kind: Str,
    parameters: *const Map,
    progress_thread: bool,
    delay: u64,
    sync: c_int,
    telemetry: bool,
}

/// `std::mutex`.
#[cfg(target_arch = "aarch64")]
type Lock = [u64; 6];
#[cfg(not(target_arch = "aarch64"))]
type Lock = [u64; 5];

/// `nixlBackendEngine`, followed by kvx's own fields.
#[repr(C)]
struct Object {
    table: *const *const c_void,
    kind: Str,
    parameters: Map,
    events: Vector<u64>,
    lock: Lock,
    failed: bool,
    agent: Str,
    telemetry: bool,
    ours: Engine,
}

/// `nixlBackendPlugin`.
#[repr(C)]
struct Plugin {
    interface: c_int,
    create: unsafe extern "C" fn(*const InitParams) -> *mut Object,
    destroy: unsafe extern "C" fn(*mut Object),
    name: extern "C" fn() -> *const c_char,
    version: extern "C" fn() -> *const c_char,
    options: extern "C" fn() -> Map,
    kinds: extern "C" fn() -> Vector<c_int>,
}

const _: () = assert!(
    size_of::<Blob>() == 56 && size_of::<Descriptor>() == 32 && size_of::<Descriptors>() == 40
);
const _: () = assert!(
    size_of::<BackendArgs>() == 72 && size_of::<InitParams>() == 96 && size_of::<Plugin>() == 56
);
const _: () = assert!(
    std::mem::offset_of!(Object, lock) == 120 && std::mem::offset_of!(Object, events) == 96
);
#[cfg(target_arch = "x86_64")]
const _: () = assert!(
    std::mem::offset_of!(Object, failed) == 160 && std::mem::offset_of!(Object, agent) == 168
);

const NAME: &std::ffi::CStr = c"KVX";
/// The maximum length of a kvx agent's name in bytes.
const LONGEST_NAME: usize = kvx_core::backend::MAX_NAME;

/// The table of all engines, for the life of the process, and the NIXL that it belongs to.
struct EngineTable {
    functions: Vec<*const c_void>,
    nixl: String,
}
// SAFETY: addresses of functions.
unsafe impl Send for EngineTable {}
// SAFETY: addresses of functions, which never change.
unsafe impl Sync for EngineTable {}

static TABLE: OnceLock<EngineTable> = OnceLock::new();

static PLUGIN: Plugin =
    Plugin { interface: 1, create, destroy, name, version, options, kinds: entries::kinds };

fn table() -> Result<&'static EngineTable, TableRefusal> {
    if let Some(table) = TABLE.get() {
        return Ok(table);
    }
    let Installation { order, name } = Installation::of_process()?;
    libstdcxx::find_heap().map_err(TableRefusal)?;
    // Offset to the top, no type information, and the two destructors: one for the object only, one
    // that also frees its memory.
    let mut functions = vec![null(), null()];
    functions.extend(order.slots().iter().enumerate().map(|(at, slot)| match (at, slot) {
        (0, _) => entries::end as *const c_void,
        (1, _) => destroy as *const c_void,
        (_, None) => entries::unsupported as *const c_void,
        (_, Some(function)) => entries::address_of(*function),
    }));
    Ok(TABLE.get_or_init(|| EngineTable { functions, nixl: name }))
}

/// The function that NIXL calls after it has loaded the library. A null result is a refusal, which
/// is logged.
#[unsafe(no_mangle)]
#[allow(unreachable_pub, reason = "the linker reaches it")]
pub extern "C" fn nixl_plugin_init() -> *const c_void {
    let found = catch_unwind(|| table().map(|_| ()));
    match found.unwrap_or_else(|_| Err(TableRefusal("its plug-ins could not be read".into()))) {
        Ok(()) => addr_of!(PLUGIN).cast(),
        Err(why) => {
            warn(format_args!("this backend is refused: {why}"));
            null()
        }
    }
}

/// The function that NIXL calls before it unloads the library, which stays loaded.
#[unsafe(no_mangle)]
#[allow(unreachable_pub, reason = "the linker reaches it")]
pub extern "C" fn nixl_plugin_fini() {}

extern "C" fn name() -> *const c_char {
    NAME.as_ptr()
}

extern "C" fn version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Returns the plug-in's options. It cannot panic: NIXL has this function from `nixl_plugin_init`,
/// which finds the heap first.
extern "C" fn options() -> Map {
    Map::empty()
}

/// Runs a body that may panic. Returns `None` if it did, and logs that.
fn guarded<T>(body: impl FnOnce() -> T) -> Option<T> {
    let done = catch_unwind(AssertUnwindSafe(body));
    if done.is_err() {
        warn("a call panicked: report this as a bug of kvx");
    }
    done.ok()
}

/// Creates an engine. A null result is a refusal, which is logged.
unsafe extern "C" fn create(setup: *const InitParams) -> *mut Object {
    // SAFETY: NIXL's parameters are valid during the call.
    guarded(|| unsafe { make(setup) }).flatten().unwrap_or(null_mut())
}

unsafe fn make(setup: *const InitParams) -> Option<*mut Object> {
    let table = TABLE.get()?;
    // SAFETY: NIXL's parameters are readable; their strings are only followed if they look like
    // strings.
    unsafe {
        let (kind, agent) = (addr_of!((*setup).kind), addr_of!((*setup).agent));
        let plausible = Str::is_plausible(kind, 15) && Str::bytes(kind) == NAME.to_bytes();
        if !plausible || !Str::is_plausible(agent, 1 << 20) || (*setup).parameters.is_null() {
            warn(format_args!(
                "{} passes its parameters in a layout that KVX does not know",
                table.nixl
            ));
            return None;
        }
        let (kind, agent) = (Str::bytes(kind), Str::bytes(agent));
        if agent.is_empty() || agent.len() > LONGEST_NAME {
            warn(format_args!(
                "an agent's name has 1 to {LONGEST_NAME} bytes, this one has {}",
                agent.len()
            ));
            return None;
        }
        let parameters = Map::pairs((*setup).parameters);
        let engine = Engine::new(&String::from_utf8_lossy(agent), &parameters, &table.nixl).ok()?;
        let object: *mut Object = Box::into_raw(Box::<Object>::new_uninit()).cast();
        addr_of_mut!((*object).table).write(table.functions.as_ptr().add(2));
        Str::make(addr_of_mut!((*object).kind), kind);
        addr_of_mut!((*object).parameters).write(Map::empty());
        addr_of_mut!((*object).events).write(Vector::EMPTY);
        addr_of_mut!((*object).lock).write(Lock::default());
        addr_of_mut!((*object).failed).write(false);
        Str::make(addr_of_mut!((*object).agent), agent);
        addr_of_mut!((*object).telemetry).write((*setup).telemetry);
        addr_of_mut!((*object).ours).write(engine);
        Some(object)
    }
}

/// Destroys an engine, and frees its memory.
unsafe extern "C" fn destroy(object: *mut Object) {
    if object.is_null() || kvx_core::backend::fork::check().is_err() {
        return; // a forked child drops no transport
    }
    // SAFETY: NIXL destroys each object from `create` once, when no call is in progress.
    let engine = unsafe {
        Str::end(addr_of_mut!((*object).kind));
        Str::end(addr_of_mut!((*object).agent));
        Map::end_empty(addr_of_mut!((*object).parameters));
        let engine = addr_of!((*object).ours).read();
        drop(Box::from_raw(object.cast::<std::mem::MaybeUninit<Object>>()));
        engine
    };
    guarded(|| engine.end());
}

#[cfg(test)]
mod tests {
    use std::mem::MaybeUninit;

    use super::*;

    /// Returns the result of `create` for these parameters after `spoil` has changed them.
    fn created(spoil: impl FnOnce(&mut InitParams)) -> *mut Object {
        libstdcxx::find_heap().expect("libstdc++ is installed");
        TABLE.get_or_init(|| EngineTable {
            functions: vec![null(); 64],
            nixl: "a NIXL of this test".to_owned(),
        });
        let parameters = Map::empty();
        let mut setup = MaybeUninit::<InitParams>::zeroed();
        let at = setup.as_mut_ptr();
        // SAFETY: everything is written, or may be zero, before it is read; the strings are leaked
        // and do not move.
        unsafe {
            Str::make(addr_of_mut!((*at).kind), NAME.to_bytes());
            Str::make(addr_of_mut!((*at).agent), b"an agent with a name of more than 15 bytes");
            (*at).parameters = &parameters;
            spoil(&mut *at);
            create(at)
        }
    }

    #[test]
    fn parameters_in_another_layout_are_rejected_without_following_pointers() {
        let object = created(|_| {});
        assert!(!object.is_null(), "NIXL's layout");
        // SAFETY: it is newly created, and has no other owner.
        unsafe { destroy(object) };
        let fits_none: [fn(&mut InitParams); 4] = [
            |setup| std::mem::swap(&mut setup.kind, &mut setup.agent),
            |setup| setup.parameters = null(),
            // A zeroed string in place of the agent's name.
            // SAFETY: a zeroed string is not a live one, and nobody follows it.
            |setup| setup.agent = unsafe { MaybeUninit::zeroed().assume_init() },
            // An additional field in front: all others are 8 bytes later.
            |setup| {
                let at: *mut u8 = (&raw mut *setup).cast();
                // SAFETY: both ranges are within it.
                unsafe { at.copy_to(at.add(8), size_of::<InitParams>() - 8) };
            },
        ];
        for (at, spoil) in fits_none.into_iter().enumerate() {
            assert!(created(spoil).is_null(), "{at}");
        }
    }

    #[test]
    fn panics_do_not_unwind_out_of_a_call() {
        assert_eq!(guarded(|| 1), Some(1));
        assert_eq!(guarded(|| -> u8 { panic!("of this test") }), None);
    }
}
