//! What waits for others: tickets and answers that concern memory which somebody may still touch.
//!
//! A stream that was given up lives on in here until the device has ended its last copy; a turn that hangs, until its
//! thread is out of it. The machine looks after them as long as it runs; after that whoever wakes them does.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use crate::Settlement;
use crate::staging::{Copies, Fetch, Store};
use kvx_core::backend::sync::{Mutex, MutexGuard};
use kvx_core::backend::{LinkId, Ticket};
use kvx_core::{Error, ErrorKind, RegionId, Result, TransferId};

use crate::tcp::memory::regions::{Served, ServedRegions};

/// Whose memory a stream touches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Concern {
    /// The local side of a transfer of ours.
    Transfer(LinkId, TransferId),
    /// The local sides of all transfers over a link of ours.
    Link(LinkId),
    /// Regions of ours that a peer reaches.
    Regions(Vec<RegionId>),
    /// Any regions of ours.
    AllRegions,
}

impl Concern {
    pub(crate) fn touches(&self, region: RegionId) -> bool {
        match self {
            Concern::Regions(regions) => regions.contains(&region),
            Concern::AllRegions => true,
            Concern::Transfer(..) | Concern::Link(_) => false,
        }
    }

    pub(crate) fn is_of(&self, link: LinkId, transfer: TransferId) -> bool {
        *self == Concern::Transfer(link, transfer) || *self == Concern::Link(link)
    }
}

/// A refusal that a peer gets when nothing of its request lands any more.
#[derive(Clone, Debug)]
pub(crate) struct LateAnswer {
    /// Which of its links, and which lane of that.
    pub(crate) link: [u8; 16],
    pub(crate) lane: u8,
    pub(crate) id: u64,
    pub(crate) why: Error,
}

/// Whether others went on without a turn, and whether its thread is out of it.
#[derive(Debug, Default)]
pub(crate) struct AbandonedTurn {
    /// What it is known by since then.
    token: OnceLock<u64>,
    is_over: AtomicBool,
}

impl AbandonedTurn {
    /// Others go on.
    pub(crate) fn leave(&self, token: u64) {
        self.token.set(token).ok(); // once
    }

    pub(crate) fn is_so(&self) -> bool {
        self.token.get().is_some()
    }
}

/// The regions that an owner's end of a lane may touch in a turn: those that it sends from, and receives into. They
/// are kept by what does so, not by this.
#[derive(Debug, Default)]
pub(crate) struct Touched(Mutex<[Option<Weak<[Arc<Served>]>>; 2]>);

impl Touched {
    fn set(&self, which: usize, regions: Option<&ServedRegions>) {
        self.0.lock()[which] = regions.map(Arc::downgrade);
    }

    pub(crate) fn sends(&self, regions: Option<&ServedRegions>) {
        self.set(0, regions);
    }

    pub(crate) fn receives(&self, regions: Option<&ServedRegions>) {
        self.set(1, regions);
    }

    /// What it touches, and what of that it receives into.
    pub(crate) fn concerns(&self) -> (Concern, Concern) {
        let [sends, receives] = {
            let touched = self.0.lock();
            touched.each_ref().map(|regions| regions.as_ref().and_then(Weak::upgrade))
        };
        let ids =
            |regions: &ServedRegions| regions.iter().map(|served| served.id).collect::<Vec<_>>();
        let receives = receives.as_ref().map(ids).unwrap_or_default();
        let all =
            sends.as_ref().map(ids).into_iter().flatten().chain(receives.iter().copied()).collect();
        (Concern::Regions(all), Concern::Regions(receives))
    }
}

/// A stream of either kind, or a turn that others went on without.
pub(crate) enum Streaming {
    Fetch(Fetch),
    Store(Store),
    Turn {
        left: Arc<AbandonedTurn>,
        /// What it receives into.
        receives: Concern,
    },
}

impl Streaming {
    fn stop(&mut self) {
        match self {
            Streaming::Fetch(fetch) => fetch.stop(),
            Streaming::Store(store) => store.stop(),
            Streaming::Turn { .. } => {}
        }
    }

    fn copies(&self) -> Copies {
        match self {
            Streaming::Fetch(fetch) => fetch.copies(),
            Streaming::Store(store) => store.copies(),
            Streaming::Turn { left, .. } if left.is_over.load(Ordering::Acquire) => Copies::Settled,
            Streaming::Turn { .. } => Copies::InFlight,
        }
    }
}

/// What is held for several streams: settled with the last of them, forgotten with the first that is lost.
struct Hold(Mutex<Option<Settlement>>);

impl Hold {
    fn take(&self) -> Option<Settlement> {
        self.0.lock().take()
    }
}

/// A stream that was given up.
struct Ended {
    stream: Streaming,
    concern: Concern,
    answer: Option<LateAnswer>,
    holds: Vec<Arc<Hold>>,
}

/// See the module.
#[derive(Default)]
pub(crate) struct DeferredCompletions {
    /// Has the machine look after a stream.
    wake: OnceLock<Box<dyn Fn(u64) + Send + Sync>>,
    tokens: AtomicU32,
    table: Mutex<GivenUpStreams>,
}

#[derive(Default)]
struct GivenUpStreams {
    /// By token. Those that have lost a copy stay for ever.
    streams: HashMap<u64, Ended>,
    /// Turns among them whose threads are not out of them.
    turns: usize,
    /// No machine looks after them any more.
    closed: bool,
}

impl DeferredCompletions {
    fn table(&self) -> MutexGuard<'_, GivenUpStreams> {
        self.table.lock()
    }

    /// Sets what has the machine look after the stream of a token.
    pub(crate) fn wake_with(&self, wake: impl Fn(u64) + Send + Sync + 'static) {
        self.wake.set(Box::new(wake)).ok(); // once, when the transport opens
    }

    /// A token for a stream of the connection at `key`.
    pub(crate) fn token(&self, key: usize) -> u64 {
        (key as u64) << 32 | u64::from(self.tokens.fetch_add(1, Ordering::Relaxed))
    }

    /// The connection whose stream it was.
    pub(crate) fn key(token: u64) -> usize {
        (token >> 32) as usize
    }

    /// A stream can go on, or a copy of one that was given up has ended. On any thread.
    pub(crate) fn wake(&self, token: u64) {
        if let Some(wake) = self.wake.get() {
            wake(token);
        }
        if self.table().closed {
            let (settled, _) = self.look(token);
            settled.into_iter().for_each(|(ticket, result)| ticket.settle(result));
        }
    }

    /// Takes a stream that is given up. The answer comes back if it may go out now.
    pub(crate) fn add(
        &self,
        token: u64,
        mut stream: Streaming,
        concern: Concern,
        answer: Option<LateAnswer>,
    ) -> Option<LateAnswer> {
        stream.stop(); // without the lock: it may wake others
        if stream.copies() == Copies::Settled {
            return answer;
        }
        self.table().streams.insert(token, Ended { stream, concern, answer, holds: Vec::new() });
        self.look(token).1 // the copies may have ended when nobody knew the stream
    }

    /// A turn hangs that touches this; `receives` of it may still be written to.
    pub(crate) fn leave(
        &self,
        token: u64,
        left: Arc<AbandonedTurn>,
        touches: Concern,
        receives: Concern,
    ) {
        self.table().turns += 1;
        self.add(token, Streaming::Turn { left, receives }, touches, None);
    }

    /// Errors: `Exhausted` if a turn that hangs may still write there, over what is written now.
    pub(crate) fn check_writable(&self, regions: &[Arc<Served>]) -> Result<()> {
        let table = self.table();
        let writes = |region: RegionId| {
            table.streams.values().any(|ended| match &ended.stream {
                Streaming::Turn { receives, .. } => receives.touches(region),
                Streaming::Fetch(_) | Streaming::Store(_) => false,
            })
        };
        match regions.iter().find(|served| table.turns > 0 && writes(served.id)) {
            None => Ok(()),
            Some(served) => {
                let why = format!(
                    "an earlier write to region {} waits for a page that does not come, and may still land: look after \
                     what backs it, or have the owner register other memory",
                    served.id
                );
                Err(Error::new(ErrorKind::Exhausted, why))
            }
        }
    }

    /// The thread is out of a turn that was left behind, and has given up the streams of its connection: what waits for
    /// the turn waits for them now.
    pub(crate) fn is_out(&self, turn: &AbandonedTurn) {
        let Some(token) = turn.token.get().copied() else { return };
        let mut table = self.table();
        let waits = table.streams.get_mut(&token).map(|ended| std::mem::take(&mut ended.holds));
        let waits = waits.unwrap_or_default();
        // The next connection in its place has later tokens.
        let is_its = |other: &u64| {
            *other < token && DeferredCompletions::key(*other) == DeferredCompletions::key(token)
        };
        let mut is_lost = false;
        for (_, ended) in table.streams.iter_mut().filter(|(other, _)| is_its(other)) {
            match ended.stream.copies() {
                Copies::Lost => is_lost = true,
                Copies::InFlight | Copies::Settled => ended.holds.extend(waits.iter().cloned()),
            }
        }
        if is_lost {
            waits.iter().for_each(|hold| drop(hold.take()));
        }
        if let Some(ended) = table.streams.get_mut(&token) {
            ended.holds = waits;
        }
        turn.is_over.store(true, Ordering::Release);
        table.turns -= 1;
        drop(table);
        self.wake(token);
    }

    /// What can be told now that copies of this stream have ended.
    pub(crate) fn look(&self, token: u64) -> (Vec<Settlement>, Option<LateAnswer>) {
        let mut table = self.table();
        let Entry::Occupied(mut entry) = table.streams.entry(token) else {
            return (Vec::new(), None);
        };
        match entry.get().stream.copies() {
            Copies::InFlight => (Vec::new(), None),
            Copies::Settled => {
                let Ended { stream, answer, holds, .. } = entry.remove();
                drop(table);
                drop(stream);
                (
                    holds.into_iter().filter_map(|hold| Arc::into_inner(hold)?.take()).collect(),
                    answer,
                )
            }
            Copies::Lost => {
                let ended = entry.get_mut();
                let (holds, answer) = (std::mem::take(&mut ended.holds), ended.answer.take());
                drop(table);
                holds.iter().for_each(|hold| drop(hold.take()));
                (Vec::new(), answer)
            }
        }
    }

    /// Settles a ticket when no copy touches what it concerns: it comes back if that is now.
    pub(crate) fn hold(
        &self,
        concerns: impl Fn(&Concern) -> bool,
        ticket: Ticket,
        result: Result<()>,
    ) -> Option<Settlement> {
        let mut table = self.table();
        let hold = Arc::new(Hold(Mutex::new(Some((ticket, result)))));
        let mut lost = false;
        for ended in table.streams.values_mut().filter(|ended| concerns(&ended.concern)) {
            match ended.stream.copies() {
                Copies::Lost => lost = true,
                // If it has settled by now, its token is on the way.
                Copies::InFlight | Copies::Settled => ended.holds.push(Arc::clone(&hold)),
            }
        }
        drop(table);
        if lost {
            drop(hold.take());
        }
        Arc::into_inner(hold)?.take()
    }

    /// The machine has ended: hands out what can be settled now, and sees to the rest by itself.
    pub(crate) fn close(&self) -> Vec<Settlement> {
        let tokens: Vec<u64> = {
            let mut table = self.table();
            table.closed = true;
            table.streams.keys().copied().collect()
        };
        tokens.into_iter().flat_map(|token| self.look(token).0).collect()
    }
}
