//! Tests a program's own use of a device: its streams, tickets that panic, and forks.

use std::sync::Arc;
use std::time::Instant;

use kvx_core::DeviceAccess as _;
use kvx_core::backend::{Direction, Hop, Piece, Ticket};
use kvx_core::{ErrorKind, Memory, Result};
use kvx_gpu::DevicePtr;
use kvx_testkit::Child;

use super::{Bench, LONG, ROLE, Test, all_of, filled, pattern, settled, until, watched};

pub(crate) const ANYWHERE: &[(&str, Test)] = &[
    ("a_ticket_that_panics_costs_nobody_else", a_ticket_that_panics),
    ("a_fork_is_told_so_and_touches_nothing", a_fork),
];

pub(crate) const TESTS: &[(&str, Test)] =
    &[("a_stream_of_the_programs_is_waited_for_when_asked", after)];

fn after(bench: &Bench<'_>) {
    let bytes = pattern(41, 64 << 10);
    let (from, to) =
        (filled(&bench.device, &bytes), bench.device.pool(bytes.len()).build().unwrap());
    bench.control.command("delay 50000");
    let stream = (bench.maker.copy_on_a_stream)(from.address(), to.address(), bytes.len());
    bench.control.command("delay 0");
    // SAFETY: the stream is never destroyed.
    settled(|done| unsafe { bench.device.after(stream, done) }).unwrap();
    assert!(all_of(&to) == bytes, "the work on the program's stream has ended");
    // Stop all streams, so that no event can occur.
    bench.control.command("hold");
    let (outcome, ticket) = watched();
    (bench.maker.copy_on_a_stream)(to.address(), from.address(), bytes.len());
    // SAFETY: the stream is never destroyed.
    unsafe { bench.device.after(stream, ticket) };
    std::thread::yield_now();
    assert!(outcome.lock().unwrap().is_none(), "no event has occurred");
    bench.control.command("release");
    until("the stream continues", || outcome.lock().unwrap().is_some());
    outcome.lock().unwrap().take().unwrap().unwrap();
}

fn a_ticket_that_panics(bench: &Bench<'_>) {
    let bytes = pattern(42, 4096);
    let pool = filled(&bench.device, &bytes);
    let hop = Hop { from: pool.address(), to: pool.address() + 1024, len: 1024 };
    // A panic without the hook, because a log should contain only unexpected panics.
    let ticket =
        Ticket::new(|_| std::panic::resume_unwind(Box::new("a ticket of the program panics")));
    // SAFETY: the pool outlives the wait for the second hop, which ends after the first.
    unsafe { bench.device.hop(&[hop], ticket) };
    // SAFETY: the pool outlives the wait for this hop.
    settled(|done| unsafe { bench.device.hop(&[hop], done) }).unwrap();
    assert!(all_of(&pool)[1024..2048] == bytes[..1024]);
}

/// Runs in its own process, which forks.
fn a_fork(_: &Bench<'_>) {
    let child = Child::start_self(ROLE, "fork").expect("a process starts");
    assert_eq!(child.hear(LONG).expect("it says how it went"), "the fork was told so");
}

/// For [`super::roles`]: every call in a forked child returns `Forked`, and objects that it drops
/// stay the parent's.
pub(crate) fn fork(bench: &Bench<'_>) {
    let bytes = pattern(43, 1 << 20);
    let pool = Arc::new(filled(&bench.device, &bytes));
    let pinned = bench.device.pinned(4096).unwrap();
    let mut inherited = Some((pool, pinned));
    // SAFETY: the child calls only functions that kvx allows in a fork, and ends without running
    // other code of this program.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let wrong = calls_of_a_fork(bench, inherited.take().expect("it is taken once"));
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(wrong.unwrap_or(0)) };
    }
    let (mut status, begun) = (0, Instant::now());
    // SAFETY: a location for one number.
    while unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } == 0 {
        if begun.elapsed() > LONG / 2 {
            // SAFETY: it is this process's child, which has not been waited for.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(
        status, 0,
        "the number of the child's call that was not rejected, in the upper byte; or it hung"
    );
    let (pool, pinned) = inherited.expect("only the child took it");
    assert!(all_of(&pool) == bytes);
    let piece = Piece { device: pool.address(), host: pinned.as_ptr(), len: 4096 };
    // SAFETY: both outlive the wait.
    settled(|done| unsafe { bench.device.copy(Direction::ToHost, &[piece], done) }).unwrap();
}

/// Returns the number of the first call that did not return `Forked`.
fn calls_of_a_fork(bench: &Bench<'_>, (pool, pinned): (Arc<Memory>, Memory)) -> Option<i32> {
    let (device, address) = (&bench.device, pool.address());
    let piece = Piece { device: address, host: pinned.as_ptr(), len: 64 };
    let hop = Hop { from: address, to: address + 64, len: 64 };
    // The answer must be immediate: no thread of a forked child answers later.
    let answer = |give: &dyn Fn(Ticket)| {
        let (outcome, ticket) = watched();
        give(ticket);
        outcome.lock().unwrap().take().unwrap_or(Ok(()))
    };
    // SAFETY: the calls copy no bytes, here and below.
    let copied = answer(&|done| unsafe { device.copy(Direction::ToHost, &[piece], done) });
    // SAFETY: the call copies no bytes.
    let hopped = answer(&|done| unsafe { device.hop(&[hop], done) });
    let at = DevicePtr(address);
    // SAFETY: the call copies no bytes.
    let gathered = answer(&|done| unsafe { device.gather(at, &[], &[0].into(), done) });
    let answers: [Result<()>; 9] = [
        copied,
        hopped,
        gathered,
        pool.copy_in(0, &[1]),
        pool.copy_out(0, &mut [0]),
        device.share(&pool).map(drop),
        device.dma_buf(address, 64).map(drop),
        device.pinned(64).map(drop),
        device.pool(64).build().map(drop),
    ];
    let refused =
        |answer: &Result<()>| answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::Forked);
    drop((pool, pinned));
    answers.iter().position(|answer| !refused(answer)).map(|at| at as i32 + 1)
}
