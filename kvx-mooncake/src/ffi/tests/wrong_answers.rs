//! Tests with one function of the real engine replaced, either by one that answers wrongly, which
//! kvx must detect, or by one that records kvx's requests.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvx_backend::fabric::Registrar as _;
use kvx_core::{DeviceAccess as _, ErrorKind, Memory, MemoryKind, Op, RegionId};
use kvx_testkit::TestDevice;

use super::super::bindings::{Functions, notify_msg, transfer_request, transfer_status};
use super::super::engine::{EnginePiece, TransferState};
use super::super::library::Library;
use super::super::{adapter_bindings, self_test};
use super::real_engine::{
    PieceAnswer, answer_as, engine, in_flight, real, real_adapter_functions, real_functions,
};
use crate::memory::{MemoryRegistrar, RegisteredRanges};

/// The time to wait for a notification that never arrives.
const MUTE: Duration = Duration::from_millis(100);

type Ask = unsafe extern "C" fn(*mut c_void, u64, usize, *mut transfer_status) -> c_int;

struct AByteLess;
impl PieceAnswer for AByteLess {
    fn change(_: usize, code: c_int, status: &mut transfer_status) -> c_int {
        status.transferred_bytes = status.transferred_bytes.saturating_sub(1);
        code
    }
}

struct FailedIsCompleted;
impl PieceAnswer for FailedIsCompleted {
    fn change(_: usize, code: c_int, status: &mut transfer_status) -> c_int {
        if status.status == 6 {
            *status = transfer_status { status: 4, transferred_bytes: 16 };
        }
        code
    }
}

struct NoPieceIsWrong;
impl PieceAnswer for NoPieceIsWrong {
    fn change(_: usize, _: c_int, _: &mut transfer_status) -> c_int {
        0
    }
}

struct AnotherError;
impl PieceAnswer for AnotherError {
    fn change(_: usize, code: c_int, _: &mut transfer_status) -> c_int {
        if code == 0 { 0 } else { 302 }
    }
}

unsafe extern "C" fn all_is_completed(
    _: *mut c_void,
    _: u64,
    status: *mut transfer_status,
) -> c_int {
    // SAFETY: the caller passed this location for the answer.
    unsafe { *status = transfer_status { status: 4, transferred_bytes: 16 } };
    0
}

/// A change of the requests of a batch before the real engine gets them.
trait RequestChange {
    fn change(requests: &mut [transfer_request]);
}

struct SecondToAnotherAddress;
impl RequestChange for SecondToAnotherAddress {
    fn change(requests: &mut [transfer_request]) {
        if let Some(second) = requests.get_mut(1) {
            second.target_offset += 1;
        }
    }
}

struct WritesRead;
impl RequestChange for WritesRead {
    fn change(requests: &mut [transfer_request]) {
        requests.iter_mut().for_each(|request| request.opcode = 0);
    }
}

unsafe extern "C" fn submit_changed<C: RequestChange>(
    engine: *mut c_void,
    batch: u64,
    requests: *mut transfer_request,
    count: usize,
) -> c_int {
    // SAFETY: the caller passes that many requests, which may be changed; both ends of every
    // request are memory of the self-test.
    unsafe {
        C::change(std::slice::from_raw_parts_mut(requests, count));
        (real_functions().submitTransfer)(engine, batch, requests, count)
    }
}

unsafe extern "C" fn no_segment(_: *mut c_void, _: *const c_char) -> i32 {
    -200
}

unsafe extern "C" fn no_registration(
    _: *mut c_void,
    _: *mut c_void,
    _: usize,
    _: *const c_char,
    _: c_int,
) -> c_int {
    0
}

unsafe extern "C" fn sent_nothing(_: *mut c_void, _: u64, _: notify_msg) -> c_int {
    0
}

unsafe extern "C" fn sent_another(engine: *mut c_void, segment: u64, message: notify_msg) -> c_int {
    let other = notify_msg { msg: c"hullo".as_ptr().cast_mut(), ..message };
    // SAFETY: passes the caller's arguments on, and a text that stays valid.
    unsafe { (real_functions().genNotifyInEngine)(engine, segment, other) }
}

unsafe extern "C" fn no_reason() -> *const c_char {
    c"".as_ptr()
}

unsafe extern "C" fn no_transport(
    _: *mut c_void,
    _: *const c_char,
    _: *mut *mut c_void,
) -> *mut c_void {
    null_mut()
}

/// The numbers of queries for pieces and for whole batches.
static PIECES_ASKED: AtomicUsize = AtomicUsize::new(0);
static BATCHES_ASKED: AtomicUsize = AtomicUsize::new(0);

struct CountedPieces;
impl PieceAnswer for CountedPieces {
    fn change(_: usize, code: c_int, _: &mut transfer_status) -> c_int {
        PIECES_ASKED.fetch_add(1, Ordering::Relaxed);
        code
    }
}

unsafe extern "C" fn batch_counted(
    engine: *mut c_void,
    batch: u64,
    status: *mut transfer_status,
) -> c_int {
    BATCHES_ASKED.fetch_add(1, Ordering::Relaxed);
    // SAFETY: passes the caller's arguments on.
    unsafe { (real_adapter_functions().kvx_mooncake_batch_status)(engine, batch, status) }
}

/// The devices of the last engine that was created with any.
static DEVICES: Mutex<Vec<String>> = Mutex::new(Vec::new());

unsafe extern "C" fn devices_noted(
    metadata: *const c_char,
    name: *const c_char,
    ip: *const c_char,
    port: u64,
    discovers: c_int,
    devices: *const *const c_char,
    count: usize,
) -> *mut c_void {
    // SAFETY: the caller passes that many C strings; the rest are its arguments.
    unsafe {
        let named = std::slice::from_raw_parts(devices, count).iter();
        let named = named.map(|device| CStr::from_ptr(*device).to_string_lossy().into_owned());
        *DEVICES.lock().expect("nobody panics with it") = named.collect();
        (real_adapter_functions().kvx_mooncake_create)(
            metadata, name, ip, port, discovers, devices, count,
        )
    }
}

/// The location of the memory that was registered last.
static LOCATION: Mutex<String> = Mutex::new(String::new());

unsafe extern "C" fn location_noted(
    _: *mut c_void,
    _: *mut c_void,
    _: usize,
    location: *const c_char,
    _: c_int,
) -> c_int {
    // SAFETY: a C string from the caller.
    let location = unsafe { CStr::from_ptr(location) }.to_string_lossy().into_owned();
    *LOCATION.lock().expect("nobody panics with it") = location;
    0
}

fn is_refused(library: &Library, heard_within: Duration, said: &[&str]) {
    let why = self_test::run(library, heard_within).expect_err(said[0]);
    assert!(said.iter().all(|part| why.contains(part)), "{said:?} is not in: {why}");
}

#[test]
fn an_engine_that_answers_wrongly_is_rejected_with_the_reason() {
    let test = "an_engine_that_answers_wrongly_is_rejected_with_the_reason";
    let Some((real, functions, of_adapter)) = real(test) else { return };
    let refused = |wrong: Functions, of_adapter: adapter_bindings::Functions, said: &[&str]| {
        is_refused(&real.with(wrong, Some(of_adapter)), self_test::PATIENCE, said);
    };
    let ask = |ask: Ask, said: &[&str]| {
        refused(Functions { getTransferStatus: ask, ..functions }, of_adapter, said);
    };
    ask(answer_as::<AByteLess>, &["state", "Completed(300000)"]);
    ask(answer_as::<FailedIsCompleted>, &["state", "Completed(16)"]);
    ask(answer_as::<NoPieceIsWrong>, &["not there", "should be an error"]);
    ask(answer_as::<AnotherError>, &["not there", "out of memory"]);
    let whole =
        adapter_bindings::Functions { kvx_mooncake_batch_status: all_is_completed, ..of_adapter };
    refused(functions, whole, &["batch's state", "Completed(16)"]);
    let silent = adapter_bindings::Functions { kvx_mooncake_error: no_reason, ..of_adapter };
    refused(functions, silent, &["not there", "no text"]);
    let misplaced =
        Functions { submitTransfer: submit_changed::<SecondToAnotherAddress>, ..functions };
    refused(misplaced, of_adapter, &["reading: byte 5000 is"]);
    let reads = Functions { submitTransfer: submit_changed::<WritesRead>, ..functions };
    refused(reads, of_adapter, &["writing: byte 11 is"]);
    refused(
        Functions { openSegmentNoCache: no_segment, ..functions },
        of_adapter,
        &["segment", "metadata"],
    );
    let unregistered = Functions { registerLocalMemory: no_registration, ..functions };
    refused(unregistered, of_adapter, &["reading", "Failed"]);
    let mute = Functions { genNotifyInEngine: sent_nothing, ..functions };
    is_refused(&real.with(mute, Some(of_adapter)), MUTE, &["notifying", "but [] arrived"]);
    let another = Functions { genNotifyInEngine: sent_another, ..functions };
    refused(another, of_adapter, &["notifying", "hullo"]);
    // These changes do not affect the real engine.
    self_test::run(real, self_test::PATIENCE).expect("the real one passes again");
}

/// A `libtransfer_engine.so` that was installed from source reports less; the same code tests and
/// uses it.
#[test]
fn an_engine_without_the_adapters_functions_is_tried_all_the_same() {
    let test = "an_engine_without_the_adapters_functions_is_tried_all_the_same";
    let Some((real, functions, _)) = real(test) else { return };
    self_test::run(&real.with(functions, None), self_test::PATIENCE).expect("it does what it says");
    let refused = |wrong: Functions, said: &[&str]| {
        is_refused(&real.with(wrong, None), self_test::PATIENCE, said);
    };
    let ask =
        |ask: Ask, said: &[&str]| refused(Functions { getTransferStatus: ask, ..functions }, said);
    ask(answer_as::<AByteLess>, &["reading", "Completed(300000)"]);
    ask(answer_as::<FailedIsCompleted>, &["reading unregistered memory", "Completed(16)"]);
    ask(answer_as::<NoPieceIsWrong>, &["not there", "should be an error"]);
    let unopened = Functions { openSegmentNoCache: no_segment, ..functions };
    refused(unopened, &["segment", "the peer's metadata could not be fetched"]);
    let devices = engine(real.with(functions, None), &["mlx5_0"]).err().expect("it takes none");
    assert_eq!(devices.kind(), ErrorKind::Unsupported);
    assert!(devices.sentence().contains("device_name"), "{devices}");
}

#[test]
fn a_batch_is_queried_as_a_whole_if_possible_and_otherwise_piece_by_piece() {
    const TEST: &str = "a_batch_is_queried_as_a_whole_if_possible_and_otherwise_piece_by_piece";
    const COUNT: usize = 8;
    const LEN: u64 = 512;
    let Some((real, functions, of_adapter)) = real(TEST) else { return };
    let counted = Functions { getTransferStatus: answer_as::<CountedPieces>, ..functions };
    let whole =
        adapter_bindings::Functions { kvx_mooncake_batch_status: batch_counted, ..of_adapter };
    // For the life of the process: pieces of a failed batch may still be in flight.
    let [near, far] =
        [0, 7].map(|byte| Vec::leak(vec![byte; COUNT * LEN as usize]).as_mut_ptr() as u64);
    for of_adapter in [Some(whole), None] {
        let ours = engine(real.with(counted, of_adapter), &[]).expect("an engine");
        let theirs = engine(real.with(functions, of_adapter), &[]).expect("another");
        // SAFETY: the memory stays valid forever.
        unsafe { ours.register(near, COUNT * LEN as usize, "*") }.expect("it is free");
        // SAFETY: the memory stays valid forever.
        unsafe { theirs.register(far, COUNT * LEN as usize, "*") }.expect("it is free");
        let segment = ours.open_segment(theirs.name()).expect("it is there");
        // The last piece is within registered memory, or beyond it.
        for beyond in [0, LEN] {
            let pieces: Vec<_> = (0..COUNT as u64)
                .map(|at| EnginePiece {
                    op: Op::Read,
                    local: near + at * LEN,
                    remote: far + at * LEN,
                    segment,
                    len: LEN,
                })
                .map(|piece| EnginePiece { remote: piece.remote + beyond, ..piece })
                .collect();
            let begun = Instant::now();
            // SAFETY: the memory stays valid forever.
            let batch = unsafe { ours.submit(&pieces) }.expect("it is taken");
            let until = begun + self_test::PATIENCE;
            while (0..COUNT).any(|piece| {
                ours.piece_state(&batch, piece).expect("it is there") == TransferState::InProgress
            }) {
                assert!(Instant::now() < until, "the pieces do not end");
                std::thread::yield_now();
            }
            let counts = [&PIECES_ASKED, &BATCHES_ASKED];
            counts.iter().for_each(|count| count.store(0, Ordering::Relaxed));
            let mut batches = in_flight(batch, &theirs, &[LEN; COUNT]);
            let ended = batches.poll_next(&ours, begun).expect("all its pieces have ended");
            assert_eq!(ended.failed.is_some(), beyond > 0);
            ours.free(ended.batch);
            let asked = counts.map(|count| count.load(Ordering::Relaxed));
            match (of_adapter.is_some(), beyond > 0) {
                (true, false) => assert_eq!(asked, [0, 1]),
                (exported, _) => {
                    assert!(asked[0] >= COUNT && asked[1] == usize::from(exported), "{asked:?}")
                }
            }
        }
    }
}

#[test]
fn a_transport_that_the_engine_does_not_install_is_an_error() {
    let test = "a_transport_that_the_engine_does_not_install_is_an_error";
    let Some((real, functions, of_adapter)) = real(test) else { return };
    let none = Functions { installTransport: no_transport, ..functions };
    for of_adapter in [Some(of_adapter), None] {
        let why = engine(real.with(none, of_adapter), &[]).err().expect("it has no transport");
        assert_eq!(why.kind(), ErrorKind::Unavailable);
        assert!(
            why.sentence().contains("no transport tcp") && why.sentence().contains("in its place"),
            "{why}"
        );
    }
}

#[test]
fn the_engine_gets_the_devices_that_are_named() {
    let test = "the_engine_gets_the_devices_that_are_named";
    let Some((real, functions, of_adapter)) = real(test) else { return };
    let noted = adapter_bindings::Functions { kvx_mooncake_create: devices_noted, ..of_adapter };
    for devices in [&["mlx5_1"][..], &["mlx5_1", "mlx5_0"]] {
        let named = engine(real.with(functions, Some(noted)), devices).expect("an engine over tcp");
        assert_eq!(*DEVICES.lock().expect("nobody panics with it"), devices);
        drop(named);
    }
}

#[test]
fn the_engine_gets_the_device_of_memory() {
    let test = "the_engine_gets_the_device_of_memory";
    let Some((real, functions, of_adapter)) = real(test) else { return };
    let noted = Functions { registerLocalMemory: location_noted, ..functions };
    let engine = Arc::new(engine(real.with(noted, Some(of_adapter)), &[]).expect("an engine"));
    let device = TestDevice::new(MemoryKind::Cuda);
    let gpu = format!("cuda:{}", device.ordinal());
    for (node, at, host) in [(None, 1, "*"), (Some("cpu:1"), 2, "cpu:1")] {
        let (weak, ranges) = (Arc::downgrade(&engine), Arc::<RegisteredRanges>::default());
        let enrolment = MemoryRegistrar { engine: weak, ranges, node: node.map(str::to_owned) };
        for (memory, location) in
            [(device.allocate(4096), &*gpu), (Memory::owned(vec![0; 64]), host)]
        {
            enrolment.register(RegionId(at), &Arc::new(memory)).expect("it is noted");
            assert_eq!(*LOCATION.lock().expect("nobody panics with it"), location);
        }
    }
}
