//! Random work for any length of time: every result must be right, and resource usage must not
//! grow.

use std::fmt;
use std::time::Duration;

use kvx_core::{Agent, ErrorKind, Grid, Op, Peer, Plan, Region, Revocation, Transfer};

use crate::check::{CUT_OFF, Check, Failure, ensure, ensure_kind};
use crate::executor::run;
use crate::far::{FarEnd, PostSpec};
use crate::flat::stays_flat;
use crate::pattern::{bytes, checksum, fill};
use crate::process_state::ResourceUsage;
use crate::random::Random;
use crate::setup::Setup;
use crate::unique::unique;

/// The length and the number of a region's blocks.
const GRID: Grid = Grid::packed(4096, 16);
const LEN: usize = 16 * 4096;
/// The number of concurrent transfers.
const AT_ONCE: usize = 8;

/// The length of a soak and the processes that take part.
#[derive(Clone, Copy, Debug)]
pub struct Soak {
    /// How long it runs.
    pub time: Duration,
    /// The number of processes in addition to this one; the first of them is never killed.
    pub processes: usize,
    /// The number of agents in each process.
    pub agents: usize,
    /// The seed of the random choices.
    pub seed: u64,
}

/// Counters of a soak.
#[derive(Clone, Copy, Debug, Default)]
pub struct SoakCounts {
    /// Transfers that arrived with the right bytes.
    pub arrived: u64,
    /// Transfers that were cancelled, timed out, or lost their peer.
    pub failed: u64,
    /// Notifications that arrived once.
    pub notified: u64,
    /// Regions that were revoked.
    pub revoked: u64,
    /// Processes that were killed and restarted.
    pub restarted: u64,
    /// How often this side's agent was shut down and rebuilt.
    pub rebuilt: u64,
}

impl fmt::Display for SoakCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SoakCounts { arrived, failed, notified, revoked, restarted, rebuilt } = self;
        write!(
            f,
            "{arrived} transfers arrived, {failed} failed as expected, {notified} notifications, \
             {revoked} revoked, {restarted} processes restarted, {rebuilt} agents rebuilt here"
        )
    }
}

/// An agent at a far end, and the connections in both directions.
struct FarAgent {
    /// The agent's number there.
    agent: usize,
    /// The region's number there, and its name.
    region: usize,
    name: String,
    /// The content of the region, and the event that wrote it.
    seed: u64,
    since: &'static str,
    peer: Peer,
    /// The number of this side's peer there.
    back: usize,
}

/// Another process.
struct FarProcess {
    far: FarEnd,
    agents: Vec<FarAgent>,
}

/// This side's agent, with a region for each concurrent transfer.
struct Near {
    agent: Agent,
    regions: Vec<Region>,
    /// The region that peers read, with constant content.
    shown: Region,
}

/// A transfer in flight.
struct Posted {
    at: (usize, usize),
    op: Op,
    order: Vec<u32>,
    seed: u64,
    note: Option<Vec<u8>>,
    transfer: Transfer,
}

/// The state of a soak.
struct World<'a> {
    setup: &'a Setup,
    spec: Soak,
    random: Random,
    near: Near,
    processes: Vec<FarProcess>,
    done: SoakCounts,
    notes: u64,
}

/// Works over the setup's backend as `spec` says, and reports the resource usage of this process
/// and of the oldest other one. Fails at the first wrong byte, result or notification, and if
/// either process [uses more](stays_flat) in the end.
///
/// # Errors
/// The first thing that was wrong.
pub fn soak(
    setup: &Setup,
    spec: Soak,
    mut tell: impl FnMut(Duration, &SoakCounts, [ResourceUsage; 2]),
) -> Result<SoakCounts, Failure> {
    let mut world = World::new(setup, spec)?;
    let patience = setup.peer_timeout + CUT_OFF;
    stays_flat(&mut world, spec.time, patience, World::turn, |world, passed| {
        let holdings = world.holdings()?;
        tell(passed, &world.done, holdings);
        Ok(holdings)
    })?;
    world.near.end()?;
    Ok(world.done)
}

impl Near {
    fn new(setup: &Setup) -> Result<Self, Failure> {
        let agent = setup.agent(&unique("near"))?;
        let region = |at: usize| {
            Ok::<_, Failure>(agent.register(&format!("slot{at}"), setup.memory(LEN, 1)?)?)
        };
        let regions = (0..AT_ONCE).map(region).collect::<Result<_, _>>()?;
        let shown = agent.register("shown", setup.memory(LEN, 3)?)?;
        Ok(Near { agent, regions, shown })
    }

    fn end(&self) -> Check {
        let ended = run(self.agent.shutdown(CUT_OFF));
        ensure!(ended.is_ok(), "the shutdown of an agent failed: {ended:?}");
        Ok(())
    }
}

impl World<'_> {
    fn new(setup: &Setup, spec: Soak) -> Result<World<'_>, Failure> {
        let near = Near::new(setup)?;
        let mut processes = Vec::new();
        for _ in 0..spec.processes {
            processes.push(FarProcess { far: setup.far()?, agents: Vec::new() });
        }
        let revokes = setup.capabilities()?.revocation != Revocation::Never;
        ensure!(revokes, "{:?} cannot revoke regions", setup.backends);
        let random = Random::seeded(spec.seed);
        let mut world =
            World { setup, spec, random, near, processes, done: SoakCounts::default(), notes: 0 };
        for at in 0..spec.processes {
            world.populate(at)?;
        }
        Ok(world)
    }

    /// Builds the agents of a process that has none, and connects in both directions.
    fn populate(&mut self, process: usize) -> Check {
        self.processes[process].agents.clear();
        for _ in 0..self.spec.agents {
            let seed = self.random.word();
            let FarProcess { far, agents } = &mut self.processes[process];
            let agent = self.setup.far_agent(far, &unique("far"))?;
            let name = unique("kv");
            let region = far.register_of(agent, &name, LEN, self.setup.far, Some(seed))?;
            let peer = self.near.agent.connect(&far.metadata_of(agent)?)?;
            let back = far.connect(agent, &self.near.agent.metadata()?)?;
            agents.push(FarAgent {
                agent,
                region,
                name,
                seed,
                since: "its registration",
                peer,
                back,
            });
        }
        Ok(())
    }

    fn any(&mut self) -> (usize, usize) {
        (self.random.below(self.spec.processes), self.random.below(self.spec.agents))
    }

    /// Runs some transfers, and sometimes a disruptive event.
    fn turn(&mut self) -> Check {
        self.transfers(None)?;
        match self.random.below(400) {
            0 => self.rebuild(),
            1..5 if self.spec.processes > 1 => self.restart(),
            5..25 => {
                let at = self.any();
                self.revoke(at)
            }
            25..60 => self.read_back(),
            _ => Ok(()),
        }
    }

    /// Posts transfers with several agents, gives some of them up, and checks the outcome of each.
    /// `killed` is a process that is killed meanwhile.
    fn transfers(&mut self, killed: Option<usize>) -> Check {
        let mut posted: Vec<Posted> = Vec::new();
        for _ in 0..AT_ONCE {
            let at = self.any();
            if posted.iter().all(|other| other.at != at) {
                posted.push(self.post(posted.len(), at)?);
            }
        }
        if let Some(process) = killed {
            self.processes[process].far.process()?.kill()?;
        }
        for (slot, posted) in posted.into_iter().enumerate() {
            let is_killed = killed == Some(posted.at.0);
            self.resolve(slot, posted, is_killed)?;
        }
        Ok(())
    }

    fn post(&mut self, slot: usize, at: (usize, usize)) -> Result<Posted, Failure> {
        let op = if self.random.below(2) == 0 { Op::Read } else { Op::Write };
        let mut order: Vec<u32> = (0..GRID.count).collect();
        for last in (1..order.len()).rev() {
            order.swap(last, self.random.below(last + 1));
        }
        let given_up = self.random.below(16);
        // A transfer that was given up may still notify later, because its data had arrived. A test
        // could not wait for that, so such transfers have no notification.
        let note = (given_up > 1 && self.random.below(4) == 0).then(|| {
            self.notes += 1;
            format!("note {}", self.notes).into_bytes()
        });
        let seed = self.random.word();
        let (region, remote) = (&self.near.regions[slot], &self.processes[at.0].agents[at.1]);
        fill(region.memory(), seed)?;
        let theirs = remote.peer.region(&remote.name)?.grid(GRID)?.blocks(order.clone());
        let own: Vec<u32> = match op {
            Op::Read => (0..GRID.count).collect(),
            Op::Write => order.clone(),
        };
        let plan = Plan::of(op, [(region.grid(GRID)?.blocks(own), theirs)])?;
        let deadline = if given_up == 0 { Duration::from_micros(200) } else { CUT_OFF };
        let mut posting = remote.peer.transfer(&plan).deadline(deadline);
        if let Some(note) = &note {
            posting = posting.notify(&note[..]);
        }
        let transfer = posting.post()?;
        if given_up == 1 {
            transfer.cancel();
        }
        Ok(Posted { at, op, order, seed, note, transfer })
    }

    fn resolve(&mut self, slot: usize, posted: Posted, killed: bool) -> Check {
        let Posted { at, op, order, seed, note, mut transfer } = posted;
        let result = run(&mut transfer);
        if !transfer.is_settled() {
            let settled = transfer.settled().wait_blocking(self.setup.peer_timeout + CUT_OFF);
            ensure!(
                settled.is_ok(),
                "a {op} that ended with {result:?} did not settle: {settled:?}"
            );
        }
        let (region, process) = (&self.near.regions[slot], &mut self.processes[at.0]);
        let remote = &mut process.agents[at.1];
        match &result {
            Ok(_) => {
                self.done.arrived += 1;
                let mut content = vec![0; LEN];
                region.copy_out(0, &mut content)?;
                match op {
                    Op::Write => (remote.seed, remote.since) = (seed, "a write"),
                    Op::Read => {
                        let theirs = bytes(remote.seed, 0, LEN);
                        let block = GRID.length as usize;
                        let wanted: Vec<u8> = order
                            .iter()
                            .flat_map(|at| &theirs[*at as usize * block..][..block])
                            .copied()
                            .collect();
                        let pairs = content.chunks(block).zip(wanted.chunks(block));
                        let wrong = pairs.filter(|(is, wanted)| is != wanted).count();
                        ensure!(
                            wrong == 0,
                            "a read of {} returned {wrong} blocks unlike its content since {}",
                            remote.name,
                            remote.since
                        );
                    }
                }
            }
            Err(error) => {
                self.done.failed += 1;
                let fits = match error.kind() {
                    ErrorKind::Cancelled | ErrorKind::TimedOut => true,
                    ErrorKind::PeerLost => killed,
                    _ => false,
                };
                ensure!(
                    fits,
                    "a {op}{} ended with {error:?}",
                    if killed { " to a killed peer" } else { "" }
                );
            }
        }
        if killed {
            return Ok(());
        }
        if result.is_err() && op == Op::Write {
            // The rest of the write may still arrive until the owner has revoked the region.
            return self.revoke(at);
        }
        if let (Ok(_), Some(note)) = (result, note) {
            let taken = process.far.take_of(remote.agent, CUT_OFF)??;
            ensure!(taken.bytes == note, "{note:?} was notified, {:?} arrived", taken.bytes);
            self.done.notified += 1;
        }
        Ok(())
    }

    /// Makes a far end read what this side shows.
    fn read_back(&mut self) -> Check {
        let at = self.any();
        let process = &mut self.processes[at.0];
        let remote = &mut process.agents[at.1];
        let blocks: Vec<u32> = (0..GRID.count).collect();
        let post = PostSpec {
            write: false,
            region: remote.region,
            theirs: self.near.shown.name().into(),
            grid: (GRID.length, GRID.count),
            local: blocks.clone(),
            remote: blocks,
            within: CUT_OFF,
            notify: None,
        };
        process.far.post(remote.back, post)??;
        (remote.seed, remote.since) = (3, "a read from here");
        ensure!(
            process.far.sum(remote.region)? == checksum(&bytes(3, 0, LEN)),
            "a far end has read wrong bytes"
        );
        self.done.arrived += 1;
        Ok(())
    }

    /// Revokes a region there, checks that it cannot be read any more, and registers another one.
    fn revoke(&mut self, at: (usize, usize)) -> Check {
        let seed = self.random.word();
        let FarProcess { far, agents } = &mut self.processes[at.0];
        let remote = &mut agents[at.1];
        far.revoke(remote.region, CUT_OFF)??;
        let own = self.near.regions[0].grid(GRID)?.blocks([0, 1]);
        let theirs = remote.peer.region(&remote.name)?.grid(GRID)?.blocks([0, 1]);
        let late = remote.peer.transfer(&Plan::read(own, theirs)?).deadline(CUT_OFF).post();
        let late = late.and_then(run);
        ensure_kind!(late, Revoked | Unregistered | WrongKey);
        far.drop_region(remote.region)?;
        (remote.name, remote.seed, remote.since) = (unique("kv"), seed, "its registration");
        remote.region =
            far.register_of(remote.agent, &remote.name, LEN, self.setup.far, Some(remote.seed))?;
        remote.peer = self.near.agent.connect(&far.metadata_of(remote.agent)?)?;
        self.done.revoked += 1;
        Ok(())
    }

    /// Kills a process during transfers and restarts it.
    fn restart(&mut self) -> Check {
        let process = 1 + self.random.below(self.spec.processes - 1);
        self.transfers(Some(process))?;
        self.processes[process].far.restart()?;
        self.populate(process)?;
        self.done.restarted += 1;
        Ok(())
    }

    /// Shuts down this side's agent and builds another one.
    fn rebuild(&mut self) -> Check {
        self.near.end()?;
        self.near = Near::new(self.setup)?;
        let metadata = self.near.agent.metadata()?;
        for FarProcess { far, agents } in &mut self.processes {
            for remote in agents {
                remote.peer = self.near.agent.connect(&far.metadata_of(remote.agent)?)?;
                far.drop_peer(remote.back)?;
                remote.back = far.connect(remote.agent, &metadata)?;
            }
        }
        self.done.rebuilt += 1;
        Ok(())
    }

    /// Returns the usage of this process and of the oldest other one, once all links are up.
    fn holdings(&mut self) -> Result<[ResourceUsage; 2], Failure> {
        for FarProcess { far, agents } in &mut self.processes {
            for remote in agents {
                run(remote.peer.ready(CUT_OFF))?;
                far.ready(remote.back, CUT_OFF)??;
            }
        }
        Ok([ResourceUsage::of_this_process()?, self.processes[0].far.holdings()?])
    }
}
