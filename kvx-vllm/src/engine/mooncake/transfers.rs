//! The prefill's requests by the names of their transfers: until all readers have them, or nobody may any more.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::layouts::DecodeWorker;
use crate::engine::deadlines::Deadlines;
use crate::ids::{BlockLists, RequestId};
use crate::time::Time;

/// Names of transfers that are over and are remembered, so that who asks late hears why.
const MAX_OVER: usize = 65_536;

/// One request of a prefill that a decode asks for.
#[derive(Debug)]
pub(super) struct MooncakeTransfer {
    pub(super) request: RequestId,
    /// Its blocks, once they are computed.
    pub(super) ready: Option<BlockLists>,
    /// How long the blocks are kept, once they are.
    pub(super) until: Time,
    /// Who has them, or does not want them any more.
    had: BTreeSet<DecodeWorker>,
    /// How many that must be, once one has asked.
    readers: usize,
    /// Writes that read the blocks, by question.
    pub(super) running: usize,
    /// Nobody gets the blocks any more but who is being written to.
    pub(super) expired: bool,
}

impl MooncakeTransfer {
    /// Whether this reader has nothing more to ask for.
    pub(super) fn has_had(&self, reader: &DecodeWorker) -> bool {
        self.had.contains(reader)
    }
}

#[derive(Debug)]
pub(super) struct Transfers {
    wait: Duration,
    by_name: BTreeMap<RequestId, MooncakeTransfer>,
    names: BTreeMap<RequestId, RequestId>,
    /// What others call transfers: the latest of that name.
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

    /// A request with that name has arrived. False: another one has it.
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

    /// Others know a transfer by this name.
    pub(super) fn alias(&mut self, alias: RequestId, name: RequestId) {
        self.aliases.insert(alias, name);
    }

    /// Makes our name of one that others use.
    pub(super) fn resolve(&self, called: &mut String) {
        if let Some(name) = self.aliases.get(called.as_str()) {
            name.as_str().clone_into(called);
        }
    }

    /// Its blocks are computed. `None`: it has no name.
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

    /// Why nobody gets that transfer any more, if it is over.
    pub(super) fn over(&self, name: &RequestId) -> Option<&'static str> {
        self.over.get(name).copied()
    }

    pub(super) fn name_of(&self, request: &RequestId) -> Option<&RequestId> {
        self.names.get(request)
    }

    /// Notes that a reader of `readers` has what it wanted. [`settle`](Self::settle) comes next.
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

    /// Whether a transfer was kept as long as it is, and not all its readers have had its blocks.
    pub(super) fn is_expired(&self, name: &RequestId) -> bool {
        self.by_name.get(name).is_some_and(|transfer| {
            let all = transfer.readers > 0 && transfer.had.len() >= transfer.readers;
            transfer.expired && !all
        })
    }

    /// Gives the request if nobody needs its blocks any more, and nothing reads them.
    pub(super) fn settle(&mut self, now: Time, name: &RequestId) -> Option<RequestId> {
        let transfer = self.by_name.get(name).filter(|transfer| transfer.ready.is_some())?;
        let all = transfer.readers > 0 && transfer.had.len() >= transfer.readers;
        if transfer.running > 0 || !(all || transfer.expired) {
            return None;
        }
        let why = match all {
            true => "every reader of that transfer has had its blocks",
            false => {
                "the blocks of that transfer were kept as long as VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, and are gone"
            }
        };
        self.end(now, name, why)
    }

    /// Forgets a transfer but for why.
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

    /// Forgets why a transfer is over.
    fn forget(&mut self, name: &RequestId) {
        self.over.remove(name);
        if self.aliases.get(name.shared()) == Some(name) {
            self.aliases.remove(name.shared());
        }
    }

    /// Takes one whose blocks nobody came for in time.
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
