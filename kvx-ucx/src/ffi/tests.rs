//! Tests the bindings and the owners of handles on every version of UCX, with two workers in this
//! process.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{Op, Options};

use super::bindings_1_13::{
    UCP_AM_SEND_FLAG_RNDV, UCP_OP_ATTR_FIELD_FLAGS, UCS_ERR_CANCELED, ucp_ep_h, ucs_status_t,
};
use super::lists::{self, Sgl};
use super::*;
use crate::config::{Config, Setting};
use crate::versions;

/// Runs `test`, the full name of a test, in a process for each version; that process calls `body`.
fn on_every_version(test: &str, body: fn(&'static Library)) {
    versions::on_each(test, |version| {
        let library = LIBRARY.open().expect("the parent has found it");
        let Version { major, minor, .. } = library.version();
        assert_eq!((major, minor), version.number, "{}", library.path().display());
        body(library);
    });
}

/// Counts completed operations and keeps the last error.
#[derive(Default)]
struct Ends {
    count: Cell<usize>,
    error: Cell<Option<Status>>,
}

impl CompletionHandler for Ends {
    unsafe fn on_completion(this: NonNull<Self>, outcome: Result<(), Status>) {
        // SAFETY: the test keeps it until all operations have ended.
        let ends = unsafe { this.as_ref() };
        ends.count.set(ends.count.get() + 1);
        ends.error.set(outcome.err().or(ends.error.get()));
    }
}

impl Ends {
    fn target(&self) -> NonNull<Ends> {
        NonNull::from(self)
    }
}

/// The active messages received.
#[derive(Default)]
struct Mail(Cell<Vec<(Vec<u8>, Vec<u8>)>>);

impl MessageHandler for Mail {
    unsafe fn on_message(this: NonNull<Self>, message: Message<'_>) {
        // SAFETY: the test keeps it as long as the worker.
        let mail = unsafe { &this.as_ref().0 };
        let mut letters = mail.take();
        letters.push((message.header.to_vec(), message.data.to_vec()));
        mail.set(letters);
    }
}

unsafe extern "C" fn ignored(_: *mut c_void, _: ucp_ep_h, _: ucs_status_t) {}

fn until(workers: [&Worker; 2], mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !done() {
        for worker in workers {
            worker.progress();
        }
        assert!(Instant::now() < end, "it took 10 s");
    }
}

/// Waits for the end of `posted`, whose callback counts in `ends`.
fn ending(workers: [&Worker; 2], ends: &Ends, posted: PostOutcome) -> Result<(), Status> {
    match posted {
        PostOutcome::Done => {}
        PostOutcome::Failed(status) => return Err(status),
        PostOutcome::Pending => {
            // Memory that peers write to is read only after the operation has ended.
            let before = ends.count.get();
            until(workers, || ends.count.get() > before);
        }
    }
    ends.error.take().map_or(Ok(()), Err)
}

fn finish(workers: [&Worker; 2], ends: &Ends, posted: PostOutcome) {
    assert_eq!(ending(workers, ends, posted), Ok(()));
}

/// Returns kvx's settings when the user restricts UCX to `tls`.
fn settings(library: &Library, tls: &str) -> Vec<Setting> {
    let options = Options::parse(&format!(r#"{{"ucx": {{"tls": {tls:?}}}}}"#)).unwrap();
    Config::read(&options).unwrap().settings(library.path())
}

fn everything_over(library: &'static Library, tls: &str) {
    let context = UcxContext::new(library, &settings(library, tls)).expect("a context");
    let (near, far) =
        (Worker::new(&context).expect("a worker"), Worker::new(&context).expect("a worker"));
    let workers = [&near, &far];
    let (ends, mail) = (Ends::default(), Mail::default());
    // SAFETY: `mail` outlives the last use of the workers; nothing is sent later.
    unsafe { far.deliver(7, NonNull::from(&mail)) }.expect("a handler");
    let address = far.address().expect("an address");
    // SAFETY: closed below.
    let endpoint = unsafe { near.connect(&address, ignored, std::ptr::null_mut()) };
    let endpoint = endpoint.unwrap_or_else(|status| panic!("over {tls}: {status:?}"));

    let count = 8;
    let mut far_bytes: Vec<u8> = (0..count * 1000).map(|at| at as u8).collect();
    let mut near_bytes = vec![0_u8; far_bytes.len()];
    let map = |memory: &mut [u8]| {
        let mapping = MapParams::new(memory.as_mut_ptr(), memory.len(), None);
        // SAFETY: both outlive the registrations.
        unsafe { context.map(&mapping) }.expect("mapped")
    };
    let (at_far, at_near) = (map(&mut far_bytes), map(&mut near_bytes));
    let key = at_far.key().expect("a key");
    // SAFETY: one thread, and the endpoint is open.
    let key = unsafe { endpoint.unpack(&key.0) }.expect("an unpacked key");
    let (remote, local) = (far_bytes.as_mut_ptr(), near_bytes.as_mut_ptr());

    for piece in 0..count {
        let at = piece * 1000;
        let back = (count - 1 - piece) * 1000;
        // SAFETY: within both regions, which outlive the operation, as `ends` does; the test waits
        // for it.
        let posted = unsafe {
            let (local, remote) = (local.add(back), remote.add(at) as u64);
            let memory = Some(at_near.raw());
            endpoint.transfer(Op::Read, (local, 1000), memory, (remote, &key), ends.target())
        };
        finish(workers, &ends, posted);
    }
    for piece in 0..count {
        assert_eq!(
            near_bytes[(count - 1 - piece) * 1000..][..1000],
            far_bytes[piece * 1000..][..1000],
            "{tls}"
        );
    }

    near_bytes.fill(11);
    if lists::is_supported_by(library) {
        let mut list = Sgl::default();
        for piece in 0..count {
            // SAFETY: within both regions.
            let (local, remote) =
                unsafe { (local.add(piece * 1000), remote.add(piece * 1000) as u64) };
            list.push(local, 500 + piece, at_near.raw(), remote, &key);
        }
        // SAFETY: all ranges are within both regions, which outlive the operation, as `list` and
        // `ends` do; `finish` waits for it.
        finish(workers, &ends, unsafe { list.put(&endpoint, ends.target()) });
    }
    for piece in (0..count).filter(|_| !lists::is_supported_by(library)) {
        // SAFETY: within both regions, which outlive the operation, as `ends` does; the test waits
        // for it.
        let posted = unsafe {
            let (local, remote) = (local.add(piece * 1000), remote.add(piece * 1000) as u64);
            let (local, memory) = ((local, 500 + piece), Some(at_near.raw()));
            endpoint.transfer(Op::Write, local, memory, (remote, &key), ends.target())
        };
        finish(workers, &ends, posted);
    }
    // SAFETY: one thread, and the endpoint is open; `ends` outlives the operation.
    finish(workers, &ends, unsafe { endpoint.flush(ends.target()) });
    for piece in 0..count {
        let written = far_bytes[piece * 1000..][..1000].iter().filter(|byte| **byte == 11).count();
        assert!(
            (500 + piece..510 + piece).contains(&written),
            "piece {piece} over {tls}: {written}"
        );
    }

    // SAFETY: both texts are constants; `ends` outlives the operation.
    finish(workers, &ends, unsafe { endpoint.send(7, b"header", b"data", ends.target()) });
    let mut letters = Vec::new();
    until(workers, || {
        letters.append(&mut mail.0.take());
        !letters.is_empty()
    });
    assert_eq!(letters, [(b"header".to_vec(), b"data".to_vec())]);

    assert!(context.printed().contains("tcp") || tls == "sm", "{}", context.printed());
    // SAFETY: the endpoint is open.
    let lanes = unsafe { endpoint.printed() };
    assert!(lanes.contains("lane"), "{lanes}");
    // SAFETY: the endpoint is open.
    match unsafe { endpoint.transports(library.version()) } {
        None => assert!(library.version() < Version::new(1, 14, 0)),
        Some(transports) => {
            assert!(!transports.is_empty());
            for (number, LaneTransport { transport, device }) in transports.iter().enumerate() {
                let mut printed =
                    lanes.lines().filter(|line| line.contains(&format!("lane[{number}]")));
                let name = format!(":{transport}/{device}");
                assert!(printed.next().is_some_and(|line| line.contains(&name)), "{name}: {lanes}");
            }
            assert_eq!(lanes.matches("lane[").count(), transports.len(), "{lanes}");
        }
    }
    let worker = near.printed_with_protocols();
    assert!(worker.contains("address"), "{worker}");
    let chosen = match (library.version().minor, tls) {
        (13, _) => "",
        (_, "tcp") => "gets: 0..inf software emulation tcp/lo; puts: 0..inf zero-copy tcp/lo",
        (_, _) => "gets: 0..inf zero-copy cma/memory; puts: 0..inf zero-copy cma/memory",
    };
    let told = crate::protocols::chosen(&lanes, &worker);
    // 1.23 lists the protocols of lists as well.
    let own = told.strip_prefix(chosen).unwrap_or_else(|| panic!("{told}\n{worker}"));
    assert_eq!(own.is_empty(), !lists::is_supported_by(library), "{told}");

    drop(key);
    // SAFETY: its key is dropped, and no operation is in flight.
    finish(workers, &ends, unsafe { endpoint.close(ends.target()) });
    drop((at_near, at_far));
    assert_eq!(Arc::strong_count(&context), 3, "the two workers and this");
}

#[test]
fn operations_reach_the_other_worker_over_tcp() {
    on_every_version("ffi::tests::operations_reach_the_other_worker_over_tcp", |library| {
        everything_over(library, "tcp");
    });
}

#[test]
fn operations_reach_the_other_worker_over_shared_memory() {
    on_every_version(
        "ffi::tests::operations_reach_the_other_worker_over_shared_memory",
        |library| {
            everything_over(library, "sm");
        },
    );
}

#[test]
fn operations_reach_the_other_worker_by_default() {
    on_every_version("ffi::tests::operations_reach_the_other_worker_by_default", |library| {
        everything_over(library, "all");
    });
}

#[test]
fn messages_that_a_worker_would_have_to_fetch_are_refused() {
    on_every_version(
        "ffi::tests::messages_that_a_worker_would_have_to_fetch_are_refused",
        |library| {
            let context = UcxContext::new(library, &settings(library, "tcp")).expect("a context");
            let (near, far) = (
                Worker::new(&context).expect("a worker"),
                Worker::new(&context).expect("a worker"),
            );
            let workers = [&near, &far];
            let (ends, mail) = (Ends::default(), Mail::default());
            // SAFETY: `mail` outlives the last use of the workers; nothing is sent later.
            unsafe { far.deliver(7, NonNull::from(&mail)) }.expect("a handler");
            let address = far.address().expect("an address");
            // SAFETY: closed below.
            let endpoint = unsafe { near.connect(&address, ignored, std::ptr::null_mut()) }
                .expect("an endpoint");
            let long = vec![1_u8; 100_000];
            let mut param = request::with_callback(ends.target());
            param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
            param.flags = UCP_AM_SEND_FLAG_RNDV;
            let send = library.functions().ucp_am_send_nbx;
            // SAFETY: one thread, the endpoint is open, and the bytes outlive the operation.
            let posted = PostOutcome::read(unsafe {
                send(
                    endpoint.raw(),
                    7,
                    std::ptr::null(),
                    0,
                    long.as_ptr().cast(),
                    long.len(),
                    &param,
                )
            });
            ending(workers, &ends, posted).ok(); // some versions report an error to the sender
            // SAFETY: both texts are constants.
            finish(workers, &ends, unsafe { endpoint.send(7, b"", b"eager", ends.target()) });
            let mut letters = Vec::new();
            until(workers, || {
                letters.append(&mut mail.0.take());
                !letters.is_empty()
            });
            assert_eq!(letters, [(Vec::new(), b"eager".to_vec())]);
            // SAFETY: no operation is in flight.
            finish(workers, &ends, unsafe { endpoint.close(ends.target()) });
        },
    );
}

#[test]
fn a_worker_that_has_nothing_to_do_can_be_slept_on() {
    on_every_version("ffi::tests::a_worker_that_has_nothing_to_do_can_be_slept_on", |library| {
        let context = UcxContext::new(library, &settings(library, "tcp")).expect("a context");
        let worker = Worker::new(&context).expect("a worker");
        let end = Instant::now() + Duration::from_secs(10);
        while worker.arm().expect("armed") == ArmOutcome::Busy {
            while worker.progress() > 0 {}
            assert!(Instant::now() < end, "it is always busy");
        }
        assert!(rustix::io::fcntl_getfd(worker.descriptor()).is_ok());
    });
}

#[test]
fn the_first_version_that_knows_lists_knows_them_as_they_are_described() {
    on_every_version(
        "ffi::tests::the_first_version_that_knows_lists_knows_them_as_they_are_described",
        |library| {
            let Version { major: 1, minor: 22, .. } = library.version() else { return };
            let context = UcxContext::new(library, &settings(library, "tcp")).expect("a context");
            let (near, far) = (
                Worker::new(&context).expect("a worker"),
                Worker::new(&context).expect("a worker"),
            );
            let ends = Ends::default();
            let mut memory = vec![0_u8; 100];
            let mapping = MapParams::new(memory.as_mut_ptr(), memory.len(), None);
            // SAFETY: the memory is freed after the registration.
            let mapped = unsafe { context.map(&mapping) }.expect("mapped");
            let (address, key) = (far.address().expect("an address"), mapped.key().expect("a key"));
            // SAFETY: closed below.
            let endpoint = unsafe { near.connect(&address, ignored, std::ptr::null_mut()) }
                .expect("an endpoint");
            // SAFETY: one thread, and the endpoint is open.
            let key = unsafe { endpoint.unpack(&key.0) }.expect("an unpacked key");
            let mut list = Sgl::default();
            list.push(memory.as_ptr(), 50, mapped.raw(), memory.as_ptr() as u64 + 50, &key);
            // SAFETY: memory and list outlive the operation. UCX fails it because no lane takes it;
            // if UCX had read other lengths or another datatype, it would report an invalid
            // parameter.
            let posted = unsafe { list.put(&endpoint, ends.target()) };
            assert_eq!(ending([&near, &far], &ends, posted), Err(Status(UCS_ERR_CANCELED)));
            drop(key);
            // SAFETY: its key is dropped, and no operation is in flight.
            let closing = unsafe { endpoint.close(ends.target()) };
            ending([&near, &far], &ends, closing).ok();
        },
    );
}

#[test]
fn a_refused_setting_is_named() {
    on_every_version("ffi::tests::a_refused_setting_is_named", |library| {
        let options = Options::parse(r#"{"ucx": {"set": "RNDV_SCHEME=no such scheme"}}"#).unwrap();
        let settings = Config::read(&options).unwrap().settings(library.path());
        let (_, setting) = UcxContext::new(library, &settings).err().expect("it is rejected");
        assert_eq!(setting.as_deref(), Some("UCX_RNDV_SCHEME=no such scheme"));
    });
}
