//! Peers: one UCX endpoint for each worker of a peer, shared by all links to it.
//!
//! UCX pairs the endpoints of two workers by the order in which they were created. With an endpoint
//! for each link, one side's endpoint of one link could be paired with the other side's endpoint of
//! another, and closing one link would break the other. So all links to a peer's worker share one
//! endpoint. It stays open when the last link closes, because the peer may be opening its next
//! link, and is closed when either side fails or ends. A worker that ends sends a message of no
//! bytes: UCX checks only whether a peer's process is alive, so an endpoint to a worker that has
//! ended would otherwise stay open as long as that process.
//!
//! A side that has replaced its endpoint may send over the new one before the other side has
//! detected the end of the old one. The other side must not use the old one for answers then. So
//! each message names the endpoint that sent it and, if known, the receiver's endpoint that it
//! answers: see [`Peers::note_message`].

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::ptr::NonNull;
use std::rc::Rc;

use kvx_backend::error::link_lost;
use kvx_backend::fabric::EndpointId;
use kvx_core::{Error, ErrorKind, Op, Result};
use slab::Slab;

use crate::address::Address;
use crate::callbacks::{
    CallbackEvent, CallbackNotes, EndpointHandle, MessageHeader, OneShotOperation, endpoint_failed,
};
use crate::error::{self, NAME};
use crate::ffi::{Endpoint, PostOutcome, Status, Version, Worker, pad};

/// A worker of a peer.
pub(crate) struct PeerWorker {
    worker: u64,
    pub(crate) version: Version,
    /// The header of messages to the worker: the number of the local endpoint, and of the peer's
    /// own once it is known.
    pub(crate) header: MessageHeader,
    /// `None` if the endpoint is closed and only the notification of its links is outstanding.
    endpoint: Option<Endpoint>,
    links: Vec<EndpointId>,
    /// The number of messages that UCX has not sent yet.
    pub(crate) unsent: Rc<Cell<usize>>,
    /// The number of pieces in flight to the peer.
    pub(crate) pieces: Rc<Cell<usize>>,
    /// The kinds of operations posted so far. UCX chooses the protocol of a kind at the first one.
    moved: Vec<Op>,
}

impl PeerWorker {
    /// Returns whether any operation has been posted to the peer.
    pub(crate) fn has_moved(&self) -> bool {
        !self.moved.is_empty()
    }

    /// Returns whether an operation of this kind has been posted to the peer.
    #[inline]
    pub(crate) fn has_moved_by(&self, op: Op) -> bool {
        self.moved.contains(&op)
    }
}

/// The maximum number of unconnected workers whose messages are remembered.
const MAX_UNCONNECTED: usize = 1024;

pub(crate) struct Peers {
    /// The number of the local worker.
    own_worker: u64,
    /// The number of endpoints created so far.
    made: u64,
    peers: Slab<PeerWorker>,
    /// By the worker's number.
    by_worker: HashMap<u64, usize>,
    /// For workers to which no local endpoint leads yet, by their numbers: the endpoint over which
    /// the worker's last message came.
    unconnected: HashMap<u64, u64>,
    by_handle: HashMap<EndpointHandle, usize>,
    by_link: BTreeMap<EndpointId, usize>,
    /// Links to peers whose first read or write was posted since they were described.
    changed: Vec<EndpointId>,
}

impl Peers {
    pub(crate) fn new(own_worker: u64) -> Self {
        Peers {
            own_worker,
            made: 0,
            peers: Slab::new(),
            by_worker: HashMap::new(),
            unconnected: HashMap::new(),
            by_handle: HashMap::new(),
            by_link: BTreeMap::new(),
            changed: Vec::new(),
        }
    }

    /// Records a message's header. Returns the peer whose endpoint has become unusable, because the
    /// peer closed its own and created another.
    pub(crate) fn note_message(&mut self, from: MessageHeader) -> Option<usize> {
        let Some(&at) = self.by_worker.get(&from.worker) else {
            // A message that answers a local endpoint answers one that is closed.
            if from.answers == 0 {
                if self.unconnected.len() >= MAX_UNCONNECTED {
                    self.unconnected.clear();
                }
                let last = self.unconnected.entry(from.worker).or_default();
                *last = from.endpoint.max(*last);
            }
            return None;
        };
        let ours = &mut self.peers[at].header;
        if from.answers == ours.endpoint || from.answers == 0 && ours.answers == 0 {
            ours.answers = from.endpoint.max(ours.answers);
        } else if from.answers == 0 && from.endpoint > ours.answers {
            self.unconnected.insert(from.worker, from.endpoint);
            return Some(at);
        }
        None
    }

    /// Records that a worker has ended. Returns its peer, whose endpoint has become unusable.
    pub(crate) fn note_farewell(&mut self, from: MessageHeader) -> Option<usize> {
        self.unconnected.remove(&from.worker);
        self.by_worker.get(&from.worker).copied()
    }

    /// Connects a link to `address`. Errors: `PeerLost`, also if no transport reaches it: UCX does
    /// not distinguish the two.
    ///
    /// # Safety
    /// No other thread uses the worker, `close_all` is called before the worker is dropped, and
    /// `notes` outlives the worker.
    pub(crate) unsafe fn connect(
        &mut self,
        link: EndpointId,
        address: Address,
        worker: &Worker,
        notes: &Rc<CallbackNotes>,
    ) -> Result<()> {
        let number = address.number();
        if let Some(&at) = self.by_worker.get(&number) {
            self.peers[at].links.push(link);
            self.by_link.insert(link, at);
            return Ok(());
        }
        let target = NonNull::from(&**notes).as_ptr().cast();
        // SAFETY: guaranteed by the caller.
        let endpoint = unsafe { worker.connect(&pad(&address.worker), endpoint_failed, target) }
            .map_err(unreachable)?;
        let handle = EndpointHandle(endpoint.raw() as usize);
        self.made += 1;
        let at = self.peers.insert(PeerWorker {
            worker: number,
            version: address.version,
            header: MessageHeader {
                worker: self.own_worker,
                endpoint: self.made,
                answers: self.unconnected.remove(&number).unwrap_or(0),
            },
            endpoint: Some(endpoint),
            links: vec![link],
            unsent: Rc::default(),
            pieces: Rc::default(),
            moved: Vec::new(),
        });
        self.by_worker.insert(number, at);
        self.by_handle.insert(handle, at);
        self.by_link.insert(link, at);
        Ok(())
    }

    /// Returns the open endpoint of a link, and its peer.
    #[inline]
    pub(crate) fn of(&self, link: EndpointId) -> Option<(&Endpoint, &PeerWorker)> {
        let peer = self.peers.get(*self.by_link.get(&link)?)?;
        peer.endpoint.as_ref().map(|endpoint| (endpoint, peer))
    }

    /// Records that a link has posted its first operation of this kind.
    pub(crate) fn note_moved(&mut self, link: EndpointId, op: Op) {
        if let Some(&at) = self.by_link.get(&link) {
            let peer = &mut self.peers[at];
            peer.moved.push(op);
            self.changed.extend(&peer.links);
        }
    }

    /// Takes the links whose description has changed.
    pub(crate) fn take_changed(&mut self) -> impl Iterator<Item = EndpointId> + use<> {
        std::mem::take(&mut self.changed).into_iter()
    }

    /// Returns the open endpoints and their peers.
    pub(crate) fn endpoints(&self) -> impl Iterator<Item = (&Endpoint, &PeerWorker)> {
        self.peers.iter().filter_map(|(_, peer)| Some((peer.endpoint.as_ref()?, peer)))
    }

    /// Returns the peer of an endpoint.
    pub(crate) fn of_handle(&self, handle: EndpointHandle) -> Option<usize> {
        self.by_handle.get(&handle).copied()
    }

    /// Returns the peer of a link.
    pub(crate) fn of_link(&self, link: EndpointId) -> Option<usize> {
        self.by_link.get(&link).copied()
    }

    /// Closes a peer's endpoint immediately; its operations in flight end. Returns the links that
    /// used it.
    ///
    /// # Safety
    /// No other thread uses the worker, which is alive.
    pub(crate) unsafe fn close(&mut self, at: usize, notes: &Rc<CallbackNotes>) -> Vec<EndpointId> {
        // In the same turn, UCX may report the failure of an endpoint that is already closed and
        // whose peer is removed.
        let peer = self.peers.get_mut(at);
        let Some((peer, endpoint)) =
            peer.and_then(|peer| peer.endpoint.take().map(|it| (peer, it)))
        else {
            return Vec::new();
        };
        let links = peer.links.clone();
        let handle = EndpointHandle(endpoint.raw() as usize);
        self.by_worker.remove(&peer.worker);
        self.by_handle.remove(&handle);
        let ended = OneShotOperation::start(CallbackEvent::Ended, notes);
        // SAFETY: guaranteed by the caller. Dropping a key does not access an endpoint in 1.13 or
        // 1.22, so the keys of operations that are still ending may be dropped later.
        match unsafe { endpoint.close(ended) } {
            PostOutcome::Pending => {}
            // SAFETY: no callback follows.
            PostOutcome::Done | PostOutcome::Failed(_) => unsafe {
                OneShotOperation::take_back(ended)
            },
        }
        notes.forget_failure(handle); // UCX may reuse the handle
        self.remove_unused(at);
        links
    }

    /// Removes a link that has ended.
    pub(crate) fn disconnect(&mut self, link: EndpointId) {
        if let Some(at) = self.by_link.remove(&link)
            && let Some(peer) = self.peers.get_mut(at)
        {
            peer.links.retain(|other| *other != link);
            self.remove_unused(at);
        }
    }

    fn remove_unused(&mut self, at: usize) {
        if self.peers.get(at).is_some_and(|peer| peer.endpoint.is_none() && peer.links.is_empty()) {
            self.peers.remove(at);
        }
    }

    /// Closes every endpoint.
    ///
    /// # Safety
    /// As for [`close`](Peers::close).
    pub(crate) unsafe fn close_all(&mut self, notes: &Rc<CallbackNotes>) {
        let all: Vec<usize> = self.peers.iter().map(|(at, _)| at).collect();
        for at in all {
            // SAFETY: guaranteed by the caller.
            unsafe { self.close(at, notes) };
        }
    }
}

fn unreachable(status: Status) -> Error {
    // UCX does not distinguish a peer that has ended from one with which it shares no transport.
    error::native(
        "UCX does not reach this peer: it has ended, or the two have no transport in common",
        status,
    )
    .with_kind(ErrorKind::PeerLost)
}

/// Returns the error of operations on a link whose endpoint is closed.
pub(crate) fn lost_link() -> Error {
    link_lost().with_backend(NAME)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a side with an endpoint of number `endpoint` to worker 7 that knows the peer's
    /// `answers`.
    fn side(endpoint: u64, answers: u64) -> Peers {
        let mut peers = Peers::new(1);
        let peer = PeerWorker {
            worker: 7,
            version: Version::new(1, 13, 0),
            header: MessageHeader { worker: 1, endpoint, answers },
            endpoint: None,
            links: Vec::new(),
            unsent: Rc::default(),
            pieces: Rc::default(),
            moved: Vec::new(),
        };
        let at = peers.peers.insert(peer);
        peers.by_worker.insert(7, at);
        peers
    }

    fn heard(mut peers: Peers, endpoint: u64, answers: u64) -> (bool, u64) {
        let broken = peers.note_message(MessageHeader { worker: 7, endpoint, answers }).is_some();
        (broken, peers.peers[0].header.answers)
    }

    #[test]
    fn ends_of_a_connection_find_each_other() {
        assert_eq!(heard(side(3, 0), 5, 0), (false, 5), "both have created one");
        assert_eq!(heard(side(3, 0), 5, 3), (false, 5), "the answer to ours");
        assert_eq!(heard(side(3, 5), 5, 0), (false, 5), "sent before the peer knew of ours");
        assert_eq!(
            heard(side(3, 4), 5, 3),
            (false, 5),
            "it replaced one that was stale because of the local one"
        );
    }

    #[test]
    fn messages_from_a_closed_endpoint_are_ignored() {
        assert_eq!(heard(side(3, 0), 5, 2), (false, 0), "it answers one of ours that is closed");
        assert_eq!(heard(side(3, 6), 5, 2), (false, 6));
        assert_eq!(heard(side(3, 6), 5, 0), (false, 6));
    }

    #[test]
    fn a_new_endpoint_of_a_peer_that_answers_none_replaces_its_old_one() {
        assert_eq!(heard(side(3, 5), 6, 0), (true, 5));
        let mut peers = side(3, 5);
        peers.note_message(MessageHeader { worker: 7, endpoint: 6, answers: 0 });
        assert_eq!(peers.unconnected.get(&7), Some(&6), "the next endpoint to it answers that one");
    }

    #[test]
    fn a_worker_that_ends_is_removed_from_the_unconnected_ones() {
        let mut peers = side(3, 5);
        let farewell = |worker| MessageHeader { worker, endpoint: 6, answers: 3 };
        peers.note_message(MessageHeader { worker: 8, endpoint: 1, answers: 0 });
        assert_eq!(
            (peers.note_farewell(farewell(7)), peers.note_farewell(farewell(8))),
            (Some(0), None)
        );
        assert!(peers.unconnected.is_empty());
    }

    #[test]
    fn unconnected_workers_are_bounded_and_none_answers_a_closed_endpoint() {
        let mut peers = Peers::new(1);
        assert_eq!(peers.note_message(MessageHeader { worker: 7, endpoint: 6, answers: 2 }), None);
        assert!(peers.unconnected.is_empty());
        for worker in 0..3 * MAX_UNCONNECTED as u64 {
            peers.note_message(MessageHeader { worker, endpoint: 6, answers: 0 });
        }
        assert!(!peers.unconnected.is_empty() && peers.unconnected.len() <= MAX_UNCONNECTED);
    }
}
