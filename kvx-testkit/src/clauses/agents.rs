//! A: agents in a host process.

use std::io::{Read as _, Write as _};
use std::sync::Arc;
use std::time::Duration;

use kvx_core::{
    Agent, Completion, ErrorKind, Grid, Idle, Memory, Notification, Op, Peer, Plan, Region,
    Registry, Revocation, Transfer, quarantined_bytes,
};

use super::clause::{Breaker, Clause, Execution, clauses};
use super::traffic::{GRACE, OPS, Traffic, exchange, is_kept, promised_by, until};
use crate::chaos::Fault;
use crate::check::{CUT_OFF, Check, Failure, ensure, ensure_kind};
use crate::far::{FarEnd, PostSpec};
use crate::process_state::ProcessState;
use crate::setup::{AgentPair, Mode, Setup};
use crate::stopwatch::Stopwatch;
use crate::tier::Tier;
use crate::unique::unique;

pub(super) const CLAUSES: &[Clause] = clauses!(
    A1 agents_share_a_process, OneProcess, [Breaker::Chaos(Fault::GlobalStop)];
    A2 an_agent_can_link_to_itself, OneProcess, [Breaker::Chaos(Fault::NoLoopback)];
    A3 idle_costs_what_is_declared, TwoProcesses, [Breaker::Chaos(Fault::Spin)];
    A4 a_forked_child_is_told_so, OneProcess, [Breaker::Core("fork")];
    A5 shutdown_settles_what_is_in_flight, Both, [Breaker::Core("shutdown-leaves")];
    A6 the_process_is_left_as_it_was, TwoProcesses, [Breaker::Chaos(Fault::TakeSignal)];
);

const LEN: usize = 256 << 10;

/// A1: several agents work concurrently, and the end of one does not affect the others.
pub async fn agents_share_a_process(setup: &Setup) -> Check {
    const AGENTS: usize = 4;
    let mut agents = Vec::new();
    for _ in 0..AGENTS {
        let agent = setup.agent(&unique("agent"))?;
        let region = agent.register("kv", setup.memory(LEN, 1)?)?;
        agents.push((agent, region));
    }
    let mut peers: Vec<Vec<Peer>> = Vec::new();
    for (agent, _) in &agents {
        peers.push(
            agents
                .iter()
                .map(|(other, _)| agent.connect(&other.metadata()?))
                .collect::<kvx_core::Result<_>>()?,
        );
    }
    let all = |alive: usize| (0..alive).flat_map(move |from| (0..alive).map(move |to| (from, to)));
    for (from, to) in all(AGENTS).filter(|(from, to)| from != to) {
        exchange(
            &agents[from].1,
            &agents[to].1,
            &peers[from][to],
            &format!("agent {from} with agent {to}"),
        )
        .await?;
    }

    let grid = Grid::packed(4096, (LEN / 4096) as u32);
    let order: Vec<u32> = (0..grid.count).rev().collect();
    let (leaving, _) = agents.pop().ok_or_else(|| Failure::new("no agents"))?;
    let mut flying = Vec::new();
    for round in 0..200 {
        let (from, to) = (round % agents.len(), (round + 1) % agents.len());
        let remote = peers[from][to].region("kv")?.grid(grid)?;
        let plan = Plan::read(
            agents[from].1.grid(grid)?.blocks(order.clone()),
            remote.blocks(order.clone()),
        )?;
        flying.push(peers[from][to].transfer(&plan).deadline(CUT_OFF).post()?);
    }
    leaving.shutdown(CUT_OFF).await?;
    for transfer in flying {
        transfer.await?;
    }
    for (from, to) in all(agents.len()).filter(|(from, to)| from != to) {
        let when = format!("agent {from} with agent {to}, after another was shut down");
        exchange(&agents[from].1, &agents[to].1, &peers[from][to], &when).await?;
    }
    ensure_kind!(peers[0][agents.len()].notify(b"hello", CUT_OFF).await, PeerLost);
    Ok(())
}

/// A2: an agent is a peer of itself like any other.
pub async fn an_agent_can_link_to_itself(setup: &Setup) -> Check {
    let agent = setup.agent(&unique("self"))?;
    let (one, other) = (
        agent.register("one", setup.memory(LEN, 1)?)?,
        agent.register("kv", setup.memory(LEN, 2)?)?,
    );
    let peer = agent.connect(&agent.metadata()?)?;
    peer.ready(CUT_OFF).await?;
    exchange(&one, &other, &peer, "an agent with itself").await?;
    peer.notify(b"to myself", CUT_OFF).await?;
    let heard = agent.notification(CUT_OFF).await?;
    ensure!(*heard.bytes == *b"to myself", "it received {:?} from itself", heard.bytes);
    ensure!(
        heard.from == *agent.identity(),
        "its notification to itself came from {:?}",
        heard.from
    );
    let grid = Grid::packed(4096, 2);
    let plan =
        Plan::write(one.grid(grid)?.blocks([0, 1]), peer.region("kv")?.grid(grid)?.blocks([1, 0]))?;
    peer.transfer(&plan).deadline(CUT_OFF).notify(*b"written").post()?.await?;
    ensure!(
        *agent.notification(CUT_OFF).await?.bytes == *b"written",
        "the notification of its own transfer has other bytes"
    );
    agent.shutdown(CUT_OFF).await?;
    Ok(())
}

/// Makes the far end read and write 64 blocks of the peer's region `kv`.
fn read_and_write(far: &mut FarEnd, peer: usize, region: usize) -> Check {
    for write in [false, true] {
        let blocks: Vec<u32> = (0..64).collect();
        let (theirs, notify) = ("kv".to_owned(), Some(b"done".to_vec()));
        let (local, remote, within) = (blocks.clone(), blocks, CUT_OFF);
        let grid = (4096, 64);
        far.post(peer, PostSpec { write, region, theirs, grid, local, remote, within, notify })??;
    }
    Ok(())
}

/// A3: a connected pair without work uses no more CPU than its backend declares.
pub async fn idle_costs_what_is_declared(setup: &Setup) -> Check {
    let time = Duration::from_secs(match setup.quick {
        true => 2,
        false if Tier::Whole.runs() => 10,
        false => 4,
    });
    let share = match setup.capabilities()?.idle {
        Idle::Asleep => 0.001,
        _ => 0.01,
    };
    // Answering the question about the CPU time is work as well, of well under a millisecond.
    let allowed = time.mul_f64(share) + Duration::from_millis(1);
    // Both ends are in separate processes, because this one has other work.
    let (mut one, mut other) = (setup.far()?, setup.far()?);
    for far in [&mut one, &mut other] {
        setup.far_agent(far, &unique("idle"))?;
        far.register("kv", LEN, setup.far, Some(1))?;
    }
    let there = one.connect(0, &other.metadata()?)?;
    let back = other.connect(0, &one.metadata()?)?;
    for (far, peer) in [(&mut one, there), (&mut other, back)] {
        read_and_write(far, peer, 0)?;
    }
    let before = [one.cpu()?, other.cpu()?];
    std::thread::sleep(time);
    for (far, before) in [&mut one, &mut other].into_iter().zip(before) {
        let used = far.cpu()? - before;
        ensure!(
            used <= allowed,
            "{used:?} of CPU in {time:?} without work, declared are {allowed:?}"
        );
    }
    Ok(())
}

/// Runs `what` in a fork of this process and returns its result. A fork that hangs is killed.
fn in_a_fork(what: impl FnOnce() -> String) -> Result<String, Failure> {
    let (mut reader, mut writer) = std::io::pipe()?;
    // SAFETY: the child has one thread, runs only `what`, and ends without running anything else of
    // this program. The C library's allocator works in a forked child.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: the call takes and returns numbers only. The signal has its default disposition,
        // which ends the child.
        unsafe { libc::alarm(8) };
        let said = std::panic::catch_unwind(std::panic::AssertUnwindSafe(what));
        let said = said.unwrap_or_else(|_| "a call panicked".to_owned());
        writer.write_all(said.as_bytes()).ok();
        // SAFETY: the call ends the child at once.
        unsafe { libc::_exit(0) };
    }
    drop(writer);
    if pid < 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    let mut said = String::new();
    reader.read_to_string(&mut said)?;
    let mut status = 0;
    // SAFETY: `pid` is this process's child, which only this function waits for, and `status` is
    // valid for the call.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    ensure!(waited == pid, "the fork could not be waited for: {}", std::io::Error::last_os_error());
    ensure!(status == 0, "a call of the fork hung or crashed: status {status:#x}");
    Ok(said)
}

/// The resources that a fork inherits.
struct Inherited {
    pair: AgentPair,
    region: Region,
    peer: Peer,
    plan: Plan,
    flying: Transfer,
    dropped: Transfer,
    waited: Transfer,
    settled: Completion<()>,
    metadata: Vec<u8>,
    registry: Registry,
}

impl Inherited {
    /// Makes every call in the fork. Returns the calls that did not fail as promised.
    fn call_everything(self) -> String {
        const SOON: Duration = Duration::from_secs(1);
        let (agent, region, peer, plan) = (&self.pair.near, &self.region, &self.peer, &self.plan);
        let grid = Grid::packed(4096, 1);
        match agent.metadata() {
            Err(error) if error.kind() == ErrorKind::Forked => {}
            // The other calls would wait for threads that the fork does not have.
            other => return format!("metadata said {:?}", other.map(drop)),
        }
        let mut wrong = String::new();
        let mut hear = |call: &str, result: kvx_core::Result<()>| match result {
            Err(error) if error.kind() == ErrorKind::Forked => {}
            other => wrong.push_str(&format!("{call} said {other:?}; ")),
        };
        hear("build", Agent::builder("forked").registry(self.registry.clone()).build().map(drop));
        hear("register", agent.register("more", Memory::owned(vec![0; 64])).map(drop));
        hear("connect", agent.connect(&self.metadata).map(drop));
        hear("connect_foreign", agent.connect_foreign("RIXL", b"").map(drop));
        hear("notification", agent.notification(SOON).join().map(drop::<Notification>));
        hear(
            "awaiting a notification",
            crate::executor::run(agent.notification(SOON)).map(drop::<Notification>),
        );
        hear("expect", agent.wait_for_senders(b"x", 1, SOON).wait_blocking(SOON).map(drop));
        hear("copy_in", region.copy_in(0, b"x"));
        hear("copy_out", region.copy_out(0, &mut [0]));
        hear("a local grid", region.grid(grid).map(drop));
        hear("revoke", region.revoke(SOON).wait_blocking(SOON).map(drop));
        hear("a peer's region", peer.region("kv").map(drop));
        hear("update", peer.update(&self.metadata).map(drop));
        hear("ready", peer.ready(SOON).wait_blocking(SOON));
        hear("notify", peer.notify(b"from the fork", SOON).wait_blocking(SOON));
        hear("post", peer.post(plan).map(drop));
        hear(
            "post with a notification",
            peer.transfer(plan).notify(*b"from the fork").post().map(drop),
        );
        hear(
            "post_wait",
            crate::executor::run(peer.transfer(plan).deadline(SOON).post_wait()).map(drop),
        );
        hear("waiting for a transfer", self.waited.wait_blocking(SOON).map(drop));
        hear("settled", self.dropped.settled().wait_blocking(SOON));
        hear("waiting for what was asked before the fork", self.settled.wait_blocking(SOON));
        hear("awaiting a transfer", crate::executor::run(self.flying).map(drop));
        hear("shutdown", agent.shutdown(SOON).wait_blocking(SOON));
        drop((self.dropped, self.plan, self.peer, self.region));
        drop(self.pair);
        wrong
    }
}

/// A4: each call in a fork reports that it is one, and the fork disturbs nothing.
pub async fn a_forked_child_is_told_so(setup: &Setup) -> Check {
    let mut pair = setup.pair()?;
    let blocks = Traffic::new(&mut pair, "kv", 4 << 20)?;
    let peer = pair.connect().await?;
    blocks.works(&mut pair.far, &peer, "before the fork").await?;
    let seed = blocks.fill_far(&mut pair.far)?;
    let plan = blocks.plan(Op::Read, &peer)?;
    let post = || peer.transfer(&plan).deadline(CUT_OFF).post();
    let (flying, dropped, waited) = (post()?, post()?, post()?);
    let settled = dropped.settled();
    let region = blocks.near.clone();
    let (metadata, registry) = (pair.far.metadata()?, setup.registry());
    let inherited = std::mem::ManuallyDrop::new(Inherited {
        pair,
        region,
        peer: peer.clone(),
        plan: plan.clone(),
        flying,
        dropped,
        waited,
        settled,
        metadata,
        registry,
    });
    let wrong = in_a_fork(|| {
        // SAFETY: this is the fork's copy, which is used once and never dropped otherwise, because
        // the fork ends without returning.
        unsafe { std::ptr::read(&*inherited) }.call_everything()
    });
    let Inherited { mut pair, flying, dropped, waited, settled, .. } =
        std::mem::ManuallyDrop::into_inner(inherited);
    let wrong = wrong?;
    ensure!(wrong.is_empty(), "a fork's calls: {wrong}");

    for transfer in [flying, dropped, waited] {
        transfer.await?;
    }
    settled.await?;
    blocks.check_near(seed, "the parent's transfers that were in flight at the fork")?;
    blocks.works(&mut pair.far, &peer, "in the parent, after the fork").await?;
    let heard = pair.far.take_many(0, 1, GRACE)?;
    ensure!(heard.is_empty(), "the fork has sent something");
    pair.near.shutdown(CUT_OFF).await?;
    Ok(())
}

/// Returns the threads of this process whose name contains `tag`.
fn threads_of(tag: &str) -> Vec<String> {
    ProcessState::of_this_process().threads.into_iter().filter(|name| name.contains(tag)).collect()
}

/// Checks that after its shutdown, every call of an agent fails with `Closed`.
async fn is_closed(agent: &Agent, blocks: &Traffic, peer: &Peer, plan: &Plan) -> Check {
    ensure_kind!(agent.metadata(), Closed);
    ensure_kind!(agent.register("more", Memory::owned(vec![0; 64])), Closed);
    ensure_kind!(agent.connect([]), Closed);
    ensure_kind!(agent.notification(CUT_OFF).await, Closed);
    ensure_kind!(agent.wait_for_senders(b"x", 1, CUT_OFF).await, Closed);
    ensure_kind!(peer.post(plan), Closed);
    ensure_kind!(peer.notify(b"x", CUT_OFF).await, Closed);
    ensure_kind!(peer.ready(CUT_OFF).await, Closed);
    // A second shutdown is permitted, and the memory belongs to the program again.
    agent.shutdown(CUT_OFF).await?;
    blocks.fill_near()?;
    Ok(())
}

/// A5: shutdown ends everything by its deadline.
pub async fn shutdown_settles_what_is_in_flight(setup: &Setup) -> Check {
    // Short enough to fit into the kernel's 15 bytes after `kvx-clock `.
    let tag: String = unique("").chars().rev().filter(char::is_ascii_digit).take(5).collect();
    let mut far = setup.far()?;
    setup.far_agent(&mut far, &unique("far"))?;
    let mut pair = AgentPair { near: setup.agent(&tag)?, far, setup: setup.clone() };
    let blocks = Traffic::new(&mut pair, "kv", 4 << 20)?;
    let peer = pair.connect().await?;
    blocks.works(&mut pair.far, &peer, "before the shutdown").await?;
    let back = pair.connect_back()?;
    let seed = blocks.fill_far(&mut pair.far)?;
    let waiting = pair.near.notification(CUT_OFF);
    let expecting = pair.near.wait_for_senders(b"never", 1, CUT_OFF);
    let plan = blocks.plan(Op::Read, &peer)?;
    let transfers = (0..8)
        .map(|_| peer.transfer(&plan).deadline(CUT_OFF).post())
        .collect::<kvx_core::Result<Vec<_>>>()?;
    ensure!(!threads_of(&tag).is_empty(), "the agent has no threads with its name");
    let begun = Stopwatch::start()?;
    pair.near.shutdown(CUT_OFF / 2).await?;
    let took = begun.read();
    ensure!(took.within(CUT_OFF / 2 + GRACE), "the shutdown took {took}");
    for transfer in transfers {
        match transfer.await {
            Ok(_) => blocks.check_near(seed, "a transfer that succeeded during the shutdown")?,
            Err(error) => ensure_kind!(Err::<(), _>(error), Closed),
        }
    }
    let took = begun.read();
    ensure!(took.within(CUT_OFF / 2 + GRACE), "transfers resolved {took} after the shutdown");
    ensure_kind!(waiting.await, Closed);
    ensure_kind!(expecting.await, Closed);
    // A thread that has been joined disappears from the list of tasks a moment later.
    until("its threads end", CUT_OFF, || Ok(threads_of(&tag).is_empty()))?;
    is_closed(&pair.near, &blocks, &peer, &plan).await?;
    ensure_kind!(pair.far.notify(back, b"anybody?", CUT_OFF)?, PeerLost);

    if setup.mode == Mode::TwoProcesses {
        pair.far.shutdown(0, CUT_OFF)??;
        until("the far end's threads end", CUT_OFF, || {
            Ok(pair.far.surroundings()?.threads.is_empty())
        })?;
        shutdown_beside_a_stopped_peer(setup).await?;
    }
    Ok(())
}

/// A shutdown waits for no peer longer than its deadline, and reports what it could not end.
async fn shutdown_beside_a_stopped_peer(setup: &Setup) -> Check {
    const DEADLINE: Duration = Duration::from_millis(500);
    for op in OPS {
        let mut pair = setup.pair()?;
        let blocks = Traffic::new(&mut pair, "kv", LEN)?;
        let peer = pair.connect().await?;
        let alone = promised_by(&peer)?.settles_without_peer.of(op);
        blocks.works(&mut pair.far, &peer, "before the stop").await?;
        let plan = blocks.plan(op, &peer)?;
        pair.far.process()?.stop()?;
        let transfer = peer.transfer(&plan).deadline(CUT_OFF).post()?;
        let begun = Stopwatch::start()?;
        let ended = pair.near.shutdown(DEADLINE).await;
        let result = transfer.await;
        let took = begun.read();
        // If something still holds the memory once all handles are gone, it is kept as long as it
        // is shared.
        let memory = Arc::downgrade(blocks.near.memory());
        let AgentPair { near, mut far, .. } = pair;
        drop((blocks, plan, peer, near));
        let (kept, counted) = (is_kept(&memory), quarantined_bytes());
        far.process()?.go_on()?;
        // A transport that cannot end gets a little more time to report that.
        ensure!(
            took.within(DEADLINE + 5 * GRACE),
            "a shutdown within {DEADLINE:?} with a stopped peer took {took}"
        );
        if let Err(error) = result {
            ensure_kind!(Err::<(), _>(error), Closed);
        }
        let provable = setup.capabilities()?.revocation == Revocation::Owner && alone;
        match ended {
            Ok(()) => {}
            Err(error) if provable => {
                return Err(Failure::new(format!(
                    "a shutdown with a stopped peer, which is promised to succeed: {error:?}"
                )));
            }
            Err(error) => {
                ensure_kind!(Err::<(), _>(error), StillShared | TimedOut);
                ensure!(
                    kept && counted >= LEN as u64,
                    "memory that is still shared is {}, and {counted} bytes are in quarantine",
                    if kept { "kept" } else { "freed" }
                );
            }
        }
    }
    Ok(())
}

/// A6: signals, environment and foreign threads are left alone.
pub async fn the_process_is_left_as_it_was(setup: &Setup) -> Check {
    // Uses a process that does nothing else, because this one runs other clauses concurrently.
    let mut far = setup.far()?;
    let before = far.surroundings()?;
    let compare = |far: &mut FarEnd, when: &str| -> Result<Vec<String>, Failure> {
        let after = far.surroundings()?;
        for (signal, (was, is)) in (1..).zip(before.signals.iter().zip(&after.signals)) {
            ensure!(
                was == is,
                "{when} the disposition of signal {signal} changed from {was:x?} to {is:x?}"
            );
        }
        ensure!(before.variables == after.variables, "{when} the environment differs");
        Ok(after.threads)
    };
    ensure!(
        before.threads.is_empty(),
        "the other process has threads before it uses kvx: {:?}",
        before.threads
    );
    setup.far_agent(&mut far, &unique("second"))?;
    far.register("kv", LEN, setup.far, Some(1))?;
    let own = far.metadata()?;
    let peer = far.connect(0, &own)?;
    far.register("more", LEN, setup.far, Some(2))?;
    read_and_write(&mut far, peer, 1)?;
    far.take(CUT_OFF)??;
    // A thread has its name only once it has run.
    let mut foreign = Vec::new();
    let named = until("the names of its threads begin with kvx", CUT_OFF, || {
        foreign = compare(&mut far, "with an agent")?;
        foreign.retain(|name| !name.starts_with("kvx"));
        Ok(foreign.is_empty())
    });
    named.map_err(|why| Failure::new(format!("{why}: others are {foreign:?}")))?;
    far.shutdown(0, CUT_OFF)??;
    until("all threads end with the agent", CUT_OFF, || {
        Ok(compare(&mut far, "after an agent")?.is_empty())
    })
}
