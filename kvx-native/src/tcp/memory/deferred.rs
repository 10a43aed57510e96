//! Deferred completions: tickets and answers that wait because a device or an abandoned turn may
//! still touch memory.
//!
//! A stream that was given up stays in this table until the device has ended its last copy, an
//! abandoned turn until its thread returns. Then the machine settles everything that waits for
//! them; after the machine has ended, the thread that calls `wake` does.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use crate::Settlement;
use crate::staging::{Copies, Fetch, Store};
use kvx_core::backend::sync::{Mutex, MutexGuard};
use kvx_core::backend::{LinkId, Ticket};
use kvx_core::{Error, ErrorKind, RegionId, Result, TransferId};

use crate::tcp::memory::regions::{ServedRegion, ServedRegions};

/// The memory that a stream or a turn touches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Concern {
    /// The local side of a transfer.
    Transfer(LinkId, TransferId),
    /// The local sides of all transfers over a link that this end opened.
    Link(LinkId),
    /// Local regions that a peer reaches.
    Regions(Vec<RegionId>),
    /// Any local regions.
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

/// A refusal that is sent to a peer once nothing of its request can land any more.
#[derive(Clone, Debug)]
pub(crate) struct LateAnswer {
    /// The peer's link; `lane` is the number of its lane.
    pub(crate) link: [u8; 16],
    pub(crate) lane: u8,
    pub(crate) id: u64,
    pub(crate) why: Error,
}

/// The state of a turn that may have been abandoned.
#[derive(Debug, Default)]
pub(crate) struct AbandonedTurn {
    /// The turn's token, set when it is abandoned.
    token: OnceLock<u64>,
    is_over: AtomicBool,
}

impl AbandonedTurn {
    /// Marks the turn as abandoned.
    pub(crate) fn abandon(&self, token: u64) {
        self.token.set(token).ok(); // set once
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.token.get().is_some()
    }
}

/// The regions that an owner's end of a lane may touch in a turn: those that it sends from, and
/// those that it receives into. Its requests keep them alive, not this value.
#[derive(Debug, Default)]
pub(crate) struct ActiveRegions(Mutex<[Option<Weak<[Arc<ServedRegion>]>>; 2]>);

impl ActiveRegions {
    fn set(&self, which: usize, regions: Option<&ServedRegions>) {
        self.0.lock()[which] = regions.map(Arc::downgrade);
    }

    pub(crate) fn sends(&self, regions: Option<&ServedRegions>) {
        self.set(0, regions);
    }

    pub(crate) fn receives(&self, regions: Option<&ServedRegions>) {
        self.set(1, regions);
    }

    /// Returns the regions that the turn touches, and those that it receives into.
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

/// A stream that was given up, or an abandoned turn.
pub(crate) enum PendingAccess {
    Fetch(Fetch),
    Store(Store),
    Turn {
        turn: Arc<AbandonedTurn>,
        /// The regions into which the stream or turn receives.
        receives: Concern,
    },
}

impl PendingAccess {
    fn stop(&mut self) {
        match self {
            PendingAccess::Fetch(fetch) => fetch.stop(),
            PendingAccess::Store(store) => store.stop(),
            PendingAccess::Turn { .. } => {}
        }
    }

    fn copies(&self) -> Copies {
        match self {
            PendingAccess::Fetch(fetch) => fetch.copies(),
            PendingAccess::Store(store) => store.copies(),
            PendingAccess::Turn { turn, .. } if turn.is_over.load(Ordering::Acquire) => {
                Copies::Settled
            }
            PendingAccess::Turn { .. } => Copies::InFlight,
        }
    }
}

/// A ticket that waits for several streams: it settles with the last of them, and is forgotten with
/// the first that is lost.
struct Hold(Mutex<Option<Settlement>>);

impl Hold {
    fn take(&self) -> Option<Settlement> {
        self.0.lock().take()
    }
}

/// A stream that was given up, or an abandoned turn, and the operations that wait for it.
struct EndedStream {
    stream: PendingAccess,
    concern: Concern,
    answer: Option<LateAnswer>,
    holds: Vec<Arc<Hold>>,
}

/// Deferred completions: see the [module](self).
#[derive(Default)]
pub(crate) struct DeferredCompletions {
    /// The function that makes the machine check a stream.
    wake: OnceLock<Box<dyn Fn(u64) + Send + Sync>>,
    tokens: AtomicU32,
    table: Mutex<PendingTable>,
}

#[derive(Default)]
struct PendingTable {
    /// The streams by token. Those that have lost a copy stay for ever.
    streams: HashMap<u64, EndedStream>,
    /// The number of turns among them whose threads have not returned.
    turns: usize,
    /// True if the machine has ended.
    closed: bool,
}

impl DeferredCompletions {
    fn table(&self) -> MutexGuard<'_, PendingTable> {
        self.table.lock()
    }

    /// Sets the function that makes the machine check the stream of a token.
    pub(crate) fn wake_with(&self, wake: impl Fn(u64) + Send + Sync + 'static) {
        self.wake.set(Box::new(wake)).ok(); // once, when the transport opens
    }

    /// Returns a new token for a stream of the connection at `key`.
    pub(crate) fn token(&self, key: usize) -> u64 {
        (key as u64) << 32 | u64::from(self.tokens.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the connection to which the stream belonged.
    pub(crate) fn key(token: u64) -> usize {
        (token >> 32) as usize
    }

    /// Reports that a stream can continue, or that a copy of one that was given up has ended.
    /// Callable from any thread.
    pub(crate) fn wake(&self, token: u64) {
        if let Some(wake) = self.wake.get() {
            wake(token);
        }
        if self.table().closed {
            let (settled, _) = self.look(token);
            settled.into_iter().for_each(|(ticket, result)| ticket.settle(result));
        }
    }

    /// Adds a stream that is given up. Returns the answer if it may be sent now.
    pub(crate) fn add(
        &self,
        token: u64,
        mut stream: PendingAccess,
        concern: Concern,
        answer: Option<LateAnswer>,
    ) -> Option<LateAnswer> {
        stream.stop(); // without the lock: it may wake others
        if stream.copies() == Copies::Settled {
            return answer;
        }
        self.table()
            .streams
            .insert(token, EndedStream { stream, concern, answer, holds: Vec::new() });
        self.look(token).1 // the copies may have ended before the stream was in the table
    }

    /// Adds an abandoned turn that touches this memory; it may still write to `receives`.
    pub(crate) fn add_turn(
        &self,
        token: u64,
        turn: Arc<AbandonedTurn>,
        touches: Concern,
        receives: Concern,
    ) {
        self.table().turns += 1;
        self.add(token, PendingAccess::Turn { turn, receives }, touches, None);
    }

    /// Returns `Exhausted` if an abandoned turn may still write to one of the regions and overwrite
    /// a new write.
    pub(crate) fn check_writable(&self, regions: &[Arc<ServedRegion>]) -> Result<()> {
        let table = self.table();
        let writes = |region: RegionId| {
            table.streams.values().any(|ended| match &ended.stream {
                PendingAccess::Turn { receives, .. } => receives.touches(region),
                PendingAccess::Fetch(_) | PendingAccess::Store(_) => false,
            })
        };
        match regions.iter().find(|served| table.turns > 0 && writes(served.id)) {
            None => Ok(()),
            Some(served) => {
                let why = format!(
                    "an earlier write to region {} hangs on an unresolved page fault and may still \
                     land: check what backs that memory, or have the owner register other memory",
                    served.id
                );
                Err(ErrorKind::Exhausted.because(why))
            }
        }
    }

    /// Ends an abandoned turn whose thread has returned and given up the streams of its connection.
    /// Operations that waited for the turn wait for these streams now.
    pub(crate) fn end_turn(&self, turn: &AbandonedTurn) {
        let Some(token) = turn.token.get().copied() else {
            return debug_assert!(false, "only a turn that was abandoned ends here");
        };
        let mut table = self.table();
        let waits = table.streams.get_mut(&token).map(|ended| std::mem::take(&mut ended.holds));
        let waits = waits.unwrap_or_default();
        // The next connection with this key has later tokens.
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

    /// Returns the results that can be settled and answered now that copies of this stream have
    /// ended.
    pub(crate) fn look(&self, token: u64) -> (Vec<Settlement>, Option<LateAnswer>) {
        let mut table = self.table();
        let Entry::Occupied(mut entry) = table.streams.entry(token) else {
            return (Vec::new(), None);
        };
        match entry.get().stream.copies() {
            Copies::InFlight => (Vec::new(), None),
            Copies::Settled => {
                let EndedStream { stream, answer, holds, .. } = entry.remove();
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

    /// Settles a ticket once no stream and no turn touches the memory that it concerns. Returns it
    /// if that is already so.
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
                // If it has settled by now, its token is about to arrive.
                Copies::InFlight | Copies::Settled => ended.holds.push(Arc::clone(&hold)),
            }
        }
        drop(table);
        if lost {
            drop(hold.take());
        }
        Arc::into_inner(hold)?.take()
    }

    /// Handles the end of the machine. Returns the results that can be settled now; the others
    /// settle when `wake` is called.
    pub(crate) fn close(&self) -> Vec<Settlement> {
        let tokens: Vec<u64> = {
            let mut table = self.table();
            table.closed = true;
            table.streams.keys().copied().collect()
        };
        tokens.into_iter().flat_map(|token| self.look(token).0).collect()
    }
}
