//! Measures whether a peer's memory is reached without the peer's CPU, which NIXL does not tell.
//!
//! Over the kernel's cross-memory attach a post has moved its bytes when it returns, and takes
//! hardly longer than the kernel itself. Over TCP, UCX asks the peer's process to read and write
//! for it. A post may have ended all the same when it returns, because a peer with a core of its
//! own answers while the poster still looks; but it takes some eight times as long. A network card
//! takes its time, too, and is not told from that: such a link promises less than it could.
//!
//! A link says nothing before that is known, so that it promises the same from its first day on.
//! How long the trial takes is the peer's business as much as the handshake's own messages are, and
//! the handshake's patience is for both.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvx_backend::fabric::EndpointId;
use kvx_core::{Op, PerOp, Result};

use crate::ffi::{MemorySegment, NixlAgent, Range, Request, State};
use crate::peer_loader::Name;
use crate::peers::{NixlRegion, PeerAccess, Peers};

/// The bytes of a peer's page that are read, or written, at once: enough to tell one copy by the
/// kernel from a conversation.
const LEN: u64 = 64 << 10;
/// How often each operation is tried, after the first time, which waits until both ends have found
/// each other.
const TIMES: usize = 16;
/// The most of them that may be late, because of other traffic on the link.
const MOST_LATE: usize = 4;
/// The fastest of the others takes at most so many times as long as the kernel takes for the same
/// bytes.
const MOST_TIMES_THE_KERNEL: u32 = 3;
/// The size of the page: one part that peers read, one that they write, and two for this side.
const PAGE: u64 = 4 * LEN;

/// The page of this process that peers may read, and write to, when they try out what a link can
/// do. Never freed, because the last such access is unknown.
pub(crate) fn page() -> Range {
    static ADDRESS: OnceLock<u64> = OnceLock::new();
    let address = *ADDRESS
        .get_or_init(|| Box::into_raw(vec![0_u8; PAGE as usize].into_boxed_slice()).addr() as u64);
    Range { segment: MemorySegment::Host, address, len: PAGE, device: 0 }
}

/// Returns how long the kernel takes at best to move as many bytes from a process to another.
/// `None`: it refuses, and so nothing reaches a peer by that way.
fn kernel_takes() -> Option<Duration> {
    let own = page().address;
    let from = libc::iovec { iov_base: own as *mut libc::c_void, iov_len: LEN as usize };
    let to = libc::iovec { iov_base: (own + PAGE / 2) as *mut libc::c_void, iov_len: LEN as usize };
    let once = || {
        let begun = Instant::now();
        // SAFETY: both lie within the page, which is never freed and to whose bytes no reference
        // exists.
        let moved = unsafe { libc::process_vm_readv(libc::getpid(), &to, 1, &from, 1, 0) };
        (moved == LEN as isize).then(|| begun.elapsed())
    };
    (0..TIMES).map(|_| once()).min().flatten()
}

/// How the posts of a trial have gone.
struct TrialTimes {
    posted: usize,
    /// How many of them took their time.
    late: usize,
    /// How long the fastest of the others took.
    fastest: Duration,
}

impl TrialTimes {
    const NEW: Self = TrialTimes { posted: 0, late: 0, fastest: Duration::MAX };

    /// Returns which of the two operations is posted next; `None`: enough is known.
    fn next(&self) -> Option<usize> {
        let operation = self.posted / (1 + TIMES);
        (self.late <= MOST_LATE && operation < 2).then_some(operation)
    }

    /// One was posted. `took`: how long, if it had ended then.
    fn note(&mut self, took: Option<Duration>) {
        let is_first = self.posted.is_multiple_of(1 + TIMES);
        self.posted += 1;
        match took {
            _ if is_first => {}
            Some(took) => self.fastest = self.fastest.min(took),
            None => self.late += 1,
        }
    }

    /// Returns which operations need the peer's CPU, where the kernel takes so long for as many
    /// bytes. The same path carries both: one that needs the peer speaks for the other.
    fn verdict(&self, kernel_takes: Option<Duration>) -> PerOp {
        let by_the_kernel = self.late <= MOST_LATE
            && kernel_takes.is_some_and(|takes| self.fastest <= takes * MOST_TIMES_THE_KERNEL);
        PerOp::same(!by_the_kernel)
    }
}

/// A peer that is being tried out.
struct CpuTrial {
    /// Its page.
    page: Arc<NixlRegion>,
    /// Who waits for it.
    endpoints: Vec<EndpointId>,
    /// A read and a write; made when NIXL knows the page.
    requests: Option<[Arc<Request>; 2]>,
    times: TrialTimes,
    /// The last post is in progress.
    flies: bool,
}

/// Where a trial stands.
enum TrialStep {
    /// The request is in progress.
    InProgress(Arc<Request>),
    Over(PerOp),
}

impl CpuTrial {
    /// Reads and writes some of the peer's page, until something takes its time. Errors: what NIXL
    /// answers.
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

/// Reads and writes do not touch the same bytes, on either side.
fn requests(agent: &NixlAgent, peer: &CStr, page: &Range) -> Result<[Arc<Request>; 2]> {
    let request = |op, offset| -> Result<_> {
        let (mut local, mut remote) = (agent.list(MemorySegment::Host)?, agent.list(page.segment)?);
        local.add(self::page().address + PAGE / 2 + offset, LEN, 0);
        remote.add(page.address + offset, LEN, page.device);
        Ok(Arc::new(agent.request(op, &local, &remote, peer)?))
    };
    Ok([request(Op::Read, 0)?, request(Op::Write, LEN)?])
}

/// The peers that are being tried out.
#[derive(Default)]
pub(crate) struct CpuTrials {
    by_peer: BTreeMap<Name, CpuTrial>,
    /// Endpoints that wait no more.
    finished: Vec<EndpointId>,
}

impl CpuTrials {
    /// An endpoint wants to know what its peer can do. `page`: the peer's.
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

    /// Returns whether an endpoint waits.
    pub(crate) fn is_waiting(&self, endpoint: EndpointId) -> bool {
        self.by_peer.values().any(|trial| trial.endpoints.contains(&endpoint))
    }

    /// Endpoints that need not wait any more since the last call.
    pub(crate) fn take_finished(&mut self) -> impl Iterator<Item = EndpointId> {
        std::mem::take(&mut self.finished).into_iter()
    }

    /// An endpoint does not want to know any more.
    pub(crate) fn forget(&mut self, endpoint: EndpointId) {
        self.by_peer.retain(|_, trial| {
            trial.endpoints.retain(|other| *other != endpoint);
            !trial.endpoints.is_empty()
        });
    }

    /// Notes that a request of a trial has ended. A failed one says nothing about the CPU; the link
    /// reports the failure.
    pub(crate) fn note_ended(&mut self, peers: &mut Peers, name: &Name, failed: bool) {
        if failed {
            self.finish(peers, name, PerOp::BOTH);
        } else if let Some(trial) = self.by_peer.get_mut(name) {
            trial.flies = false;
        }
    }

    /// Requests in progress to a peer were given up. Endpoints that wait for another life of it go
    /// on waiting.
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

    /// Continues the trials that can. Returns the requests that are in progress then.
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
                    tracing::debug!(peer = ?name, %why, "a link could not be tried out");
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

/// Has NIXL load a region of a peer, unless it has. Returns whether the region is loaded now.
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

    /// A trial whose posts take so long, by their number.
    fn tried(took: impl Fn(usize) -> Option<Duration>) -> TrialTimes {
        let mut times = TrialTimes::NEW;
        while times.next().is_some() {
            times.note(took(times.posted));
        }
        times
    }

    /// The first read and the first write, which wait until both ends have found each other.
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

    /// Late posts among 34, the fastest of the others, the kernel's own time; whether the peer's
    /// CPU was in the way.
    #[test]
    fn the_peers_cpu_is_in_the_way_of_what_is_slow_or_late() {
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
                // The first of either operation counts for nothing, and some writes are late.
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
