//! Tests the wrappers of libfabric with two endpoints in this process.

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvx_core::Op;

use super::bindings_1_17::{
    FI_ENOKEY, FI_MR_VIRT_ADDR, FI_WAIT_NONE, fi_cq_attr, fi_ops, fi_ops_domain, fid, fid_cq,
    fid_domain,
};
use super::*;

const PATIENCE: Duration = Duration::from_secs(10);
/// The length of completion queues.
const COMPLETIONS: usize = 64;

/// Opens an endpoint of a provider with 64 bytes for each operation. Returns `None` if libfabric is
/// not installed, and reports that.
fn endpoint(provider: &str, test: &str) -> Option<Endpoint> {
    let library = match LIBRARY.open() {
        Ok(library) => library,
        Err(why) => {
            kvx_testkit::skip(test, &why.to_string(), "cargo xtask test --install on Debian 12");
            return None;
        }
    };
    let asked =
        ProviderQuery { provider: Some(provider), delivery: provider != "shm", devices: false };
    let infos = Infos::find(library, asked).unwrap();
    let wanted = if provider == "shm" { "shm" } else { "lo" };
    let info = infos.iter().find(|info| info.domain() == wanted).unwrap();
    let domain = Domain::open(library, info).unwrap();
    Some(Endpoint::open(&domain, provider != "shm", COMPLETIONS, Arc::new(())).unwrap())
}

/// Opens two endpoints of a provider.
fn pair(provider: &str, test: &str) -> Option<(Endpoint, Endpoint)> {
    Some((endpoint(provider, test)?, endpoint(provider, test)?))
}

/// Retries a post while there is no capacity or no connection, and makes progress on both ends.
fn post(ends: [&Endpoint; 2], mut post: impl FnMut() -> Result<(), Errno>) {
    let until = Instant::now() + PATIENCE;
    while let Err(errno) = post() {
        assert_eq!(errno, Errno(libc::EAGAIN));
        assert!(Instant::now() < until, "there has been no capacity for too long");
        for end in ends {
            assert!(matches!(end.read(|_| panic!("nothing was posted")).unwrap(), Read::Nothing));
        }
    }
}

/// Makes progress on both ends until an operation of the first has ended.
fn wait([first, other]: [&Endpoint; 2]) -> Result<*mut c_void, FailedOperation> {
    let until = Instant::now() + PATIENCE;
    let mut ended = None;
    while Instant::now() < until {
        if let Read::Failed(failed) =
            first.read(|completion| ended = Some(completion.context)).unwrap()
        {
            return Err(failed);
        }
        if let Some(context) = ended {
            return Ok(context);
        }
        other.read(|_| ()).unwrap();
    }
    panic!("the operation has not ended");
}

fn described(memory: &[u8]) -> MemoryDescription<'static> {
    let address = memory.as_ptr().addr() as u64;
    MemoryDescription { address, len: memory.len(), read_only: false, device: None, file: None }
}

/// Returns the remote range that begins at byte `offset` of a registration.
fn remote(
    peer: PeerNumber,
    memory: &[u8],
    registration: &Registration,
    end: &Endpoint,
    offset: u64,
) -> RemoteRange {
    let by_address = end.domain().info().wants(FI_MR_VIRT_ADDR);
    let base = if by_address { memory.as_ptr().addr() as u64 } else { 0 };
    RemoteRange { peer, address: base + offset, key: registration.key() }
}

fn bytes_go_both_ways(provider: &str, test: &str) {
    let Some((near, far)) = pair(provider, test) else { return };
    let (mut ours, theirs) = (vec![1_u8; 8192], vec![2_u8; 8192]);
    let mut contexts = [[0_u64; 8]; 2];
    let [first, second] = contexts.each_mut().map(|context| context.as_mut_ptr().cast::<c_void>());
    // SAFETY: both memories and the contexts outlive all operations, which the test waits for.
    unsafe {
        let (local, lent) = (
            near.domain().register(described(&ours), 7).unwrap(),
            far.domain().register(described(&theirs), 9).unwrap(),
        );
        let peer = near.insert(&far.address().unwrap()).unwrap();
        let at = ours.as_mut_ptr();
        let range = |local_offset, remote_offset| Range {
            local: at.add(local_offset),
            len: 4096,
            descriptor: local.descriptor(),
            remote: remote(peer, &theirs, &lent, &far, remote_offset),
        };
        post([&near, &far], || near.transfer(Op::Read, range(0, 4096), first));
        assert_eq!(wait([&near, &far]).unwrap(), first);
        post([&near, &far], || near.transfer(Op::Write, range(4096, 0), second));
        assert_eq!(wait([&near, &far]).unwrap(), second);
    }
    assert!(
        ours[..4096].iter().all(|byte| *byte == 2) && ours[4096..].iter().all(|byte| *byte == 1)
    );
    // SAFETY: the memory is allocated, and no operation on it is in flight.
    let came = |at: usize| unsafe { theirs.as_ptr().wrapping_add(at).read_volatile() };
    assert_eq!([came(0), came(4095), came(4096)], [1, 1, 2]);
}

/// Makes libfabric report that an object is in use when it is closed; the object stays open.
///
/// # Safety
/// The object is open.
unsafe fn refuse_to_close(object: *mut fid) {
    unsafe extern "C" fn refuse(_: *mut fid) -> std::ffi::c_int {
        -libc::EBUSY
    }
    // SAFETY: an open object has a table of functions, of which only `close` is called from now on.
    unsafe {
        let functions = fi_ops { close: Some(refuse), ..*(*object).ops };
        (*object).ops = Box::leak(Box::new(functions));
    }
}

#[test]
fn an_object_that_the_provider_keeps_is_reported() {
    const NAME: &str = "an_object_that_the_provider_keeps_is_reported";
    let Some(end) = endpoint("tcp;ofi_rxm", NAME) else { return };
    let memory = vec![0_u8; 8192].leak();
    let given: Arc<()> = Arc::default();
    let other = Endpoint::open(end.domain(), false, COMPLETIONS, Arc::clone(&given) as _).unwrap();
    // SAFETY: the memory is never freed; both objects are open.
    let registration = unsafe {
        let registration = end.domain().register(described(memory), 7).unwrap();
        refuse_to_close(registration.fid());
        refuse_to_close(other.fid());
        registration
    };
    assert_eq!(registration.close(), Err(Errno(libc::EBUSY)));
    assert_eq!(other.close(), Err(Errno(libc::EBUSY)));
    assert_eq!(
        Arc::strong_count(&given),
        2,
        "the provider may still use the memory that it was given"
    );
    end.close().unwrap();
}

#[test]
fn bytes_go_both_ways_over_sockets() {
    bytes_go_both_ways("tcp;ofi_rxm", "bytes_go_both_ways_over_sockets");
}

#[test]
fn bytes_go_both_ways_over_shared_memory() {
    bytes_go_both_ways("shm", "bytes_go_both_ways_over_shared_memory");
}

#[test]
fn ranges_go_together_over_sockets() {
    let Some((near, far)) = pair("tcp;ofi_rxm", "ranges_go_together_over_sockets") else { return };
    assert!(near.domain().info().ranges() >= MAX_RANGES);
    let (mut ours, mut theirs) = (vec![1_u8; 800], vec![2_u8; 800]);
    theirs[300..400].fill(3);
    let mut context = [0_u64; 8];
    let context = context.as_mut_ptr().cast();
    // SAFETY: the vectors and the context outlive the operations, which the test waits for, and the
    // registrations.
    unsafe {
        let local = near.domain().register(described(&ours), 7).unwrap();
        let lent = far.domain().register(described(&theirs), 9).unwrap();
        let peer = near.insert(&far.address().unwrap()).unwrap();
        let at = ours.as_mut_ptr();
        let range = |(from_ours, in_theirs): (usize, u64)| Range {
            local: at.add(from_ours),
            len: 100,
            descriptor: local.descriptor(),
            remote: remote(peer, &theirs, &lent, &far, in_theirs),
        };
        let go = |op, ranges: &[(usize, u64)]| {
            post([&near, &far], || {
                near.transfer_all(op, ranges.iter().copied().map(range), context)
            });
            assert_eq!(wait([&near, &far]).unwrap(), context);
        };
        go(Op::Read, &[(0, 300), (200, 0), (600, 700), (400, 300)]);
        go(Op::Write, &[(0, 500), (700, 0)]);
    }
    let first = |memory: &[u8]| {
        [0, 1, 2, 3, 4, 5, 6, 7].map(|at| {
            // SAFETY: the memory is allocated, and no operation on it is in flight.
            unsafe { memory.as_ptr().add(at * 100).read_volatile() }
        })
    };
    assert_eq!(first(&ours), [3, 1, 2, 1, 3, 1, 2, 1]);
    assert_eq!(first(&theirs), [1, 2, 2, 3, 2, 3, 2, 2]);
}

#[test]
fn over_sockets_the_owner_refuses_what_is_outside_and_what_has_another_key() {
    let test = "over_sockets_the_owner_refuses_what_is_outside_and_what_has_another_key";
    for wrong in [(8192 - 100, 0), (0, 1)] {
        let Some((near, far)) = pair("tcp;ofi_rxm", test) else { return };
        let (mut ours, theirs) = (vec![1_u8; 4096], vec![2_u8; 8192]);
        let mut context = [0_u64; 8];
        // SAFETY: the vectors and the context outlive the operation, which the test waits for, and
        // the registrations, which this block drops.
        unsafe {
            let local = near.domain().register(described(&ours), 7).unwrap();
            let lent = far.domain().register(described(&theirs), 9).unwrap();
            let peer = near.insert(&far.address().unwrap()).unwrap();
            let to = remote(peer, &theirs, &lent, &far, wrong.0);
            let range = Range {
                local: ours.as_mut_ptr(),
                len: 4096,
                descriptor: local.descriptor(),
                remote: RemoteRange { key: to.key + wrong.1, ..to },
            };
            let context = context.as_mut_ptr().cast();
            post([&near, &far], || near.transfer(Op::Write, range, context));
            assert_eq!(wait([&near, &far]).unwrap_err().context, context, "{wrong:?}");
        }
        assert!(theirs.iter().all(|byte| *byte == 2));
    }
}

#[test]
fn the_interface_with_dma_bufs_is_requested_where_the_library_has_it() {
    let [old, with, new] =
        [(1, 17), (1, 20), (2, 5)].map(|(major, minor)| Version::of(major, minor));
    assert_eq!([old, with, new].map(library::interface_of), [old, with, with]);
    let test = "the_interface_with_dma_bufs_is_requested_where_the_library_has_it";
    let Some(end) = endpoint("tcp;ofi_rxm", test) else { return };
    let version = LIBRARY.opened().unwrap().version();
    assert_eq!(end.domain().info().interface(), library::interface_of(version));
}

#[test]
fn a_key_is_taken_once() {
    let Some(end) = endpoint("tcp;ofi_rxm", "a_key_is_taken_once") else { return };
    let memory = vec![0_u8; 4096];
    // SAFETY: the memory outlives its registrations.
    unsafe {
        let first = end.domain().register(described(&memory), 7).unwrap();
        assert_eq!(first.key(), 7);
        let errno = end.domain().register(described(&memory), 7).err().unwrap();
        assert_eq!(errno, Errno(FI_ENOKEY.cast_signed()));
        drop(first);
        assert!(end.domain().register(described(&memory), 7).is_ok());
    }
}

#[test]
fn an_endpoint_over_sockets_may_be_slept_on_and_one_over_shared_memory_not() {
    let test = "an_endpoint_over_sockets_may_be_slept_on_and_one_over_shared_memory_not";
    let Some(sockets) = endpoint("tcp;ofi_rxm", test) else { return };
    let Some(shared) = endpoint("shm", test) else { return };
    assert!(matches!(sockets.wait_method(), WaitMethod::Descriptor(descriptor) if descriptor >= 0));
    assert!(sockets.may_sleep(), "no event has occurred");
    assert_eq!(shared.wait_method(), WaitMethod::Never);
    assert!(has_descriptors(sockets.domain()));
    refuse_descriptors(sockets.domain());
    assert!(!has_descriptors(sockets.domain()), "as EFA");
    let polled = |sleeps| Endpoint::open(sockets.domain(), sleeps, COMPLETIONS, Arc::new(()));
    assert!(polled(true).is_err() && polled(false).is_ok());
}

type OpenQueue = unsafe extern "C" fn(
    *mut fid_domain,
    *mut fi_cq_attr,
    *mut *mut fid_cq,
    *mut c_void,
) -> std::ffi::c_int;

/// Makes a domain open no queue with a descriptor.
fn refuse_descriptors(domain: &Domain) {
    static OPEN: OnceLock<OpenQueue> = OnceLock::new();
    unsafe extern "C" fn refuse(
        domain: *mut fid_domain,
        attributes: *mut fi_cq_attr,
        queue: *mut *mut fid_cq,
        context: *mut c_void,
    ) -> std::ffi::c_int {
        // SAFETY: the caller's arguments.
        unsafe {
            match OPEN.get() {
                Some(open) if (*attributes).wait_obj == FI_WAIT_NONE => {
                    open(domain, attributes, queue, context)
                }
                _ => -libc::ENOSYS,
            }
        }
    }
    // SAFETY: the domain is open and has a table of functions.
    unsafe {
        let raw = domain.raw();
        OPEN.get_or_init(|| (*(*raw).ops).cq_open.expect("it opens queues"));
        let functions = fi_ops_domain { cq_open: Some(refuse), ..*(*raw).ops };
        (*raw).ops = Box::leak(Box::new(functions));
    }
}

#[test]
fn shared_memory_that_a_process_of_this_number_left_is_passed_over() {
    let test = "shared_memory_that_a_process_of_this_number_left_is_passed_over";
    let Some(first) = endpoint("shm", test) else { return };
    let address = String::from_utf8(first.address().unwrap()).unwrap();
    let name = address.trim_end_matches('\0').strip_prefix("fi_shm://").unwrap();
    let (before, number) = name.rsplit_once(':').unwrap();
    let number: u32 = number.parse().unwrap();
    // Killed processes leave such files. Create several, because concurrent tests take some of the
    // next names.
    let copy = format!("/dev/shm/{name}-left");
    std::fs::copy(format!("/dev/shm/{name}"), &copy).unwrap();
    let names: Vec<String> =
        (1..8).map(|next| format!("/dev/shm/{before}:{}", number + next)).collect();
    let left: Vec<&String> =
        names.iter().filter(|path| std::fs::hard_link(&copy, path).is_ok()).collect();
    std::fs::remove_file(copy).unwrap();
    let next = endpoint("shm", test).unwrap().address().unwrap();
    for path in left {
        std::fs::remove_file(path).ok(); // the library removes the files that it finds
    }
    assert_ne!(next, address.as_bytes());
}
