//! What becomes of work when something fails beside it: which error and when, whether a byte is wrong, when its memory
//! is free again, and whether the next transfer works.

use std::fmt;
use std::time::{Duration, Instant};

use kvx_core::{Agent, Capabilities, Grid, Kind, Op, Peer, Plan, Region, Transfer};

use crate::check::{Check, Failure, ensure};
use crate::executor::run;
use crate::far::{Far, limit_files};
use crate::pattern::{bytes, checksum, fill};
use crate::setup::{CUT_OFF, Setup, free_port, unique};
use crate::stopwatch::Stopwatch;

/// What fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The peer's process is killed.
    Killed,
    /// The same, and a child that it has forked holds all that it had open.
    KilledBesideAChild,
    /// The same, and another takes its place: of the same name, and at its port where the backend has one.
    Restarted,
    /// The peer's process stands still, and goes on when the work has ended.
    Stopped,
    /// The peer's process stands still, and is killed when the work has ended.
    StoppedThenKilled,
    /// The peer's agent is shut down.
    ShutDown,
    /// The peer takes its regions back.
    Revoked,
    /// The peer's process can open no more files, until the work has ended.
    NoFilesThere,
    /// This process can open no more files, until the work has ended.
    NoFilesHere,
    /// This side gives 10,000 transfers up as soon as they are posted.
    Cancelled,
}

impl Trouble {
    /// All of them.
    pub const ALL: [Trouble; 10] = [
        Trouble::Killed,
        Trouble::KilledBesideAChild,
        Trouble::Restarted,
        Trouble::Stopped,
        Trouble::StoppedThenKilled,
        Trouble::ShutDown,
        Trouble::Revoked,
        Trouble::NoFilesThere,
        Trouble::NoFilesHere,
        Trouble::Cancelled,
    ];

    /// How work may end beside it, other than well. A deadline is what every backend keeps.
    fn kinds(self, moment: Moment, capabilities: &Capabilities) -> &'static [Kind] {
        let is_told = capabilities.peer_loss_within.is_some();
        match self {
            // A child that holds its parent's sockets may keep a stranger waiting.
            Trouble::Killed if is_told => &[Kind::PeerLost],
            Trouble::KilledBesideAChild if is_told && moment != Moment::Unlinked => &[Kind::PeerLost],
            Trouble::Killed | Trouble::KilledBesideAChild | Trouble::Stopped | Trouble::StoppedThenKilled => {
                &[Kind::PeerLost, Kind::TimedOut]
            }
            Trouble::Restarted => &[Kind::PeerLost, Kind::PeerRestarted, Kind::TimedOut],
            // Nobody answers a stranger. Who is linked hears of it, and its regions are taken back first.
            Trouble::ShutDown if moment == Moment::Unlinked => &[Kind::PeerLost, Kind::TimedOut],
            Trouble::ShutDown => &[Kind::PeerLost, Kind::Revoked],
            Trouble::Revoked => &[Kind::Revoked],
            Trouble::NoFilesThere | Trouble::NoFilesHere => {
                &[Kind::PeerLost, Kind::TimedOut, Kind::Exhausted]
            }
            Trouble::Cancelled => &[Kind::Cancelled],
        }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Trouble::Killed => "killed",
            Trouble::KilledBesideAChild => "killed, a forked child lives on",
            Trouble::Restarted => "killed and started again",
            Trouble::Stopped => "stopped, goes on afterwards",
            Trouble::StoppedThenKilled => "stopped, killed afterwards",
            Trouble::ShutDown => "shut down",
            Trouble::Revoked => "takes its regions back",
            Trouble::NoFilesThere => "has no descriptors left",
            Trouble::NoFilesHere => "no descriptors left here",
            Trouble::Cancelled => "10,000 cancelled here",
        })
    }
}

/// When it fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The metadata is known, and nothing else.
    Unlinked,
    /// After work, with nothing under way.
    Idle,
    /// With reads under way.
    Reading,
    /// With writes under way.
    Writing,
}

impl Moment {
    /// All of them.
    pub const ALL: [Moment; 4] = [Moment::Unlinked, Moment::Idle, Moment::Reading, Moment::Writing];

    /// Whether that can fail then.
    pub fn has(self, trouble: Trouble) -> bool {
        trouble != Trouble::Cancelled || matches!(self, Moment::Reading | Moment::Writing)
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Moment::Unlinked => "before the link",
            Moment::Idle => "idle",
            Moment::Reading => "reading",
            Moment::Writing => "writing",
        })
    }
}

/// What became of the work.
#[derive(Clone, Debug)]
pub struct Ended {
    /// How many transfers arrived, and how the others ended.
    pub results: String,
    /// When the last of them had ended, after the trouble began.
    pub after: Duration,
    /// When nothing touched this side's memory any more, after that. `None`: not while the trouble lasted, which only
    /// a backend may say whose transfers do not settle without the peer.
    pub settled: Option<Duration>,
    /// Whether it was still so when the trouble was over: the memory stays in quarantine.
    pub held: bool,
    /// How long it took, from the end of the trouble, until bytes had been moved both ways again.
    pub works: Duration,
}

/// So much after its deadline an end is late.
const GRACE: Duration = Duration::from_secs(1);
/// How often work is tried again when the trouble is over: a link that it has broken may be noticed by the first.
const TRIES: usize = 3;
/// Bytes and number of a slot's blocks; transfers that are under way at once, each with a slot of its own here.
const GRID: Grid = Grid::packed(4096, 512);
const SLOT: usize = 4096 * 512;
const SLOTS: usize = 24;
/// Transfers of one block each that are posted and cancelled.
const CANCELLED: u32 = 10_000;
/// How long bytes that come too late are waited for.
const LATE: Duration = Duration::from_millis(200);
/// How long a forked child holds what it has inherited.
const LIFE_OF_A_CHILD: Duration = Duration::from_secs(6);
/// What the peer's region for reads holds.
const SOURCE: u64 = 2;

/// Has this trouble at this moment, over the setup's backend, and tells what became of the work, whose transfers have
/// this `deadline`.
///
/// # Errors
/// A transfer that ended too late or in a way that the contract does not have, a wrong byte, memory that does not
/// come back, or a next transfer that does not work.
pub fn fault(setup: &Setup, trouble: Trouble, moment: Moment, deadline: Duration) -> Result<Ended, Failure> {
    let mut scene = Scene::new(setup, trouble, deadline)?;
    let op = if moment == Moment::Writing { Op::Write } else { Op::Read };
    let metadata = scene.metadata()?;
    let mut linked = None;
    if moment != Moment::Unlinked {
        let peer = scene.near.connect(&metadata)?;
        scene.works(&peer)?;
        linked = Some(peer);
    }
    let mut posted = match (&linked, moment) {
        (Some(peer), Moment::Reading | Moment::Writing) if trouble == Trouble::Cancelled => {
            scene.post_small(op, peer)?
        }
        (Some(peer), Moment::Reading | Moment::Writing) => scene.post(op, peer)?,
        _ => Vec::new(),
    };
    let (begun, watch) = (Instant::now(), Stopwatch::start()?);
    scene.begin(trouble)?;
    let peer = match linked {
        Some(peer) => peer,
        None => scene.near.connect(&metadata)?,
    };
    let mut refused = None;
    if posted.is_empty() {
        // A post may say at once what an answer would say later: a lost peer, files that cannot be opened.
        match scene.post(op, &peer) {
            Ok(transfers) => posted = transfers,
            Err(error) => refused = Some(Err(error)),
        }
    }
    let waited = posted.iter_mut().map(|transfer| run(transfer).map(drop));
    let results: Vec<_> = waited.chain(refused).collect();
    let after = begun.elapsed();
    let limit = deadline + GRACE + if trouble == Trouble::Restarted { CUT_OFF } else { Duration::ZERO };
    let took = watch.read();
    ensure!(took.within(limit), "the work ended after {took}, {deadline:?} were its deadline");
    let settled = scene.settled(&posted, op)?;
    scene.check_results(&results, op, trouble, moment)?;

    // Others have the memory now: nothing of what was given up may change it.
    let canary = settled.map(|_| scene.spoil()).transpose()?;
    let over = Instant::now();
    scene.end(trouble)?;
    scene.works_again(peer, trouble)?;
    let works = over.elapsed();
    let held = settled.is_none() && scene.settled(&posted, op)?.is_none();
    if let Some(seed) = canary {
        std::thread::sleep(LATE);
        scene.is_untouched(seed)?;
    }
    Ok(Ended { results: told(results), after, settled, held, works })
}

/// An agent here and one at a far end.
struct Scene {
    setup: Setup,
    deadline: Duration,
    /// What the backend promises on whatever link.
    capabilities: Capabilities,
    /// With a port of its own where it has to come back to it.
    far_setup: Setup,
    near: Agent,
    /// A slot for each transfer, and one more to see whether work goes on.
    slots: Region,
    far: Far,
    name: String,
    /// The far end's agent, and its regions for reads and writes, by number.
    agent: usize,
    regions: [usize; 2],
}

/// The far end's region for reads, and that for writes.
const NAMES: [&str; 2] = ["source", "sink"];

fn region_for(op: Op) -> &'static str {
    NAMES[usize::from(op == Op::Write)]
}

impl Scene {
    fn new(setup: &Setup, trouble: Trouble, deadline: Duration) -> Result<Scene, Failure> {
        let far_setup = match trouble {
            Trouble::Restarted => setup.with_option("tcp", "ports", free_port(0)?)?,
            _ => setup.clone(),
        };
        let near = setup.agent(&unique("near"))?;
        let slots = near.register("slots", setup.memory((SLOTS + 1) * SLOT, 1)?)?;
        let far = setup.far()?;
        let mut scene = Scene {
            setup: setup.clone(),
            deadline,
            capabilities: setup.capabilities()?,
            far_setup,
            near,
            slots,
            far,
            name: unique("far"),
            agent: 0,
            regions: [0; 2],
        };
        scene.populate()?;
        Ok(scene)
    }

    /// Builds the far end's agent.
    fn populate(&mut self) -> Check {
        self.agent = self.far_setup.far_agent(&mut self.far, &self.name)?;
        self.register()
    }

    /// Another process takes the place of the far end's, which is killed if it lives.
    fn start_again(&mut self) -> Check {
        self.far.process()?.kill()?;
        self.far.restart()?;
        self.populate()
    }

    fn register(&mut self) -> Check {
        for (number, (name, seed)) in self.regions.iter_mut().zip([(NAMES[0], SOURCE), (NAMES[1], 3)]) {
            *number = self.far.register_of(self.agent, name, SLOT, self.setup.far, Some(seed))?;
        }
        Ok(())
    }

    fn metadata(&mut self) -> Result<Vec<u8>, Failure> {
        self.far.metadata_of(self.agent)
    }

    /// A transfer of all blocks of a slot, in another order there, so that nothing is merged.
    fn plan(&self, op: Op, peer: &Peer, slot: usize) -> kvx_core::Result<Plan> {
        let local = self.slots.grid(GRID.at((slot * SLOT) as u64))?.blocks(0..GRID.count);
        let backwards: Vec<u32> = (0..GRID.count).rev().collect();
        Plan::of(op, [(local, peer.region(region_for(op))?.grid(GRID)?.blocks(backwards))])
    }

    /// One in each slot.
    fn post(&self, op: Op, peer: &Peer) -> kvx_core::Result<Vec<Transfer>> {
        let posted = |slot| peer.transfer(&self.plan(op, peer, slot)?).deadline(self.deadline).post();
        (0..SLOTS).map(posted).collect()
    }

    /// Many, of a block each.
    fn post_small(&self, op: Op, peer: &Peer) -> Result<Vec<Transfer>, Failure> {
        let theirs = peer.region(region_for(op))?.grid(GRID)?;
        let all = Grid::packed(4096, GRID.count * SLOTS as u32);
        let ours = self.slots.grid(all)?;
        let posted = |number: u32| {
            let blocks = (ours.blocks([number % all.count]), theirs.blocks([number % GRID.count]));
            let transfer = peer.transfer(&Plan::of(op, [blocks])?).deadline(CUT_OFF).post()?;
            transfer.cancel();
            Ok(transfer)
        };
        (0..CANCELLED).map(posted).collect()
    }

    fn begin(&mut self, trouble: Trouble) -> Check {
        match trouble {
            Trouble::Killed => self.far.process()?.kill(),
            Trouble::KilledBesideAChild => {
                self.far.fork(LIFE_OF_A_CHILD)?;
                self.far.process()?.kill()
            }
            Trouble::Restarted => self.start_again(),
            Trouble::Stopped | Trouble::StoppedThenKilled => self.far.process()?.stop(),
            Trouble::ShutDown => {
                // What others still hold of it is its own business: a shutdown may say `StillShared`.
                self.far.shutdown(self.agent, CUT_OFF)?.ok();
                Ok(())
            }
            Trouble::Revoked => {
                for region in self.regions {
                    self.far.revoke(region, CUT_OFF)?.ok();
                }
                Ok(())
            }
            Trouble::NoFilesThere => self.far.open_files(false),
            Trouble::NoFilesHere => Ok(limit_files(false).map_err(std::io::Error::from)?),
            // They are cancelled as they are posted.
            Trouble::Cancelled => Ok(()),
        }
    }

    /// The trouble is over.
    fn end(&mut self, trouble: Trouble) -> Check {
        match trouble {
            Trouble::Killed | Trouble::KilledBesideAChild | Trouble::StoppedThenKilled => self.start_again(),
            Trouble::Stopped => self.far.process()?.go_on(),
            Trouble::ShutDown => self.populate(),
            Trouble::Revoked => self.register(),
            Trouble::NoFilesThere => self.far.open_files(true),
            Trouble::NoFilesHere => Ok(limit_files(true).map_err(std::io::Error::from)?),
            Trouble::Restarted | Trouble::Cancelled => Ok(()),
        }
    }

    /// Work goes on: over the same handle where nothing has happened to the peer.
    fn works_again(&mut self, peer: Peer, trouble: Trouble) -> Check {
        if trouble == Trouble::Cancelled {
            return self.works(&peer);
        }
        let metadata = self.metadata()?;
        let mut last = Ok(());
        for _ in 0..TRIES {
            let peer = self.near.connect(&metadata)?;
            last = run(peer.ready(CUT_OFF)).map_err(Failure::from).and_then(|()| self.works(&peer));
            if last.is_ok() {
                break;
            }
        }
        last
    }

    /// When all have settled. Fails where they must and do not.
    fn settled(&self, posted: &[Transfer], op: Op) -> Result<Option<Duration>, Failure> {
        let begun = Instant::now();
        let alone = self.capabilities.settles_without_peer;
        let must = if op == Op::Read { alone.read } else { alone.write };
        let limit = if must { self.setup.peer_timeout + CUT_OFF } else { self.setup.peer_timeout + GRACE };
        for transfer in posted {
            match transfer.settled().wait(limit.saturating_sub(begun.elapsed())) {
                Ok(()) => {}
                Err(_) if !must => return Ok(None),
                Err(error) => {
                    return Err(Failure::new(format!("memory is not free after {limit:?}: {error:?}")));
                }
            }
        }
        Ok(Some(begun.elapsed()))
    }

    /// What arrived is right, and what did not ended as it may.
    fn check_results(
        &self,
        results: &[kvx_core::Result<()>],
        op: Op,
        trouble: Trouble,
        moment: Moment,
    ) -> Check {
        let kinds = trouble.kinds(moment, &self.capabilities);
        for error in results.iter().filter_map(|result| result.as_ref().err()) {
            ensure!(kinds.contains(&error.kind()), "{kinds:?} were allowed, not {error:?}");
        }
        if op != Op::Read || trouble == Trouble::Cancelled {
            return Ok(());
        }
        let source = bytes(SOURCE, 0, SLOT);
        let wanted: Vec<u8> = source.chunks(GRID.length as usize).rev().flatten().copied().collect();
        let mut content = vec![0; SLOT];
        for slot in results.iter().enumerate().filter(|(_, result)| result.is_ok()).map(|(slot, _)| slot) {
            self.slots.copy_out(slot * SLOT, &mut content)?;
            ensure!(content == wanted, "read {slot} arrived with wrong bytes");
        }
        Ok(())
    }

    /// Gives this side's memory another content.
    fn spoil(&self) -> Result<u64, Failure> {
        let seed = 99;
        fill(self.slots.memory(), seed)?;
        Ok(seed)
    }

    fn is_untouched(&self, seed: u64) -> Check {
        let mut content = vec![0; SLOTS * SLOT];
        self.slots.copy_out(0, &mut content)?;
        ensure!(content == bytes(seed, 0, content.len()), "memory changed after its transfers had settled");
        Ok(())
    }

    /// All of a slot goes to and fro.
    fn works(&mut self, peer: &Peer) -> Check {
        let seed = 7;
        self.far.fill(self.regions[0], seed)?;
        let read = self.plan(Op::Read, peer, SLOTS)?;
        run(peer.transfer(&read).deadline(CUT_OFF).post()?)?;
        let write = self.plan(Op::Write, peer, SLOTS)?;
        run(peer.transfer(&write).deadline(CUT_OFF).post()?)?;
        let there = self.far.sum(self.regions[1])?;
        ensure!(there == checksum(&bytes(seed, 0, SLOT)), "bytes that went to and fro are wrong");
        self.far.fill(self.regions[0], SOURCE)?;
        Ok(())
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        // Errors: nobody had lowered it.
        limit_files(true).ok();
    }
}

/// `18 arrived, 6 peer_lost`.
fn told(results: Vec<kvx_core::Result<()>>) -> String {
    let (mut arrived, mut failed) = (0, Vec::<(Kind, u32)>::new());
    for result in results {
        match result.map_err(|error| error.kind()) {
            Ok(()) => arrived += 1,
            Err(kind) => match failed.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, count)) => *count += 1,
                None => failed.push((kind, 1)),
            },
        }
    }
    let arrived = (arrived > 0).then(|| format!("{arrived} arrived"));
    let failed = failed.into_iter().map(|(kind, count)| format!("{count} {}", kind.as_str()));
    arrived.into_iter().chain(failed).collect::<Vec<_>>().join(", ")
}
