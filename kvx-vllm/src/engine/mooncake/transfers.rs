//! The prefill's requests by the names of their transfers, until all readers have the blocks or the
//! blocks are freed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::layouts::DecodeWorker;
use crate::engine::deadlines::Deadlines;
use crate::ids::{BlockLists, RequestId};
use crate::time::Time;

/// The maximum number of ended transfers to remember, so that late askers learn the reason.
const MAX_OVER: usize = 65_536;

/// A request of a prefill that a decode asks for.
#[derive(Debug)]
pub(super) struct MooncakeTransfer {
    pub(super) request: RequestId,
    /// The blocks of the request, once they are computed.
    pub(super) ready: Option<BlockLists>,
    /// The time until which the computed blocks are kept.
    pub(super) until: Time,
    /// Readers that have the blocks or no longer want them.
    had: BTreeSet<DecodeWorker>,
    /// The number of readers that must be in `had`; 0 until one has asked.
    readers: usize,
    /// The number of pulled requests whose writes read the blocks.
    pub(super) running: usize,
    /// True if no further reader gets the blocks. Writes in progress continue.
    pub(super) expired: bool,
}

impl MooncakeTransfer {
    /// Returns whether this reader has the blocks or no longer wants them.
    pub(super) fn has_had(&self, reader: &DecodeWorker) -> bool {
        self.had.contains(reader)
    }
}

#[derive(Debug)]
pub(super) struct Transfers {
    wait: Duration,
    by_name: BTreeMap<RequestId, MooncakeTransfer>,
    names: BTreeMap<RequestId, RequestId>,
    /// Other names of transfers, each for the latest one with that name.
    aliases: BTreeMap<RequestId, RequestId>,
    expiries: Deadlines<RequestId>,
    over: BTreeMap<RequestId, &'static str>,
    over_until: Deadlines<RequestId>,
}

impl Transfers {
    pub(super) fn new(wait: Duration) -> Self {
        Transfers {
            wait,
            by_name: BTreeMap::new(),
            names: BTreeMap::new(),
            aliases: BTreeMap::new(),
            expiries: Deadlines::default(),
            over: BTreeMap::new(),
            over_until: Deadlines::default(),
        }
    }

    /// Adds a request with the name of its transfer. Returns false if another request has the name.
    pub(super) fn add(&mut self, request: RequestId, name: RequestId) -> bool {
        if self.by_name.contains_key(&name) {
            return false;
        }
        self.over.remove(&name);
        self.over_until.clear(&name);
        self.names.insert(request.clone(), name.clone());
        let (until, had) = (Time::default(), BTreeSet::new());
        let transfer = MooncakeTransfer {
            request,
            ready: None,
            until,
            had,
            readers: 0,
            running: 0,
            expired: false,
        };
        self.by_name.insert(name, transfer);
        true
    }

    /// Adds another name for a transfer.
    pub(super) fn alias(&mut self, alias: RequestId, name: RequestId) {
        self.aliases.insert(alias, name);
    }

    /// Replaces an alias with the transfer's own name.
    pub(super) fn resolve(&self, called: &mut String) {
        if let Some(name) = self.aliases.get(called.as_str()) {
            name.as_str().clone_into(called);
        }
    }

    /// Stores the computed blocks of a request. Returns the transfer's name, or `None` if it has
    /// none.
    pub(super) fn ready(
        &mut self,
        request: &RequestId,
        blocks: BlockLists,
        until: Time,
    ) -> Option<RequestId> {
        let name = self.names.get(request)?.clone();
        let transfer = self.by_name.get_mut(&name)?;
        (transfer.ready, transfer.until) = (Some(blocks), until);
        self.expiries.set(name.clone(), until);
        Some(name)
    }

    pub(super) fn get(&self, name: &RequestId) -> Option<&MooncakeTransfer> {
        self.by_name.get(name)
    }

    pub(super) fn get_mut(&mut self, name: &RequestId) -> Option<&mut MooncakeTransfer> {
        self.by_name.get_mut(name)
    }

    /// Returns the reason for the end of a transfer, if it has ended.
    pub(super) fn over(&self, name: &RequestId) -> Option<&'static str> {
        self.over.get(name).copied()
    }

    pub(super) fn name_of(&self, request: &RequestId) -> Option<&RequestId> {
        self.names.get(request)
    }

    /// Records that one of `readers` readers needs nothing more. The caller then calls
    /// [`settle`](Self::settle).
    pub(super) fn add_reader_that_has(
        &mut self,
        name: &RequestId,
        reader: DecodeWorker,
        readers: usize,
    ) {
        if let Some(transfer) = self.by_name.get_mut(name) {
            transfer.readers = transfer.readers.max(readers);
            transfer.had.insert(reader);
        }
    }

    /// Returns whether the time of a transfer ended before all its readers had the blocks.
    pub(super) fn is_expired(&self, name: &RequestId) -> bool {
        self.by_name.get(name).is_some_and(|transfer| {
            let all = transfer.readers > 0 && transfer.had.len() >= transfer.readers;
            transfer.expired && !all
        })
    }

    /// Ends a transfer if its blocks are needed no longer and no write reads them. Returns the
    /// request.
    pub(super) fn settle(&mut self, now: Time, name: &RequestId) -> Option<RequestId> {
        let transfer = self.by_name.get(name).filter(|transfer| transfer.ready.is_some())?;
        let all = transfer.readers > 0 && transfer.had.len() >= transfer.readers;
        if transfer.running > 0 || !(all || transfer.expired) {
            return None;
        }
        let why = match all {
            true => "all readers of that transfer have received its blocks",
            false => {
                "the blocks of that transfer were freed after VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"
            }
        };
        self.end(now, name, why)
    }

    /// Ends a transfer, and remembers the reason.
    pub(super) fn end(
        &mut self,
        now: Time,
        name: &RequestId,
        why: &'static str,
    ) -> Option<RequestId> {
        let transfer = self.by_name.remove(name)?;
        self.names.remove(&transfer.request);
        self.expiries.clear(name);
        self.over.insert(name.clone(), why);
        self.over_until.set(name.clone(), now + self.wait);
        while self.over.len() > MAX_OVER
            && let Some(oldest) = self.over_until.take_next()
        {
            self.forget(&oldest);
        }
        Some(transfer.request)
    }

    /// Forgets the reason for the end of a transfer.
    fn forget(&mut self, name: &RequestId) {
        self.over.remove(name);
        if self.aliases.get(name.shared()) == Some(name) {
            self.aliases.remove(name.shared());
        }
    }

    /// Marks a transfer as expired whose time has passed, and returns its name.
    pub(super) fn take_expired(&mut self, now: Time) -> Option<RequestId> {
        while let Some(name) = self.over_until.take_reached(now) {
            self.forget(&name);
        }
        let name = self.expiries.take_reached(now)?;
        if let Some(transfer) = self.by_name.get_mut(&name) {
            transfer.expired = true;
        }
        Some(name)
    }

    pub(super) fn next_deadline(&self) -> Option<Time> {
        self.expiries.next().into_iter().chain(self.over_until.next()).min()
    }

    pub(super) fn len(&self) -> usize {
        self.by_name.len()
    }
}
