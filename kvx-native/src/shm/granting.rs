//! Who may read what: grants by the owner, and their end.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvx_core::reactor::Outbox;
use kvx_core::{Kind, RegionId, RegionKey, Result, Ticket};

use super::connection::Imported;
use super::error::{error, revoked, still_shared};
use super::memory::{self, Held, Mapping, Revoked};
use super::messages::{Message, Reached, Refusal};
use super::progress::{Machine, Work};

/// The most regions that one peer may lend.
const MAX_LENT: usize = 16 << 10;
/// How many bytes of a mapping are made present in one turn.
const POPULATE_STEP: usize = 2 << 20;

/// A revocation that waits for peers.
pub(crate) struct Recall {
    region: Revoked,
    /// The connections whose peers have not let go.
    waiting: HashSet<usize>,
    done: Ticket,
}

/// A mapping whose pages are being made present.
pub(crate) struct Populate {
    pub(crate) at: usize,
    pub(crate) id: RegionId,
    mapping: Arc<Mapping>,
    from: usize,
}

impl Machine {
    /// A peer asks to read a region of ours.
    pub(crate) fn take_want(&mut self, at: usize, import: u64, id: RegionId, key: &RegionKey) {
        let connection = &mut self.connections[at];
        match self.regions.check(id, key) {
            Ok(memory) => {
                connection.granted.insert(id);
                let grant = Message::Grant { import, reached: memory::reached(&memory) };
                connection.send_with(&self.poller, &grant, Some(memory));
            }
            Err(refused) => {
                let why = Refusal::from(&refused);
                connection.send(&self.poller, &Message::Deny { import, why });
            }
        }
    }

    /// A peer lends us a region to pull its writes from. Errors: `Malformed` for one that is lent already.
    pub(crate) fn take_lend(
        &mut self,
        at: usize,
        id: RegionId,
        reached: Reached,
        file: Option<&OwnedFd>,
    ) -> Result<()> {
        let connection = &mut self.connections[at];
        if connection.lent.len() >= MAX_LENT || connection.lent.contains_key(&id) {
            return Err(error(
                Kind::Malformed,
                "malformed SHM message: a region is lent twice, or too many are",
            ));
        }
        // One that does not fit is refused when a write names it: the others go on.
        let held = Held::of(id, reached, file);
        if let Ok(held) = &held {
            self.populate(at, held);
        }
        self.connections[at].lent.insert(id, held);
        Ok(())
    }

    /// Has a new mapping's pages made present while there is nothing else to do, so that transfers do not pay for it.
    pub(crate) fn populate(&mut self, at: usize, held: &Held) {
        if let Some(mapping) = &held.place.mapping {
            let populate = Populate { at, id: held.id, mapping: Arc::clone(mapping), from: 0 };
            self.populates.push_back(populate);
        }
    }

    /// Says how many steps it took.
    pub(crate) fn populate_turn(&mut self) -> usize {
        let Some(mut populate) = self.populates.pop_front() else { return 0 };
        if let Some(next) = populate.mapping.populate(populate.from, POPULATE_STEP) {
            populate.from = next;
            self.populates.push_back(populate);
        }
        1
    }

    /// Our region is revoked: nobody is granted it any more, and everyone who was is asked to let go.
    pub(crate) fn revoke(&mut self, region: Revoked, done: Ticket, out: &mut Outbox) {
        let id = region.id;
        self.stop_pulls(|pull| pull.writes(id), &revoked(id));
        let mut waiting = HashSet::new();
        for (at, connection) in &mut self.connections {
            if connection.granted.contains(&id) {
                connection.send(&self.poller, &Message::Recall { id });
                waiting.insert(at);
            }
        }
        if waiting.is_empty() {
            out.settle(done, Ok(()));
        } else {
            self.recalls.push(Recall { region, waiting, done });
        }
    }

    /// A peer has let go of our region. Errors: `Malformed` when it did not hold it.
    pub(crate) fn take_released(&mut self, at: usize, id: RegionId, out: &mut Outbox) -> Result<()> {
        if !self.connections[at].granted.remove(&id) {
            return Err(error(
                Kind::Malformed,
                format!("malformed SHM message: region {id} was not granted"),
            ));
        }
        self.confirm(at, Some(id), out);
        Ok(())
    }

    /// The peer of a connection has let go of one region, or of all.
    pub(crate) fn confirm(&mut self, at: usize, id: Option<RegionId>, out: &mut Outbox) {
        let matches = |recall: &Recall| id.is_none_or(|id| recall.region.id == id);
        for recall in self.recalls.iter_mut().filter(|recall| matches(recall)) {
            recall.waiting.remove(&at);
        }
        for recall in self.recalls.extract_if(.., |recall| recall.waiting.is_empty()) {
            out.settle(recall.done, Ok(()));
        }
    }

    /// The owner takes a region back that we were granted or lent: lets go of it and says so.
    pub(crate) fn take_recall(&mut self, at: usize, id: RegionId, out: &mut Outbox) {
        let reason = revoked(id);
        self.stop_pulls(|pull| pull.at == at && pull.reads(id), &reason);
        let stopped = self.turns.extract(|work| match work {
            Work::Read(read) => read.at == at && read.reads(id),
            Work::Pull(_) => false,
        });
        self.populates.retain(|populate| populate.at != at || populate.id != id);
        for work in stopped {
            work.settle(reason.clone(), out);
        }
        let connection = &mut self.connections[at];
        connection.lent.remove(&id);
        connection.shut_windows(|held| held.id == id);
        for imported in connection.imports.values_mut() {
            if matches!(imported, Imported::Held(held, _) if held.id == id) {
                *imported = Imported::Refused(reason.clone());
            }
        }
        connection.send(&self.poller, &Message::Released { id });
        self.post_waiting(at, out);
    }

    /// The machine ends: what peers have not let go of is never freed.
    pub(crate) fn keep_unproven(&mut self, out: &mut Outbox) {
        let unproven: HashSet<RegionId> =
            self.connections.iter().flat_map(|(_, connection)| connection.granted.iter().copied()).collect();
        self.regions.close(unproven);
        for recall in self.recalls.drain(..) {
            out.settle(recall.done, Err(still_shared(recall.region.id)));
            std::mem::forget(recall.region);
        }
    }
}
