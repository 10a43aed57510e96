//! Threads for the engine's calls that block: opening segments, sending notifications,
//! unregistering memory. Toward a stopped peer the first two take a minute each.
//!
//! Calls to one destination are made in order, by one thread at a time. A thread that is held up by
//! a destination keeps nobody else waiting: others are started beside it.

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

/// The name of the notifications of kvx's own links, which tells them from others.
pub(crate) const TAG: &CStr = c"kvx-link-1";
/// The longest text of one notification: the engine takes 128 KiB and refuses 1 MiB.
const MAX_TEXT: usize = 112 << 10;
/// The most bytes that wait for one destination.
const MAX_WAITING: usize = 1 << 20;
/// A thread that a call has kept for so long counts as held up: another one may be started beside
/// it.
const HELD_UP: Duration = Duration::from_millis(100);
/// How long a thread waits for work before it ends.
const IDLE: Duration = Duration::from_secs(10);
/// The most threads: each may be held up by another stopped peer.
const MAX_THREADS: usize = 1024;
const STACK: usize = 256 << 10;
/// Delays between two checks whether connections of ended processes are drained.
const LOOKS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));
/// The destination of calls that lead to no peer: unregistering memory. No peer has an address like
/// that.
const OWN: &str = "";
/// Ends the name under which a peer is probed: not behind other calls that lead there.
const PROBED: &str = "probed";
/// How long the last calls may take when the fabric ends.
const LAST_CALLS: Duration = Duration::from_millis(300);

/// A call of the engine, by what it is for.
enum Call {
    /// `asks`: whether anybody listens there, which the engine does not ask about a segment that it
    /// has had before.
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
    /// A region was unregistered. `dead`: an error, if it is unknown whether bytes of ended
    /// processes can still reach it.
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
    /// Calls wait and there are enough threads, which may all be held up: to be looked at again.
    short: AtomicBool,
    /// The number of threads to have beside those that a peer holds up.
    wanted: usize,
}

#[derive(Default)]
struct Queues {
    destinations: HashMap<Arc<str>, Destination>,
    /// Destinations with calls that no thread makes.
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
    /// Since when a thread makes its calls.
    since: Option<Instant>,
    /// No endpoint leads there any more: to be forgotten when all calls are made.
    left: bool,
}

impl BlockingCalls {
    /// Errors: `Exhausted` without a descriptor to wake the machine by.
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

    /// Opens the peer's segment. `asks`: nobody else will find out whether the peer lives, as a
    /// handshake would.
    pub(crate) fn open(&self, engine: &Arc<Engine>, to: &Arc<str>, asks: bool) -> Result<()> {
        self.enqueue(engine, to, Call::Open { asks }, 0).map(|_| ())
    }

    /// Asks whether somebody is there, beside all other calls: a peer that is stopped holds those
    /// up for a minute.
    pub(crate) fn probe(&self, engine: &Arc<Engine>, to: &Arc<str>) -> Result<()> {
        let probed = Arc::from(format!("{to} {PROBED}"));
        let sent = self.enqueue(engine, &probed, Call::Probe(Arc::clone(to)), 0);
        self.leave(&probed);
        sent.map(|_| ())
    }

    /// Sends a frame of a link. Returns false where its queue is full.
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

    /// Drops the messages of an endpoint that wait.
    pub(crate) fn forget(&self, to: &str, endpoint: EndpointId) {
        let mut state = self.shared.lock();
        // Its last call may have been made meanwhile.
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

    /// No endpoint leads to this destination any more.
    pub(crate) fn leave(&self, to: &str) {
        let mut state = self.shared.lock();
        let Some(there) = state.destinations.get_mut(to) else { return }; // nothing was asked of it
        there.left = true;
        if there.calls.is_empty() && there.since.is_none() {
            state.destinations.remove(to);
        }
    }

    /// Starts a thread if calls wait because others are held up. Returns whether that may still be
    /// so.
    pub(crate) fn start_a_thread_if_short(&self, engine: &Arc<Engine>) -> Result<bool> {
        if self.shared.short.swap(false, Ordering::Relaxed) {
            let state = self.shared.lock();
            if !state.ready.is_empty() {
                self.shared.wake_or_start_a_thread(state, engine)?;
            }
        }
        Ok(self.shared.short.load(Ordering::Relaxed))
    }

    /// The outcomes of calls.
    pub(crate) fn reports(&self) -> &Mailbox<CallReport> {
        &self.shared.reports
    }

    /// Sends what waits, for a moment, and lets the threads end. Those that a stopped peer holds up
    /// end when it lets them.
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

    /// Waits until a thread has done something, or for so long.
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
            drop(engine); // perhaps the last to have it: then the engine ends here
            shared.lock().threads -= 1;
            shared.done.notify_all();
        };
        state.threads += 1;
        if let Err(error) =
            std::thread::Builder::new().name("kvx-mooncake".into()).stack_size(STACK).spawn(run)
        {
            state.threads -= 1;
            if state.threads == 0 {
                let why = "no thread for Mooncake's blocking calls: raise the limit of threads";
                return Err(Error::os(why, error).with_kind(ErrorKind::Exhausted));
            }
        }
        Ok(())
    }

    /// The life of a thread.
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
            // `forget` may have dropped its calls meanwhile, and `leave` the destination.
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
                // Somebody else may have gone away meanwhile, with work left for nobody.
                self.work.notify_one();
            } else if destination.left {
                state.destinations.remove(&to);
            }
        }
    }

    /// Makes calls in order; gives the segment as it is known then.
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

    /// Unregisters regions, and waits until what the dead had sent for them was read to its end.
    /// Others that come meanwhile are unregistered at once.
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
                    // Connections that appeared after the first check cannot reach the region.
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
                return std::mem::forget(leaving); // the engine ends, or all is kept
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
