//! Requests in progress, and what their end says of the peer.

use std::sync::Arc;

use kvx_backend::fabric::{Event, JobId};
use kvx_core::{Error, ErrorKind};

use super::NixlFabric;
use crate::connection::{self, ConnectionState};
use crate::ffi::{NixlAgent, Request, State, Status};
use crate::peer_loader::Name;

/// The purpose of a request in progress.
#[derive(Clone, Copy)]
pub(super) enum FlightPurpose {
    Job(JobId),
    /// It tries the link out.
    Trial,
    /// It looks whether the peer can be reached.
    Look,
}

/// A request in progress.
pub(super) struct InFlightRequest {
    pub(super) purpose: FlightPurpose,
    pub(super) request: Arc<Request>,
    pub(super) peer: Name,
}

impl NixlFabric {
    /// Finds out whether an error at a peer means that it is lost: `PeerLost`, if NIXL has dropped
    /// the peer over it, or does not reach it any more.
    pub(super) fn attribute_error(&mut self, agent: &NixlAgent, name: &Name, why: Error) -> Error {
        if **name == *self.peers.own_name() {
            return why;
        }
        if !self.peers.is_lost(name) && agent.knows(name) {
            let Some(there) = self.peers.any_memory(name) else { return why };
            match connection::look(agent, name, &there) {
                ConnectionState::Broken => {}
                ConnectionState::Works => return why,
                ConnectionState::Pending(request) => {
                    self.track(FlightPurpose::Look, Arc::new(request), name);
                    return why;
                }
            }
        }
        let mut events = Vec::new();
        // Asked once more: NIXL may have dropped the peer over the look.
        self.peers.lose(name, agent.knows(name), &mut events);
        self.events.extend(events);
        why.with_kind(ErrorKind::PeerLost)
    }

    /// Returns whether pieces may be under way whose post has failed: over what it refuses a plugin
    /// forgets those before it, without an end to them, and so it does over the flush that follows
    /// the last. What NIXL does not know it has not begun. A connection that is broken carries
    /// none: proven over TCP and cross-memory attach, not over cards for RDMA.
    pub(super) fn may_continue(status: Status, why: &Error) -> bool {
        !status.is_not_found() && why.kind() != ErrorKind::PeerLost
    }

    /// A request is in progress, and nobody will say when it has ended: it is never released.
    pub(super) fn give_up(&mut self, request: Arc<Request>) {
        std::mem::forget(request);
        self.gave_up = true;
        self.note_in_progress();
    }

    /// Drops a peer's trials after its last endpoint. NIXL reports nothing more about their
    /// requests, which read and write pages that are never freed.
    pub(super) fn abandon(&mut self, peer: &Name) {
        let gone: Vec<_> = self.flights.extract_if(.., |flight| flight.peer == *peer).collect();
        gone.into_iter().for_each(|flight| self.give_up(flight.request));
        self.trials.restart(peer);
    }

    /// Notes whether the agent can be destroyed.
    pub(super) fn note_in_progress(&self) {
        self.agent_lock.note_in_progress(self.gave_up || !self.flights.is_empty());
    }

    /// A request is in progress.
    pub(super) fn track(&mut self, purpose: FlightPurpose, request: Arc<Request>, peer: &Name) {
        self.peers.note_posted(peer);
        self.flights.push(InFlightRequest { purpose, request, peer: Arc::clone(peer) });
        self.note_in_progress();
    }

    /// Asks after the requests in progress.
    pub(super) fn poll_flights(&mut self, agent: &NixlAgent) {
        let (mut at, mut events) = (0, Vec::new());
        while let Some(InFlightRequest { purpose, request, peer }) = self.flights.get(at) {
            if !self.peers.can_be_asked(peer) {
                at += 1;
                continue;
            }
            // Before 1.5 a refusal looks like the failure by which NIXL notices that a peer has
            // died: so it is asked first.
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
                        && self.peers.note_dropped(peer, &mut events) =>
                {
                    at += 1;
                    continue;
                }
                State::Failed(status) => Err(status.error("a transfer")),
            };
            let (purpose, peer) = (*purpose, Arc::clone(peer));
            self.flights.swap_remove(at);
            let result = result.map_err(|why| self.attribute_error(agent, &peer, why));
            self.peers.note_ended(&peer);
            match purpose {
                FlightPurpose::Job(job) => {
                    self.events.push_back(Event::Completed { job, pieces: 1, result })
                }
                FlightPurpose::Trial => {
                    self.trials.note_ended(&mut self.peers, &peer, result.is_err())
                }
                FlightPurpose::Look => {}
            }
        }
        self.events.extend(events);
    }

    /// Goes on with finding out what peers can do.
    pub(super) fn advance_trials(&mut self, agent: &NixlAgent) {
        for (peer, request) in self.trials.advance(agent, &mut self.peers) {
            self.track(FlightPurpose::Trial, request, &peer);
        }
        self.events.extend(self.trials.take_finished().map(Event::Ready));
    }
}
