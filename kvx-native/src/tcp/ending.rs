//! What waits for a device: tickets and answers that concern memory which copies in flight may still touch.
//!
//! A stream that was given up lives on in here until its last copy has ended. The machine looks after it as long as it
//! runs; after that whoever wakes the stream does.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use crate::Settled;
use crate::staging::{Copies, Fetch, Store};
use kvx_core::sync::{Mutex, MutexGuard};
use kvx_core::{Error, LinkId, RegionId, Result, Ticket, TransferId};

use super::progress::Command;
use super::transport::Handle;

/// Whose memory a stream touches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Concern {
    /// The local side of a transfer of ours.
    Transfer(LinkId, TransferId),
    /// Regions of ours that a peer reaches.
    Regions(Vec<RegionId>),
}

impl Concern {
    pub(super) fn touches(&self, region: RegionId) -> bool {
        matches!(self, Concern::Regions(regions) if regions.contains(&region))
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

/// A stream of either kind.
pub(super) enum Streaming {
    Fetch(Fetch),
    Store(Store),
}

impl Streaming {
    fn stop(&mut self) {
        match self {
            Streaming::Fetch(fetch) => fetch.stop(),
            Streaming::Store(store) => store.stop(),
        }
    }

    fn copies(&self) -> Copies {
        match self {
            Streaming::Fetch(fetch) => fetch.copies(),
            Streaming::Store(store) => store.copies(),
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
