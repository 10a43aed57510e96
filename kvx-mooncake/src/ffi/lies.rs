//! Engines that lie are refused: the real one, with one of its functions in place of which another answers.

use std::ffi::{c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use super::bindings::{Functions, notify_msg, transfer_request, transfer_status};
use super::library::{Library, Wanted};
use super::{adapter_bindings, self_test};

const TEST: &str = "an_engine_that_lies_is_refused_with_the_reason";
/// How long a notification that never comes is waited for here.
const MUTE: Duration = Duration::from_secs(2);

/// What the liars pass most of their calls on to.
static HONEST: OnceLock<Functions> = OnceLock::new();

fn honest() -> &'static Functions {
    HONEST.get().expect("set before anybody lies")
}

type Ask = unsafe extern "C" fn(*mut c_void, u64, usize, *mut transfer_status) -> c_int;

unsafe extern "C" fn a_byte_less(
    engine: *mut c_void,
    batch: u64,
    task: usize,
    status: *mut transfer_status,
) -> c_int {
    // SAFETY: the caller's arguments, and the place that it gave for the answer.
    unsafe {
        let code = (honest().getTransferStatus)(engine, batch, task, status);
        (*status).transferred_bytes = (*status).transferred_bytes.saturating_sub(1);
        code
    }
}

unsafe extern "C" fn failed_is_completed(
    engine: *mut c_void,
    batch: u64,
    task: usize,
    status: *mut transfer_status,
) -> c_int {
    // SAFETY: as above.
    unsafe {
        let code = (honest().getTransferStatus)(engine, batch, task, status);
        if (*status).status == 6 {
            *status = transfer_status { status: 4, transferred_bytes: 16 };
        }
        code
    }
}

unsafe extern "C" fn no_task_is_wrong(
    engine: *mut c_void,
    batch: u64,
    task: usize,
    status: *mut transfer_status,
) -> c_int {
    // SAFETY: as above.
    unsafe { (honest().getTransferStatus)(engine, batch, task, status) };
    0
}

unsafe extern "C" fn another_error(
    engine: *mut c_void,
    batch: u64,
    task: usize,
    status: *mut transfer_status,
) -> c_int {
    // SAFETY: as above.
    let code = unsafe { (honest().getTransferStatus)(engine, batch, task, status) };
    if code == 0 { 0 } else { 302 }
}

unsafe extern "C" fn all_is_completed(_: *mut c_void, _: u64, status: *mut transfer_status) -> c_int {
    // SAFETY: the place that the caller gave for the answer.
    unsafe { *status = transfer_status { status: 4, transferred_bytes: 16 } };
    0
}

unsafe extern "C" fn the_second_elsewhere(
    engine: *mut c_void,
    batch: u64,
    requests: *mut transfer_request,
    count: usize,
) -> c_int {
    // SAFETY: as many requests as the caller says, which are its own to change.
    unsafe {
        if let Some(second) = std::slice::from_raw_parts_mut(requests, count).get_mut(1) {
            second.target_offset += 1;
        }
        (honest().submitTransfer)(engine, batch, requests, count)
    }
}

unsafe extern "C" fn writes_read(
    engine: *mut c_void,
    batch: u64,
    requests: *mut transfer_request,
    count: usize,
) -> c_int {
    // SAFETY: as above; both ends of every request are memory of the self-test's.
    unsafe {
        for request in std::slice::from_raw_parts_mut(requests, count) {
            request.opcode = 0;
        }
        (honest().submitTransfer)(engine, batch, requests, count)
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
    // SAFETY: the caller's arguments, and a text that stays.
    unsafe { (honest().genNotifyInEngine)(engine, segment, other) }
}

unsafe extern "C" fn no_reason() -> *const c_char {
    c"".as_ptr()
}

/// The adapter, which lies below the target directory as this program does.
fn adapter() -> Option<PathBuf> {
    let program = std::env::current_exe().expect("a program knows where it lies");
    let file = "peers/mooncake/libkvx_mooncake_adapter.so";
    program.ancestors().map(|folder| folder.join(file)).find(|file| file.exists())
}

#[test]
fn an_engine_that_lies_is_refused_with_the_reason() {
    let Some(file) = adapter() else {
        let why = "Mooncake's wheel and the adapter are not there";
        return kvx_testkit::skip(TEST, why, "cargo xtask peers mooncake");
    };
    let real =
        Library::open(&Wanted { files: vec![file], ..Wanted::default() }).expect("the real one passes");
    let functions = *HONEST.get_or_init(|| *real.functions());
    let of_adapter = *real.adapter().expect("that is the adapter");
    let refused_within =
        |patience, lie: Functions, of_adapter: adapter_bindings::Functions, said: &[&str]| {
            let why = self_test::run(&real.with(lie, Some(of_adapter)), patience).expect_err(said[0]);
            assert!(said.iter().all(|part| why.contains(part)), "{said:?} is not in: {why}");
        };
    let refused = |lie, of_adapter, said: &[&str]| refused_within(self_test::PATIENCE, lie, of_adapter, said);
    let ask = |ask: Ask, said: &[&str]| {
        refused(Functions { getTransferStatus: ask, ..functions }, of_adapter, said);
    };
    ask(a_byte_less, &["state", "Completed(300000)"]);
    ask(failed_is_completed, &["state", "Completed(16)"]);
    ask(no_task_is_wrong, &["not there", "should be an error"]);
    ask(another_error, &["not there", "out of memory"]);
    let whole = adapter_bindings::Functions { kvx_mooncake_batch_status: all_is_completed, ..of_adapter };
    refused(functions, whole, &["batch's state", "Completed(16)"]);
    let silent = adapter_bindings::Functions { kvx_mooncake_error: no_reason, ..of_adapter };
    refused(functions, silent, &["not there", "no reason"]);
    let elsewhere = Functions { submitTransfer: the_second_elsewhere, ..functions };
    refused(elsewhere, of_adapter, &["reading: byte 5000 is"]);
    let reads = Functions { submitTransfer: writes_read, ..functions };
    refused(reads, of_adapter, &["writing: byte 11 is"]);
    refused(Functions { openSegmentNoCache: no_segment, ..functions }, of_adapter, &["segment", "metadata"]);
    let unregistered = Functions { registerLocalMemory: no_registration, ..functions };
    refused(unregistered, of_adapter, &["reading", "Failed"]);
    let mute = Functions { genNotifyInEngine: sent_nothing, ..functions };
    refused_within(MUTE, mute, of_adapter, &["notifying: [] arrived"]);
    let another = Functions { genNotifyInEngine: sent_another, ..functions };
    refused(another, of_adapter, &["notifying", "hullo"]);
    // Nothing of this spoils the real one.
    self_test::run(real, self_test::PATIENCE).expect("the real one passes again");
}
