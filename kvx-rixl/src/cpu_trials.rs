//! Measures whether a peer's memory is accessible without the peer's CPU, which NIXL does not tell.
//!
//! Over the kernel's cross-memory attach, a post has moved its bytes when it returns, and takes
//! hardly longer than the kernel itself. Over TCP, UCX asks the peer's process to read and write. A
//! post may still have ended when it returns, because a peer with its own core answers while the
//! poster polls; but it takes some eight times as long. A network card takes longer as well, and
//! cannot be distinguished from that: such a link reports less than it could.
//!
//! A link carries no messages before the result is known, so its capabilities do not change. The
//! duration of the trial depends on the peer as the handshake's messages do, and the handshake's
//! time limit covers both.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvx_backend::fabric::EndpointId;
use kvx_core::{Op, PerOp, Result};

use crate::ffi::{MemorySegment, NixlAgent, Range, Request, State};
use crate::peer_loader::Name;
use crate::peers::{NixlRegion, PeerAccess, Peers};

/// The number of bytes per read or write of a peer's page: enough to distinguish one copy by the
/// kernel from a message exchange.
const LEN: u64 = 64 << 10;
/// The number of trials per operation, after the first one, which waits until both ends have
/// connected.
const TIMES: usize = 16;
/// The maximum number of late posts, which other traffic on the link may cause.
const MOST_LATE: usize = 4;
/// The fastest post in time takes at most this multiple of the kernel's time for the same bytes.
const MOST_TIMES_THE_KERNEL: u32 = 3;
/// The size of the page: one part that peers read, one that they write, and two for this side.
const PAGE: u64 = 4 * LEN;

/// Returns the page of this process that peers read and write in their trials. It is never freed,
/// because the last such access is unknown.
pub(crate) fn page() -> Range {
    static ADDRESS: OnceLock<u64> = OnceLock::new();
    let address = *ADDRESS
        .get_or_init(|| Box::into_raw(vec![0_u8; PAGE as usize].into_boxed_slice()).addr() as u64);
    Range { segment: MemorySegment::Host, address, len: PAGE, device: 0 }
}

/// Returns the kernel's best time to move that many bytes between processes; `None` if it refuses,
/// so that no peer is accessible that way.
fn kernel_takes() -> Option<Duration> {
    let own = page().address;
    let from = libc::iovec { iov_base: own as *mut libc::c_void, iov_len: LEN as usize };
    let to = libc::iovec { iov_base: (own + PAGE / 2) as *mut libc::c_void, iov_len: LEN as usize };
    let once = || {
        let begun = Instant::now();
        // SAFETY: both ranges are in the page, which is never freed and to whose bytes no reference
        // exists.
        let moved = unsafe { libc::process_vm_readv(libc::getpid(), &to, 1, &from, 1, 0) };
        (moved == LEN as isize).then(|| begun.elapsed())
    };
    (0..TIMES).map(|_| once()).min().flatten()
}

/// The results of the posts of a trial.
struct TrialTimes {
    posted: usize,
    /// The number of posts that had not ended when they returned.
    late: usize,
    /// The time of the fastest post that had ended when it returned.
    fastest: Duration,
}

impl TrialTimes {
    const NEW: Self = TrialTimes { posted: 0, late: 0, fastest: Duration::MAX };

    /// Returns which of the two operations is posted next; `None` when enough is known.
    fn next(&self) -> Option<usize> {
        let operation = self.posted / (1 + TIMES);
        (self.late <= MOST_LATE && operation < 2).then_some(operation)
    }

    /// Records a post. `took` is its duration if it had ended when it returned.
    fn note(&mut self, took: Option<Duration>) {
        let is_first = self.posted.is_multiple_of(1 + TIMES);
        self.posted += 1;
        match took {
            _ if is_first => {}
            Some(took) => self.fastest = self.fastest.min(took),
            None => self.late += 1,
        }
    }

    /// Returns which operations need the peer's CPU, given the kernel's time for as many bytes.
    /// Both use the same path, so if one needs the peer, both do.
    fn verdict(&self, kernel_takes: Option<Duration>) -> PerOp {
        let by_the_kernel = self.late <= MOST_LATE
            && kernel_takes.is_some_and(|takes| self.fastest <= takes * MOST_TIMES_THE_KERNEL);
        PerOp::same(!by_the_kernel)
    }
}

/// A peer in a trial.
struct CpuTrial {
    /// The peer's page.
    page: Arc<NixlRegion>,
    /// The endpoints that wait for the result.
    endpoints: Vec<EndpointId>,
    /// A read and a write; created when NIXL knows the page.
    requests: Option<[Arc<Request>; 2]>,
    times: TrialTimes,
    /// True while the last post is in progress.
    flies: bool,
}

/// The outcome of a step of a trial.
enum TrialStep {
    /// The request is in progress.
    InProgress(Arc<Request>),
    Over(PerOp),
}

impl CpuTrial {
    /// Reads and writes parts of the peer's page until an operation does not end immediately.
    /// Errors: what NIXL answers.
    fn step(&mut self, agent: &NixlAgent, peer: &CStr) -> Result<TrialStep> {
        let requests = match &self.requests {
            Some(requests) => requests,
            None => self.requests.insert(requests(agent, peer, &self.page.range)?),
        };
        while let Some(operation) = self.times.next() {
            let request = &requests[operation];
            let begun = Instant::now();
            // SAFETY: the page is never freed, and the request is not in progress.
            match unsafe { agent.post(request) } {
                State::Done => self.times.note(Some(begun.elapsed())),
                State::InProgress => {
                    self.times.note(None);
                    self.flies = true;
                    return Ok(TrialStep::InProgress(Arc::clone(request)));
                }
                State::Failed(status) => return Err(status.error("trying a link out")),
            }
        }
        Ok(TrialStep::Over(self.times.verdict(kernel_takes())))
    }
}

/// Creates the requests. Reads and writes access different bytes on both sides.
fn requests(agent: &NixlAgent, peer: &CStr, page: &Range) -> Result<[Arc<Request>; 2]> {
    let request = |op, offset| -> Result<_> {
        let (mut local, mut remote) = (agent.list(MemorySegment::Host)?, agent.list(page.segment)?);
        local.add(self::page().address + PAGE / 2 + offset, LEN, 0);
        remote.add(page.address + offset, LEN, page.device);
        Ok(Arc::new(agent.request(op, &local, &remote, peer)?))
    };
    Ok([request(Op::Read, 0)?, request(Op::Write, LEN)?])
}

/// The peers in a trial.
#[derive(Default)]
pub(crate) struct CpuTrials {
    by_peer: BTreeMap<Name, CpuTrial>,
    /// Endpoints whose trial has finished.
    finished: Vec<EndpointId>,
}

impl CpuTrials {
    /// Starts a trial for an endpoint. `page`: the peer's page.
    pub(crate) fn begin(&mut self, peers: &Peers, endpoint: EndpointId, page: Arc<NixlRegion>) {
        if peers.reach(endpoint).is_some() {
            return;
        }
        let Some(name) = peers.name(endpoint) else {
            return debug_assert!(false, "the endpoint was connected a moment ago");
        };
        let new = || CpuTrial {
            page,
            endpoints: Vec::new(),
            requests: None,
            times: TrialTimes::NEW,
            flies: false,
        };
        self.by_peer.entry(name).or_insert_with(new).endpoints.push(endpoint);
    }

    /// Returns whether an endpoint waits for a result.
    pub(crate) fn is_waiting(&self, endpoint: EndpointId) -> bool {
        self.by_peer.values().any(|trial| trial.endpoints.contains(&endpoint))
    }

    /// Takes the endpoints whose trial has finished since the last call.
    pub(crate) fn take_finished(&mut self) -> impl Iterator<Item = EndpointId> {
        std::mem::take(&mut self.finished).into_iter()
    }

    /// Removes an endpoint from its trial.
    pub(crate) fn forget(&mut self, endpoint: EndpointId) {
        self.by_peer.retain(|_, trial| {
            trial.endpoints.retain(|other| *other != endpoint);
            !trial.endpoints.is_empty()
        });
    }

    /// Records that a request of a trial has ended. A failed one gives no information about the
    /// CPU; the link reports the failure.
    pub(crate) fn note_ended(&mut self, peers: &mut Peers, name: &Name, failed: bool) {
        if failed {
            self.finish(peers, name, PerOp::BOTH);
        } else if let Some(trial) = self.by_peer.get_mut(name) {
            trial.flies = false;
        }
    }

    /// Restarts the trial of a peer whose requests in progress were given up. Endpoints that wait
    /// for another incarnation continue to wait.
    pub(crate) fn restart(&mut self, name: &Name) {
        if let Some(trial) = self.by_peer.get_mut(name) {
            (trial.requests, trial.times, trial.flies) = (None, TrialTimes::NEW, false);
        }
    }

    fn finish(&mut self, peers: &mut Peers, name: &Name, reach: PerOp) {
        if let Some(trial) = self.by_peer.remove(name) {
            trial.endpoints.iter().for_each(|endpoint| peers.set_reach(*endpoint, reach));
            self.finished.extend(trial.endpoints);
        }
    }

    /// Continues the trials that can. Returns the requests that are then in progress.
    pub(crate) fn advance(
        &mut self,
        agent: &NixlAgent,
        peers: &mut Peers,
    ) -> Vec<(Name, Arc<Request>)> {
        let (mut flying, mut over) = (Vec::new(), Vec::new());
        for (name, trial) in &mut self.by_peer {
            let Some(endpoint) = trial.endpoints.first().copied().filter(|_| !trial.flies) else {
                continue;
            };
            match peers.access(endpoint) {
                Ok(PeerAccess::Open(..)) => {}
                Ok(PeerAccess::Later) => continue,
                Err(_) => {
                    over.push((Arc::clone(name), PerOp::BOTH));
                    continue;
                }
            }
            match load_region(agent, peers, endpoint, &trial.page)
                .and_then(|told| told.then(|| trial.step(agent, name)).transpose())
            {
                Ok(None) => {}
                Ok(Some(TrialStep::InProgress(request))) => {
                    flying.push((Arc::clone(name), request))
                }
                Ok(Some(TrialStep::Over(reach))) => over.push((Arc::clone(name), reach)),
                Err(why) => {
                    tracing::debug!(peer = ?name, %why, "the trial of a link failed");
                    over.push((Arc::clone(name), PerOp::BOTH));
                }
            }
        }
        for (name, reach) in over {
            self.finish(peers, &name, reach);
        }
        flying
    }
}

/// Asks NIXL to load a peer's region, unless it has. Returns whether the region is loaded.
pub(crate) fn load_region(
    agent: &NixlAgent,
    peers: &mut Peers,
    endpoint: EndpointId,
    region: &Arc<NixlRegion>,
) -> Result<bool> {
    if peers.unloaded_blob(endpoint, region).is_none() {
        return Ok(true);
    }
    if !peers.may_load_region(endpoint, region) {
        return Ok(false);
    }
    if let Some(blob) = peers.unloaded_blob(endpoint, region) {
        agent.load(blob)?;
        peers.note_loaded_region(endpoint, region);
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(us: u64) -> Option<Duration> {
        Some(Duration::from_micros(us))
    }

    /// Returns the times of a trial whose posts take the given durations, by their number.
    fn tried(took: impl Fn(usize) -> Option<Duration>) -> TrialTimes {
        let mut times = TrialTimes::NEW;
        while times.next().is_some() {
            times.note(took(times.posted));
        }
        times
    }

    /// Returns whether a post is the first read or write, which waits until both ends have
    /// connected.
    fn is_first(at: usize) -> bool {
        [0, 17].contains(&at)
    }

    #[test]
    fn sixteen_reads_and_sixteen_writes_are_tried_after_the_first_of_each() {
        let mut times = TrialTimes::NEW;
        for at in 0..34 {
            assert_eq!(times.next(), Some(usize::from(at >= 17)), "{at}");
            times.note(us(10));
        }
        assert_eq!(times.next(), None);
        assert_eq!(
            (tried(|_| None).posted, tried(|at| us(10).filter(|_| at < 20)).posted),
            (6, 25)
        );
    }

    /// Rows: late posts among 34, the time of the fastest other post, the kernel's time, and
    /// whether the peer's CPU is needed.
    #[test]
    fn slow_or_late_posts_show_that_the_peers_cpu_is_needed() {
        let rows = [
            (0, us(10), us(10), false),
            (0, us(30), us(10), false),
            (0, us(31), us(10), true),
            (4, us(30), us(10), false),
            (5, us(10), us(10), true),
            (0, us(10), None, true),
        ];
        for (late, fastest, kernel_takes, in_the_way) in rows {
            for rest in [us(1000), fastest] {
                // The first post of either operation is ignored, and some writes are late.
                let took = |at| match at {
                    _ if is_first(at) => us(1).filter(|_| late == 0),
                    18.. if at < 18 + late => None,
                    16 => fastest,
                    _ => rest,
                };
                let verdict = tried(took).verdict(kernel_takes);
                assert_eq!(
                    verdict,
                    PerOp::same(in_the_way),
                    "{late} late, {fastest:?} of {kernel_takes:?}"
                );
            }
        }
    }
}
