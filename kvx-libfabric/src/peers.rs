//! Peers: an entry in the address vector of each local rail for each of a peer's rails, shared by
//! all links to it.

use std::collections::HashMap;

use kvx_backend::fabric::EndpointId;
use kvx_core::{ErrorKind, Result};
use rustix::net::SocketAddrUnix;
use slab::Slab;

use crate::address::Address;
use crate::error::{self, NAME};
use crate::ffi;
use crate::neighbours::Neighbour;
use crate::peer_probe::PeerProbe;
use crate::rail::Rail;
use crate::subnets::{self, RailSet};
use crate::wake_socket;

/// A peer, with an endpoint on each of its rails.
pub(crate) struct PeerEndpoints {
    pub(crate) address: Address,
    /// By local rail, then by the peer's rail; filled on first use.
    table: Box<[Box<[Option<ffi::PeerNumber>]>]>,
    /// The peer's rails that each local rail uses.
    pub(crate) pairs: Box<[RailSet]>,
    pub(crate) wake_at: Option<SocketAddrUnix>,
    links: Vec<EndpointId>,
    /// True once the peer has accepted a message.
    pub(crate) answers: bool,
    /// Set while the peer accepts no messages.
    pub(crate) probe: Option<PeerProbe>,
    /// Dropped when no address vector has the peer any more.
    _neighbour: Option<Neighbour>,
    /// The number of messages to the peer that the provider has.
    pub(crate) unsent: usize,
}

struct PeerLink {
    peer: usize,
    /// True if nothing more is posted on the link.
    severed: bool,
}

#[derive(Default)]
pub(crate) struct Peers {
    /// True if a message was sent to a peer that has never answered, and so may still do so.
    pub(crate) unanswered: bool,
    peers: Slab<PeerEndpoints>,
    /// By the address of the rail that receives messages.
    by_address: HashMap<Box<[u8]>, usize>,
    links: HashMap<EndpointId, PeerLink>,
}

impl Peers {
    /// Connects a link to `address` over the local `rails`. Errors: `Malformed`, libfabric's.
    pub(crate) fn connect(
        &mut self,
        link: EndpointId,
        address: Address,
        rails: &[Rail],
    ) -> Result<()> {
        let at = match self.by_address.get(&address.rails[0]) {
            Some(&at) if self.peers[at].address == address => at,
            Some(_) => {
                let why = "malformed LIBFABRIC address: another peer has the same endpoint";
                return Err(ErrorKind::Malformed.because(why).with_backend(NAME));
            }
            None => {
                let wake_at = address
                    .host
                    .as_ref()
                    .map(|host| wake_socket::socket_of(&host.wake_name))
                    .transpose()?;
                let row = || vec![None; address.rails.len()].into_boxed_slice();
                let table = rails.iter().map(|_| row()).collect();
                let pairs = subnets::pairs(rails.iter().map(Rail::subnet), &address.rails);
                let key = address.rails[0].clone();
                let is_ours =
                    address.host.as_ref().is_some_and(|host| host.process == std::process::id());
                let neighbour = if is_ours {
                    Some(Neighbour::find(&key).ok_or_else(error::lost_link)?)
                } else {
                    None
                };
                let at = self.peers.insert(PeerEndpoints {
                    address,
                    table,
                    pairs,
                    wake_at,
                    links: Vec::new(),
                    answers: false,
                    probe: None,
                    _neighbour: neighbour,
                    unsent: 0,
                });
                self.by_address.insert(key, at);
                at
            }
        };
        self.peers[at].links.push(link);
        self.links.insert(link, PeerLink { peer: at, severed: false });
        Ok(())
    }

    /// Returns the peer of a link, if operations may be posted on it.
    #[inline]
    pub(crate) fn of(&self, link: EndpointId) -> Option<usize> {
        self.links.get(&link).filter(|link| !link.severed).map(|link| link.peer)
    }

    pub(crate) fn peer(&mut self, at: usize) -> Option<&mut PeerEndpoints> {
        self.peers.get_mut(at)
    }

    /// Returns the number of the peer's rail `their_rail` in the local rail `our_rail`. Errors:
    /// libfabric's.
    #[inline]
    pub(crate) fn peer_number(
        &mut self,
        at: usize,
        our_rail: usize,
        their_rail: usize,
        rail: &Rail,
    ) -> Result<ffi::PeerNumber> {
        let Some(peer) = self.peers.get_mut(at) else { return Err(error::lost_link()) };
        match peer.table[our_rail][their_rail] {
            Some(address) => Ok(address),
            None => {
                // SAFETY: `Address::check` has compared its form with that of the rail's own
                // address.
                let address = unsafe { rail.endpoint().insert(&peer.address.rails[their_rail]) }
                    .map_err(|errno| {
                        error::native("libfabric could not resolve the peer's address", errno)
                            .with_kind(ErrorKind::PeerLost)
                    })?;
                peer.table[our_rail][their_rail] = Some(address);
                Ok(address)
            }
        }
    }

    /// Marks a link on which nothing more is posted.
    pub(crate) fn sever(&mut self, link: EndpointId) {
        if let Some(link) = self.links.get_mut(&link) {
            link.severed = true;
        }
    }

    /// Severs the links of an unreachable peer. Returns those that were not severed before.
    pub(crate) fn break_off(&mut self, at: usize) -> Vec<EndpointId> {
        // Pieces may fail after all links of their peer were closed.
        let Some(peer) = self.peers.get(at) else { return Vec::new() };
        let mut broken = Vec::new();
        for number in &peer.links {
            if let Some(link) = self.links.get_mut(number)
                && !std::mem::replace(&mut link.severed, true)
            {
                broken.push(*number);
            }
        }
        broken
    }

    /// Removes a link that has ended.
    pub(crate) fn disconnect(&mut self, link: EndpointId, rails: &[Rail]) {
        if let Some(PeerLink { peer: at, .. }) = self.links.remove(&link)
            && let Some(peer) = self.peers.get_mut(at)
        {
            peer.links.retain(|other| *other != link);
            self.remove_unused(at, rails);
        }
    }

    /// Records that a message to a peer has ended.
    pub(crate) fn sent(&mut self, at: usize, rails: &[Rail]) {
        if let Some(peer) = self.peers.get_mut(at) {
            peer.unsent -= 1;
            self.remove_unused(at, rails);
        }
    }

    /// Removes a peer that has no links, unless the provider still has messages to it.
    fn remove_unused(&mut self, at: usize, rails: &[Rail]) {
        if self.peers.get(at).is_some_and(|peer| peer.links.is_empty() && peer.unsent == 0) {
            let peer = self.peers.remove(at);
            self.by_address.remove(&peer.address.rails[0]);
            self.forget(peer, rails);
        }
    }

    /// Removes all peers.
    pub(crate) fn clear(&mut self, rails: &[Rail]) {
        self.by_address.clear();
        self.links.clear();
        for peer in std::mem::take(&mut self.peers) {
            self.forget(peer.1, rails);
        }
    }

    fn forget(&mut self, peer: PeerEndpoints, rails: &[Rail]) {
        self.unanswered |= peer.table[0][0].is_some() && !peer.answers;
        for (rail, row) in rails.iter().zip(&peer.table) {
            for address in row.iter().flatten() {
                rail.endpoint().remove(*address);
            }
        }
    }
}
