//! P: peers that stop, fall silent, lack a resource, or restart.

use std::time::{Duration, Instant};

use kvx_core::backend::Metadata;
use kvx_core::{Error, ErrorKind, Grid, Op, Peer, Plan, Region, Transfer};

use super::clause::{Breaker, Clause, Execution, clauses};
use super::traffic::{GRACE, OPS, Traffic, now, promised_by, stays, until};
use crate::chaos::Fault;
use crate::check::{CUT_OFF, Check, Failure, ensure, ensure_kind};
use crate::far::{FarEnd, PostSpec};
use crate::pattern::{self, bytes, checksum};
use crate::setup::{AgentPair, Setup};
use crate::stopwatch::Stopwatch;
use crate::unique::{free_port, unique};

pub(super) const CLAUSES: &[Clause] = clauses!(
    P1 a_stopped_peer_costs_at_most_the_deadline, TwoProcesses, [Breaker::Core("deadline")];
    P2 a_silent_peer_is_lost_after_peer_timeout, TwoProcesses, [Breaker::Chaos(Fault::DropPeerLoss)];
    P5 a_lost_peer_stays_lost, TwoProcesses, [Breaker::Core("lost-again")];
    P6 a_restarted_peer_is_recognised, TwoProcesses, [Breaker::Core("any-invitation")];
    P7 a_stopped_peer_keeps_no_other_waiting, TwoProcesses, [Breaker::Chaos(Fault::OneQueue)];
    P9 what_was_short_is_tried_again, TwoProcesses, [Breaker::Core("refused-for-good")];
);

/// The length of the regions: enough that a link uses its paths for both small and large transfers.
pub(super) const LEN: usize = 512 << 10;
/// The `peer_timeout` of clauses that wait for it: longer than a busy machine keeps a live process
/// from answering.
const SILENCE: Duration = Duration::from_secs(1);
/// When a silent peer is lost at the latest: a link checks for silence in steps of a part of the
/// time.
const LOST_BY: Duration = SILENCE.saturating_mul(2).saturating_add(GRACE);
/// How long a lost handle may take to answer.
pub(super) const AT_ONCE: Duration = Duration::from_millis(500);

/// P1: while the peer is stopped, a transfer ends by its deadline, and afterwards the handle works.
pub async fn a_stopped_peer_costs_at_most_the_deadline(setup: &Setup) -> Check {
    /// The deadline of work that can only time out.
    const DEADLINE: Duration = Duration::from_millis(300);
    let mut pair = setup.pair()?;
    let blocks = Traffic::new(&mut pair, "kv", LEN)?;
    // The effect of a write that timed out on the peer's region, and its time, are not specified,
    // so these are other blocks.
    let others = Traffic::new(&mut pair, "others", LEN)?;
    let peer = pair.connect().await?;
    let needs = promised_by(&peer)?.target_cpu;
    blocks.works(&mut pair.far, &peer, "before the stop").await?;
    for op in OPS {
        let seed = match op {
            Op::Read => blocks.fill_far(&mut pair.far)?,
            Op::Write => blocks.fill_near()?,
        };
        let deadline = if needs.of(op) { DEADLINE } else { CUT_OFF };
        pair.far.process()?.stop()?;
        let transfers = (0..8)
            .map(|_| blocks.post(op, &peer, deadline))
            .collect::<kvx_core::Result<Vec<_>>>()?;
        let posted = Stopwatch::start()?;
        let settled: Vec<_> = transfers.iter().map(Transfer::settled).collect();
        let mut results = Vec::new();
        for transfer in transfers {
            results.push(transfer.await);
        }
        let took = posted.read();
        ensure!(
            took.within(deadline + GRACE),
            "a {op} with a deadline of {deadline:?} ended after {took}"
        );
        for result in results {
            match result {
                Ok(_) if op == Op::Read => blocks.check_near(seed, "a read from a stopped peer")?,
                Ok(_) => {}
                Err(error) if needs.of(op) => ensure_kind!(Err::<(), _>(error), TimedOut),
                Err(error) => {
                    return Err(Failure::new(format!(
                        "a {op} needs no CPU at the peer, but: {error:?}"
                    )));
                }
            }
        }
        pair.far.process()?.go_on()?;
        for settled in settled {
            settled.await?;
        }
        if op == Op::Write && !needs.of(op) {
            blocks.check_far(&mut pair.far, seed, "a write to a stopped peer")?;
        }
        others.works(&mut pair.far, &peer, "after the peer continued").await?;
    }
    Ok(())
}

/// P2: silence with work in flight loses the peer after `peer_timeout`; silence without work does
/// not.
pub async fn a_silent_peer_is_lost_after_peer_timeout(setup: &Setup) -> Check {
    let setup = &Setup { peer_timeout: SILENCE, ..setup.clone() };
    let mut pair = setup.pair()?;
    let blocks = Traffic::new(&mut pair, "kv", LEN)?;
    let peer = pair.connect().await?;
    let needs = promised_by(&peer)?.target_cpu;
    blocks.works(&mut pair.far, &peer, "before the stop").await?;

    pair.far.process()?.stop()?;
    stays("an idle peer that is silent is not lost", LOST_BY, || Ok(peer.lost().is_none()))?;
    pair.far.process()?.go_on()?;
    let last_word = Instant::now(); // at the earliest
    blocks.works(&mut pair.far, &peer, "after a silence without work").await?;

    let seed = blocks.fill_far(&mut pair.far)?;
    pair.far.process()?.stop()?;
    for op in OPS.into_iter().filter(|op| !needs.of(*op)) {
        let result = blocks.run(op, &peer, CUT_OFF).await;
        ensure!(result.is_ok(), "a {op} needs no CPU at the peer, but: {result:?}");
        if op == Op::Read {
            blocks.check_near(seed, "a read from a silent peer")?;
        }
    }
    let begun = Stopwatch::start()?;
    let needing = OPS.into_iter().filter(|op| needs.of(*op));
    let transfers =
        needing.map(|op| blocks.post(op, &peer, CUT_OFF)).collect::<kvx_core::Result<Vec<_>>>()?;
    for transfer in transfers {
        ensure_kind!(transfer.await, PeerLost);
        let silent = last_word.elapsed();
        ensure!(silent + GRACE >= SILENCE, "it was lost after {silent:?} of silence");
        let took = begun.read();
        ensure!(took.within(LOST_BY), "it was lost only after {took}");
    }
    pair.far.process()?.go_on()
}

/// Checks that each later call on a lost handle fails with `PeerLost`, at once.
async fn stays_lost(peer: &Peer, blocks: &Traffic, when: &str) -> Check {
    let begun = Stopwatch::start()?;
    ensure_kind!(blocks.run(Op::Read, peer, CUT_OFF).await, PeerLost);
    ensure_kind!(blocks.run(Op::Write, peer, CUT_OFF).await, PeerLost);
    ensure_kind!(peer.notify(b"hello", CUT_OFF).await, PeerLost);
    ensure_kind!(peer.ready(CUT_OFF).await, PeerLost);
    let took = begun.read();
    ensure!(took.within(AT_ONCE), "{when}: four calls on a lost handle took {took}");
    let kind = peer.lost().map(|error| error.kind());
    ensure!(kind == Some(ErrorKind::PeerLost), "{when}: the handle reports {kind:?}");
    Ok(())
}

/// P5: a lost handle stays lost; data that had arrived stays, and other peers work.
pub async fn a_lost_peer_stays_lost(setup: &Setup) -> Check {
    let setup = &Setup { peer_timeout: SILENCE, ..setup.clone() };
    let mut pair = setup.pair()?;
    let kept = Traffic::new(&mut pair, "kept", LEN)?;
    let blocks = Traffic::new(&mut pair, "kv", LEN)?;
    let peer = pair.connect().await?;
    let mut far = setup.far()?;
    setup.far_agent(&mut far, &unique("far"))?;
    let mut other = AgentPair { near: pair.near.clone(), far, setup: setup.clone() };
    let others = Traffic::new(&mut other, "other", LEN)?;
    let other_peer = other.connect().await?;
    let needs = promised_by(&other_peer)?.target_cpu;

    let seed = kept.fill_far(&mut pair.far)?;
    kept.run(Op::Read, &peer, CUT_OFF).await?;
    pair.far.process()?.kill()?;
    ensure_kind!(blocks.run(Op::Write, &peer, CUT_OFF).await, PeerLost);
    stays_lost(&peer, &blocks, "after a kill").await?;
    kept.check_near(seed, "data that had arrived before the kill")?;
    others.works(&mut other.far, &other_peer, "another peer, after a kill").await?;

    // The handle of a peer that was lost by its silence but lives on stays lost as well.
    let Some(op) = OPS.into_iter().find(|op| needs.of(*op)) else { return Ok(()) };
    let metadata = other.far.metadata()?;
    other.far.process()?.stop()?;
    ensure_kind!(others.run(op, &other_peer, CUT_OFF).await, PeerLost);
    other.far.process()?.go_on()?;
    // Once the far end answers this, it has read all that was sent to it before.
    other.far.metadata()?;
    stays_lost(&other_peer, &others, "after a silence").await?;
    let again = other.near.connect(&metadata)?;
    others.works(&mut other.far, &again, "a new handle, after a silence").await
}

/// P6: a restarted peer is another incarnation, for old handles and for old metadata.
pub async fn a_restarted_peer_is_recognised(setup: &Setup) -> Check {
    let name = unique("far");
    let far_setup = setup.with_option("tcp", "ports", free_port(0)?)?;
    let mut far = setup.far()?;
    far_setup.far_agent(&mut far, &name)?;
    let mut pair = AgentPair { near: setup.agent(&unique("near"))?, far, setup: setup.clone() };
    let blocks = Traffic::new(&mut pair, "kv", LEN)?;
    let old = pair.far.metadata()?;
    let peer = pair.connect().await?;
    blocks.works(&mut pair.far, &peer, "before the restart").await?;
    let other = setup.agent(&unique("near"))?.connect(&old)?;
    other.ready(CUT_OFF).await?;

    pair.far.process()?.kill()?;
    let stranger = setup.agent(&unique("near"))?;
    ensure_kind!(stranger.connect(&old)?.ready(CUT_OFF).await, PeerLost);

    pair.far.restart()?;
    far_setup.far_agent(&mut pair.far, &name)?;
    let seed = Traffic::seed();
    pair.far_region("kv", LEN, seed)?;
    let new = pair.far.metadata()?;
    let (was, is) = (Metadata::decode(&old)?, Metadata::decode(&new)?);
    ensure!(was.identity.name == is.identity.name, "it has another name after its restart");
    ensure!(
        was.identity.incarnation != is.identity.incarnation,
        "it has the same incarnation after its restart"
    );

    // Work in flight when the loss is noticed fails with `PeerLost`, so the handle gets time to
    // notice the loss before the calls below.
    if let Some(within) = setup.capabilities()?.peer_loss_within {
        until("the old handle has noticed the loss", within + CUT_OFF, || {
            Ok(peer.lost().is_some())
        })?;
    }
    let ours = blocks.fill_near()?;
    let late = stranger.connect(&old)?.ready(CUT_OFF).await;
    // If the address died with the process, its restart cannot be detected.
    let answers = was.backends == is.backends
        || matches!(&late, Err(error) if error.kind() == ErrorKind::PeerRestarted);
    let mut said = vec![("connecting with old metadata", late)];
    for op in OPS {
        said.push(("a post on an old handle", blocks.run(op, &peer, CUT_OFF).await));
    }
    let sent = other.notify(b"for the one that was", CUT_OFF).await;
    ensure!(sent.is_err(), "a notification on an old handle was accepted");
    let wanted = if answers { ErrorKind::PeerRestarted } else { ErrorKind::PeerLost };
    for (what, result) in said {
        let kind = result.as_ref().err().map(kvx_core::Error::kind);
        ensure!(kind == Some(wanted), "{what}: expected {wanted:?}, got {result:?}");
    }
    ensure_kind!(peer.update(&new), PeerRestarted);
    blocks.check_near(ours, "after reads that the restarted peer must not serve")?;
    blocks.check_far(&mut pair.far, seed, "after writes that were not for it")?;
    let heard = pair.far.take_many(0, 1, GRACE)?;
    ensure!(heard.is_empty(), "the new incarnation got a notification for the old one");

    let again = pair.near.connect(&new)?;
    blocks.works(&mut pair.far, &again, "a new handle, after the restart").await
}

/// P7: work in flight to a stopped peer does not block work for others.
pub async fn a_stopped_peer_keeps_no_other_waiting(setup: &Setup) -> Check {
    /// More blocks in each direction than fit into any library's queue.
    const MUCH: usize = 12 << 20;
    const ROUNDS: usize = 16;
    const DEADLINE: Duration = Duration::from_secs(3);
    /// The deadline and `peer_timeout` of work that waits until the peer continues, after all
    /// rounds: the work must not end before, and the peer must not be lost.
    const HELD: Duration = Duration::from_secs(60);
    let setup = &Setup { peer_timeout: HELD, ..setup.clone() };
    let mut pair = setup.pair()?;
    let (read, write) =
        (Traffic::new(&mut pair, "read", MUCH)?, Traffic::new(&mut pair, "write", MUCH)?);
    let peer = pair.connect().await?;
    let mut far = setup.far()?;
    setup.far_agent(&mut far, &unique("far"))?;
    let mut other = AgentPair { near: pair.near.clone(), far, setup: setup.clone() };
    let blocks = Traffic::new(&mut other, "kv", LEN)?;
    let other_peer = other.connect().await?;
    let needs = promised_by(&peer)?.target_cpu;
    read.works(&mut pair.far, &peer, "before the stop").await?;
    write.works(&mut pair.far, &peer, "before the stop").await?;
    blocks.works(&mut other.far, &other_peer, "before the stop").await?;

    let (came, went) = (read.fill_far(&mut pair.far)?, write.fill_near()?);
    pair.far.process()?.stop()?;
    let mut reading = read.post(Op::Read, &peer, HELD)?;
    let writing = write.post(Op::Write, &peer, HELD)?;
    let notices: Vec<_> = (0..100).map(|_| peer.notify(b"later", HELD)).collect();
    // With each round, more of the others' turns have passed: in the last rounds, all that fits is
    // in flight to the stopped peer.
    for round in 0..ROUNDS {
        for op in OPS {
            let result = blocks.run(op, &other_peer, DEADLINE).await;
            ensure!(result.is_ok(), "round {round}: a {op} of another peer's blocks: {result:?}");
        }
        let result = other_peer.notify(b"now", DEADLINE).await;
        ensure!(result.is_ok(), "round {round}: a notification for another peer: {result:?}");
    }
    blocks.works(&mut other.far, &other_peer, "another peer, while one is stopped").await?;
    if needs.read {
        ensure!(
            now(&mut reading).is_none(),
            "a read from a stopped peer has ended: nothing was in flight"
        );
    }
    pair.far.process()?.go_on()?;
    reading.await?;
    writing.await?;
    for notice in notices {
        notice.await?;
    }
    read.check_near(came, "after the peer continued")?;
    write.check_far(&mut pair.far, went, "after the peer continued")
}

/// P9: work that lacked a descriptor succeeds once there are some.
pub async fn what_was_short_is_tried_again(setup: &Setup) -> Check {
    // The deadline of work that cannot succeed.
    const SOON: Duration = Duration::from_secs(2);
    let mut pair = setup.pair()?;
    let len = 64 << 10;
    let (near, more) = (pair.near_region("kv", len, 1)?, pair.near_region("more", len, 2)?);
    let own = pair.far_region("kv", len, 3)?;
    let post = |theirs: &Region, write, within| PostSpec {
        write,
        region: own,
        theirs: theirs.name().to_owned(),
        grid: (4096, 16),
        local: (0..16).collect(),
        remote: (0..16).collect(),
        within,
        notify: None,
    };
    let holds = |far: &mut FarEnd, seed| -> Check {
        ensure!(far.sum(own)? == checksum(&bytes(seed, 0, len)), "the far end has wrong bytes");
        Ok(())
    };
    let metadata = pair.near.metadata()?;
    // The link itself.
    pair.far.open_files(false)?;
    let peer = pair.far.connect(0, &metadata)?;
    let begun = Stopwatch::start()?;
    let short = pair.far.post(peer, post(&near, false, SOON))?;
    let took = begun.read();
    ensure!(took.within(SOON + GRACE), "without a descriptor a post ended after {took}: {short:?}");
    pair.far.open_files(true)?;
    let peer = far_succeeds(&mut pair.far, &metadata, peer, &post(&near, false, CUT_OFF))?;
    holds(&mut pair.far, 1)?;
    // What a link prepares for a region that it has not seen: as the reader of it, and as the
    // target of a write from it.
    let mut back = pair.connect().await?;
    pair.far.open_files(false)?;
    pair.far.post(peer, post(&more, false, SOON))?.ok();
    pair.far.open_files(true)?;
    let peer = far_succeeds(&mut pair.far, &metadata, peer, &post(&more, false, CUT_OFF))?;
    holds(&mut pair.far, 2)?;
    pattern::fill(more.memory(), 5)?;
    let (grid, all) = (Grid::packed(4096, 16), 0..16u32);
    let write = |peer: &Peer, within| {
        let theirs = peer.region("kv")?.grid(grid)?.blocks(all.clone());
        peer.transfer(&Plan::write(more.grid(grid)?.blocks(all.clone()), theirs)?)
            .deadline(within)
            .post()
    };
    pair.far.open_files(false)?;
    write(&back, SOON)?.await.ok();
    pair.far.open_files(true)?;
    let begun = Stopwatch::start()?;
    while let Err(error) = write(&back, CUT_OFF)?.await {
        lost_lately(&error, &begun)?;
        back = pair.connect().await?;
    }
    holds(&mut pair.far, 5)?;
    pair.far.fill(own, 4)?;
    far_succeeds(&mut pair.far, &metadata, peer, &post(&near, true, CUT_OFF))?;
    let mut content = vec![0; len];
    near.copy_out(0, &mut content)?;
    ensure!(content == bytes(4, 0, len), "the far end wrote wrong bytes");
    Ok(())
}

/// Posts at the far end until it succeeds: on this handle or, if the peer was lost, on one from
/// `connect`.
fn far_succeeds(
    far: &mut FarEnd,
    metadata: &[u8],
    peer: usize,
    post: &PostSpec,
) -> Result<usize, Failure> {
    let (mut peer, begun) = (peer, Stopwatch::start()?);
    while let Err(error) = far.post(peer, post.clone())? {
        lost_lately(&error, &begun)?;
        peer = far.connect(0, metadata)?;
    }
    Ok(peer)
}

/// Fails unless the error is a loss. A handle learns of its loss a moment after its transfers, and
/// is shared until then.
fn lost_lately(error: &Error, begun: &Stopwatch) -> Check {
    let lost = error.kind() == ErrorKind::PeerLost && begun.read().within(CUT_OFF);
    ensure!(lost, "with descriptors again: {error:?}");
    Ok(())
}
