//! The functions in the table.

use std::ffi::{c_int, c_void};
use std::ptr::addr_of;

use kvx::Op;

use super::libstdcxx::{Str, Vector};
use super::memory::{DEVICE, HOST, adopt};
use super::{BackendArgs, Blob, Descriptors, Object, guarded};
use crate::engine::Engine;
use crate::handles::NixlHandle;
use crate::log::warn;
use crate::status::{NixlResult, NixlStatus};
use crate::vtable::Function;

/// Returns the function of a slot.
pub(super) fn address_of(function: Function) -> *const c_void {
    match function {
        Function::SupportsRemote | Function::SupportsLocal | Function::SupportsNotif => {
            yes as *const c_void
        }
        Function::SupportedMems => kinds_of as *const c_void,
        Function::RegisterMem => register as *const c_void,
        Function::DeregisterMem => deregister as *const c_void,
        Function::Connect => connect as *const c_void,
        Function::Disconnect => disconnect as *const c_void,
        Function::UnloadMd => unload as *const c_void,
        Function::PrepXfer => prepare as *const c_void,
        Function::PostXfer => post as *const c_void,
        Function::CheckXfer => check as *const c_void,
        Function::ReleaseReq => release as *const c_void,
        Function::PublicData => public_data as *const c_void,
        Function::ConnInfo => introduction as *const c_void,
        Function::LoadRemoteConnInfo => load_peer as *const c_void,
        Function::LoadRemoteMd => load_remote as *const c_void,
        Function::LoadLocalMd => load_local as *const c_void,
        Function::GetNotifs => notifications as *const c_void,
        Function::GenNotif => notify as *const c_void,
    }
}

/// Calls `body` with the engine. Returns its result as NIXL's status.
///
/// # Safety
/// `create` returned `this`, and `destroy` has not freed it.
unsafe fn on(this: *const Object, body: impl FnOnce(&Engine) -> NixlResult<NixlStatus>) -> c_int {
    let whole = guarded(|| {
        if let Err(error) = kvx_core::backend::fork::check() {
            warn(error);
            return Err(NixlStatus::Backend);
        }
        // SAFETY: guaranteed by the caller; all threads share the engine.
        body(unsafe { &*addr_of!((*this).ours) })
    });
    match whole {
        Some(Ok(status) | Err(status)) => status as c_int,
        None => NixlStatus::Backend as c_int,
    }
}

fn done(outcome: NixlResult) -> NixlResult<NixlStatus> {
    outcome.map(|()| NixlStatus::Success)
}

/// Writes a handle to `out`.
///
/// # Safety
/// `out` is writable.
unsafe fn give(handle: NixlResult<NixlHandle>, out: *mut NixlHandle) -> NixlResult<NixlStatus> {
    // SAFETY: guaranteed by the caller.
    handle.map(|handle| unsafe {
        out.write(handle);
        NixlStatus::Success
    })
}

/// Returns true. Like all functions below that return a constant, it cannot panic.
extern "C" fn yes(_: *const Object) -> bool {
    true
}

fn listed(kinds: &[c_int]) -> Vector<c_int> {
    let mut list = Vector::<c_int>::EMPTY;
    // SAFETY: it is empty, and has space for the elements that are copied.
    unsafe {
        Vector::grow(&mut list, kinds.len()).copy_from_nonoverlapping(kinds.as_ptr(), kinds.len())
    };
    list
}

/// Returns the kinds of memory that KVX can serve. NIXL calls this for every plug-in, including
/// unused ones, so it starts no driver.
pub(super) extern "C" fn kinds() -> Vector<c_int> {
    guarded(|| listed(&[HOST, DEVICE])).unwrap_or(Vector::EMPTY)
}

/// Returns the kinds that this agent serves: GPU memory if there are GPUs. NIXL registers no other
/// kind with it.
unsafe extern "C" fn kinds_of(this: *const Object) -> Vector<c_int> {
    let kinds = guarded(|| {
        // SAFETY: NIXL passes an object that `create` returned and `destroy` has not freed.
        let engine = unsafe { &*addr_of!((*this).ours) };
        listed(if engine.devices().all().is_empty() { &[HOST] } else { &[HOST, DEVICE] })
    });
    kinds.unwrap_or(Vector::EMPTY)
}

/// Returns `NIXL_ERR_NOT_SUPPORTED`, in slots that KVX does not implement.
pub(super) extern "C" fn unsupported(_: *const Object) -> c_int {
    NixlStatus::NotSupported as c_int
}

/// The destructor that does not free the memory: NIXL does not use it.
pub(super) extern "C" fn end(_: *mut Object) {}

// SAFETY (all functions below): NIXL calls them through the table of an object that `create`
// returned, with strings, lists and result locations that are valid during the call.

unsafe extern "C" fn register(
    this: *mut Object,
    blob: *const Blob,
    kind: *const c_int,
    out: *mut NixlHandle,
) -> c_int {
    // SAFETY: NIXL passes an object that `create` returned and `destroy` has not freed.
    unsafe {
        on(this, |engine| {
            let memory = adopt(&*blob, *kind, engine.devices())?;
            give(engine.register(memory), out)
        })
    }
}

unsafe extern "C" fn deregister(this: *mut Object, memory: NixlHandle) -> c_int {
    // SAFETY: NIXL passes an object that `create` returned and `destroy` has not freed.
    unsafe { on(this, |engine| done(engine.deregister(memory))) }
}

/// Does nothing: links open when a peer introduces itself, or when this agent first names itself.
unsafe extern "C" fn connect(_: *mut Object, _: *const Str) -> c_int {
    NixlStatus::Success as c_int
}

unsafe extern "C" fn disconnect(this: *mut Object, agent: *const Str) -> c_int {
    // SAFETY: NIXL passes an object that `create` returned and `destroy` has not freed.
    unsafe {
        on(this, |engine| {
            engine.forget_peer(&Str::text(agent));
            Ok(NixlStatus::Success)
        })
    }
}

unsafe extern "C" fn unload(this: *mut Object, memory: NixlHandle) -> c_int {
    // SAFETY: NIXL passes an object that `create` returned and `destroy` has not freed.
    unsafe {
        on(this, |engine| {
            engine.unload(memory);
            Ok(NixlStatus::Success)
        })
    }
}

unsafe extern "C" fn prepare(
    this: *const Object,
    op: *const c_int,
    local: *const Descriptors,
    remote: *const Descriptors,
    agent: *const Str,
    out: *mut NixlHandle,
    _: *const BackendArgs,
) -> c_int {
    // SAFETY: NIXL passes an object that `create` returned and `destroy` has not freed.
    unsafe {
        on(this, |engine| {
            let op = if *op == 0 { Op::Read } else { Op::Write };
            let (local, remote) = (addr_of!((*local).list), addr_of!((*remote).list));
            let (local, remote) = (Vector::slice(local), Vector::slice(remote));
            give(engine.prepare(op, local, remote, &Str::text(agent)), out)
        })
    }
}

unsafe extern "C" fn post(
    this: *const Object,
    _: *const c_int,
    _: *const Descriptors,
    _: *const Descriptors,
    _: *const Str,
    request: *const NixlHandle,
    extra: *const BackendArgs,
) -> c_int {
    // SAFETY: NIXL passes an object that `create` returned and `destroy` has not freed.
    unsafe {
        on(this, |engine| {
            let has_note = !extra.is_null() && (*extra).has_note;
            let note = has_note.then(|| Str::bytes(addr_of!((*extra).note)));
            engine.post(*request, note)
        })
    }
}

unsafe extern "C" fn check(this: *const Object, request: NixlHandle) -> c_int {
    // SAFETY: NIXL passes an object that `create` returned and `destroy` has not freed.
    unsafe { on(this, |engine| engine.check(request)) }
}

unsafe extern "C" fn release(this: *const Object, request: NixlHandle) -> c_int {
    // SAFETY: NIXL passes an object that `create` returned and `destroy` has not freed.
    unsafe { on(this, |engine| done(engine.release(request))) }
}

unsafe extern "C" fn public_data(this: *const Object, memory: NixlHandle, out: *mut Str) -> c_int {
    // SAFETY: NIXL passes an object that `create` returned and `destroy` has not freed.
    unsafe {
        on(this, |engine| {
            Str::set(out, &engine.public_data(memory)?);
            Ok(NixlStatus::Success)
        })
    }
}

unsafe extern "C" fn introduction(this: *const Object, out: *mut Str) -> c_int {
    // SAFETY: NIXL passes an object that `create` returned and `destroy` has not freed.
    unsafe {
        on(this, |engine| {
            Str::set(out, engine.introduction());
            Ok(NixlStatus::Success)
        })
    }
}

unsafe extern "C" fn load_peer(
    this: *mut Object,
    agent: *const Str,
    introduction: *const Str,
) -> c_int {
    // SAFETY: NIXL passes an object that `create` returned and `destroy` has not freed.
    unsafe {
        on(this, |engine| done(engine.load_peer(&Str::text(agent), Str::bytes(introduction))))
    }
}

unsafe extern "C" fn load_remote(
    this: *mut Object,
    blob: *const Blob,
    _: *const c_int,
    agent: *const Str,
    out: *mut NixlHandle,
) -> c_int {
    // SAFETY: NIXL passes an object that `create` returned and `destroy` has not freed.
    unsafe {
        on(this, |engine| {
            let (address, len, data) =
                ((*blob).address, (*blob).len as u64, Str::bytes(addr_of!((*blob).data)));
            give(engine.load_remote(address, len, data, &Str::text(agent)), out)
        })
    }
}

unsafe extern "C" fn load_local(
    this: *mut Object,
    memory: NixlHandle,
    out: *mut NixlHandle,
) -> c_int {
    // SAFETY: NIXL passes an object that `create` returned and `destroy` has not freed.
    unsafe { on(this, |engine| give(engine.load_local(memory), out)) }
}

unsafe extern "C" fn notifications(this: *mut Object, out: *mut Vector<[Str; 2]>) -> c_int {
    // SAFETY: NIXL passes an object that `create` returned and `destroy` has not freed, and an
    // empty list, in which each string is initialised.
    unsafe {
        on(this, |engine| {
            if !Vector::slice(out).is_empty() {
                return Err(NixlStatus::InvalidParam);
            }
            let got = engine.notifications();
            if got.is_empty() {
                return Ok(NixlStatus::Success);
            }
            let first = Vector::grow(out, got.len()).cast::<Str>();
            for (at, (agent, note)) in got.iter().enumerate() {
                Str::make(first.add(2 * at), agent.as_bytes());
                Str::make(first.add(2 * at + 1), note);
            }
            Ok(NixlStatus::Success)
        })
    }
}

unsafe extern "C" fn notify(this: *const Object, agent: *const Str, note: *const Str) -> c_int {
    // SAFETY: NIXL passes an object that `create` returned and `destroy` has not freed.
    unsafe { on(this, |engine| done(engine.notify(&Str::text(agent), Str::bytes(note)))) }
}
