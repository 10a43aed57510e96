//! The regions that a peer may use: requests, grants and recalls.

use std::collections::HashSet;
use std::sync::Arc;

use crate::reactor::Outbox;
use kvx_core::backend::{RemoteSpec, Ticket};
use kvx_core::{RegionId, Result};

use super::library::{EndpointId, Fabric, Unregister};
use super::machine::Machine;
use super::regions::RegionRecord;
use super::shared_link::{Import, RemoteMemory, SharedLink};
use crate::control::ControlMessage;
use crate::control::errors::{malformed, revoked};

impl<F: Fabric> Machine<F> {
    pub(super) fn import(
        &mut self,
        link: &Arc<SharedLink>,
        import: &Arc<Import>,
        out: &mut Outbox,
    ) {
        // Expected: the link was lost or closed, or is not up yet; a transfer that uses the region
        // fails.
        let Some(&number) = self.links.get(&link.id) else { return };
        let Some(session) = self.sessions.get_mut(&number).filter(|session| session.is_up()) else {
            return;
        };
        match &import.what {
            RemoteMemory::Foreign(range) => {
                let made = self.fabric.unpack_foreign(EndpointId(number), range);
                let made = made.map(|remote| (Arc::new(remote), RegionId(u64::MAX)));
                session
                    .imports
                    .settle(import.number, made.map_err(|why| why.with_backend(self.name)));
            }
            RemoteMemory::Region { id, key, .. } => {
                session.imports.want(import.number, Arc::clone(import));
                let want = ControlMessage::Want { import: import.number, id: *id, key: *key };
                self.send(number, &want, out);
                self.after_work(number, out);
            }
        }
    }

    /// Takes the owner's answer to a request. Returns `Malformed` if nothing was requested.
    pub(super) fn take_grant(
        &mut self,
        number: u64,
        import: u64,
        answer: Result<()>,
        out: &mut Outbox,
    ) -> Result<()> {
        let name = self.name;
        let Some(session) = self.sessions.get_mut(&number) else {
            debug_assert!(false, "an answer arrived for session {number}, which has ended");
            return Ok(());
        };
        let wanted = session.imports.take_answer(import)?;
        let made = answer.and_then(|()| match &wanted.what {
            RemoteMemory::Region { id, key, len, kind, export } => {
                let spec = RemoteSpec { id: *id, key: *key, len: *len, kind: *kind, export };
                let remote = self.fabric.unpack(EndpointId(number), &spec)?;
                Ok((Arc::new(remote), *id))
            }
            RemoteMemory::Foreign(_) => Err(malformed("a grant for foreign memory")),
        });
        session.imports.settle(import, made.map_err(|why| why.with_backend(name)));
        for transfer in std::mem::take(&mut session.waiting) {
            self.post(number, transfer, None, out);
        }
        self.after_work(number, out);
        Ok(())
    }

    /// Revokes a local region: asks every peer that was granted it to release it.
    pub(super) fn revoke(
        &mut self,
        region: Arc<RegionRecord<F::Local>>,
        done: Ticket,
        out: &mut Outbox,
    ) {
        let id = region.id;
        let mut waiting: HashSet<u64> = HashSet::new();
        for (number, session) in &self.sessions {
            if session.granted.holds(id) {
                waiting.insert(*number);
            }
        }
        let asked: Vec<u64> = waiting.iter().copied().collect();
        waiting.extend(
            self.lost_peers
                .iter()
                .filter(|(_, lost)| lost.granted.holds(id))
                .map(|(number, _)| *number),
        );
        self.recalls.begin(id, waiting, (region, done));
        for number in asked {
            self.send(number, &ControlMessage::Recall { id }, out);
        }
        self.check_lost_peers(out);
        self.finish_recalls(out);
    }

    /// Records that the peer of a session has released one region, or all of them.
    pub(super) fn confirm(&mut self, number: u64, id: Option<RegionId>, out: &mut Outbox) {
        self.recalls.release(&number, id);
        self.finish_recalls(out);
    }

    pub(super) fn finish_recalls(&mut self, out: &mut Outbox) {
        for (region, done) in self.recalls.take_done(|_| false) {
            // The last lane unregisters the region for all lanes.
            if region.release() {
                self.released.push((region, done));
            } else {
                out.settle(done, Ok(()));
            }
        }
        self.unregister(out);
    }

    /// Has the library end remote access to regions that every peer has released. Returns the
    /// number of regions for which it did so.
    pub(super) fn unregister(&mut self, out: &mut Outbox) -> usize {
        let released = std::mem::take(&mut self.released);
        let count = released.len();
        for (region, done) in released {
            let result = match self.fabric.unregister(&region.local) {
                Ok(Unregister::Later) => {
                    self.released.push((region, done));
                    continue;
                }
                Ok(Unregister::Now) => {
                    region.free();
                    Ok(())
                }
                Err(why) => {
                    region.quarantine();
                    Err(why.with_backend(self.name))
                }
            };
            out.settle(done, result);
        }
        count - self.released.len()
    }

    /// Takes the owner's recall of a region that this end was granted.
    pub(super) fn take_recall(&mut self, number: u64, id: RegionId, out: &mut Outbox) {
        let why = revoked(id).with_backend(self.name);
        let Some(session) = self.sessions.get_mut(&number) else {
            debug_assert!(false, "a recall arrived for session {number}, which has ended");
            return;
        };
        session.imports.recall(|(_, held)| *held == id, &why);
        session.recalled.insert(id);
        self.fail_jobs(|running| running.session == number && running.uses(id), &why, out);
        self.release_recalled(number, out);
    }

    /// Confirms the release of recalled regions that no transfer uses any more.
    pub(super) fn release_recalled(&mut self, number: u64, out: &mut Outbox) {
        // Expected: the session ended together with the last transfer that used the region.
        let Some(session) = self.sessions.get_mut(&number) else { return };
        if session.recalled.is_empty() {
            return;
        }
        let jobs = &self.jobs;
        let used = |id: RegionId| jobs.iter().any(|(_, job)| job.session == number && job.uses(id));
        let released: Vec<RegionId> = session.recalled.extract_if(|id| !used(*id)).collect();
        for id in released {
            self.send(number, &ControlMessage::Released { id }, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;
    use std::time::Duration;

    use super::super::hostile::{Quiet, machine};
    use super::*;
    use crate::reactor::{Armed, Progress as _, Queued};
    use kvx_core::backend::{RegionKey, RegionSpec};
    use kvx_core::{Completion, ErrorKind, Memory};

    /// Returns a machine with a region that the library does not unregister yet, the region's
    /// memory, and the completion of the recall.
    fn busy() -> (Machine<Quiet>, Weak<Memory>, Completion<()>) {
        let mut machine = machine();
        let memory = Arc::new(Memory::owned(vec![0; 64]));
        let kept = Arc::downgrade(&memory);
        let region = RegionSpec { id: RegionId(2), key: RegionKey([2; 16]), memory };
        let (end, done) = Completion::with_ticket();
        machine.fabric.busy = true;
        let mut out = Outbox::default();
        machine.revoke(Arc::new(RegionRecord::new(region, (), 1)), done, &mut out);
        assert_eq!(machine.progress(&Queued::default(), &mut out).done, 0, "nothing is done");
        assert!(matches!(machine.arm(), Ok(Armed::Sleep(None))), "it sleeps until it is woken");
        assert_eq!(kept.strong_count(), 1);
        (machine, kept, end)
    }

    /// Returns how many references to the region's memory are left, and the result of the recall.
    fn after(
        machine: &Machine<Quiet>,
        mut out: Outbox,
        kept: &Weak<Memory>,
        end: Completion<()>,
    ) -> (usize, Result<(), ErrorKind>) {
        out.deliver(&*machine.events);
        (kept.strong_count(), end.wait_blocking(Duration::ZERO).map_err(|why| why.kind()))
    }

    #[test]
    fn a_region_is_released_in_the_turn_in_which_the_library_unregisters_it() {
        let (mut machine, kept, end) = busy();
        machine.fabric.busy = false;
        let mut out = Outbox::default();
        assert_eq!(machine.progress(&Queued::default(), &mut out).done, 1);
        assert_eq!(after(&machine, out, &kept, end), (0, Ok(())));
        assert_eq!(machine.progress(&Queued::default(), &mut Outbox::default()).done, 0);
    }

    #[test]
    fn a_library_that_unregisters_during_shutdown_releases_the_region() {
        let (mut machine, kept, end) = busy();
        (machine.fabric.busy, machine.fabric.kept) = (false, true);
        let mut out = Outbox::default();
        machine.stop(&mut out);
        assert_eq!(after(&machine, out, &kept, end), (0, Ok(())));
    }

    #[test]
    fn a_region_that_is_never_unregistered_ends_with_the_library_or_stays_quarantined() {
        for (kept_by_it, left) in [(false, (0, Ok(()))), (true, (1, Err(ErrorKind::StillShared)))] {
            let (mut machine, kept, end) = busy();
            machine.fabric.kept = kept_by_it;
            let mut out = Outbox::default();
            machine.stop(&mut out);
            assert_eq!(after(&machine, out, &kept, end), left);
        }
    }
}
