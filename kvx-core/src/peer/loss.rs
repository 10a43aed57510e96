//! Handles the loss of a peer: closes its links, fails what waits, and probes who answers at its
//! address.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::candidates::{Imported, LinkStage};
use super::links::{PeerInner, PeerState, Probe};
use super::requests::LinkRequest;
use crate::agent::inner::AgentInner;
use crate::bound::Released;
use crate::deadline::Reason;
use crate::fault_injection::injected;
use crate::identity::{LinkId, RegionId};
use crate::transport::Link;
use crate::{Error, ErrorKind};

/// The time that transfers wait for the answer to a probe. An address at which no process listens
/// usually refuses at once; over RDMA, and on a host that is down, nobody does, and the handshake
/// takes seconds to fail.
const PROBE_PATIENCE: Duration = Duration::from_millis(300);

impl PeerInner {
    /// Marks the peer as lost for good: closes all links and fails what waits.
    pub(super) fn lose(self: &Arc<Self>, error: Error, parked: Vec<LinkRequest>) {
        let error = error.with_peer(Arc::clone(&self.identity.name));
        let (closed, more, waiting) = {
            let mut state = self.state.lock();
            state.lost.get_or_insert_with(|| error.clone());
            let closed = ClosedLinks::all(&mut state, &error);
            (closed, std::mem::take(&mut state.parked), std::mem::take(&mut state.awaiting_loss))
        };
        self.agent.clock.interrupt(&Reason::Lost(self.id, error.clone()));
        closed.finish(&self.agent);
        for promise in waiting.iter().filter_map(Weak::upgrade).filter(|_| !injected("loss-untold"))
        {
            promise.finish(Ok(error.clone()));
        }
        for job in parked.into_iter().chain(more) {
            job.fail(error.clone());
        }
    }

    /// Connects once more after the loss of a peer, to find out who answers at its address. A
    /// restarted peer is a different error from a dead one: the user should connect again rather
    /// than wait. Transfers wait for a short time; a later answer counts for the next ones.
    pub(super) fn probe(self: &Arc<Self>, lost: &Error) {
        let id = self.agent.new_link(self.as_owner());
        let at = {
            let mut state = self.state.lock();
            if state.probe.is_some() {
                return self.agent.forget_link(id); // another post has already started one
            }
            let backend = lost.backend();
            let awaited_until = Instant::now() + PROBE_PATIENCE;
            state.probe = Some(Probe { id, link: None, awaited_until });
            state
                .candidates
                .iter()
                .position(|candidate| Some(candidate.backend) == backend)
                .unwrap_or(0)
        };
        match self.start_link(at, id) {
            Err(_) => self.probed(id, false),
            Ok(link) => {
                let mut state = self.state.lock();
                match &mut state.probe {
                    Some(probe) if probe.id == id => probe.link = Some(link),
                    _ => {
                        drop(state);
                        link.close(); // the answer arrived before the link was returned
                    }
                }
            }
        }
    }

    pub(super) fn probed(self: &Arc<Self>, id: LinkId, restarted: bool) {
        let (probe, parked, error) = {
            let mut state = self.state.lock();
            if state.probe.as_ref().is_none_or(|probe| probe.id != id) {
                return;
            }
            if restarted {
                state.lost = Some(self.restarted());
            }
            let error = state.lost.clone();
            (state.probe.take(), std::mem::take(&mut state.parked), error)
        };
        if let Some(probe) = probe {
            self.agent.forget_link(id);
            if let Some(link) = probe.link {
                link.close();
            }
        }
        for job in parked {
            match &error {
                Some(error) => job.fail(error.clone()),
                None => self.dispatch(job),
            }
        }
    }

    pub(super) fn restarted(&self) -> Error {
        let was = self.identity.incarnation;
        let why = format!(
            "the peer restarted: its address no longer answers as incarnation {was}; get its new \
             metadata and connect again"
        );
        ErrorKind::PeerRestarted.because(why).with_peer(Arc::clone(&self.identity.name))
    }
}

/// Links that were closed under a peer's lock, to be released without it.
#[derive(Default)]
struct ClosedLinks {
    links: Vec<(LinkId, Arc<dyn Link>)>,
    _imports: Vec<HashMap<RegionId, Imported>>,
    _bindings: Vec<Released>,
}

impl ClosedLinks {
    fn all(state: &mut PeerState, error: &Error) -> Self {
        let mut closed = ClosedLinks::default();
        if let Some(Probe { id, link: Some(link), .. }) = state.probe.take() {
            closed.links.push((id, link));
        }
        for candidate in &mut state.candidates {
            match std::mem::replace(&mut candidate.stage, LinkStage::Refused(error.clone())) {
                LinkStage::Up { id, link } | LinkStage::Opening { id, link: Some(link), .. } => {
                    closed._bindings.extend(candidate.bindings.release(id));
                    closed._imports.push(std::mem::take(&mut candidate.imports));
                    closed.links.push((id, link));
                }
                kept @ LinkStage::Refused(_) => candidate.stage = kept,
                LinkStage::Untried | LinkStage::Opening { link: None, .. } => {}
            }
        }
        closed
    }

    fn finish(self, agent: &AgentInner) {
        for (id, link) in &self.links {
            agent.forget_link(*id);
            link.close();
        }
    }
}

impl Drop for PeerInner {
    fn drop(&mut self) {
        if crate::fork::check().is_err() {
            // Links belong to threads that a forked child does not have, and those threads may hold
            // the locks that a drop takes.
            let PeerState { candidates, parked, probe, .. } = self.state.get_mut();
            return std::mem::forget((
                std::mem::take(candidates),
                std::mem::take(parked),
                probe.take(),
            ));
        }
        let closed = ErrorKind::Closed.because("the peer's handle was dropped");
        let (links, parked, waiting) = {
            let mut state = self.state.lock();
            let links = ClosedLinks::all(&mut state, &closed);
            (links, std::mem::take(&mut state.parked), std::mem::take(&mut state.awaiting_loss))
        };
        links.finish(&self.agent);
        for promise in waiting.iter().filter_map(Weak::upgrade) {
            promise.finish(Err(closed.clone()));
        }
        for job in parked {
            job.fail(closed.clone());
        }
    }
}
