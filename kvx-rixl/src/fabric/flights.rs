//! Requests in progress, and what their end tells about the peer.

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
    /// A request of a link's trial.
    Trial,
    /// A check whether the peer is reachable.
    Look,
}

/// A request in progress.
pub(super) struct InFlightRequest {
    pub(super) purpose: FlightPurpose,
    pub(super) request: Arc<Request>,
    pub(super) peer: Name,
}

impl NixlFabric {
    /// Finds out whether an error at a peer means that it is lost: `PeerLost` if NIXL has dropped
    /// the peer because of it, or can no longer reach it.
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
        // Check again: NIXL may have dropped the peer during the check.
        self.peers.lose(name, agent.knows(name), &mut events);
        self.events.extend(events);
        why.with_kind(ErrorKind::PeerLost)
    }

    /// Returns whether pieces of a failed post may be in progress. If the plugin rejects a piece,
    /// or the flush after the last one, it forgets the pieces before without ending them. NIXL
    /// starts nothing for a peer that it does not know. A broken connection carries no pieces:
    /// proven over TCP and cross-memory attach, but not over RDMA cards.
    pub(super) fn may_continue(status: Status, why: &Error) -> bool {
        !status.is_not_found() && why.kind() != ErrorKind::PeerLost
    }

    /// Keeps a request in progress whose end nobody will report: it is never released.
    pub(super) fn give_up(&mut self, request: Arc<Request>) {
        std::mem::forget(request);
        self.gave_up = true;
        self.note_in_progress();
    }

    /// Drops a peer's trials after its last endpoint. NIXL reports nothing more about their
    /// requests, which access pages that are never freed.
    pub(super) fn abandon(&mut self, peer: &Name) {
        let gone: Vec<_> = self.flights.extract_if(.., |flight| flight.peer == *peer).collect();
        gone.into_iter().for_each(|flight| self.give_up(flight.request));
        self.trials.restart(peer);
    }

    /// Records whether the agent can be destroyed.
    pub(super) fn note_in_progress(&self) {
        self.agent_lock.note_in_progress(self.gave_up || !self.flights.is_empty());
    }

    /// Records a request in progress.
    pub(super) fn track(&mut self, purpose: FlightPurpose, request: Arc<Request>, peer: &Name) {
        self.peers.note_posted(peer);
        self.flights.push(InFlightRequest { purpose, request, peer: Arc::clone(peer) });
        self.note_in_progress();
    }

    /// Queries the requests in progress.
    pub(super) fn poll_flights(&mut self, agent: &NixlAgent) {
        let (mut at, mut events) = (0, Vec::new());
        while let Some(InFlightRequest { purpose, request, peer }) = self.flights.get(at) {
            if !self.peers.can_be_asked(peer) {
                at += 1;
                continue;
            }
            // Before 1.5, this answer looks like the failure by which NIXL detects that a peer has
            // died, so check first whether it knows the peer.
            let known = agent.names_refusals() || agent.knows(peer);
            let result = match agent.state(request) {
                State::InProgress => {
                    at += 1;
                    continue;
                }
                State::Done => Ok(()),
                // NIXL no longer knows the peer, so the request was not queried.
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

    /// Continues the trials of peers.
    pub(super) fn advance_trials(&mut self, agent: &NixlAgent) {
        for (peer, request) in self.trials.advance(agent, &mut self.peers) {
            self.track(FlightPurpose::Trial, request, &peer);
        }
        self.events.extend(self.trials.take_finished().map(Event::Ready));
    }
}
