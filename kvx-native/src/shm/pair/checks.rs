//! Checks of the result of every operation.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Error, ErrorKind, Op};

use super::end::Resources;
use super::{ORDERS, OpenLink, POISON, Pair, Place, RegionRole, cut, indices};
use crate::shm::progress::Command;
use crate::shm::shared_link::SharedLink;

impl Pair {
    /// Returns true if no operation is under way.
    pub(super) fn is_idle(&self) -> bool {
        let is_open = |place: &Place| place.revoked.is_none();
        self.told.is_empty()
            && self.slots.iter().all(|slot| {
                slot.posted.is_none()
                    && is_open(&slot.local)
                    && is_open(&slot.source)
                    && is_open(&slot.sink)
            })
    }

    /// Returns true if neither end has a connection.
    pub(super) fn is_apart(&self) -> bool {
        self.initiator.machine.connections.is_empty() && self.owner.machine.connections.is_empty()
    }

    /// Describes the operations in progress, for the message of a failed test.
    pub(super) fn standing(&self) -> String {
        let link = self
            .link
            .as_ref()
            .map(|link| (link.shared.id, link.shared.gone.get(), self.up().is_some()));
        let phases = [&self.initiator, &self.owner].map(|end| {
            let all = end.machine.connections.iter();
            all.map(|(_, one)| format!("{:?}, {} packets wait", one.phase, one.queued()))
                .collect::<Vec<_>>()
        });
        let posted = self
            .slots
            .iter()
            .map(|slot| slot.posted.as_ref().map(|posted| (posted.op, &posted.ends_by)));
        let revoked = self.slots.iter().map(|slot| {
            [&slot.local, &slot.source, &slot.sink].map(|place| place.revoked.is_some())
        });
        format!(
            "the link: {link:?}; connections: {phases:?}; transfers: {:?}; {} notifications; being \
             revoked: {:?}",
            posted.collect::<Vec<_>>(),
            self.told.len(),
            revoked.collect::<Vec<_>>()
        )
    }

    /// Checks the operations that have settled, and overwrites their memory so that later accesses
    /// are noticed.
    pub(super) fn settle(&mut self) {
        if let Some(OpenLink { shared, ends_by, .. }) = &self.link
            && let Some(why) = shared.gone.get()
        {
            let lost_file = why.kind() == ErrorKind::Exhausted && cut::lost_files() > 0;
            let is_expected = lost_file || ends_by.contains(&why.kind());
            assert!(is_expected, "a link was lost without a reason: {why}");
        }
        for at in 0..self.slots.len() {
            self.settle_transfer(at);
            RegionRole::ALL.into_iter().for_each(|which| self.settle_revocation(at, which));
        }
        let (inbox, mut acknowledged) = (&self.inbox, 0);
        self.told.retain(|told| {
            let Some(result) = told.outcome.get("a notification") else { return true };
            inbox.observe(("told", told.number, result.as_ref().err().map(Error::kind)));
            match result {
                Ok(()) => {
                    acknowledged += 1;
                    assert!(
                        inbox.has(told.number),
                        "a notification was acknowledged before it arrived"
                    );
                }
                Err(why) => {
                    assert!(
                        told.ends_by.contains(&why.kind()),
                        "a notification failed without a reason: {why}"
                    );
                }
            }
            false
        });
        self.acknowledged += acknowledged;
    }

    fn settle_transfer(&mut self, at: usize) {
        let slot = &mut self.slots[at];
        let Some(result) =
            slot.posted.as_ref().and_then(|posted| posted.outcome.get("a transfer")).cloned()
        else {
            return;
        };
        let Some(posted) = slot.posted.take() else { return };
        self.inbox.observe(("transfer", posted.id, result.as_ref().err().map(Error::kind)));
        if let Err(why) = &result {
            let lost_file = why.kind() == ErrorKind::Exhausted && cut::lost_files() > 0;
            let is_expected = lost_file || posted.ends_by.contains(&why.kind());
            assert!(is_expected, "a {:?} failed without a reason: {why}", posted.op);
        }
        let (block, orders) =
            (slot.shape.block, if posted.op == Op::Read { ORDERS } else { [ORDERS[1], ORDERS[0]] });
        let into = match posted.op {
            Op::Read => &mut slot.local,
            Op::Write => &mut slot.sink,
        };
        let now = into.look();
        if result.is_ok() {
            self.arrived += 1;
            let mut expected = std::mem::take(&mut into.content);
            let [to_order, from_order] = orders.map(|by| indices(slot.shape, posted.is_list, by));
            for number in 0..to_order.len() {
                let [to, from] =
                    [&to_order, &from_order].map(|order| order.at(number) as usize * block);
                expected[to..to + block].copy_from_slice(&posted.from[from..from + block]);
            }
            assert!(now == expected || posted.orphan, "a {:?} moved wrong bytes", posted.op);
        }
        // A killed owner's memory may have been reused: bytes of a failed transfer do not count.
        let is_garbage = result.is_err() && posted.ends_by.contains(&ErrorKind::PeerLost);
        if !posted.orphan && !is_garbage {
            assert!(
                !now.contains(&POISON),
                "a {:?} moved bytes that must not be read any more",
                posted.op
            );
        }
        into.content = now;
        if posted.op == Op::Write {
            let poison = vec![POISON; slot.local.content.len()];
            slot.local.set(poison);
        }
    }

    fn settle_revocation(&mut self, at: usize, which: RegionRole) {
        let revoked = which.of(&mut self.slots[at]).revoked.as_ref();
        let Some(result) = revoked.and_then(|outcome| outcome.get("a revocation")) else { return };
        if let Err(why) = result {
            panic!("a region's revocation failed: {why}");
        }
        self.revoked += 1;
        self.inbox.observe(("revoked", at, which as u8));
        let new = self.open(which.owner(), self.slots[at].shape);
        let slot = &mut self.slots[at];
        let mut old = std::mem::replace(which.of(slot), new);
        if let Some(posted) = &mut slot.posted {
            // A target that no longer holds a lent region, or did not get its file, refuses the
            // rest of the write.
            let is_refused =
                cut::lost_files() > 0 || posted.ends_by.contains(&ErrorKind::Unregistered);
            assert!(
                which != RegionRole::Local || is_refused,
                "a region was released during a write from it"
            );
            // The transfer moves nothing any more, and settles later.
            posted.orphan |= which == RegionRole::Sink && posted.op == Op::Write;
        }
        let poison = vec![POISON; old.content.len()];
        old.set(poison);
        self.given_back.push(old);
        self.import();
    }

    /// Checks that memory that must not be written to is unchanged.
    pub(super) fn check(&self, longest: usize) {
        for slot in &self.slots {
            let op = slot.posted.as_ref().filter(|posted| !posted.orphan).map(|posted| posted.op);
            let checked = [
                (&slot.local, op != Some(Op::Read), "local"),
                (&slot.source, true, "source"),
                (&slot.sink, op != Some(Op::Write) && !slot.unsure, "sink"),
            ];
            for (place, is_still, whose) in checked {
                if is_still && place.content.len() <= longest {
                    place.check(whose);
                }
            }
        }
        self.given_back.iter().filter(|place| place.content.len() <= longest).for_each(|place| {
            place.check("revoked");
        });
    }

    /// Checks that, after the end of a link, all its operations have ended and nothing is left of
    /// it.
    pub(super) fn has_ended(&mut self) {
        let is_gone = |link: &Arc<SharedLink>| link.gone.get().is_some();
        self.until("the end of all operations", |pair| {
            let all_gone = pair.link.iter().map(|link| &link.shared).chain(&pair.lost).all(is_gone);
            let all_landed =
                [&pair.initiator, &pair.owner].iter().all(|end| !end.machine.flights.any());
            pair.is_idle() && pair.is_apart() && all_gone && all_landed
        });
        for end in [&self.initiator, &self.owner] {
            assert!(end.machine.held.is_empty(), "{:?} is still counted", end.machine.held);
        }
        for link in self.link.take().map(|link| link.shared).into_iter().chain(self.lost.drain(..))
        {
            let why = link.gone.get().expect("the loop above waited for it");
            // `settle` has checked the reason, unless the owner was killed.
            let is_expected = matches!(
                why.kind(),
                ErrorKind::PeerLost | ErrorKind::PeerRestarted | ErrorKind::Exhausted
            );
            assert!(is_expected, "a link was lost without a reason: {why}");
            let (ups, ends) = self.inbox.told_of(link.id);
            assert!(
                ups <= 1 && ends == 1,
                "a link was reported up {ups} times, and ended {ends} times"
            );
            self.initiator.command(Command::Close { link });
        }
        for slot in &mut self.slots {
            (slot.source.import, slot.sink.import) = (None, None);
            if std::mem::take(&mut slot.unsure) {
                // The last write may have arrived in part.
                let content = slot.source.content.clone();
                slot.sink.set(content);
            }
        }
        self.check(usize::MAX);
        let places = self.slots.iter().flat_map(|slot| [&slot.local, &slot.source, &slot.sink]);
        let pools =
            places.chain(&self.given_back).filter(|place| place.memory.shared_file().is_some());
        let descriptors =
            self.others + self.initiator.descriptors() + self.owner.descriptors() + pools.count();
        let wanted = Resources { descriptors, mapped: 0 };
        assert_eq!(Resources::now(), wanted, "a link leaves resources behind");
    }

    /// Checks that the next link supports every operation, and that every region can be revoked
    /// over it.
    pub(super) fn all_works(&mut self) {
        self.owner.set_room(true);
        self.patience = Duration::from_secs(30);
        self.connect();
        self.until("a link", |pair| pair.up().is_some());
        for op in [Op::Read, Op::Write] {
            let before = self.arrived;
            for at in 0..self.slots.len() {
                assert!(self.post(at, op, false), "slot {at} is not free");
            }
            self.until("the next transfers", Pair::is_idle);
            assert_eq!(self.arrived, before + self.slots.len() as u64);
        }
        let before = self.acknowledged;
        self.notify(100);
        self.until("a notification", Pair::is_idle);
        assert_eq!(self.acknowledged, before + 1);
        let before = self.revoked;
        // The replacements move nothing, and pools cost time.
        self.slots.iter_mut().for_each(|slot| slot.shape.on_pools = Some(false));
        for which in RegionRole::ALL {
            (0..self.slots.len()).for_each(|at| self.revoke(at, which));
        }
        self.until("revocations", Pair::is_idle);
        assert_eq!(self.revoked, before + 3 * self.slots.len() as u64);
        self.close();
        self.has_ended();
    }
}
