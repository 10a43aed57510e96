//! What waits for others: tickets and answers that concern memory which somebody may still touch.
//!
//! A stream that was given up lives on in here until the device has ended its last copy; a turn that hangs, until its
//! thread is out of it. The machine looks after them as long as it runs; after that whoever wakes them does.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use crate::Settled;
use crate::staging::{Copies, Fetch, Store};
use kvx_core::sync::{Mutex, MutexGuard};
use kvx_core::{Error, LinkId, RegionId, Result, Ticket, TransferId};

use super::memory::Served;
use super::payload::ServedRegions;
use super::progress::Command;
use super::transport::Handle;

/// Whose memory a stream touches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Concern {
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
    pub(super) fn touches(&self, region: RegionId) -> bool {
        match self {
            Concern::Regions(regions) => regions.contains(&region),
            Concern::AllRegions => true,
            Concern::Transfer(..) | Concern::Link(_) => false,
        }
    }

    pub(super) fn is_of(&self, link: LinkId, transfer: TransferId) -> bool {
        *self == Concern::Transfer(link, transfer) || *self == Concern::Link(link)
    }
}

/// A refusal that a peer gets when nothing of its request lands any more.
#[derive(Clone, Debug)]
pub(super) struct LateAnswer {
    /// Which of its links, and which lane of that.
    pub(super) link: [u8; 16],
    pub(super) lane: u8,
    pub(super) id: u64,
    pub(super) why: Error,
}

/// Whether others went on without a turn, and whether its thread is out of it.
#[derive(Debug, Default)]
pub(super) struct LeftBehind {
    /// What it is known by since then.
    token: OnceLock<u64>,
    is_over: AtomicBool,
}

impl LeftBehind {
    /// Others go on.
    pub(super) fn leave(&self, token: u64) {
        self.token.set(token).ok(); // once
    }

    pub(super) fn is_so(&self) -> bool {
        self.token.get().is_some()
    }
}

/// The regions that an owner's end of a lane may touch in a turn: those that it sends from, and receives into. They
/// are kept by what does so, not by this.
#[derive(Debug, Default)]
pub(super) struct Touched(Mutex<[Option<Weak<[Arc<Served>]>>; 2]>);

impl Touched {
    fn set(&self, which: usize, regions: Option<&ServedRegions>) {
        self.0.lock()[which] = regions.map(Arc::downgrade);
    }

    pub(super) fn sends(&self, regions: Option<&ServedRegions>) {
        self.set(0, regions);
    }

    pub(super) fn receives(&self, regions: Option<&ServedRegions>) {
        self.set(1, regions);
    }

    pub(super) fn concern(&self) -> Concern {
        let kept: Vec<_> = self.0.lock().iter().flatten().filter_map(Weak::upgrade).collect();
        Concern::Regions(kept.iter().flat_map(|regions| regions.iter()).map(|served| served.id).collect())
    }
}

/// A stream of either kind, or a turn that others went on without.
pub(super) enum Streaming {
    Fetch(Fetch),
    Store(Store),
    Turn(Arc<LeftBehind>),
}

impl Streaming {
    fn stop(&mut self) {
        match self {
            Streaming::Fetch(fetch) => fetch.stop(),
            Streaming::Store(store) => store.stop(),
            Streaming::Turn(_) => {}
        }
    }

    fn copies(&self) -> Copies {
        match self {
            Streaming::Fetch(fetch) => fetch.copies(),
            Streaming::Store(store) => store.copies(),
            Streaming::Turn(turn) if turn.is_over.load(Ordering::Acquire) => Copies::Settled,
            Streaming::Turn(_) => Copies::InFlight,
        }
    }
}

/// What is held for several streams: settled with the last of them, forgotten with the first that is lost.
struct Hold(Mutex<Option<Settled>>);

impl Hold {
    fn take(&self) -> Option<Settled> {
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
pub(super) struct Ending {
    /// The way to the machine.
    home: OnceLock<Weak<Handle>>,
    tokens: AtomicU32,
    table: Mutex<GivenUpStreams>,
}

#[derive(Default)]
struct GivenUpStreams {
    /// By token. Those that have lost a copy stay for ever.
    streams: HashMap<u64, Ended>,
    /// No machine looks after them any more.
    closed: bool,
}

impl Ending {
    fn table(&self) -> MutexGuard<'_, GivenUpStreams> {
        self.table.lock()
    }

    /// Says where the machine is.
    pub(super) fn home(&self, handle: &Arc<Handle>) {
        self.home.set(Arc::downgrade(handle)).ok(); // once, when the transport opens
    }

    /// A token for a stream of the connection at `key`.
    pub(super) fn token(&self, key: usize) -> u64 {
        (key as u64) << 32 | u64::from(self.tokens.fetch_add(1, Ordering::Relaxed))
    }

    /// The connection whose stream it was.
    pub(super) fn key(token: u64) -> usize {
        (token >> 32) as usize
    }

    /// A stream can go on, or a copy of one that was given up has ended. On any thread.
    pub(super) fn wake(&self, token: u64) {
        if let Some(handle) = self.home.get().and_then(Weak::upgrade) {
            handle.reactor.submit(Command::Staged { token });
        }
        if self.table().closed {
            let (settled, _) = self.look(token);
            settled.into_iter().for_each(|(ticket, result)| ticket.settle(result));
        }
    }

    /// Takes a stream that is given up. The answer comes back if it may go out now.
    pub(super) fn add(
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

    /// The thread is out of a turn that was left behind, and has given up the streams of its connection: what waits for
    /// the turn waits for them now.
    pub(super) fn is_out(&self, turn: &LeftBehind) {
        let Some(token) = turn.token.get().copied() else { return };
        let mut table = self.table();
        let waits = table.streams.get_mut(&token).map(|ended| std::mem::take(&mut ended.holds));
        let waits = waits.unwrap_or_default();
        let of_same = |other: &u64| *other != token && Ending::key(*other) == Ending::key(token);
        for (_, ended) in table.streams.iter_mut().filter(|(other, _)| of_same(other)) {
            ended.holds.extend(waits.iter().cloned());
        }
        if let Some(ended) = table.streams.get_mut(&token) {
            ended.holds = waits;
        }
        turn.is_over.store(true, Ordering::Release);
        drop(table);
        self.wake(token);
    }

    /// What can be told now that copies of this stream have ended.
    pub(super) fn look(&self, token: u64) -> (Vec<Settled>, Option<LateAnswer>) {
        let mut table = self.table();
        let Entry::Occupied(mut entry) = table.streams.entry(token) else { return (Vec::new(), None) };
        match entry.get().stream.copies() {
            Copies::InFlight => (Vec::new(), None),
            Copies::Settled => {
                let Ended { stream, answer, holds, .. } = entry.remove();
                drop(table);
                drop(stream);
                (holds.into_iter().filter_map(|hold| Arc::into_inner(hold)?.take()).collect(), answer)
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
    pub(super) fn hold(
        &self,
        concerns: impl Fn(&Concern) -> bool,
        ticket: Ticket,
        result: Result<()>,
    ) -> Option<Settled> {
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
    pub(super) fn close(&self) -> Vec<Settled> {
        let tokens: Vec<u64> = {
            let mut table = self.table();
            table.closed = true;
            table.streams.keys().copied().collect()
        };
        tokens.into_iter().flat_map(|token| self.look(token).0).collect()
    }
}
