//! Threads for the engine's calls that block: opening segments, sending notifications, unregistering memory. Toward a
//! stopped peer the first two take a minute each.
//!
//! Errands to one destination are run in order, by one courier at a time. A courier that waits for a destination keeps
//! nobody else waiting: others are started beside it.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::ffi::{CStr, CString};
use std::mem::take;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvx_backend::fabric::EndpointId;
use kvx_backend::reactor::Mailbox;
use kvx_core::{Error, Kind, RegionId, Result};

use crate::ffi::{Engine, SegmentId, block_sigpipe};
use crate::frames;
use crate::memory::{Leaving, Local, Ranges};

/// What tells the notifications of kvx's own links from others.
pub(crate) const TAG: &CStr = c"kvx-link-1";
/// The longest text of one notification: the engine takes 128 KiB and refuses 1 MiB.
const MAX_TEXT: usize = 112 << 10;
/// The most bytes that wait for one destination.
const MAX_WAITING: usize = 1 << 20;
/// A courier that is away for so long does not count among those there should be.
const AWAY: Duration = Duration::from_millis(100);
/// How long a courier waits for work before it goes.
const IDLE: Duration = Duration::from_secs(10);
/// The most couriers: each may be held by another stopped peer.
const MAX_COURIERS: usize = 1024;
const STACK: usize = 256 << 10;
/// How often it is looked whether what comes in is over.
const LOOKS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));
/// Where regions are let go, which leads to nobody. No peer has an address like that.
const HOME: &str = "";
/// Ends the name under which a peer is probed: not behind other errands that lead there.
const BESIDE: &str = "beside";
/// How long the last errands may take when the fabric ends.
const LAST_ERRANDS: Duration = Duration::from_millis(300);

/// What is to be done at a destination.
enum Errand {
    /// `asks`: whether anybody listens there, which the engine does not ask about a segment that it has had before.
    Open {
        asks: bool,
    },
    Probe(Arc<str>),
    Frame(EndpointId, Box<[u8]>),
    Foreign(EndpointId, CString, CString),
    LetGo(Arc<Ranges>, Local),
}

/// What came of it.
pub(crate) enum Report {
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
    /// What came of unregistering a region. `dead`: an error, if it could not be told whether the dead are done with it.
    LetGo {
        region: RegionId,
        left: Result<Leaving>,
        dead: Result<()>,
    },
}

pub(crate) struct Couriers {
    shared: Arc<Shared>,
    home: Arc<str>,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    done: Condvar,
    reports: Mailbox<Report>,
    /// Errands wait and there are enough couriers, who may all be held up: to be looked at again.
    short: AtomicBool,
    /// How many there should be.
    wanted: usize,
}

#[derive(Default)]
struct State {
    destinations: HashMap<Arc<str>, Destination>,
    /// Those with errands and without a courier.
    ready: VecDeque<Arc<str>>,
    couriers: usize,
    idle: usize,
    closed: bool,
}

#[derive(Default)]
struct Destination {
    errands: VecDeque<Errand>,
    bytes: usize,
    segment: Option<SegmentId>,
    /// Since when a courier is there.
    since: Option<Instant>,
    /// No endpoint leads there any more: to be forgotten when all errands are run.
    left: bool,
}

impl Couriers {
    /// Errors: `Exhausted` without a descriptor to wake the machine by.
    pub(crate) fn new(wanted: usize) -> Result<Self> {
        Ok(Couriers {
            shared: Arc::new(Shared {
                state: Mutex::default(),
                work: Condvar::new(),
                done: Condvar::new(),
                reports: Mailbox::new()?,
                short: AtomicBool::new(false),
                wanted,
            }),
            home: HOME.into(),
        })
    }

    /// Opens the peer's segment. `asks`: nobody else will find out whether the peer lives, as a handshake would.
    pub(crate) fn open(&self, engine: &Arc<Engine>, to: &Arc<str>, asks: bool) -> Result<()> {
        self.send_out(engine, to, Errand::Open { asks }, 0).map(|_| ())
    }

    /// Asks whether somebody is there, beside all other errands: a peer that is stopped holds those for a minute.
    pub(crate) fn probe(&self, engine: &Arc<Engine>, to: &Arc<str>) -> Result<()> {
        let beside = Arc::from(format!("{to} {BESIDE}"));
        let sent = self.send_out(engine, &beside, Errand::Probe(Arc::clone(to)), 0);
        self.leave(&beside);
        sent.map(|_| ())
    }

    /// Says whether there was room for it.
    pub(crate) fn frame(
        &self,
        engine: &Arc<Engine>,
        to: &Arc<str>,
        from: EndpointId,
        frame: &[u8],
    ) -> Result<bool> {
        self.send_out(engine, to, Errand::Frame(from, frame.into()), frame.len())
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
        self.send_out(engine, to, Errand::Foreign(from, name, text), len)
    }

    /// Unregisters a region, and waits until nobody who has died reaches it any more.
    pub(crate) fn let_go(&self, engine: &Arc<Engine>, ranges: &Arc<Ranges>, local: &Local) -> Result<()> {
        let errand = Errand::LetGo(Arc::clone(ranges), *local);
        self.send_out(engine, &self.home, errand, 0).map(|_| ())
    }

    fn send_out(&self, engine: &Arc<Engine>, to: &Arc<str>, errand: Errand, bytes: usize) -> Result<bool> {
        let mut state = self.shared.lock();
        let destination = state.destinations.entry(Arc::clone(to)).or_default();
        if bytes > 0 && destination.bytes > 0 && destination.bytes + bytes > MAX_WAITING {
            return Ok(false);
        }
        destination.left = false;
        destination.bytes += bytes;
        destination.errands.push_back(errand);
        if destination.since.is_none() && destination.errands.len() == 1 {
            state.ready.push_back(Arc::clone(to));
            self.shared.call_one(state, engine)?;
        }
        Ok(true)
    }

    /// What waits of an endpoint's is not sent any more.
    pub(crate) fn forget(&self, to: &str, endpoint: EndpointId) {
        let mut state = self.shared.lock();
        let Some(destination) = state.destinations.get_mut(to) else { return };
        let mut gone = 0;
        destination.errands.retain(|errand| match errand {
            Errand::Frame(from, frame) if *from == endpoint => {
                gone += frame.len();
                false
            }
            Errand::Foreign(from, _, text) if *from == endpoint => {
                gone += text.as_bytes().len();
                false
            }
            _ => true,
        });
        destination.bytes -= gone;
    }

    /// Nobody leads there any more.
    pub(crate) fn leave(&self, to: &str) {
        let mut state = self.shared.lock();
        let Some(there) = state.destinations.get_mut(to) else { return };
        there.left = true;
        if there.errands.is_empty() && there.since.is_none() {
            state.destinations.remove(to);
        }
    }

    /// Looks whether errands wait because couriers are held up. Says whether that may still be so.
    pub(crate) fn tend(&self, engine: &Arc<Engine>) -> Result<bool> {
        if self.shared.short.swap(false, Ordering::Relaxed) {
            let state = self.shared.lock();
            if !state.ready.is_empty() {
                self.shared.call_one(state, engine)?;
            }
        }
        Ok(self.shared.short.load(Ordering::Relaxed))
    }

    /// What came of errands.
    pub(crate) fn reports(&self) -> &Mailbox<Report> {
        &self.shared.reports
    }

    /// Sends what waits, for a moment, and lets the couriers go. Those at a stopped peer go when it lets them.
    pub(crate) fn close(&self) {
        let until = Instant::now() + LAST_ERRANDS;
        let mut state = self.shared.lock();
        let busy = |state: &State| !state.ready.is_empty() || state.couriers > state.idle;
        while busy(&state)
            && let Some(left) = until.checked_duration_since(Instant::now())
        {
            state = self.shared.done.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.closed = true;
        state.ready.clear();
        self.shared.work.notify_all();
        let until = Instant::now() + LAST_ERRANDS;
        let away = |state: &State| {
            let at_a_peer = state.destinations.iter().filter(|(to, _)| &***to != HOME);
            at_a_peer.filter(|(_, there)| there.since.is_some_and(|since| since.elapsed() > AWAY)).count()
        };
        while state.couriers > away(&state)
            && let Some(left) = until.checked_duration_since(Instant::now())
        {
            let left = left.min(Duration::from_millis(20));
            state = self.shared.done.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sees to it that somebody looks at what is ready.
    fn call_one(self: &Arc<Self>, mut state: MutexGuard<'_, State>, engine: &Arc<Engine>) -> Result<()> {
        if state.closed {
            return Ok(());
        }
        if state.idle >= state.ready.len() {
            self.work.notify_one();
            return Ok(());
        }
        let away = |there: &Destination| there.since.is_some_and(|since| since.elapsed() >= AWAY);
        let at_hand = state.couriers - state.destinations.values().filter(|there| away(there)).count();
        if at_hand >= self.wanted || state.couriers >= MAX_COURIERS {
            self.short.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let (shared, engine) = (Arc::clone(self), Arc::clone(engine));
        let run = move || {
            block_sigpipe();
            shared.run(&engine);
            drop(engine); // perhaps the last to have it: then the engine ends here
            shared.lock().couriers -= 1;
            shared.done.notify_all();
        };
        state.couriers += 1;
        if let Err(error) =
            std::thread::Builder::new().name("kvx-mooncake".into()).stack_size(STACK).spawn(run)
        {
            state.couriers -= 1;
            if state.couriers == 0 {
                let why = "no thread for Mooncake's blocking calls: raise the limit of threads";
                return Err(Error::os(why, error).kind_is(Kind::Exhausted));
            }
        }
        Ok(())
    }

    /// The life of a courier.
    fn run(self: &Arc<Self>, engine: &Arc<Engine>) {
        let mut state = self.lock();
        loop {
            if state.closed {
                return;
            }
            let Some(to) = state.ready.pop_front() else {
                state.idle += 1;
                self.done.notify_all();
                let waited = self.work.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
                state = waited.0;
                state.idle -= 1;
                if waited.1.timed_out() && state.ready.is_empty() {
                    return;
                }
                continue;
            };
            let Some(destination) = state.destinations.get_mut(&to) else { continue };
            let errands = take(&mut destination.errands);
            destination.bytes = 0;
            destination.since = Some(Instant::now());
            let segment = destination.segment;
            drop(state);
            let segment = self.visit(engine, &to, segment, errands);
            state = self.lock();
            let Some(destination) = state.destinations.get_mut(&to) else { continue };
            (destination.segment, destination.since) = (segment, None);
            if !destination.errands.is_empty() {
                state.ready.push_back(to);
                // Somebody else may have gone away meanwhile, with work left for nobody.
                self.work.notify_one();
            } else if destination.left {
                state.destinations.remove(&to);
            }
        }
    }

    /// Runs errands in order; gives the segment as it is known then.
    fn visit(
        &self,
        engine: &Engine,
        to: &Arc<str>,
        mut segment: Option<SegmentId>,
        errands: VecDeque<Errand>,
    ) -> Option<SegmentId> {
        let mut errands = errands.into_iter().peekable();
        while let Some(errand) = errands.next() {
            match errand {
                Errand::Open { asks } => {
                    let nobody = asks && engine.probe(to) == Some(false);
                    let result = if nobody { Err(crate::error::lost(to)) } else { engine.open_segment(to) };
                    segment = result.as_ref().ok().copied().or(segment);
                    self.reports.put(Report::Opened { to: Arc::clone(to), result });
                }
                Errand::Probe(to) => {
                    let alive = engine.probe(&to);
                    self.reports.put(Report::Probed { to, alive });
                }
                first @ Errand::LetGo(..) => {
                    self.let_go(engine, std::iter::once(first).chain(errands.by_ref()).collect());
                }
                Errand::Frame(endpoint, frame) => {
                    let (mut text, mut senders) = (Vec::new(), HashSet::from([endpoint]));
                    frames::append(&mut text, &frame);
                    while let Some(Errand::Frame(endpoint, frame)) = errands.next_if(
                        |next| matches!(next, Errand::Frame(_, more) if text.len() + frames::text_len(more.len()) <= MAX_TEXT),
                    ) {
                        frames::append(&mut text, &frame);
                        senders.insert(endpoint);
                    }
                    let text = CString::new(text).expect("base64 has no NUL");
                    if let Err(why) = self.notify(engine, to, segment, TAG, &text) {
                        for endpoint in senders {
                            self.reports.put(Report::Unsent { endpoint, why: why.clone() });
                        }
                    }
                }
                Errand::Foreign(endpoint, name, text) => {
                    let result = self.notify(engine, to, segment, &name, &text);
                    self.reports.put(Report::ForeignSent { endpoint, result });
                }
            }
        }
        segment
    }

    /// Unregisters regions, and waits until what the dead had sent for them was read to its end. Others that come meanwhile are
    /// unregistered at once.
    fn let_go(&self, engine: &Engine, mut errands: VecDeque<Errand>) {
        let (mut leaving, mut waited_for) = (Vec::new(), None::<BTreeSet<u64>>);
        let mut pause = LOOKS.0;
        loop {
            for errand in errands.drain(..) {
                let Errand::LetGo(ranges, local) = errand else { continue };
                let left = ranges.remove(&local, |address| engine.unregister(address));
                leaving.push((local.region, left));
                waited_for = None;
            }
            let dead = match engine.what_the_dead_sent() {
                Ok(None) => None,
                Ok(Some(found)) => {
                    // Those that were not there at the first look have come since, and are refused.
                    let left = waited_for.take().map_or_else(|| found.clone(), |earlier| &earlier & &found);
                    waited_for = Some(left).filter(|left| !left.is_empty());
                    waited_for.is_none().then_some(Ok(()))
                }
                Err(why) => Some(Err(why)),
            };
            if let Some(dead) = dead {
                for (region, left) in leaving {
                    self.reports.put(Report::LetGo { region, left, dead: dead.clone() });
                }
                return;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LOOKS.1);
            let mut state = self.lock();
            if state.closed {
                return std::mem::forget(leaving); // the engine ends, or all is kept
            }
            if let Some(home) = state.destinations.get_mut(HOME) {
                errands = take(&mut home.errands);
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
