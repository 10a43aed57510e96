//! The initiator: kvx's local side of the measurement.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use kvx::{Agent, Options, Peer, Plan, Region, Registry, Transfer};

use super::deadlines::DEADLINE;
use super::points::{Backing, BenchOp, Shape, Wait};
use super::pools::{PoolKind, Pools};
use super::rounds::{Round, timed};
use super::target::TargetProcess;
use crate::Result;

/// The number of first posts of a round that are timed; after them, one post in this many is timed.
/// A prime, so that every list has its turn.
const TIMED_POSTS: u64 = 17;

/// An agent with one backend, connected to the target's agent.
pub(crate) struct Initiator {
    agent: Agent,
    pub(crate) peer: Peer,
    regions: Vec<(PoolKind, Region)>,
}

impl Initiator {
    /// Builds the agent, and waits until its link is up.
    pub(crate) fn connect(
        label: &str,
        backend: &str,
        registry: &Registry,
        options: &str,
        pools: &Pools,
        target: &TargetProcess,
    ) -> Result<Self> {
        let builder = pools.agent(label).backends([backend]).options(Options::parse(options)?);
        let agent = builder.registry(registry.clone()).build()?;
        let regions = pools
            .all()
            .map(|(pool, memory)| Ok((pool, agent.register(pool.name(), memory.clone())?)));
        let regions = regions.collect::<kvx::Result<Vec<_>>>()?;
        let peer = agent.connect(target.metadata(backend)?)?;
        peer.ready(DEADLINE).join()?;
        Ok(Initiator { agent, peer, regions })
    }

    pub(crate) fn region(&self, pool: PoolKind) -> Result<&Region> {
        let found = self.regions.iter().find(|(which, _)| *which == pool);
        Ok(found.map(|(_, region)| region).ok_or("this side has no memory of that kind")?)
    }

    /// Builds the plans of a point, one for each list.
    pub(crate) fn plans(&self, op: BenchOp, shape: Shape, memory: Backing) -> Result<Plans> {
        let ours = self.region(memory.local())?.grid(shape.grid())?;
        let theirs = self.peer.region(memory.remote().name())?.grid(shape.grid())?;
        let (from, to) = (shape.from(), shape.to());
        let mut plans = Plans { plans: Vec::new(), took: Vec::new(), next: 0 };
        for transfer in 0..u64::from(shape.lists) {
            let part = shape.part(transfer);
            // Each list is a separate allocation, as an engine's block table is.
            let (from, to): (Arc<[u32]>, Arc<[u32]>) = (from[part.clone()].into(), to[part].into());
            let start = Instant::now();
            let plan = match op {
                BenchOp::Read => Plan::read(ours.blocks(to), theirs.blocks(from)),
                BenchOp::Write => Plan::write(ours.blocks(from), theirs.blocks(to)),
            };
            plans.took.push(start.elapsed().as_secs_f64());
            plans.plans.push(plan?);
        }
        Ok(plans)
    }

    /// Posts the plan.
    pub(crate) fn post(&self, plan: &Plan) -> Result<Transfer> {
        Ok(self.peer.transfer(plan).deadline(DEADLINE).post()?)
    }

    /// Moves one list after the other until `budget` has passed, and at least `least` lists.
    ///
    /// The time of a transfer covers kvx's work and one clock reading, as in the loops of the
    /// limits: the next transfer begins where one ends. A second reading times some of the posts,
    /// at a hundredth of the cost of a small read.
    pub(crate) fn round(
        &self,
        plans: &mut Plans,
        wait: Wait,
        budget: Duration,
        least: u64,
    ) -> Result<Round> {
        let mut posts = Vec::new();
        let round = timed(budget, least, |nth, now| -> Result<()> {
            let until = now + DEADLINE;
            let transfer = self.peer.transfer(plans.next()).deadline(until).post()?;
            if nth < TIMED_POSTS || nth.is_multiple_of(TIMED_POSTS) {
                posts.push(now.elapsed().as_secs_f64());
            }
            match wait {
                Wait::Block => transfer.wait_blocking(until)?,
                Wait::Async => block_on(transfer)?,
            };
            Ok(())
        })?;
        Ok(Round { posts, ..round })
    }

    /// Shuts the agent down.
    pub(crate) fn end(self) -> Result<()> {
        drop(self.regions);
        Ok(self.agent.shutdown(DEADLINE).join()?)
    }
}

/// The plans of a point, which take turns.
pub(crate) struct Plans {
    plans: Vec<Plan>,
    /// Seconds to build each plan.
    pub(crate) took: Vec<f64>,
    next: usize,
}

impl Plans {
    /// Creates a list of one plan.
    pub(crate) fn one(plan: Plan) -> Self {
        Plans { plans: vec![plan], took: Vec::new(), next: 0 }
    }

    /// Starts again with the first list.
    pub(crate) fn rewind(&mut self) {
        self.next = 0;
    }

    /// Returns the next plan.
    pub(crate) fn next(&mut self) -> &Plan {
        let at = self.next % self.plans.len();
        self.next = at + 1;
        &self.plans[at]
    }
}

/// Runs a future on this thread, which sleeps until the future's waker wakes it.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.unpark();
    }
}
