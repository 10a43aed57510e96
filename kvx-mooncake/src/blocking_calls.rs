//! Threads for the engine's blocking calls: opening segments, sending notifications, unregistering
//! memory. The first two take a minute each if the peer is stopped.
//!
//! Calls to one destination are made in order, by one thread at a time. A thread that a destination
//! blocks delays no other destination: other threads are started.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::ffi::{CStr, CString};
use std::mem::take;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvx_backend::fabric::EndpointId;
use kvx_backend::reactor::Mailbox;
use kvx_core::{Error, ErrorKind, RegionId, Result};

use crate::ffi::{Engine, SegmentId, block_sigpipe};
use crate::frames;
use crate::memory::{EndingRegion, Local, RegisteredRanges};

/// The name of notifications on kvx's own links, which distinguishes them from others.
pub(crate) const TAG: &CStr = c"kvx-link-1";
/// The maximum length of a notification's text: the engine accepts 128 KiB and rejects 1 MiB.
const MAX_TEXT: usize = 112 << 10;
/// The maximum number of bytes that wait for one destination.
const MAX_WAITING: usize = 1 << 20;
/// A thread counts as blocked after a call has taken this long; another thread may then be started.
const HELD_UP: Duration = Duration::from_millis(100);
/// The time that a thread waits for work before it ends.
const IDLE: Duration = Duration::from_secs(10);
/// The maximum number of threads: each may be blocked by another stopped peer.
const MAX_THREADS: usize = 1024;
const STACK: usize = 256 << 10;
/// The first and the longest delay between checks whether connections of ended processes are
/// drained.
const LOOKS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));
/// The destination of calls that concern no peer: unregistering memory. No peer has such an
/// address.
const OWN: &str = "";
/// A suffix of the destination for probes, so that they do not wait for other calls to the peer.
const PROBED: &str = "probed";
/// The time that the last calls may take when the fabric ends.
const LAST_CALLS: Duration = Duration::from_millis(300);

/// A call of the engine.
enum Call {
    /// Opens a segment. `asks`: also checks whether a process listens there, because the engine
    /// does not check a segment that it has opened before.
    Open {
        asks: bool,
    },
    Probe(Arc<str>),
    Frame(EndpointId, Box<[u8]>),
    Foreign(EndpointId, CString, CString),
    Unregister(Arc<RegisteredRanges>, Local),
}

/// The outcome of a call.
pub(crate) enum CallReport {
    Opened {
        to: Arc<str>,
        result: Result<SegmentId>,
    },
    Probed {
        to: Arc<str>,
        alive: Option<bool>,
    },
    Unsent {
        endpoint: EndpointId,
        why: Error,
    },
    ForeignSent {
        endpoint: EndpointId,
        result: Result<()>,
    },
    /// A region was unregistered. `dead` is an error if bytes of ended processes may still reach
    /// it.
    Unregister {
        region: RegionId,
        left: Result<EndingRegion>,
        dead: Result<()>,
    },
}

pub(crate) struct BlockingCalls {
    shared: Arc<CallPool>,
    own: Arc<str>,
}

struct CallPool {
    state: Mutex<Queues>,
    work: Condvar,
    done: Condvar,
    reports: Mailbox<CallReport>,
    /// Calls are waiting, and there are enough threads, but all may be blocked: check again later.
    short: AtomicBool,
    /// The number of threads to run, in addition to those that a peer blocks.
    wanted: usize,
}

#[derive(Default)]
struct Queues {
    destinations: HashMap<Arc<str>, Destination>,
    /// Destinations with calls that no thread is making.
    ready: VecDeque<Arc<str>>,
    threads: usize,
    idle: usize,
    closed: bool,
}

#[derive(Default)]
struct Destination {
    calls: VecDeque<Call>,
    bytes: usize,
    segment: Option<SegmentId>,
    /// The time at which a thread started the destination's current call.
    since: Option<Instant>,
    /// No endpoint leads there any more: remove the destination when all calls are made.
    left: bool,
}

impl BlockingCalls {
    /// Creates the queue. Errors: `Exhausted` without a descriptor to wake the machine.
    pub(crate) fn new(wanted: usize) -> Result<Self> {
        Ok(BlockingCalls {
            shared: Arc::new(CallPool {
                state: Mutex::default(),
                work: Condvar::new(),
                done: Condvar::new(),
                reports: Mailbox::new()?,
                short: AtomicBool::new(false),
                wanted,
            }),
            own: OWN.into(),
        })
    }

    /// Opens the peer's segment. `asks`: also checks whether the peer is alive, if no handshake
    /// will.
    pub(crate) fn open(&self, engine: &Arc<Engine>, to: &Arc<str>, asks: bool) -> Result<()> {
        self.enqueue(engine, to, Call::Open { asks }, 0).map(|_| ())
    }

    /// Checks whether a process listens there, without waiting for other calls: a stopped peer
    /// blocks those for a minute.
    pub(crate) fn probe(&self, engine: &Arc<Engine>, to: &Arc<str>) -> Result<()> {
        let probed = Arc::from(format!("{to} {PROBED}"));
        let sent = self.enqueue(engine, &probed, Call::Probe(Arc::clone(to)), 0);
        self.leave(&probed);
        sent.map(|_| ())
    }

    /// Sends a frame of a link. Returns false if its queue is full.
    pub(crate) fn frame(
        &self,
        engine: &Arc<Engine>,
        to: &Arc<str>,
        from: EndpointId,
        frame: &[u8],
    ) -> Result<bool> {
        self.enqueue(engine, to, Call::Frame(from, frame.into()), frame.len())
    }

    pub(crate) fn foreign(
        &self,
        engine: &Arc<Engine>,
        to: &Arc<str>,
        from: EndpointId,
        name: CString,
        text: CString,
    ) -> Result<bool> {
        let len = text.as_bytes().len();
        self.enqueue(engine, to, Call::Foreign(from, name, text), len)
    }

    /// Unregisters a region, and waits until no bytes from ended processes can reach it.
    pub(crate) fn unregister(
        &self,
        engine: &Arc<Engine>,
        ranges: &Arc<RegisteredRanges>,
        local: &Local,
    ) -> Result<()> {
        let call = Call::Unregister(Arc::clone(ranges), *local);
        self.enqueue(engine, &self.own, call, 0).map(|_| ())
    }

    fn enqueue(
        &self,
        engine: &Arc<Engine>,
        to: &Arc<str>,
        call: Call,
        bytes: usize,
    ) -> Result<bool> {
        let mut state = self.shared.lock();
        let destination = state.destinations.entry(Arc::clone(to)).or_default();
        if bytes > 0 && destination.bytes > 0 && destination.bytes + bytes > MAX_WAITING {
            return Ok(false);
        }
        destination.left = false;
        destination.bytes += bytes;
        destination.calls.push_back(call);
        if destination.since.is_none() && destination.calls.len() == 1 {
            state.ready.push_back(Arc::clone(to));
            self.shared.wake_or_start_a_thread(state, engine)?;
        }
        Ok(true)
    }

    /// Drops an endpoint's waiting messages.
    pub(crate) fn forget(&self, to: &str, endpoint: EndpointId) {
        let mut state = self.shared.lock();
        // Its last call may have been made already.
        let Some(destination) = state.destinations.get_mut(to) else { return };
        let mut gone = 0;
        destination.calls.retain(|call| match call {
            Call::Frame(from, frame) if *from == endpoint => {
                gone += frame.len();
                false
            }
            Call::Foreign(from, _, text) if *from == endpoint => {
                gone += text.as_bytes().len();
                false
            }
            _ => true,
        });
        destination.bytes -= gone;
    }

    /// Records that no endpoint leads to this destination any more.
    pub(crate) fn leave(&self, to: &str) {
        let mut state = self.shared.lock();
        let Some(there) = state.destinations.get_mut(to) else { return }; // no call was made to it
        there.left = true;
        if there.calls.is_empty() && there.since.is_none() {
            state.destinations.remove(to);
        }
    }

    /// Starts a thread if calls wait because other threads are blocked. Returns whether calls may
    /// still wait.
    pub(crate) fn start_a_thread_if_short(&self, engine: &Arc<Engine>) -> Result<bool> {
        if self.shared.short.swap(false, Ordering::Relaxed) {
            let state = self.shared.lock();
            if !state.ready.is_empty() {
                self.shared.wake_or_start_a_thread(state, engine)?;
            }
        }
        Ok(self.shared.short.load(Ordering::Relaxed))
    }

    /// Returns the mailbox of the outcomes of calls.
    pub(crate) fn reports(&self) -> &Mailbox<CallReport> {
        &self.shared.reports
    }

    /// Makes the remaining calls for a moment, and ends the threads. A thread that a stopped peer
    /// blocks ends when its call returns.
    pub(crate) fn close(&self) {
        let until = Instant::now() + LAST_CALLS;
        let mut state = self.shared.lock();
        let busy = |state: &Queues| !state.ready.is_empty() || state.threads > state.idle;
        while busy(&state)
            && let Some(left) = until.checked_duration_since(Instant::now())
        {
            state = self.shared.wait_for_done(state, left);
        }
        state.closed = true;
        state.ready.clear();
        self.shared.work.notify_all();
        let until = Instant::now() + LAST_CALLS;
        let held_up = |state: &Queues| {
            let at_a_peer = state.destinations.iter().filter(|(to, _)| &***to != OWN);
            at_a_peer
                .filter(|(_, there)| there.since.is_some_and(|since| since.elapsed() > HELD_UP))
                .count()
        };
        while state.threads > held_up(&state)
            && let Some(left) = until.checked_duration_since(Instant::now())
        {
            let left = left.min(Duration::from_millis(20));
            state = self.shared.wait_for_done(state, left);
        }
    }
}

impl CallPool {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a thread has completed a call, or until the timeout.
    fn wait_for_done<'a>(
        &self,
        state: MutexGuard<'a, Queues>,
        longest: Duration,
    ) -> MutexGuard<'a, Queues> {
        self.done.wait_timeout(state, longest).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Wakes a thread for a ready destination, or starts one.
    fn wake_or_start_a_thread(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, Queues>,
        engine: &Arc<Engine>,
    ) -> Result<()> {
        if state.closed {
            return Ok(());
        }
        if state.idle >= state.ready.len() {
            self.work.notify_one();
            return Ok(());
        }
        let held_up =
            |there: &Destination| there.since.is_some_and(|since| since.elapsed() >= HELD_UP);
        let at_hand =
            state.threads - state.destinations.values().filter(|there| held_up(there)).count();
        if at_hand >= self.wanted || state.threads >= MAX_THREADS {
            self.short.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let (shared, engine) = (Arc::clone(self), Arc::clone(engine));
        let run = move || {
            block_sigpipe();
            shared.run(&engine);
            drop(engine); // ends the engine if this is its last reference
            shared.lock().threads -= 1;
            shared.done.notify_all();
        };
        state.threads += 1;
        if let Err(error) =
            std::thread::Builder::new().name("kvx-mooncake".into()).stack_size(STACK).spawn(run)
        {
            state.threads -= 1;
            if state.threads == 0 {
                let why = "could not start a thread for Mooncake's blocking calls: raise the limit of threads";
                return Err(Error::os(why, error).with_kind(ErrorKind::Exhausted));
            }
        }
        Ok(())
    }

    /// Runs a thread.
    fn run(self: &Arc<Self>, engine: &Arc<Engine>) {
        let mut state = self.lock();
        loop {
            if state.closed {
                return;
            }
            let Some(to) = state.ready.pop_front() else {
                state.idle += 1;
                self.done.notify_all();
                let waited =
                    self.work.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
                state = waited.0;
                state.idle -= 1;
                if waited.1.timed_out() && state.ready.is_empty() {
                    return;
                }
                continue;
            };
            // `forget` may have dropped its calls, and `leave` the destination.
            let Some(destination) = state.destinations.get_mut(&to) else { continue };
            let calls = take(&mut destination.calls);
            destination.bytes = 0;
            destination.since = Some(Instant::now());
            let segment = destination.segment;
            drop(state);
            let segment = self.run_calls(engine, &to, segment, calls);
            state = self.lock();
            let Some(destination) = state.destinations.get_mut(&to) else {
                debug_assert!(false, "a destination stays while a thread makes its calls");
                continue;
            };
            (destination.segment, destination.since) = (segment, None);
            if !destination.calls.is_empty() {
                state.ready.push_back(to);
                // Another thread may have ended with work left over.
                self.work.notify_one();
            } else if destination.left {
                state.destinations.remove(&to);
            }
        }
    }

    /// Makes calls in order. Returns the segment as it is known afterwards.
    fn run_calls(
        &self,
        engine: &Engine,
        to: &Arc<str>,
        mut segment: Option<SegmentId>,
        calls: VecDeque<Call>,
    ) -> Option<SegmentId> {
        let mut calls = calls.into_iter().peekable();
        while let Some(call) = calls.next() {
            match call {
                Call::Open { asks } => {
                    let nobody = asks && engine.probe(to) == Some(false);
                    let result =
                        if nobody { Err(crate::error::lost(to)) } else { engine.open_segment(to) };
                    segment = result.as_ref().ok().copied().or(segment);
                    self.reports.put(CallReport::Opened { to: Arc::clone(to), result });
                }
                Call::Probe(to) => {
                    let alive = engine.probe(&to);
                    self.reports.put(CallReport::Probed { to, alive });
                }
                first @ Call::Unregister(..) => {
                    self.unregister_all(
                        engine,
                        std::iter::once(first).chain(calls.by_ref()).collect(),
                    );
                }
                Call::Frame(endpoint, frame) => {
                    let (mut text, mut senders) = (Vec::new(), HashSet::from([endpoint]));
                    frames::append(&mut text, &frame);
                    while let Some(Call::Frame(endpoint, frame)) = calls.next_if(
                        |next| matches!(next, Call::Frame(_, more) if text.len() + frames::text_len(more.len()) <= MAX_TEXT),
                    ) {
                        frames::append(&mut text, &frame);
                        senders.insert(endpoint);
                    }
                    let text = CString::new(text).expect("base64 has no NUL");
                    if let Err(why) = self.notify(engine, to, segment, TAG, &text) {
                        for endpoint in senders {
                            self.reports.put(CallReport::Unsent { endpoint, why: why.clone() });
                        }
                    }
                }
                Call::Foreign(endpoint, name, text) => {
                    let result = self.notify(engine, to, segment, &name, &text);
                    self.reports.put(CallReport::ForeignSent { endpoint, result });
                }
            }
        }
        segment
    }

    /// Unregisters regions, and waits until the engine has read everything that ended processes
    /// sent for them. Regions that arrive meanwhile are unregistered immediately.
    fn unregister_all(&self, engine: &Engine, mut calls: VecDeque<Call>) {
        let (mut leaving, mut waited_for) = (Vec::new(), None::<BTreeSet<u64>>);
        let mut pause = LOOKS.0;
        loop {
            for call in calls.drain(..) {
                let Call::Unregister(ranges, local) = call else {
                    debug_assert!(false, "nothing but regions is unregistered at no peer");
                    continue;
                };
                let left = ranges.remove(&local, |address| engine.unregister(address));
                leaving.push((local.region, left));
                waited_for = None;
            }
            let dead = match engine.connections_of_ended_processes() {
                Ok(None) => None,
                Ok(Some(found)) => {
                    // Connections that appeared after the first check cannot access the region.
                    let left = waited_for
                        .take()
                        .map_or_else(|| found.clone(), |earlier| &earlier & &found);
                    waited_for = Some(left).filter(|left| !left.is_empty());
                    waited_for.is_none().then_some(Ok(()))
                }
                Err(why) => Some(Err(why)),
            };
            if let Some(dead) = dead {
                for (region, left) in leaving {
                    self.reports.put(CallReport::Unregister { region, left, dead: dead.clone() });
                }
                return;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LOOKS.1);
            let mut state = self.lock();
            if state.closed {
                return std::mem::forget(leaving); // the engine ends, or all memory is kept
            }
            if let Some(own) = state.destinations.get_mut(OWN) {
                calls = take(&mut own.calls);
            }
        }
    }

    fn notify(
        &self,
        engine: &Engine,
        to: &str,
        segment: Option<SegmentId>,
        name: &CStr,
        text: &CStr,
    ) -> Result<()> {
        match segment {
            Some(segment) => engine.notify(segment, name, text),
            None => Err(crate::error::lost(to)),
        }
    }
}
