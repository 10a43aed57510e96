//! Tests streams and events: order, delays, and memory that is freed too early.

use kvx_testkit::test;

use crate::cuda::{Cuda, Handle};
use crate::symbols::call;
use crate::wait_for;

fn event(cuda: &Cuda) -> Handle {
    let mut event = 0;
    assert_eq!(call!(cuda.library, cuEventCreate(&mut event => *mut Handle, 2 => u32)), 0);
    event
}

fn record(cuda: &Cuda, event: Handle) {
    assert_eq!(call!(cuda.library, cuEventRecord(event => Handle, cuda.stream => Handle)), 0);
}

fn query(cuda: &Cuda, event: Handle) -> i32 {
    call!(cuda.library, cuEventQuery(event => Handle))
}

#[test]
fn an_event_completes_after_the_work_before_it() {
    let cuda = Cuda::new();
    let (memory, mark) = (cuda.allocate(8), event(&cuda));
    assert_eq!(query(&cuda, mark), 0, "never recorded");
    cuda.control.command("hold");
    let bytes = *b"kvx kvx ";
    assert_eq!(
        call!(cuda.library, cuMemcpyHtoDAsync_v2(
        memory => u64, bytes.as_ptr() => *const u8, 8 => usize, cuda.stream => Handle)),
        0
    );
    record(&cuda, mark);
    assert_eq!(query(&cuda, mark), 600);
    assert_eq!(call!(cuda.library, cuStreamQuery(cuda.stream => Handle)), 600);
    cuda.control.command("release");
    wait_for("the event", || query(&cuda, mark) == 0);
    assert_eq!(cuda.download(memory, 8), bytes);
    assert_eq!(call!(cuda.library, cuEventDestroy_v2(mark => Handle)), 0);
    assert_eq!(query(&cuda, mark), 400);
    assert_eq!(cuda.free(memory), 0);
}

#[test]
fn an_event_is_late_when_a_test_requests_it() {
    let cuda = Cuda::new();
    let mark = event(&cuda);
    cuda.control.command("late 100000");
    let start = std::time::Instant::now();
    record(&cuda, mark);
    wait_for("the event", || {
        let (answer, time) = (query(&cuda, mark), start.elapsed().as_millis());
        assert!(answer == 600 || answer == 0 && time >= 100, "{answer} after {time} ms");
        answer == 0
    });
    call!(cuda.library, cuEventDestroy_v2(mark => Handle));
}

#[test]
fn a_stream_waits_for_an_event_of_another() {
    let cuda = Cuda::new();
    let (memory, mark) = (cuda.allocate(4), event(&cuda));
    let mut other: Handle = 0;
    assert_eq!(call!(cuda.library, cuStreamCreate(&mut other => *mut Handle, 1 => u32)), 0);
    cuda.control.command("delay 20000");
    for value in [1_u8, 2] {
        assert_eq!(
            call!(cuda.library, cuMemsetD8Async(
            memory => u64, value => u8, 4 => usize, cuda.stream => Handle)),
            0
        );
    }
    record(&cuda, mark);
    assert_eq!(
        call!(cuda.library, cuStreamWaitEvent(other => Handle, mark => Handle, 0 => u32)),
        0
    );
    cuda.control.command("delay 0");
    assert_eq!(
        call!(cuda.library, cuMemsetD8Async(memory => u64, 3 => u8, 4 => usize, other => Handle)),
        0
    );
    assert_eq!(call!(cuda.library, cuStreamSynchronize(other => Handle)), 0);
    assert_eq!(cuda.download(memory, 4), [3; 4]);
    assert_eq!(call!(cuda.library, cuStreamDestroy_v2(other => Handle)), 0);
    assert_eq!(call!(cuda.library, cuStreamDestroy_v2(other => Handle)), 400);
    assert_eq!(cuda.free(memory), 0);
}

#[test]
fn memory_freed_during_a_copy_is_a_fault() {
    let cuda = Cuda::new();
    let (memory, bytes) = (cuda.allocate(8), [0_u8; 8]);
    cuda.control.command("hold");
    assert_eq!(
        call!(cuda.library, cuMemcpyHtoDAsync_v2(
        memory => u64, bytes.as_ptr() => *const u8, 8 => usize, cuda.stream => Handle)),
        0
    );
    assert_eq!(cuda.free(memory), 0);
    cuda.control.command("release");
    assert_eq!(cuda.wait(), 700);
    assert_eq!(cuda.control.faults(), 1);
}

#[test]
fn pinned_memory_freed_during_a_copy_is_a_fault() {
    let cuda = Cuda::new();
    let memory = cuda.allocate(8);
    let mut pinned = 0_u64;
    assert_eq!(
        call!(cuda.library, cuMemHostAlloc(&mut pinned => *mut u64, 8 => usize, 1 => u32)),
        0
    );
    cuda.control.command("hold");
    assert_eq!(
        call!(cuda.library, cuMemcpyDtoHAsync_v2(
        pinned => u64, memory => u64, 8 => usize, cuda.stream => Handle)),
        0
    );
    assert_eq!(call!(cuda.library, cuMemFreeHost(pinned => u64)), 0);
    cuda.control.command("release");
    assert_eq!(cuda.wait(), 700);
    assert_eq!(cuda.control.faults(), 1);
    cuda.control.command("well");
    assert_eq!(cuda.free(memory), 0);
}
