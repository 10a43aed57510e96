//! A provider that demands local registrations, chooses the keys itself and registers memory with
//! an endpoint: tcp, some of whose functions these tests replace. It takes no operation that
//! breaks a demand.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use kvx_core::Result;
use kvx_core::backend::{Context, Transport};

use super::unordered::{OpenedBy, notifications_wait};
use crate::config::Config;
use crate::factory;
use crate::ffi::bindings_1_17::*;
use crate::ffi::{self, Domain};
use crate::providers::{self, DeliveryProof};

const DEMANDS: u32 = FI_MR_LOCAL | FI_MR_PROV_KEY | FI_MR_ENDPOINT;

/// The types of the provider's own functions, and these functions.
type RegisterFunction =
    unsafe extern "C" fn(*mut fid, *const fi_mr_attr, u64, *mut *mut fid_mr) -> c_int;
type EndpointFunction =
    unsafe extern "C" fn(*mut fid_domain, *mut fi_info, *mut *mut fid_ep, *mut c_void) -> c_int;

static REGISTER: OnceLock<RegisterFunction> = OnceLock::new();
static ENDPOINT: OnceLock<EndpointFunction> = OnceLock::new();
static CLOSE: OnceLock<unsafe extern "C" fn(*mut fid) -> c_int> = OnceLock::new();
static RMA: OnceLock<fi_ops_rma> = OnceLock::new();
static MSG: OnceLock<fi_ops_msg> = OnceLock::new();

/// A registration, by its address.
struct Registered {
    memory: Range<u64>,
    key: u64,
    is_bound: bool,
    is_enabled: bool,
}

static REGISTERED: Mutex<Option<HashMap<usize, Registered>>> = Mutex::new(None);
static KEY: AtomicU64 = AtomicU64::new(1 << 20);
/// The numbers of operations with local descriptors, and with remote keys.
static CHECKED: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];
static BROKEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn registered<T>(use_it: impl FnOnce(&mut HashMap<usize, Registered>) -> T) -> T {
    use_it(REGISTERED.lock().unwrap().get_or_insert_with(HashMap::new))
}

/// Checks a range of local memory and the descriptor that it is used with.
fn check_local(what: &str, start: u64, len: usize, descriptor: *mut c_void) -> bool {
    let range = start..start + len as u64;
    let why = registered(|all| match all.get(&descriptor.addr()) {
        None => Some("no registration has this descriptor"),
        Some(one) if !one.is_enabled => Some("the registration is not enabled"),
        Some(one) if range.start < one.memory.start || range.end > one.memory.end => {
            Some("the memory is not within the registration")
        }
        Some(_) => None,
    });
    note(0, what, why)
}

/// Checks the key of remote memory, which is in this process.
fn check_remote(what: &str, key: u64) -> bool {
    let why = registered(|all| match all.values().find(|one| one.key == key) {
        None => Some("no registration has this key"),
        Some(one) if !one.is_enabled => Some("the peer's registration is not enabled"),
        Some(_) => None,
    });
    note(1, what, why)
}

fn note(kind: usize, what: &str, why: Option<&str>) -> bool {
    CHECKED[kind].fetch_add(1, Ordering::Relaxed);
    if let Some(why) = why {
        BROKEN.lock().unwrap().push(format!("{what}: {why}"));
    }
    why.is_none()
}

const REFUSED: isize = -(libc::EINVAL as isize);

unsafe extern "C" fn register(
    domain: *mut fid,
    attributes: *const fi_mr_attr,
    flags: u64,
    out: *mut *mut fid_mr,
) -> c_int {
    let key = KEY.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the caller's arguments, with another key; the new object has tables of functions.
    unsafe {
        let own = fi_mr_attr { requested_key: key, ..*attributes };
        let answer = REGISTER.get().unwrap()(domain, &own, flags, out);
        if answer == 0 {
            let memory = *own.mr_iov;
            let start = memory.iov_base.addr() as u64;
            let memory = start..start + memory.iov_len as u64;
            let raw = *out;
            let one = Registered { memory, key, is_bound: false, is_enabled: false };
            registered(|all| all.insert(raw.addr(), one));
            (*raw).mem_desc = raw.cast();
            let functions = *(*raw).fid.ops;
            CLOSE.get_or_init(|| functions.close.unwrap());
            let strict = fi_ops {
                close: Some(close),
                bind: Some(bind),
                control: Some(control),
                ..functions
            };
            (*raw).fid.ops = Box::leak(Box::new(strict));
        }
        answer
    }
}

unsafe extern "C" fn close(object: *mut fid) -> c_int {
    registered(|all| all.remove(&object.addr()));
    // SAFETY: the caller's argument.
    unsafe { CLOSE.get().unwrap()(object) }
}

unsafe extern "C" fn bind(object: *mut fid, _endpoint: *mut fid, _: u64) -> c_int {
    registered(|all| all.get_mut(&object.addr()).unwrap().is_bound = true);
    0
}

unsafe extern "C" fn control(object: *mut fid, command: c_int, _: *mut c_void) -> c_int {
    registered(|all| {
        let one = all.get_mut(&object.addr()).unwrap();
        one.is_enabled = one.is_bound && command == FI_ENABLE.cast_signed();
        if one.is_enabled { 0 } else { -libc::EINVAL }
    })
}

unsafe extern "C" fn open(
    domain: *mut fid_domain,
    info: *mut fi_info,
    out: *mut *mut fid_ep,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's arguments; the new object has tables of functions.
    unsafe {
        let answer = ENDPOINT.get().unwrap()(domain, info, out, context);
        if answer == 0 {
            let raw = *out;
            let (rma, msg) = (*(*raw).rma, *(*raw).msg);
            RMA.get_or_init(|| rma);
            MSG.get_or_init(|| msg);
            (*raw).rma = Box::leak(Box::new(fi_ops_rma {
                read: Some(read),
                write: Some(write),
                readmsg: Some(readmsg),
                writemsg: Some(writemsg),
                ..rma
            }));
            let strict = fi_ops_msg { send: Some(send), recv: Some(receive), ..msg };
            (*raw).msg = Box::leak(Box::new(strict));
        }
        answer
    }
}

/// Defines a function that checks its operation, and calls the provider's own without a descriptor.
macro_rules! checked {
    (
        $name:ident, $table:ident.$own:ident, $pointer:ty, ($($rest:ident: $type:ty),*), $remote:expr
    ) => {
        #[allow(clippy::too_many_arguments, reason = "it is libfabric's")]
        unsafe extern "C" fn $name(
            endpoint: *mut fid_ep,
            memory: $pointer,
            len: usize,
            descriptor: *mut c_void,
            peer: fi_addr_t,
            $($rest: $type,)*
            context: *mut c_void,
        ) -> isize {
            let what = stringify!($name);
            if !check_local(what, memory.addr() as u64, len, descriptor) || !$remote {
                return REFUSED;
            }
            let own = $table.get().unwrap().$own.unwrap();
            // SAFETY: the caller's arguments, without a descriptor, which tcp does not need.
            unsafe { own(endpoint, memory, len, std::ptr::null_mut(), peer, $($rest,)* context) }
        }
    };
}

checked!(send, MSG.send, *const c_void, (), true);
checked!(receive, MSG.recv, *mut c_void, (), true);
checked!(read, RMA.read, *mut c_void, (address: u64, key: u64), check_remote("read", key));
checked!(write, RMA.write, *const c_void, (address: u64, key: u64), check_remote("write", key));

/// Checks an operation of several ranges.
///
/// # Safety
/// The message is complete.
unsafe fn are_checked(what: &str, message: *const fi_msg_rma) -> bool {
    // SAFETY: guaranteed by the caller.
    let fi_msg_rma { msg_iov, desc, iov_count, rma_iov, rma_iov_count, .. } = unsafe { *message };
    let local = (0..iov_count).all(|at| {
        // SAFETY: guaranteed by the caller.
        let (range, descriptor) = unsafe { (*msg_iov.add(at), *desc.add(at)) };
        check_local(what, range.iov_base.addr() as u64, range.iov_len, descriptor)
    });
    // SAFETY: guaranteed by the caller.
    local && (0..rma_iov_count).all(|at| check_remote(what, unsafe { (*rma_iov.add(at)).key }))
}

macro_rules! checked_message {
    ($name:ident) => {
        unsafe extern "C" fn $name(
            endpoint: *mut fid_ep,
            message: *const fi_msg_rma,
            flags: u64,
        ) -> isize {
            // SAFETY: kvx passes complete messages; the provider gets them without descriptors.
            unsafe {
                if !are_checked(stringify!($name), message) {
                    return REFUSED;
                }
                let plain = fi_msg_rma { desc: std::ptr::null_mut(), ..*message };
                RMA.get().unwrap().$name.unwrap()(endpoint, &plain, flags)
            }
        }
    };
}

checked_message!(readmsg);
checked_message!(writemsg);

/// Makes a domain demand what this provider demands.
fn impose(domain: &Arc<Domain>) {
    // SAFETY: the domain is open, nothing was opened in it, and no other thread has it.
    unsafe {
        let raw = domain.raw();
        let info = domain.info().raw();
        (*(*info).domain_attr).mr_mode |= DEMANDS.cast_signed();
        let (domain_functions, mr_functions) = (*(*raw).ops, *(*raw).mr);
        REGISTER.get_or_init(|| mr_functions.regattr.unwrap());
        ENDPOINT.get_or_init(|| domain_functions.endpoint.unwrap());
        let strict = fi_ops_domain { endpoint: Some(open), ..domain_functions };
        (*raw).ops = Box::leak(Box::new(strict));
        let strict = fi_ops_mr { regattr: Some(register), ..mr_functions };
        (*raw).mr = Box::leak(Box::new(strict));
    }
}

fn open_strict(agent: Context) -> Result<Arc<dyn Transport>> {
    let library = ffi::LIBRARY.open().unwrap();
    let chosen = providers::choose(library, &Config::read(&agent.options)?, false)?;
    let parts = factory::build(&agent, library, &chosen, DeliveryProof::ReadBack, impose)?;
    kvx_backend::fabric::open(agent, parts)
}

#[test]
fn a_provider_gets_all_that_it_demands_of_registrations() {
    let test = "a_provider_gets_all_that_it_demands_of_registrations";
    let options = r#"{"libfabric": {"provider": "tcp;ofi_rxm", "domain": ["lo", "lo"]}}"#;
    let ran = notifications_wait(test, options, OpenedBy(open_strict));
    assert_eq!(*BROKEN.lock().unwrap(), [""; 0]);
    let checked = CHECKED.each_ref().map(|count| count.load(Ordering::Relaxed));
    assert!(!ran || checked.iter().all(|count| *count > 100), "{checked:?}");
}
