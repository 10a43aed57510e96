//! An unordered fabric over any provider. It posts pieces late and in random order, and reports
//! completions late and in random order. On it, a notification that does not wait for all of its
//! pieces arrives too early.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use kvx_backend::fabric::{EndpointId, Event, Fabric, Job, Parts, SendStatus, Unregister};
use kvx_backend::reactor::{Armed, Turn};
use kvx_core::backend::{
    Admission, Availability, Context, Factory, Placement, RemoteSpec, Transport, Unavailable,
};
use kvx_core::{Agent, Capabilities, Grid, Identity, Memory, Options, Plan, Registry, Result};

use crate::fabric::LibfabricFabric;
use crate::factory::{self, Libfabric};
use crate::ffi::Range;
use crate::memory::{Local, Remote};
use crate::posting::{PiecePath, PostingState};
use crate::rail::{Post, PostOutcome};

const PATIENCE: Duration = Duration::from_secs(10);
/// The maximum number of pieces that are held back.
const HELD: usize = 256;

struct Shuffling {
    inner: LibfabricFabric,
    held: Vec<(usize, Post, Range)>,
    late: Vec<Event>,
    seed: u64,
}

// SAFETY: pieces are plain addresses; the machine's lock guards them with everything else.
unsafe impl Send for Shuffling {}

impl Shuffling {
    fn random(&mut self, below: usize) -> usize {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        (self.seed >> 11) as usize % below.max(1)
    }

    fn shuffle<T>(&mut self, what: &mut [T]) {
        for at in (1..what.len()).rev() {
            let with = self.random(at + 1);
            what.swap(at, with);
        }
    }

    /// Posts some of the pieces that are held back.
    fn let_go(&mut self) {
        let mut held = std::mem::take(&mut self.held);
        self.shuffle(&mut held);
        let count = if held.len() > 8 { held.len() / 3 } else { held.len() };
        for (rail, post, range) in held.split_off(held.len() - count) {
            // SAFETY: the piece is counted as posted, and the machine keeps its memory until it is
            // reported.
            match unsafe { self.inner.rail(rail).post(post, &[range]) } {
                Ok(PostOutcome::Posted) => {}
                Ok(PostOutcome::Later) => held.push((rail, post, range)),
                Err(errno) => {
                    let result = Err(crate::error::native("a piece", errno));
                    self.late.push(Event::Completed { job: post.job, pieces: 1, result });
                }
            }
        }
        self.held = held;
    }
}

// SAFETY: `LibfabricFabric` touches local memory only for pieces that it has taken and not
// reported; pieces that are held back here were not given to it yet.
unsafe impl Fabric for Shuffling {
    type Local = Local;
    type Remote = Remote;
    type State = PostingState;

    fn connect(&mut self, endpoint: EndpointId, peer: &Identity, address: &[u8]) -> Result<()> {
        self.inner.connect(endpoint, peer, address)
    }

    fn send(&mut self, endpoint: EndpointId, message: &[u8]) -> Result<SendStatus> {
        self.inner.send(endpoint, message)
    }

    fn max_message(&self) -> usize {
        self.inner.max_message()
    }

    fn unpack(&mut self, endpoint: EndpointId, region: &RemoteSpec<'_>) -> Result<Remote> {
        self.inner.unpack(endpoint, region)
    }

    fn max_piece(&self) -> u64 {
        self.inner.max_piece()
    }

    fn advance(&mut self, job: &mut Job<'_, Self>) -> Result<u64> {
        let Some(peer) = self.inner.peer_of(job.endpoint()) else {
            return Err(crate::error::lost_link());
        };
        let mut bytes = 0;
        while self.held.len() < HELD
            && let Some(segment) = job.next_piece()
        {
            let (ours, theirs) =
                (job.local(segment.local_region), job.remote(segment.remote_region));
            let path =
                self.inner.path(peer, self.held.len(), ours, theirs, segment.remote_offset)?;
            let PiecePath { rail, descriptor, remote } = path;
            let (local, len) = (job.local_address(&segment) as *mut u8, segment.len as usize);
            let post = Post { op: job.op(), job: job.id(), peer };
            self.held.push((rail, post, Range { local, len, descriptor, remote }));
            job.add_in_flight(1);
            bytes += segment.len;
        }
        Ok(bytes)
    }

    fn sever(&mut self, endpoint: EndpointId) {
        self.inner.sever(endpoint);
    }

    fn disconnect(&mut self, endpoint: EndpointId) {
        self.inner.disconnect(endpoint);
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Turn {
        self.let_go();
        let mut told = std::mem::take(&mut self.late);
        self.inner.poll(&mut told);
        self.shuffle(&mut told);
        let late = if told.len() > 2 { told.len() / 2 } else { 0 };
        self.late = told.split_off(told.len() - late);
        events.extend(told);
        Turn::did(events.len() + self.held.len())
    }

    fn arm(&mut self, waiting: bool) -> Result<Armed> {
        if self.held.is_empty() && self.late.is_empty() {
            self.inner.arm(waiting)
        } else {
            Ok(Armed::Again)
        }
    }

    fn fds(&self) -> &[RawFd] {
        self.inner.fds()
    }

    fn describe(&mut self, endpoint: EndpointId) -> (String, Capabilities) {
        self.inner.describe(endpoint)
    }

    fn unregister(&mut self, local: &Local) -> Result<Unregister> {
        self.inner.unregister(local)
    }

    fn stop(&mut self) -> bool {
        self.held.clear();
        self.inner.stop()
    }
}

/// The factory with another way to open a transport.
pub(crate) struct OpenedBy(pub(crate) fn(Context) -> Result<Arc<dyn Transport>>);

impl Factory for OpenedBy {
    fn name(&self) -> &'static str {
        "LIBFABRIC"
    }

    fn placement(&self) -> Placement {
        Libfabric.placement()
    }

    fn admission(&self) -> Admission {
        Libfabric.admission()
    }

    fn available(&self, options: &Options) -> Result<Availability, Unavailable> {
        Libfabric.available(options)
    }

    fn open(&self, agent: Context) -> Result<Arc<dyn Transport>> {
        self.0(agent)
    }
}

fn open_unordered(agent: Context) -> Result<Arc<dyn Transport>> {
    let Parts { name, capabilities, address, fabric: inner, registrar } = factory::parts(&agent)?;
    let seed = u64::from_le_bytes(std::array::from_fn(|at| agent.agent.incarnation.0[at])) | 1;
    let fabric = Shuffling { inner, held: Vec::new(), late: Vec::new(), seed };
    kvx_backend::fabric::open(agent, Parts { name, capabilities, address, fabric, registrar })
}

/// Writes scattered blocks with a notification, repeatedly: when the notification arrives, all
/// blocks have arrived. Returns false if the provider is not available here.
pub(crate) fn notifications_wait(test: &str, options: &str, factory: OpenedBy) -> bool {
    const BLOCK: u64 = 1024;
    const BLOCKS: u32 = 1000;
    let mut registry = Registry::new();
    registry.add(factory).unwrap();
    let options = Options::parse(options).unwrap();
    if let Err(why) = registry.require("LIBFABRIC", &options) {
        let cure = "cargo xtask test --install on Debian 12";
        kvx_testkit::skip(test, &why.to_string(), cure);
        return false;
    }
    let agent = |name: &str| {
        let builder = Agent::builder(name).backends(["LIBFABRIC"]).options(options.clone());
        let agent = builder.registry(registry.clone()).build().unwrap();
        let region = agent
            .register("kv", Memory::owned(vec![0; (BLOCK * u64::from(BLOCKS)) as usize]))
            .unwrap();
        (agent, region)
    };
    let ((near, ours), (far, theirs)) = (agent("near"), agent("far"));
    let peer = near.connect(far.metadata().unwrap()).unwrap();
    peer.ready(PATIENCE).wait_blocking(PATIENCE).unwrap();
    let grid = || Grid::packed(BLOCK, BLOCKS);
    let (local, remote) =
        (ours.grid(grid()).unwrap(), peer.region("kv").unwrap().grid(grid()).unwrap());
    // 7 is coprime to the number of blocks.
    let from: Vec<u32> = (0..BLOCKS).map(|at| at * 7 % BLOCKS).collect();
    let to: Vec<u32> = (0..BLOCKS).rev().collect();
    let plan = Plan::write(local.blocks(from), remote.blocks(to)).unwrap();
    for round in 1..=20_u8 {
        let sent = vec![round; (BLOCK * u64::from(BLOCKS)) as usize];
        ours.copy_in(0, &sent).unwrap();
        let transfer = peer.transfer(&plan).notify(vec![round]).post().unwrap();
        far.wait_for_senders([round], 1, PATIENCE).wait_blocking(PATIENCE).unwrap();
        let mut came = vec![0; sent.len()];
        theirs.copy_out(0, &mut came).unwrap();
        let missing = came.iter().filter(|byte| **byte != round).count();
        assert_eq!(missing, 0, "bytes were missing when the notification of round {round} arrived");
        transfer.wait_blocking(PATIENCE).unwrap();
    }
    true
}

#[test]
fn notifications_come_after_all_of_their_data_over_unordered_shared_memory() {
    let test = "notifications_come_after_all_of_their_data_over_unordered_shared_memory";
    let options = r#"{"libfabric": {"provider": "shm"}}"#;
    notifications_wait(test, options, OpenedBy(open_unordered));
}

#[test]
fn notifications_come_after_all_of_their_data_over_unordered_rails() {
    let test = "notifications_come_after_all_of_their_data_over_unordered_rails";
    notifications_wait(
        test,
        r#"{"libfabric": {"provider": "tcp;ofi_rxm", "domain": ["lo", "lo"]}}"#,
        OpenedBy(open_unordered),
    );
}
