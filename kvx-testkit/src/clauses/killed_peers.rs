//! P: peers whose processes are killed.

use std::time::Duration;

use kvx_core::{Capabilities, Error, ErrorKind, Grid, Plan, Revocation};

use super::clause::{Breaker, Clause, Execution, clauses};
use super::peers::{AT_ONCE, LEN};
use super::traffic::{GRACE, OPS, Traffic, until};
use crate::chaos::Fault;
use crate::check::{CUT_OFF, Check, Failure, ensure, ensure_kind};
use crate::far::PostSpec;
use crate::pattern::bytes;
use crate::setup::Setup;
use crate::stopwatch::{Stopwatch, Took};
use crate::unique::unique;

pub(super) const CLAUSES: &[Clause] = clauses!(
    P3 a_peer_killed_before_a_post_is_reported, TwoProcesses, [Breaker::Chaos(Fault::DropPeerLoss)];
    P4 a_peer_killed_in_mid_transfer_is_reported, TwoProcesses,
        [Breaker::Chaos(Fault::HideFailure), Breaker::Chaos(Fault::DropPeerLoss)];
    P8 the_loss_of_an_idle_peer_is_told, TwoProcesses,
        [Breaker::Core("loss-untold"), Breaker::Chaos(Fault::DropPeerLoss)];
    P10 a_forked_child_hides_no_death, TwoProcesses, [Breaker::Core("fork-keeps")];
    P11 a_kill_amid_much_leaves_the_survivor_well, TwoProcesses, [Breaker::Chaos(Fault::DropPeerLoss)];
);

/// Returns how soon the loss of a killed peer is promised for transfers with this deadline, and
/// whether `TimedOut` may report it.
fn promised(capabilities: &Capabilities, deadline: Duration) -> (Duration, bool) {
    let within = capabilities.peer_loss_within;
    (within.map_or(deadline, |within| within.min(deadline)) + GRACE, within.is_none())
}

/// Returns whether this is a permitted error for work that a killed peer was to do.
fn is_loss(error: &Error, late_allowed: bool) -> bool {
    error.kind() == ErrorKind::PeerLost || late_allowed && error.kind() == ErrorKind::TimedOut
}

/// P3: a post to a killed peer fails promptly.
pub async fn a_peer_killed_before_a_post_is_reported(setup: &Setup) -> Check {
    const DEADLINE: Duration = Duration::from_secs(8);
    let (promptly, late_allowed) = promised(&setup.capabilities()?, DEADLINE);
    let check = |result: kvx_core::Result<()>, took: Took, what: &str| {
        match result {
            Err(error) if is_loss(&error, late_allowed) => {}
            other => {
                return Err(Failure::new(format!(
                    "{what} to a killed peer: expected PeerLost, got {other:?}"
                )));
            }
        }
        ensure!(
            took.within(promptly),
            "{what} to a killed peer was reported after {took}, promised were {promptly:?}"
        );
        Ok(())
    };
    for op in OPS {
        let mut pair = setup.pair()?;
        let blocks = Traffic::new(&mut pair, "kv", LEN)?;
        let metadata = pair.far.metadata()?;
        let peer = pair.connect().await?;
        blocks.works(&mut pair.far, &peer, "before the kill").await?;
        let seed = blocks.fill_near()?;
        pair.far.process()?.kill()?;
        let begun = Stopwatch::start()?;
        check(blocks.run(op, &peer, DEADLINE).await, begun.read(), "a post")?;
        let begun = Stopwatch::start()?;
        check(peer.notify(b"hello", DEADLINE).await, begun.read(), "a notification")?;
        blocks.check_near(seed, "after a transfer that could not take place")?;

        // Repeats the test with a handle that never had a link.
        let stranger = setup.agent(&unique("near"))?.connect(&metadata)?;
        let begun = Stopwatch::start()?;
        check(stranger.ready(DEADLINE).await, begun.read(), "a first link")?;
    }
    Ok(())
}

/// P4: a kill in mid transfer is reported promptly, and success means right bytes.
pub async fn a_peer_killed_in_mid_transfer_is_reported(setup: &Setup) -> Check {
    for first_arrives in [false, true] {
        // If all reads have arrived before the kill, because the machine was fast or the kill late,
        // more reads are posted.
        let mut some = false;
        for reads in [12, 24, 48, 96] {
            some = some || killed_in_mid_transfer(setup, reads, first_arrives).await?;
        }
        ensure!(some, "no transfer was in flight at a kill, however many were posted");
    }
    Ok(())
}

/// Kills the peer while `slots` reads and some writes are posted. Returns whether some were in
/// flight.
async fn killed_in_mid_transfer(
    setup: &Setup,
    slots: usize,
    first_arrives: bool,
) -> Result<bool, Failure> {
    const SLOT: usize = 2 << 20;
    const DEADLINE: Duration = Duration::from_secs(8);
    let (promptly, late_allowed) = promised(&setup.capabilities()?, DEADLINE);
    let grid = Grid::packed(4096, (SLOT / 4096) as u32);
    let order: Vec<u32> = (0..grid.count).rev().collect();
    let mut pair = setup.pair()?;
    let near = pair.near_region("slots", slots * SLOT, 1)?;
    pair.far_region("source", SLOT, 2)?;
    pair.far_region("sink", SLOT, 3)?;
    let peer = pair.connect().await?;
    let remote = |name| Ok::<_, Failure>(peer.region(name)?.grid(grid)?.blocks(order.clone()));
    // A first round, so that the links and regions are in use at the kill.
    let first = Plan::read(near.grid(grid)?.blocks(order.clone()), remote("source")?)?;
    peer.transfer(&first).deadline(CUT_OFF).post()?.await?;

    let mut reads = Vec::new();
    for slot in 0..slots {
        let local = near.grid(grid.at((slot * SLOT) as u64))?.blocks(order.clone());
        let plan = Plan::read(local, remote("source")?)?;
        reads.push((slot, peer.transfer(&plan).deadline(DEADLINE).post()?));
    }
    let spare = pair.near_region("spare", SLOT, 4)?;
    let write = Plan::write(spare.grid(grid)?.blocks(order.clone()), remote("sink")?)?;
    let writes = (0..4)
        .map(|_| peer.transfer(&write).deadline(DEADLINE).post())
        .collect::<kvx_core::Result<Vec<_>>>()?;
    let mut arrived = Vec::new();
    if first_arrives {
        let (slot, first) = reads.remove(0);
        arrived.push((slot, first.await));
    }
    pair.far.process()?.kill()?;
    let killed = Stopwatch::start()?;
    for (slot, read) in reads {
        arrived.push((slot, read.await));
    }
    let mut results = Vec::new();
    for write in writes {
        results.push(write.await.map(|_| ()));
    }
    let took = killed.read();
    ensure!(
        took.within(promptly),
        "the kill was reported after {took}, promised were {promptly:?}"
    );
    let wanted = bytes(2, 0, SLOT);
    for (slot, result) in arrived {
        if result.is_ok() {
            let mut content = vec![0; SLOT];
            near.copy_out(slot * SLOT, &mut content)?;
            ensure!(
                content == wanted,
                "read {slot} was reported as a success and its bytes are wrong"
            );
        }
        results.push(result.map(|_| ()));
    }
    let failed: Vec<_> = results.into_iter().filter_map(Result::err).collect();
    for error in &failed {
        ensure!(
            is_loss(error, late_allowed),
            "a transfer in flight at the kill: expected PeerLost, got {error:?}"
        );
    }
    // The link is gone for good, and the agent notices it without a post.
    if !late_allowed {
        until("the kill is noticed", promptly, || Ok(peer.lost().is_some()))?;
    }
    Ok(!failed.is_empty())
}

/// P8: a caller that waits for the loss of a peer is notified, even with nothing in flight.
pub async fn the_loss_of_an_idle_peer_is_told(setup: &Setup) -> Check {
    const DEADLINE: Duration = Duration::from_secs(8);
    let (promptly, late_allowed) = promised(&setup.capabilities()?, DEADLINE);
    let mut pair = setup.pair()?;
    let blocks = Traffic::new(&mut pair, "kv", LEN)?;
    let peer = pair.connect().await?;
    blocks.works(&mut pair.far, &peer, "before the kill").await?;
    ensure_kind!(peer.loss(GRACE).await, TimedOut);
    let agent = setup.agent(&unique("near"))?;
    let dropped = agent.connect(&pair.far.metadata()?)?.loss(CUT_OFF);
    ensure_kind!(dropped.await, Closed);

    let told = peer.loss(DEADLINE);
    pair.far.process()?.kill()?;
    let killed = Stopwatch::start()?;
    match told.await {
        Ok(reason) if reason.kind() == ErrorKind::PeerLost => {}
        Err(late) if late.kind() == ErrorKind::TimedOut && late_allowed => return Ok(()),
        other => {
            return Err(Failure::new(format!(
                "a killed idle peer: expected PeerLost, got {other:?}"
            )));
        }
    }
    let took = killed.read();
    ensure!(
        took.within(promptly),
        "the loss was reported after {took}, promised were {promptly:?}"
    );
    let again = peer.loss(DEADLINE).await?;
    ensure!(again.kind() == ErrorKind::PeerLost, "reported again, the reason is {again:?}");
    Ok(())
}

/// P10: the descriptors that a child has inherited do not hide the death of its parent.
pub async fn a_forked_child_hides_no_death(setup: &Setup) -> Check {
    const DEADLINE: Duration = Duration::from_secs(6);
    let (promptly, late_allowed) = promised(&setup.capabilities()?, DEADLINE);
    let mut pair = setup.pair()?;
    let blocks = Traffic::new(&mut pair, "kv", LEN)?;
    let peer = pair.connect().await?;
    blocks.works(&mut pair.far, &peer, "before the fork").await?;
    pair.far.fork(2 * DEADLINE)?;
    blocks.works(&mut pair.far, &peer, "while the child lives").await?;
    let told = peer.loss(DEADLINE);
    pair.far.process()?.kill()?;
    let killed = Stopwatch::start()?;
    match told.await {
        Ok(reason) => {
            ensure!(reason.kind() == ErrorKind::PeerLost, "the loss is reported as {reason:?}")
        }
        Err(late) if late.kind() == ErrorKind::TimedOut && late_allowed => {}
        Err(error) => {
            return Err(Failure::new(format!("a killed peer whose child lives on: {error:?}")));
        }
    }
    let took = killed.read();
    ensure!(
        took.within(promptly),
        "the loss was reported after {took}, promised were {promptly:?}"
    );
    Ok(())
}

/// P11: the survivor of a kill during much work gets its memory back, sleeps, and serves others as
/// before.
pub async fn a_kill_amid_much_leaves_the_survivor_well(setup: &Setup) -> Check {
    for owner_survives in [true, false] {
        killed_amid_much(setup, owner_survives).await?;
    }
    Ok(())
}

/// Makes one process read much from another one repeatedly, and kills one of the two.
async fn killed_amid_much(setup: &Setup, owner_survives: bool) -> Check {
    const BLOCK: u64 = 64 << 10;
    const COUNT: u32 = 8192; // 512 MiB
    /// More rounds than finish before the kill. A process takes up to a tenth of a second to die,
    /// and copies that a reader's device has been told to make from shared memory still arrive
    /// after the owner's death.
    const TIMES: u32 = 50;
    const AFTER: Duration = Duration::from_millis(30);
    const DEADLINE: Duration = Duration::from_secs(10);
    /// A thread that spins uses all of it.
    const WATCHED: Duration = Duration::from_secs(2);
    let (len, all) = (COUNT as usize * BLOCK as usize, (0..COUNT).rev().collect::<Vec<_>>());
    let read = |blocks: &[u32]| PostSpec {
        write: false,
        region: 0,
        theirs: "kv".into(),
        grid: (BLOCK, COUNT),
        local: blocks.to_vec(),
        remote: blocks.iter().rev().copied().collect(),
        within: DEADLINE,
        notify: None,
    };
    let [mut owner, mut reader] = [setup.far()?, setup.far()?];
    for far in [&mut owner, &mut reader] {
        setup.far_agent(far, &unique("far"))?;
        far.register("kv", len, setup.far, None)?;
    }
    let to_owner = reader.connect(0, &owner.metadata()?)?;
    reader.post(to_owner, read(&all[..4]))??;
    let third = setup.agent(&unique("third"))?;
    let near = third.register("kv", setup.memory(4 * BLOCK as usize, 1)?)?;
    let [survivor, victim] =
        if owner_survives { [&mut owner, &mut reader] } else { [&mut reader, &mut owner] };
    let peer = third.connect(&survivor.metadata()?)?;
    let few = |first: u32| -> Result<Plan, Failure> {
        let theirs =
            peer.region("kv")?.grid(Grid::packed(BLOCK, COUNT))?.blocks([first, first + 2]);
        Ok(Plan::read(near.grid(Grid::packed(BLOCK, 4))?.blocks([0, 2]), theirs)?)
    };
    peer.transfer(&few(0)?).deadline(CUT_OFF).post()?.await?;

    let reader = if owner_survives { &mut *victim } else { &mut *survivor };
    reader.begin_posts(to_owner, read(&all), TIMES)?;
    std::thread::sleep(AFTER);
    victim.process()?.kill()?;
    if !owner_survives {
        let (promptly, late_allowed) = promised(&setup.capabilities()?, DEADLINE);
        match survivor.posted(promptly + DEADLINE)? {
            Err(error) if is_loss(&error, late_allowed) => {}
            other => {
                return Err(Failure::new(format!(
                    "a transfer in flight at the kill: expected PeerLost, got {other:?}"
                )));
            }
        }
    }
    let before = survivor.cpu()?;
    std::thread::sleep(WATCHED);
    let used = survivor.cpu()? - before;
    ensure!(
        used < WATCHED / 2,
        "the survivor used {used:?} of CPU within {WATCHED:?} after the kill"
    );
    let asked = Stopwatch::start()?;
    peer.transfer(&few(5)?).deadline(CUT_OFF).post()?.await?;
    let took = asked.read();
    ensure!(took.within(GRACE + AT_ONCE), "a third peer was served after {took}");
    if setup.capabilities()?.revocation != Revocation::Never {
        drop((peer, third));
        survivor.revoke(0, CUT_OFF)??;
    }
    Ok(())
}
