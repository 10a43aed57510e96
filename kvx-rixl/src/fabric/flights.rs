//! Requests in progress, and what their end says of the peer.

use std::sync::Arc;

use kvx_backend::fabric::{Event, JobId};
use kvx_core::{Error, ErrorKind};

use super::NixlFabric;
use crate::connection::{self, Connection};
use crate::ffi::{NixlAgent, Request, State, Status};
use crate::loads::Name;

/// The purpose of a request in progress.
#[derive(Clone, Copy)]
pub(super) enum Purpose {
    Job(JobId),
    /// It tries the link out.
    Trial,
    /// It looks whether the peer can be reached.
    Look,
}

/// A request in progress.
pub(super) struct Flight {
    pub(super) purpose: Purpose,
    pub(super) request: Arc<Request>,
    pub(super) peer: Name,
}

impl NixlFabric {
    /// Finds out whether an error at a peer means that it is lost: `PeerLost`, if NIXL has dropped the peer over it, or
    /// does not reach it any more.
    pub(super) fn blame(&mut self, agent: &NixlAgent, name: &Name, why: Error) -> Error {
        if **name == *self.peers.me() {
            return why;
        }
        if !self.peers.is_lost(name) && agent.knows(name) {
            let Some(there) = self.peers.somewhere(name) else { return why };
            match connection::look(agent, name, &there) {
                Connection::Broken => {}
                Connection::Works => return why,
                Connection::Flies(request) => {
                    self.fly(Purpose::Look, Arc::new(request), name);
                    return why;
                }
            }
        }
        let mut events = Vec::new();
        // Asked once more: NIXL may have dropped the peer over the look.
        self.peers.lose(name, agent.knows(name), &mut events);
        self.news.extend(events);
        why.with_kind(ErrorKind::PeerLost)
    }

    /// Whether pieces may be under way whose post has failed: over what it refuses a plugin forgets those before it,
    /// without an end to them, and so it does over the flush that follows the last. What NIXL does not know it has not
    /// begun. A connection that is broken carries none: proven over TCP and cross-memory attach, not over cards for
    /// RDMA.
    pub(super) fn flies_on(status: Status, why: &Error) -> bool {
        !status.is_not_found() && why.kind() != ErrorKind::PeerLost
    }

    /// A request is in progress, and nobody will say when it has ended: it is never released.
    pub(super) fn give_up(&mut self, request: Arc<Request>) {
        std::mem::forget(request);
        self.gave_up = true;
        self.note_in_progress();
    }

    /// A peer's last endpoint has gone. NIXL answers nothing more of what is in progress to try the link out or to look
    /// after it, which reads and writes pages that are never freed.
    pub(super) fn abandon(&mut self, peer: &Name) {
        let gone: Vec<_> = self.flights.extract_if(.., |flight| flight.peer == *peer).collect();
        gone.into_iter().for_each(|flight| self.give_up(flight.request));
        self.trials.begin_anew(peer);
    }

    /// Notes whether the agent can be destroyed.
    pub(super) fn note_in_progress(&self) {
        self.agent_lock.note_in_progress(self.gave_up || !self.flights.is_empty());
    }

    /// A request is in progress.
    pub(super) fn fly(&mut self, purpose: Purpose, request: Arc<Request>, peer: &Name) {
        self.peers.flies(peer);
        self.flights.push(Flight { purpose, request, peer: Arc::clone(peer) });
        self.note_in_progress();
    }

    /// Asks after the requests in progress.
    pub(super) fn look_at_flights(&mut self, agent: &NixlAgent) {
        let (mut at, mut events) = (0, Vec::new());
        while let Some(Flight { purpose, request, peer }) = self.flights.get(at) {
            if !self.peers.can_be_asked(peer) {
                at += 1;
                continue;
            }
            // Before 1.5 a refusal looks like the failure by which NIXL notices that a peer has died: so it is asked
            // first.
            let known = agent.names_refusals() || agent.knows(peer);
            let result = match agent.state(request) {
                State::InProgress => {
                    at += 1;
                    continue;
                }
                State::Done => Ok(()),
                // It was not asked after: NIXL does not know the peer any more.
                State::Failed(status)
                    if (!known || status.is_not_found())
                        && self.peers.dropped(peer, &mut events) =>
                {
                    at += 1;
                    continue;
                }
                State::Failed(status) => Err(status.error("a transfer")),
            };
            let (purpose, peer) = (*purpose, Arc::clone(peer));
            self.flights.swap_remove(at);
            let result = result.map_err(|why| self.blame(agent, &peer, why));
            self.peers.landed(&peer);
            match purpose {
                Purpose::Job(job) => {
                    self.news.push_back(Event::Completed { job, pieces: 1, result })
                }
                Purpose::Trial => self.trials.landed(&mut self.peers, &peer, result.is_err()),
                Purpose::Look => {}
            }
        }
        self.news.extend(events);
    }

    /// Goes on with finding out what peers can do.
    pub(super) fn try_out(&mut self, agent: &NixlAgent) {
        for (peer, request) in self.trials.go_on(agent, &mut self.peers) {
            self.fly(Purpose::Trial, request, &peer);
        }
        self.news.extend(self.trials.take_over().map(Event::Ready));
    }
}
