//! The two ends of a failure: what each does before, during and after it.

use std::time::{Duration, Instant};

use kvx_core::{
    Agent, Capabilities, ErrorKind, Grid, HungPageScope, Memory, Op, Peer, Place as _, Plan,
    Region, Transfer,
};

use super::{
    CANCELLED, GRACE, GRID, LARGE, LIFE_OF_A_CHILD, Moment, SERVED, SLOT, SLOTS, SOURCE, TRIES,
    Trouble,
};
use crate::backing::Backing;
use crate::check::{CUT_OFF, Check, Failure, ensure};
use crate::executor::run;
use crate::far::{FarEnd, Limit, limit};
use crate::hosts::Hosts;
use crate::pattern::{bytes, checksum, fill};
use crate::setup::Setup;
use crate::unique::{free_port, unique};

/// An agent in this process and one at a far end.
pub(super) struct Scene {
    setup: Setup,
    deadline: Duration,
    /// The backend's capabilities, which hold for every link.
    capabilities: Capabilities,
    /// The far end's setup, with a fixed port if the far end has to return to it.
    far_setup: Setup,
    pub(super) near: Agent,
    /// A slot for each transfer, and another one to check that work continues.
    slots: Region,
    far: FarEnd,
    name: String,
    /// The far end's agent, and its regions for reads and writes, by number.
    agent: usize,
    regions: [usize; 2],
}

/// The names of the far end's regions for reads and for writes.
const NAMES: [&str; 2] = ["source", "sink"];

fn region_for(op: Op) -> &'static str {
    NAMES[usize::from(op == Op::Write)]
}

impl Scene {
    pub(super) fn new(
        setup: &Setup,
        trouble: Trouble,
        deadline: Duration,
    ) -> Result<Scene, Failure> {
        let mut far_setup = match trouble {
            Trouble::Restarted => setup.with_option("tcp", "ports", free_port(0)?)?,
            _ => setup.clone(),
        };
        let mut setup = setup.clone();
        if trouble == Trouble::HungPage {
            // With a pool, each end has its own pages.
            (setup.far, far_setup.far) = (Backing::Owned, Backing::Owned);
        }
        let near = setup.agent(&unique("near"))?;
        let slots = near.register("slots", setup.memory((SLOTS + 1) * SLOT, 1)?)?;
        let (far, capabilities) = (setup.far()?, setup.capabilities()?);
        let mut scene = Scene {
            setup,
            deadline,
            capabilities,
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

    /// Replaces the far end's process by a new one; kills the old one if it lives.
    fn start_again(&mut self) -> Check {
        self.far.process()?.kill()?;
        self.far.restart()?;
        self.populate()
    }

    fn register(&mut self) -> Check {
        for (number, (name, seed)) in
            self.regions.iter_mut().zip([(NAMES[0], SOURCE), (NAMES[1], 3)])
        {
            *number = self.far.register_of(self.agent, name, SLOT, self.setup.far, Some(seed))?;
        }
        Ok(())
    }

    pub(super) fn metadata(&mut self) -> Result<Vec<u8>, Failure> {
        self.far.metadata_of(self.agent)
    }

    /// Plans a transfer of all blocks of a slot, in reverse order at the far end, so that nothing
    /// is merged.
    fn plan(&self, op: Op, peer: &Peer, slot: usize) -> kvx_core::Result<Plan> {
        let local = self.slots.grid(GRID.at((slot * SLOT) as u64))?.blocks(0..GRID.count);
        let backwards: Vec<u32> = (0..GRID.count).rev().collect();
        Plan::of(op, [(local, peer.region(region_for(op))?.grid(GRID)?.blocks(backwards))])
    }

    /// Posts one transfer for each slot.
    pub(super) fn post(&self, op: Op, peer: &Peer) -> kvx_core::Result<Vec<Transfer>> {
        let posted =
            |slot| peer.transfer(&self.plan(op, peer, slot)?).deadline(self.deadline).post();
        (0..SLOTS).map(posted).collect()
    }

    /// Posts many transfers of one block each, and cancels them.
    pub(super) fn post_small(&self, op: Op, peer: &Peer) -> Result<Vec<Transfer>, Failure> {
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

    pub(super) fn begin(&mut self, trouble: Trouble, op: Op) -> Check {
        match trouble {
            Trouble::Killed => self.far.process()?.kill(),
            Trouble::KilledBesideAChild => {
                self.far.fork(LIFE_OF_A_CHILD)?;
                self.far.process()?.kill()
            }
            Trouble::Restarted => self.start_again(),
            Trouble::Stopped | Trouble::StoppedThenKilled => self.far.process()?.stop(),
            Trouble::ShutDown => {
                // A shutdown may fail with `StillShared`: other holders of the memory do not matter
                // here.
                self.far.shutdown(self.agent, CUT_OFF)?.ok();
                Ok(())
            }
            Trouble::Revoked => {
                for region in self.regions {
                    self.far.revoke(region, CUT_OFF)?.ok();
                }
                Ok(())
            }
            Trouble::Lacks(what) => {
                self.far.limit(what, false)?;
                Self::check_refusal(what, self.more_there(what)?)
            }
            Trouble::LacksHere(what) => {
                limit(what, false)?;
                Self::check_refusal(what, self.more_here(what)?)
            }
            Trouble::CutOff => Hosts::cut_off_far(true),
            Trouble::HungPage => {
                self.far.hang_page(Some(self.regions[usize::from(op == Op::Write)]))
            }
            // The transfers are cancelled as they are posted.
            Trouble::Cancelled => Ok(()),
        }
    }

    /// Tries to build another agent at the far end or, without mappings, to allocate another pool:
    /// the standard library ends a process that starts a thread without mappings.
    fn more_there(&mut self, what: Limit) -> Result<kvx_core::Result<()>, Failure> {
        Ok(match what {
            Limit::Mappings => {
                self.far.try_register_of(self.agent, "more", LARGE, Backing::Pool)?.map(drop)
            }
            _ => self.far_setup.try_far_agent(&mut self.far, &unique("more"))?.map(drop),
        })
    }

    /// Does the same in this process.
    fn more_here(&self, what: Limit) -> Result<kvx_core::Result<()>, Failure> {
        Ok(match what {
            Limit::Mappings => Memory::pool(LARGE).build().map(drop),
            _ => self
                .setup
                .builder(&unique("more"))?
                .registry(self.setup.registry())
                .build()
                .map(drop),
        })
    }

    /// Checks that the process was refused what exceeds its limit: a limit must not end a process.
    fn check_refusal(what: Limit, more: kvx_core::Result<()>) -> Check {
        match more.map_err(|why| (why.kind(), why)) {
            Err((ErrorKind::Exhausted | ErrorKind::Unavailable, _)) => Ok(()),
            Err((_, why)) => {
                Err(Failure::new(format!("without {what} left, the error is wrong: {why:?}")))
            }
            Ok(()) => Err(Failure::new(format!("a request succeeded although no {what} are left"))),
        }
    }

    /// Ends the failure.
    pub(super) fn end(&mut self, trouble: Trouble) -> Check {
        match trouble {
            Trouble::Killed | Trouble::KilledBesideAChild | Trouble::StoppedThenKilled => {
                self.start_again()
            }
            Trouble::Stopped => self.far.process()?.go_on(),
            Trouble::ShutDown => self.populate(),
            Trouble::Revoked => self.register(),
            Trouble::Lacks(what) => self.far.limit(what, true),
            Trouble::LacksHere(what) => Ok(limit(what, true)?),
            Trouble::CutOff => Hosts::cut_off_far(false),
            Trouble::HungPage => self.far.hang_page(None),
            Trouble::Restarted | Trouble::Cancelled => Ok(()),
        }
    }

    /// Checks that work continues: over the same handle if nothing has happened to the peer.
    pub(super) fn works_again(&mut self, peer: Peer, trouble: Trouble) -> Check {
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

    /// Waits until all transfers have settled. Returns when; fails if they must settle and do not.
    pub(super) fn settled(
        &self,
        posted: &[Transfer],
        op: Op,
        trouble: Trouble,
    ) -> Result<Option<Duration>, Failure> {
        let begun = Instant::now();
        let alone = self.capabilities.settles_without_peer;
        // A thread that waits for a page is in the kernel, which has access to both sides' memory
        // meanwhile.
        let must =
            trouble != Trouble::HungPage && if op == Op::Read { alone.read } else { alone.write };
        let limit =
            if must { self.setup.peer_timeout + CUT_OFF } else { self.setup.peer_timeout + GRACE };
        for transfer in posted {
            match transfer.settled().wait_blocking(limit.saturating_sub(begun.elapsed())) {
                Ok(()) => {}
                Err(_) if !must => return Ok(None),
                Err(error) => {
                    return Err(Failure::new(format!(
                        "memory is not free after {limit:?}: {error:?}"
                    )));
                }
            }
        }
        Ok(Some(begun.elapsed()))
    }

    /// Checks that data that arrived is right, and that other transfers ended with a permitted
    /// error.
    pub(super) fn check_results(
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
        let wanted: Vec<u8> =
            source.chunks(GRID.length as usize).rev().flatten().copied().collect();
        let mut content = vec![0; SLOT];
        for slot in
            results.iter().enumerate().filter(|(_, result)| result.is_ok()).map(|(slot, _)| slot)
        {
            self.slots.copy_out(slot * SLOT, &mut content)?;
            ensure!(content == wanted, "read {slot} arrived with wrong bytes");
        }
        Ok(())
    }

    /// Checks that other agents of both processes are not blocked.
    pub(super) fn others_go_on(&mut self) -> Check {
        let number = self.far_setup.far_agent(&mut self.far, &unique("other"))?;
        self.far.register_of(number, "other", SLOT, Backing::Pool, Some(SOURCE))?;
        let near = self.setup.agent(&unique("other"))?;
        let region = near.register("other", self.setup.memory(SLOT, 1)?)?;
        let peer = near.connect(&self.far.metadata_of(number)?)?;
        let blocks = 0..GRID.count;
        let ours = region.grid(GRID)?.blocks(blocks.clone());
        let plan = Plan::of(Op::Read, [(ours, peer.region("other")?.grid(GRID)?.blocks(blocks))])?;
        run(peer.transfer(&plan).deadline(CUT_OFF).post()?)?;
        ensure!(
            checksum(&bytes(SOURCE, 0, SLOT)) == sum(&region)?,
            "another agent has read wrong bytes meanwhile"
        );
        Ok(())
    }

    /// Checks that third peers of the two agents are not blocked, unless that is declared. One is
    /// read by this side's agent, and one reads from the far agent, over memory of their programs.
    pub(super) fn third_peers_go_on(&mut self) -> Check {
        let mut far = self.setup.far()?;
        let third = self.setup.far_agent(&mut far, &unique("third"))?;
        far.register_of(third, "third", SLOT, Backing::Owned, Some(SOURCE))?;
        self.far.register_of(self.agent, "third", SLOT, Backing::Owned, Some(SOURCE))?;
        let other = self.setup.agent(&unique("third"))?;
        let ends = [(self.near.clone(), far.metadata_of(third)?), (other, self.metadata()?)];
        for (number, (agent, metadata)) in ends.into_iter().enumerate() {
            let region = agent.register("third", self.setup.memory(SLOT, 1)?)?;
            let peer = agent.connect(&metadata)?;
            let blocks = 0..GRID.count;
            let ours = region.grid(GRID)?.blocks(blocks.clone());
            let plan =
                Plan::of(Op::Read, [(ours, peer.region("third")?.grid(GRID)?.blocks(blocks))])?;
            match run(peer.transfer(&plan).deadline(SERVED).post()?)
                .map_err(|error| (error.kind(), error))
            {
                Ok(_) => ensure!(
                    checksum(&bytes(SOURCE, 0, SLOT)) == sum(&region)?,
                    "a third peer has read wrong bytes meanwhile"
                ),
                Err((ErrorKind::TimedOut | ErrorKind::PeerLost, _))
                    if self.capabilities.hung_page == HungPageScope::Agent => {}
                Err((_, error)) => {
                    return Err(Failure::new(format!(
                        "third peer {number} is not served: {error:?}"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Overwrites this side's memory.
    pub(super) fn spoil(&self) -> Result<u64, Failure> {
        let seed = 99;
        fill(self.slots.memory(), seed)?;
        Ok(seed)
    }

    pub(super) fn is_untouched(&self, seed: u64) -> Check {
        let mut content = vec![0; SLOTS * SLOT];
        self.slots.copy_out(0, &mut content)?;
        ensure!(
            content == bytes(seed, 0, content.len()),
            "memory changed after its transfers had settled"
        );
        Ok(())
    }

    /// Moves all blocks of a slot in both directions.
    pub(super) fn works(&mut self, peer: &Peer) -> Check {
        let seed = 7;
        self.far.fill(self.regions[0], seed)?;
        let read = self.plan(Op::Read, peer, SLOTS)?;
        run(peer.transfer(&read).deadline(CUT_OFF).post()?)?;
        let write = self.plan(Op::Write, peer, SLOTS)?;
        run(peer.transfer(&write).deadline(CUT_OFF).post()?)?;
        let there = self.far.sum(self.regions[1])?;
        ensure!(there == checksum(&bytes(seed, 0, SLOT)), "bytes read and written back are wrong");
        self.far.fill(self.regions[0], SOURCE)?;
        Ok(())
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        // The errors mean that the limit had not been lowered.
        for what in [Limit::Files, Limit::Threads, Limit::Mappings] {
            limit(what, true).ok();
        }
    }
}

fn sum(region: &Region) -> kvx_core::Result<u64> {
    let mut content = vec![0; region.len() as usize];
    region.copy_out(0, &mut content)?;
    Ok(checksum(&content))
}
