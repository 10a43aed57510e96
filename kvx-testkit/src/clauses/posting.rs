//! T: the cost of a post, and the end of a transfer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use kvx_core::{Deadline, ErrorKind, Grid, Indices, Limits, Op, Peer, Plan, Region, Transfer};
use rustix::time::{ClockId, clock_gettime};

use super::clause::{Breaker, Clause, Execution, clauses};
use super::traffic::{GRACE, OPS, Traffic, now, promised_by, until};
use crate::chaos::{Fault, Gate};
use crate::check::{CUT_OFF, Check, Failure, ensure, ensure_kind};
use crate::executor::run;
use crate::pattern::bytes;
use crate::setup::{Mode, Setup};
use crate::stopwatch::Stopwatch;
use crate::unique::unique;

pub(super) const CLAUSES: &[Clause] = clauses!(
    T11 post_waits_for_nothing, TwoProcesses, [Breaker::Chaos(Fault::BlockInPost)];
    T12 a_transfer_resolves_by_its_deadline, Both, [Breaker::Core("deadline")];
    T13 cancel_ends_a_transfer_early, Both, [Breaker::Chaos(Fault::IgnoreCancel)];
    T14 a_full_budget_says_busy, OneProcess, [Breaker::Core("budget")];
    T15 reports_say_what_moved, Both, [Breaker::Core("report")];
    T16 waiting_needs_no_runtime, Both, [Breaker::Core("wake")];
    T17 many_threads_share_one_link, Both, [Breaker::Chaos(Fault::Mix), Breaker::Chaos(Fault::FailNth)];
);

/// Plans a read of the first `count` blocks of 4 KiB of region `kv`.
fn small_read(near: &Region, peer: &Peer, count: u32) -> kvx_core::Result<Plan> {
    let grid = Grid::packed(4096, count);
    Plan::read(near.grid(grid)?.blocks(0..count), peer.region("kv")?.grid(grid)?.blocks(0..count))
}

/// Returns the CPU time that this thread has used. A thread that was preempted has not waited.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// T11: a post to a stopped peer returns at once and moves little on the calling thread.
pub async fn post_waits_for_nothing(setup: &Setup) -> Check {
    let mut pair = setup.pair()?;
    let small = Traffic::new(&mut pair, "small", 1 << 16)?;
    let large = Traffic::new(&mut pair, "large", 32 << 20)?;
    let peer = pair.connect().await?;
    for op in OPS {
        small.run(op, &peer, CUT_OFF).await?; // prepares the link and the regions
        large.run(op, &peer, CUT_OFF).await?;
    }
    let metadata = pair.far.metadata()?;
    pair.far.process()?.stop()?;
    for op in OPS {
        let (small, large) = (small.plan(op, &peer)?, large.plan(op, &peer)?);
        let (mut waited, mut worked, mut transfers) = (Vec::new(), Vec::new(), Vec::new());
        let _beats = Stopwatch::start()?; // so that the ones below start no threads
        for turn in 0..40 {
            let plan = if turn % 4 == 0 { &large } else { &small };
            let (watch, clock, cpu) = (Stopwatch::start()?, Instant::now(), thread_time());
            transfers.push(peer.transfer(plan).deadline(Duration::from_millis(500)).post()?);
            waited.push(clock.elapsed());
            if turn % 4 == 0 {
                worked.push(thread_time() - cpu);
            }
            let took = watch.read();
            ensure!(
                took.within(Duration::from_secs(1)),
                "{op}: a post to a stopped peer took {took}"
            );
        }
        waited.sort();
        worked.sort();
        // A loaded machine takes the processor away now and then, so only most posts must be quick.
        let most = waited[waited.len() * 3 / 4];
        ensure!(
            most < Duration::from_millis(20),
            "{op}: three of four posts to a stopped peer took up to {most:?}"
        );
        // 32 MiB take milliseconds to move, 64 KiB about ten microseconds.
        let half = worked[worked.len() / 2];
        ensure!(
            half < Duration::from_millis(2),
            "{op}: posting 32 MiB kept the calling thread busy for {half:?}"
        );
        for transfer in transfers {
            transfer.await.ok();
        }
    }
    // Repeats the test before there is a link.
    let stranger = setup.agent(&unique("stranger"))?;
    let near = stranger.register("near", setup.memory(1 << 16, 1)?)?;
    let clock = Stopwatch::start()?;
    let peer = stranger.connect(&metadata)?;
    let grid = Grid::packed(4096, 1);
    let plan =
        Plan::read(near.grid(grid)?.blocks([0]), peer.region("small")?.grid(grid)?.blocks([0]))?;
    let transfer = peer.transfer(&plan).deadline(CUT_OFF).post()?;
    let took = clock.read();
    ensure!(
        took.within(Duration::from_secs(1)),
        "connecting and posting to a stopped peer took {took}"
    );
    pair.far.process()?.go_on()?;
    transfer.await?;
    Ok(())
}

/// T12: a transfer whose ticket is held back fails with `TimedOut` at its deadline, once.
pub async fn a_transfer_resolves_by_its_deadline(setup: &Setup) -> Check {
    let (mut pair, gate) = setup.gated_pair()?;
    let near = pair.near_region("near", 1 << 16, 1)?;
    pair.far_region("kv", 1 << 16, 2)?;
    let peer = pair.connect().await?;
    let plan = small_read(&near, &peer, 4)?;
    let mut latest = Duration::MAX;
    // A loaded machine may be late once; the agent must not be.
    for _ in 0..3 {
        gate.hold_transfers();
        let wanted = Duration::from_millis(200);
        let clock = Instant::now();
        let mut transfer = peer.transfer(&plan).deadline(wanted).post()?;
        let settled = transfer.settled();
        let result = (&mut transfer).await;
        let took = clock.elapsed();
        ensure_kind!(result, TimedOut);
        ensure!(
            took >= wanted,
            "a transfer with a deadline of {wanted:?} timed out after {took:?}"
        );
        let again = now(&mut transfer)
            .ok_or_else(|| Failure::new("a resolved transfer is pending again"))?;
        ensure!(
            matches!(&again, Err(error) if error.kind() != ErrorKind::TimedOut),
            "a transfer resolved twice: {again:?}"
        );
        latest = latest.min(took - wanted);
        until("the transport has finished", CUT_OFF, || Ok(gate.held() > 0))?;
        gate.open();
        settled.await?;
        if latest <= GRACE {
            break;
        }
    }
    ensure!(latest <= GRACE, "a transfer resolved {latest:?} after its deadline, three times");
    let clock = Instant::now();
    let left = Deadline::default_for_transfers().left();
    let half_a_minute = left..=left + clock.elapsed();
    ensure!(
        half_a_minute.contains(&Duration::from_secs(30)),
        "the default deadline is in {half_a_minute:?}"
    );
    // A transfer that settles in time keeps its result.
    peer.transfer(&plan).deadline(CUT_OFF).post()?.await?;
    Ok(())
}

/// T13: after `cancel` a transfer settles, with `Cancelled` or with the result that came first.
pub async fn cancel_ends_a_transfer_early(setup: &Setup) -> Check {
    let mut pair = setup.pair()?;
    let traffic = Traffic::new(&mut pair, "kv", 8 << 20)?;
    let peer = pair.near.connect(&pair.far.metadata()?)?;
    // At once, perhaps before there is a link; in later rounds on a link that is up.
    for round in 0..3 {
        for op in OPS {
            let before = traffic.fill_near()?;
            let theirs = traffic.fill_far(&mut pair.far)?;
            let mut transfer = traffic.post(op, &peer, CUT_OFF)?;
            let (settled, canceller) = (transfer.settled(), transfer.canceller());
            canceller.clone().cancel();
            settled.await?;
            let result = (&mut transfer).await;
            transfer.cancel();
            drop(transfer);
            canceller.cancel(); // nothing is left to cancel
            match &result {
                Ok(_) if op == Op::Read => {
                    traffic.check_near(theirs, "a read that was cancelled too late")?
                }
                Ok(_) => traffic.check_far(
                    &mut pair.far,
                    before,
                    "a write that was cancelled too late",
                )?,
                Err(error) if error.kind() == ErrorKind::Cancelled && op == Op::Read => {}
                // Bytes of a cancelled write may still arrive at the owner until something else has
                // been moved.
                Err(error) if error.kind() == ErrorKind::Cancelled => {
                    traffic.run(Op::Read, &peer, CUT_OFF).await?
                }
                Err(error) => {
                    return Err(Failure::new(format!(
                        "round {round}: a cancelled {op} failed with {error:?}"
                    )));
                }
            }
        }
        peer.ready(CUT_OFF).await?;
    }
    if setup.mode == Mode::TwoProcesses {
        cancelled_while_stopped(&mut pair.far, &peer, &traffic).await?;
        traffic.run(Op::Read, &peer, CUT_OFF).await?;
    }
    traffic.works(&mut pair.far, &peer, "after cancels").await
}

/// Cancels transfers to a stopped peer.
async fn cancelled_while_stopped(far: &mut crate::FarEnd, peer: &Peer, traffic: &Traffic) -> Check {
    let alone = promised_by(peer)?.settles_without_peer;
    for op in OPS {
        far.process()?.stop()?;
        let mut transfer = traffic.post(op, peer, Duration::from_secs(30))?;
        let mut settled = transfer.settled();
        transfer.cancel();
        if alone.of(op) {
            let what = format!("a cancelled {op} settles while the peer is stopped");
            until(&what, Duration::from_secs(3), || Ok(now(&mut settled).is_some()))?;
        }
        far.process()?.go_on()?;
        if !alone.of(op) {
            settled.await?;
        }
        let result = (&mut transfer).await;
        ensure!(
            result.is_ok() || matches!(&result, Err(error) if error.kind() == ErrorKind::Cancelled),
            "a {op} that was cancelled while the peer was stopped ended with {result:?}"
        );
    }
    Ok(())
}

/// T14: above the budget, `post` fails with `Busy`; a transfer counts until it has settled.
pub async fn a_full_budget_says_busy(setup: &Setup) -> Check {
    let mut pair = setup.pair()?;
    pair.far_region("kv", 1 << 20, 2)?;
    let gate = Gate::new();
    let limits = Limits { transfers: 4, description_bytes: 4096 };
    let agent = setup
        .builder(&unique("frugal"))?
        .budget(limits)
        .registry(setup.gated_registry(&gate))
        .build()?;
    let near = agent.register("near", setup.memory(1 << 20, 1)?)?;
    let peer = agent.connect(&pair.far.metadata()?)?;
    peer.ready(CUT_OFF).await?;
    let plan = small_read(&near, &peer, 4)?;
    let post = |within| peer.transfer(&plan).deadline(within).post();
    gate.hold_transfers();
    let mut transfers =
        vec![post(CUT_OFF)?, post(Duration::from_millis(50))?, post(CUT_OFF)?, post(CUT_OFF)?];
    ensure_kind!(post(CUT_OFF), Busy);
    // One transfer times out, another one is dropped: neither has settled.
    ensure_kind!(transfers.remove(1).await, TimedOut);
    drop(transfers.pop());
    ensure_kind!(post(CUT_OFF), Busy);
    let mut waiting = Box::pin(peer.transfer(&plan).deadline(CUT_OFF).post_wait());
    ensure!(now(&mut waiting).is_none(), "post_wait did not wait although the budget is used up");
    let soon = peer.transfer(&plan).deadline(Duration::from_millis(50)).post_wait().await;
    ensure_kind!(soon, TimedOut);
    until("four transfers have been posted and no more", CUT_OFF, || Ok(gate.held() == 4))?;
    gate.open();
    waiting.await?.await?;
    for transfer in transfers {
        transfer.await?;
    }
    // Descriptions: index lists count, whatever blocks they name.
    gate.hold_transfers();
    let grid = Grid::packed(512, 1000);
    let many: Vec<u32> = (0..400).map(|at| at * 7 % 1000).collect();
    let many = Indices::from(many);
    let remote = peer.region("kv")?.grid(grid)?.blocks(many.clone());
    let large = Plan::read(near.grid(grid)?.blocks(many), remote)?;
    let first = peer.transfer(&large).deadline(CUT_OFF).post()?;
    ensure_kind!(peer.transfer(&large).deadline(CUT_OFF).post(), Busy);
    until("the first has been carried out", CUT_OFF, || Ok(gate.held() == 1))?;
    gate.open();
    first.await?;
    peer.transfer(&large).deadline(CUT_OFF).post()?.await?;
    Ok(())
}

/// T15: the report's counts are exact, its times are those of the transfer, and it names the
/// backend.
pub async fn reports_say_what_moved(setup: &Setup) -> Check {
    let mut pair = setup.pair()?;
    let near = pair.near_region("near", 1 << 20, 1)?;
    pair.far_region("kv", 1 << 20, 2)?;
    let peer = pair.connect().await?;
    let grid = Grid::packed(1000, 1000);
    let (ours, theirs) = (near.grid(grid)?, peer.region("kv")?.grid(grid)?);
    let registry = setup.registry();
    let backend = registry.canonical(&setup.backends[0])?;
    for op in OPS {
        for (local, remote, blocks, segments) in [
            (vec![1, 2, 3, 9], vec![4, 5, 6, 8], 4, 2),
            (vec![0, 999], vec![999, 0], 2, 2),
            (vec![5], vec![5], 1, 1),
        ] {
            let plan = Plan::of(op, [(ours.blocks(local), theirs.blocks(remote))])?;
            let clock = Instant::now();
            let transfer = peer.transfer(&plan).deadline(CUT_OFF).post()?;
            let posted = clock.elapsed();
            let report = transfer.await?;
            let took = clock.elapsed();
            let counts = (report.bytes, report.blocks, report.segments);
            let wanted = (blocks * 1000, blocks, segments);
            ensure!(
                counts == wanted,
                "{op}: bytes, blocks and segments are {counts:?}, expected {wanted:?}"
            );
            let size = plan.size();
            ensure!(
                counts == (size.bytes, size.blocks, size.segments),
                "{op}: the plan's size says {size:?}"
            );
            let (post_time, transfer_time) = (report.post_time, report.transfer_time);
            ensure!(
                post_time <= posted,
                "{op}: a post of at most {posted:?} was reported as {post_time:?}"
            );
            ensure!(
                transfer_time <= took && !transfer_time.is_zero(),
                "{op}: a transfer of at most {took:?} was reported as {transfer_time:?}"
            );
            ensure!(
                report.backend == backend,
                "{op}: {backend} carried it, the report says {}",
                report.backend
            );
        }
    }
    Ok(())
}

/// A waker that counts its calls.
#[derive(Default)]
struct Calls(AtomicUsize);

impl Wake for Calls {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// T16: a transfer calls its waker, and `wait_blocking` needs no executor.
pub async fn waiting_needs_no_runtime(setup: &Setup) -> Check {
    let (mut pair, gate) = setup.gated_pair()?;
    let near = pair.near_region("near", 1 << 16, 1)?;
    pair.far_region("kv", 1 << 16, 2)?;
    let peer = pair.connect().await?;
    let plan = small_read(&near, &peer, 16)?;
    let post = || peer.transfer(&plan).deadline(CUT_OFF).post();
    // With a waker of the suite, which is called once the ticket has settled.
    gate.hold_transfers();
    let mut transfer = post()?;
    let calls = Arc::new(Calls::default());
    let waker = Waker::from(Arc::clone(&calls));
    let poll = |transfer: &mut Transfer| {
        std::pin::Pin::new(transfer).poll(&mut Context::from_waker(&waker))
    };
    ensure!(poll(&mut transfer).is_pending(), "a transfer whose ticket is held has resolved");
    until("the transport has finished", CUT_OFF, || Ok(gate.held() == 1))?;
    ensure!(
        calls.0.load(Ordering::SeqCst) == 0,
        "the waker was called before the transfer resolved"
    );
    gate.open();
    until("the waker is called", CUT_OFF, || Ok(calls.0.load(Ordering::SeqCst) > 0))?;
    ensure!(
        matches!(poll(&mut transfer), Poll::Ready(Ok(_))),
        "a transfer that woke its task has no result"
    );
    // In a loop of the caller.
    gate.hold_transfers();
    let mut transfer = post()?;
    until("the transport has finished", CUT_OFF, || {
        ensure!(transfer.drive().is_none(), "a transfer whose ticket is held has a result");
        Ok(gate.held() == 1)
    })?;
    gate.open();
    let mut result = None;
    until("a driven transfer has its result", CUT_OFF, || {
        result = transfer.drive();
        Ok(result.is_some())
    })?;
    ensure!(matches!(result, Some(Ok(_))), "a driven transfer ended with {result:?}");
    ensure!(transfer.is_settled(), "a transfer that has succeeded has not settled");
    // Without an executor, on a separate thread, without and with a deadline of the wait.
    std::thread::scope(|scope| {
        scope
            .spawn(|| {
                post()?.wait_blocking(CUT_OFF)?;
                gate.hold_transfers();
                let clock = Stopwatch::start()?;
                let waited = post()?.wait_blocking(Duration::from_millis(100));
                let took = clock.read();
                ensure_kind!(waited, TimedOut);
                ensure!(
                    took.reaches(Duration::from_millis(100)) && took.within(Duration::from_secs(2)),
                    "a wait of 100 ms took {took}"
                );
                until("the transport has finished", CUT_OFF, || Ok(gate.held() == 1))?;
                gate.open();
                // In another executor than the clause's, on this thread.
                run(post()?)?;
                Ok(())
            })
            .join()
            .map_err(|_| Failure::new("waiting panicked"))?
    })
}

/// T17: threads that use one link concurrently get their own results and their own bytes.
pub async fn many_threads_share_one_link(setup: &Setup) -> Check {
    const THREADS: u64 = 16;
    const ROUNDS: u64 = 24;
    const SHARE: u64 = 64 << 10;
    let mut pair = setup.pair()?;
    let near = pair.near_region("near", (THREADS * SHARE) as usize, 1)?;
    pair.far_region("kv", 1 << 20, 2)?;
    let peer = pair.connect().await?;
    let sent = AtomicUsize::new(0);
    let one = |thread: u64| -> Check {
        let grid = Grid::packed(4096, 16).at(thread * SHARE);
        let source = Grid::packed(4096, 256);
        for round in 0..ROUNDS {
            let mine: Vec<u32> = (0..16).map(|at| (at * 5 + round as u32) % 16).collect();
            let theirs: Vec<u32> =
                (0..16).map(|at| ((thread * 31 + round * 7 + at * 13) % 256) as u32).collect();
            let remote = peer.region("kv")?.grid(source)?.blocks(theirs.clone());
            let plan = Plan::read(near.grid(grid)?.blocks(mine.clone()), remote)?;
            let posting = peer.transfer(&plan).deadline(CUT_OFF);
            match (thread + round) % 4 {
                0 => {
                    let transfer = posting.post()?;
                    let settled = transfer.settled();
                    transfer.cancel();
                    let result = transfer.wait_blocking(CUT_OFF);
                    settled.wait_blocking(CUT_OFF)?;
                    if let Err(error) = result {
                        ensure!(
                            error.kind() == ErrorKind::Cancelled,
                            "a cancelled transfer failed with {error:?}"
                        );
                        continue;
                    }
                }
                1 => {
                    posting.notify(thread.to_le_bytes()).post()?.wait_blocking(CUT_OFF)?;
                    sent.fetch_add(1, Ordering::SeqCst);
                }
                2 => {
                    run(posting.post()?)?;
                }
                _ => {
                    posting.post()?.wait_blocking(CUT_OFF)?;
                }
            }
            for (our_block, their_block) in mine.iter().zip(&theirs) {
                let mut block = [0; 4096];
                near.copy_out(grid.offset(*our_block) as usize, &mut block)?;
                let wanted = bytes(2, source.offset(*their_block), 4096);
                ensure!(
                    block[..] == wanted,
                    "thread {thread}, round {round}: {their_block} did not arrive at {our_block}"
                );
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || one(thread))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Check>| {
            thread.join().map_err(|_| Failure::new("a thread panicked"))?
        };
        threads.into_iter().try_for_each(join)
    })?;
    let sent = sent.load(Ordering::SeqCst);
    let taken = pair.far.take_many(0, sent, CUT_OFF)?;
    ensure!(
        taken.len() == sent,
        "{sent} notifications were sent with the data, {} arrived",
        taken.len()
    );
    for thread in 0..THREADS {
        let count = taken.iter().filter(|one| one.bytes == thread.to_le_bytes()).count() as u64;
        let wanted = (0..ROUNDS).filter(|round| (thread + round) % 4 == 1).count() as u64;
        ensure!(count == wanted, "thread {thread} sent {wanted} notifications, {count} arrived");
    }
    Ok(())
}
