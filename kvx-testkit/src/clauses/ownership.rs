//! O: access to memory, and when it ends.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvx_core::backend::Ticket;
use kvx_core::{ErrorKind, Memory, Op, Peer, Region, Revocation, Transfer, quarantined_bytes};

use super::clause::{Breaker, Clause, Execution, clauses};
use super::traffic::{GRACE, OPS, Traffic, is_kept, now, promised_by, stays, until};
use crate::chaos::{Chaos, Fault};
use crate::check::{CUT_OFF, Check, Failure, ensure, ensure_kind};
use crate::far::PostSpec;
use crate::setup::{AgentPair, Mode, Setup};
use crate::stopwatch::Stopwatch;
use crate::unique::unique;

pub(super) const CLAUSES: &[Clause] = clauses!(
    O1 a_ticket_settles_only_once, Compiler, [Breaker::CompileFail("kvx-core/src/ticket.rs")];
    O2 settled_waits_for_the_transport, Both, [Breaker::Core("free-early"), Breaker::Chaos(Fault::ForgetTicket)];
    O3 a_dropped_transfer_frees_nothing_early, Both, [Breaker::Core("free-early")];
    O4 a_forgotten_ticket_quarantines, OneProcess, [Breaker::Core("forget-is-fine")];
    O5 nothing_is_written_after_settle, TwoProcesses, [Breaker::Chaos(Fault::WriteLate)];
    O6 revoke_gives_the_memory_back, Both, [Breaker::Core("revoke-at-once"), Breaker::Chaos(Fault::IgnoreRevoke)];
    O7 a_revoke_that_cannot_finish_quarantines, Both, [Breaker::Core("revoke-at-once")];
    O8 a_dropped_region_never_blocks, Both, [Breaker::Core("drop-frees"), Breaker::Chaos(Fault::BlockInRevoke)];
);

/// O1: settling consumes the ticket, which the compiler checks. This test checks the rest at run
/// time.
pub async fn a_ticket_settles_only_once(_: &Setup) -> Check {
    let calls = Arc::new(AtomicUsize::new(0));
    let count = || {
        let calls = Arc::clone(&calls);
        move |_| {
            calls.fetch_add(1, Ordering::SeqCst);
        }
    };
    Ticket::new(count()).settle(Ok(()));
    drop(Ticket::new(count()));
    let calls = calls.load(Ordering::SeqCst);
    ensure!(calls == 1, "a settled ticket and a dropped one made {calls} calls");
    Ok(())
}

/// O2: `settled` resolves when the ticket has settled and not before, and then nothing touches the
/// memory.
pub async fn settled_waits_for_the_transport(setup: &Setup) -> Check {
    let (mut pair, gate) = setup.gated_pair()?;
    let traffic = Traffic::new(&mut pair, "kv", 1 << 20)?;
    let peer = pair.connect().await?;
    for op in OPS {
        gate.hold_transfers();
        let transfer = traffic.post(op, &peer, Duration::from_millis(150))?;
        let mut settled = transfer.settled();
        let mut again = transfer.settled();
        ensure_kind!(transfer.await, TimedOut);
        until("the transport has finished", CUT_OFF, || Ok(gate.held() == 1))?;
        let pending = now(&mut settled).is_none() && now(&mut again).is_none();
        ensure!(
            pending,
            "{op}: the transfer counts as settled although the transport holds its ticket"
        );
        gate.open();
        settled.await?;
        again.await?;
        let (mine, theirs) = (traffic.fill_near()?, traffic.fill_far(&mut pair.far)?);
        stays("the local memory is left alone", Duration::from_millis(50), || {
            traffic.check_near(mine, "after settling").map(|()| true)
        })?;
        traffic.check_far(&mut pair.far, theirs, "after settling")?;
    }
    // A transfer that settled in time is settled for later calls, too.
    let mut transfer = traffic.post(Op::Read, &peer, CUT_OFF)?;
    (&mut transfer).await?;
    transfer.settled().await?;
    Ok(())
}

/// O3: dropping a transfer keeps its memory until the ticket has settled, whatever else is dropped.
pub async fn a_dropped_transfer_frees_nothing_early(setup: &Setup) -> Check {
    let (mut pair, gate) = setup.gated_pair()?;
    let traffic = Traffic::new(&mut pair, "kv", 1 << 20)?;
    let peer = pair.connect().await?;
    gate.hold_transfers();
    // While the region still exists, a revocation shows whether the memory counts as used.
    drop(traffic.post(Op::Read, &peer, CUT_OFF)?);
    until("the transport has finished", CUT_OFF, || Ok(gate.held() == 1))?;
    ensure_kind!(traffic.near.revoke(Duration::from_millis(150)).await, StillShared);
    // Once everything is dropped, the memory itself shows it.
    let other = Traffic::new(&mut pair, "other", 1 << 20)?;
    peer.update(&pair.far.metadata()?)?;
    let memory = Arc::downgrade(other.near.memory());
    drop(other.post(Op::Read, &peer, CUT_OFF)?);
    drop((other, peer));
    until("the transport has finished with both", CUT_OFF, || Ok(gate.held() == 2))?;
    stays("the memory is kept while the ticket is held", Duration::from_millis(100), || {
        Ok(is_kept(&memory))
    })?;
    gate.open();
    traffic.near.revoke(CUT_OFF).await?;
    until("the memory is freed once the ticket has settled", CUT_OFF, || Ok(!is_kept(&memory)))?;
    if setup.mode == Mode::TwoProcesses {
        dropped_while_stopped(setup, &mut pair).await?;
    }
    Ok(())
}

/// Drops a transfer and everything that belongs to it while the peer is stopped.
async fn dropped_while_stopped(setup: &Setup, pair: &mut AgentPair) -> Check {
    let capabilities = setup.capabilities()?;
    for op in OPS {
        let traffic = Traffic::new(pair, &format!("stopped-{op}"), 1 << 20)?;
        let peer = pair.connect().await?;
        let alone = promised_by(&peer)?.settles_without_peer.of(op);
        let memory = Arc::downgrade(traffic.near.memory());
        // Runs one transfer first, so that the next one reaches the peer: a transfer that still
        // waits for a region may end at once.
        traffic.post(op, &peer, CUT_OFF)?.await?;
        pair.far.process()?.stop()?;
        let transfer = traffic.post(op, &peer, Duration::from_secs(30))?;
        let mut settled = transfer.settled();
        drop((transfer, peer, traffic));
        if alone {
            let what = format!("a dropped {op} settles while the peer is stopped");
            until(&what, Duration::from_secs(3), || Ok(now(&mut settled).is_some()))?;
            if capabilities.revocation == Revocation::Owner {
                until("its memory is freed", CUT_OFF, || Ok(!is_kept(&memory)))?;
            }
        } else if stays("the memory is kept", GRACE, || Ok(is_kept(&memory))).is_err() {
            // A link may settle without the peer although it does not promise that. O5 detects
            // whether the peer writes afterwards.
            let what = format!(
                "a dropped {op} whose memory is freed while the peer is stopped has settled"
            );
            until(&what, CUT_OFF, || Ok(now(&mut settled).is_some()))?;
        }
        pair.far.process()?.go_on()?;
        if capabilities.revocation != Revocation::Never {
            until("the memory is freed after the peer continued", CUT_OFF, || {
                Ok(!is_kept(&memory))
            })?;
        }
    }
    Ok(())
}

/// O4: a forgotten ticket fails its transfer, and the memory is kept for ever.
pub async fn a_forgotten_ticket_quarantines(setup: &Setup) -> Check {
    /// The bytes that this clause has put into quarantine in this process, where they stay.
    static FORGOTTEN: AtomicU64 = AtomicU64::new(0);
    let forgetful =
        setup.registry().wrapped(|factory| Arc::new(Chaos::over(factory, Fault::ForgetTicket)));
    let near = setup.builder(&unique("near"))?.registry(forgetful.clone()).build()?;
    let mut pair = AgentPair { near, ..setup.pair()? };
    let traffic = Traffic::new(&mut pair, "kv", 1 << 20)?;
    let peer = pair.connect().await?;
    let mut transfer = traffic.post(Op::Read, &peer, CUT_OFF)?;
    let settled = transfer.settled();
    let result = (&mut transfer).await;
    ensure_kind!(result, Forgotten);
    ensure_kind!(settled.await, Forgotten);
    ensure_kind!(transfer.settled().await, Forgotten);
    let wanted = FORGOTTEN.fetch_add(1 << 20, Ordering::SeqCst) + (1 << 20);
    let counted = quarantined_bytes();
    ensure!(counted >= wanted, "{wanted} bytes are in quarantine for ever, {counted} are counted");
    ensure_kind!(traffic.near.revoke(Duration::from_millis(150)).await, StillShared);
    let memory = Arc::downgrade(traffic.near.memory());
    drop((transfer, traffic, peer));
    pair.near.shutdown(Duration::from_millis(300)).await.ok(); // another clause checks the result
    drop(pair);
    stays("the memory is kept", Duration::from_millis(50), || Ok(is_kept(&memory)))
}

/// O5: after a transfer has settled, its memory belongs to the program, whatever a late peer does.
pub async fn nothing_is_written_after_settle(setup: &Setup) -> Check {
    let mut pair = setup.pair()?;
    let traffic = Traffic::new(&mut pair, "kv", 16 << 20)?;
    let peer = pair.connect().await?;
    let alone = promised_by(&peer)?.settles_without_peer.read;
    // The peer is stopped before the post; then in the middle of the transfer; then as it answers.
    for round in 0..3 {
        traffic.fill_near()?;
        let theirs = traffic.fill_far(&mut pair.far)?;
        if round == 0 {
            pair.far.process()?.stop()?;
        }
        let transfer = traffic.post(Op::Read, &peer, Duration::from_millis(200))?;
        if round == 2 {
            std::thread::sleep(Duration::from_millis(2));
        }
        pair.far.process()?.stop()?;
        let mut settled = transfer.settled();
        match transfer.await {
            Ok(_) => traffic.check_near(theirs, "a read from a stopped peer")?,
            Err(error) => {
                ensure!(
                    error.kind() == ErrorKind::TimedOut,
                    "a read from a stopped peer failed with {error:?}"
                )
            }
        }
        if alone {
            until("the read settles while the peer is stopped", CUT_OFF, || {
                Ok(now(&mut settled).is_some())
            })?;
        } else if stays("it does not settle", GRACE, || Ok(now(&mut settled).is_none())).is_ok() {
            pair.far.process()?.go_on()?;
            settled.await?;
        }
        // A transfer that has settled early while the peer is stopped must also leave the memory
        // alone when the peer continues.
        let mine = traffic.fill_near()?;
        pair.far.process()?.go_on()?;
        stays("the memory keeps what the program wrote", Duration::from_millis(500), || {
            traffic.check_near(mine, "after the peer continued").map(|()| true)
        })?;
        ensure!(pair.far.metadata().is_ok(), "the peer does not continue");
        traffic.check_near(mine, "after the peer has answered")?;
    }
    traffic.works(&mut pair.far, &peer, "after reads that were given up").await
}

/// The numbers of reads and writes of 2 MiB that O6 posts so that some are in flight at a revoke.
/// If those were too few, because the machine was fast or the revoke late, it tries the next
/// number.
const ENOUGH: [usize; 4] = [16, 64, 256, 1024];

/// Posts `count` reads and `count` writes, and returns while they are in flight.
fn in_flight(traffic: &Traffic, peer: &Peer, count: usize) -> Result<Vec<Transfer>, Failure> {
    let mut transfers = Vec::new();
    for _ in 0..count {
        for op in OPS {
            transfers.push(traffic.post(op, peer, CUT_OFF)?);
        }
    }
    Ok(transfers)
}

/// Makes the peer revoke a region with transfers of this agent in flight. Returns whether some
/// were.
async fn revoked_by_the_peer(
    pair: &mut AgentPair,
    peer: &Peer,
    count: usize,
) -> Result<bool, Failure> {
    let theirs = Traffic::new(pair, &format!("theirs-{count}"), 2 << 20)?;
    peer.update(&pair.far.metadata()?)?;
    theirs.works(&mut pair.far, peer, "before a revoke").await?;
    let transfers = in_flight(&theirs, peer, count)?;
    pair.far.revoke(theirs.far, CUT_OFF)??;
    let content = theirs.fill_far(&mut pair.far)?;
    let mut failed = false;
    for transfer in transfers {
        if let Err(error) = transfer.await {
            ensure!(
                error.kind() == ErrorKind::Revoked,
                "a transfer whose region was revoked failed with {error:?}"
            );
            failed = true;
        }
    }
    theirs.check_far(&mut pair.far, content, "after the revoke")?;
    for op in OPS {
        let mine = theirs.fill_near()?;
        ensure_kind!(theirs.run(op, peer, CUT_OFF).await, Revoked);
        theirs.check_near(mine, "after a transfer with a revoked region")?;
        theirs.check_far(&mut pair.far, content, "after a transfer with a revoked region")?;
    }
    Ok(failed)
}

/// Revokes a region of this agent with its own transfers in flight. Returns whether some were.
async fn revoked_by_its_owner(
    pair: &mut AgentPair,
    peer: &Peer,
    count: usize,
) -> Result<bool, Failure> {
    let ours = Traffic::new(pair, &format!("ours-{count}"), 2 << 20)?;
    peer.update(&pair.far.metadata()?)?;
    ours.works(&mut pair.far, peer, "before this agent's revoke").await?;
    let transfers = in_flight(&ours, peer, count)?;
    let memory = ours.near.revoke(CUT_OFF).await?;
    ensure!(Arc::ptr_eq(&memory, ours.near.memory()), "the revoke returned another memory");
    let mine = ours.fill_near()?;
    let mut failed = false;
    for transfer in transfers {
        if let Err(error) = transfer.await {
            let fits = matches!(error.kind(), ErrorKind::Revoked | ErrorKind::Cancelled);
            ensure!(fits, "a transfer of a revoked region failed with {error:?}");
            failed = true;
        }
    }
    ensure_kind!(ours.post(Op::Read, peer, CUT_OFF), Revoked);
    ours.check_near(mine, "after this agent's revoke")?;
    // The memory can be registered again.
    let again = pair.near.register(&format!("again-{count}"), memory)?;
    let other = Traffic { near: again, ..Traffic::new(pair, &format!("other-{count}"), 2 << 20)? };
    peer.update(&pair.far.metadata()?)?;
    other.works(&mut pair.far, peer, "after revokes").await?;
    Ok(failed)
}

/// O6: after a revoke, no remote operation reaches the memory, and peers get `Revoked`.
pub async fn revoke_gives_the_memory_back(setup: &Setup) -> Check {
    let mut pair = setup.pair()?;
    let beside = Traffic::new(&mut pair, "beside", 2 << 20)?;
    let peer = pair.connect().await?;
    if setup.capabilities()?.revocation == Revocation::Never {
        let _transfers = in_flight(&beside, &peer, ENOUGH[0])?;
        ensure_kind!(pair.far.revoke(beside.far, CUT_OFF)?, StillShared);
        return Ok(());
    }
    let mut some = [false; 2];
    for count in ENOUGH {
        if !some[0] {
            some[0] = revoked_by_the_peer(&mut pair, &peer, count).await?;
        }
        if !some[1] {
            some[1] = revoked_by_its_owner(&mut pair, &peer, count).await?;
        }
    }
    ensure!(
        some == [true; 2],
        "no transfer was in flight at a revoke: {some:?} of the peer's and this agent's"
    );
    // Other regions of the pair still work.
    beside.works(&mut pair.far, &peer, "after other regions were revoked").await
}

/// Registers a region of this agent that the far end has read over its link.
fn known_to_the_peer(pair: &mut AgentPair, name: &str) -> Result<Region, Failure> {
    let near = pair.near_region(name, 1 << 20, 1)?;
    let far = pair.far_region(name, 1 << 20, 2)?;
    let back = pair.connect_back()?;
    let post = PostSpec {
        write: false,
        region: far,
        theirs: name.to_owned(),
        grid: (4096, 256),
        local: vec![1, 7, 9],
        remote: vec![0, 255, 3],
        within: CUT_OFF,
        notify: None,
    };
    pair.far.post(back, post)??;
    Ok(near)
}

/// O7: a revocation that has not settled in time fails with `StillShared`, and the memory is kept.
pub async fn a_revoke_that_cannot_finish_quarantines(setup: &Setup) -> Check {
    let (mut pair, gate) = setup.gated_pair()?;
    let revocation = setup.capabilities()?.revocation;
    let mut latest = Duration::MAX;
    for attempt in 0..3 {
        let region = known_to_the_peer(&mut pair, &format!("held-{attempt}"))?;
        let memory = Arc::downgrade(region.memory());
        gate.hold_revocations();
        let (clock, wanted) = (Instant::now(), Duration::from_millis(200));
        let revoked = region.revoke(wanted).await;
        let took = clock.elapsed();
        ensure_kind!(revoked, StillShared);
        ensure!(took >= wanted, "a revoke of {wanted:?} gave up after {took:?}");
        let counted = quarantined_bytes();
        ensure!(
            counted >= 1 << 20,
            "a region of 1 MiB that is still shared counts as {counted} quarantined bytes"
        );
        let again = region.revoke(Duration::from_millis(20)).await;
        ensure_kind!(again, StillShared);
        drop(region);
        stays("the memory is kept", Duration::from_millis(50), || Ok(is_kept(&memory)))?;
        gate.open();
        if revocation != Revocation::Never {
            until("the memory is freed once it is no longer shared", CUT_OFF, || {
                Ok(!is_kept(&memory))
            })?;
        }
        latest = latest.min(took - wanted);
        if latest <= GRACE {
            break;
        }
    }
    ensure!(
        latest <= GRACE,
        "a revoke failed with `StillShared` {latest:?} after its deadline, three times"
    );
    if setup.mode == Mode::TwoProcesses {
        let region = known_to_the_peer(&mut pair, "stopped")?;
        pair.far.process()?.stop()?;
        match revocation {
            Revocation::Owner => drop(region.revoke(CUT_OFF).await?),
            _ => ensure_kind!(region.revoke(Duration::from_millis(300)).await, StillShared),
        }
        pair.far.process()?.go_on()?;
        if revocation != Revocation::Never {
            region.revoke(CUT_OFF).await?;
        }
    }
    Ok(())
}

/// O8: dropping a region returns at once; its memory is freed when remote access has ended.
pub async fn a_dropped_region_never_blocks(setup: &Setup) -> Check {
    let (mut pair, gate) = setup.gated_pair()?;
    let revocation = setup.capabilities()?.revocation;
    let dropped = |region: Region| -> Result<Weak<Memory>, Failure> {
        let memory = Arc::downgrade(region.memory());
        let clock = Stopwatch::start()?;
        drop(region);
        let took = clock.read();
        ensure!(took.within(Duration::from_millis(300)), "dropping a region took {took}");
        Ok(memory)
    };
    let region = known_to_the_peer(&mut pair, "held")?;
    gate.hold_revocations();
    let memory = dropped(region)?;
    stays("the memory is kept", Duration::from_millis(100), || Ok(is_kept(&memory)))?;
    gate.open();
    if revocation == Revocation::Never {
        return stays("the memory is kept", Duration::from_millis(100), || Ok(is_kept(&memory)));
    }
    until("the memory is freed", CUT_OFF, || Ok(!is_kept(&memory)))?;
    let region = known_to_the_peer(&mut pair, "free")?;
    let memory = dropped(region)?;
    until("the memory is freed without being asked for", CUT_OFF, || Ok(!is_kept(&memory)))?;
    if setup.mode == Mode::TwoProcesses {
        let region = known_to_the_peer(&mut pair, "stopped")?;
        pair.far.process()?.stop()?;
        let memory = dropped(region)?;
        if revocation == Revocation::Owner {
            until("the memory is freed while the peer is stopped", CUT_OFF, || {
                Ok(!is_kept(&memory))
            })?;
        } else {
            stays("the memory is kept", Duration::from_millis(100), || Ok(is_kept(&memory)))?;
        }
        pair.far.process()?.go_on()?;
        until("the memory is freed after the peer continued", CUT_OFF, || Ok(!is_kept(&memory)))?;
    }
    Ok(())
}
