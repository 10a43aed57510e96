//! Accounting for the memory that this end holds for peers: unfinished requests, descriptions,
//! unread answers, and notifications that do not fit into the agent's queue.

use std::collections::HashMap;
use std::hash::Hash;

use kvx_core::{Error, ErrorKind, Result};

/// The limit in bytes for one peer, over all its connections.
const ONE_PEER: usize = 64 << 20;
/// The limit in bytes for all peers together.
const ALL_PEERS: usize = 256 << 20;
/// The granularity in bytes: smaller amounts on one connection, and smaller changes, are not
/// counted.
const STEP: usize = 64 << 10;
/// The bytes counted for an entry in a queue, in addition to its content.
pub const ENTRY_OVERHEAD: usize = 64;

/// The bytes held for each peer. `P` identifies a peer.
#[derive(Debug)]
pub struct HeldBytes<P> {
    by_peer: HashMap<P, usize>,
    all: usize,
    one_peer: usize,
    all_peers: usize,
}

impl<P> Default for HeldBytes<P> {
    fn default() -> Self {
        HeldBytes::of(ONE_PEER, ALL_PEERS)
    }
}

impl<P> HeldBytes<P> {
    /// Creates a budget with other limits, for tests.
    pub fn of(one_peer: usize, all_peers: usize) -> Self {
        HeldBytes { by_peer: HashMap::new(), all: 0, one_peer, all_peers }
    }

    /// Returns the part of `bytes` that [`note`](HeldBytes::note) counts.
    pub fn rounded_to_step(bytes: usize) -> usize {
        bytes / STEP * STEP
    }

    /// Returns true if no bytes are held.
    pub fn is_empty(&self) -> bool {
        self.all == 0 && self.by_peer.is_empty()
    }

    /// Returns the error that ends a connection.
    pub fn too_much(&self) -> Error {
        let why = format!(
            "the peer has more than {} bytes of unfinished requests, unread answers and waiting \
             notifications, or holds most of the {} that are kept for all peers",
            self.one_peer, self.all_peers
        );
        ErrorKind::Exhausted.because(why)
    }
}

impl<P: Hash + Eq + Clone> HeldBytes<P> {
    /// Records that a connection of `who` now holds `bytes`, and updates `counted`, the amount
    /// counted for this connection.
    ///
    /// # Errors
    ///
    /// `Exhausted` if the peer exceeds its limit.
    pub fn note(&mut self, who: &P, counted: &mut usize, bytes: usize) -> Result<()> {
        self.note_all(who, counted, Self::rounded_to_step(bytes))
    }

    /// Like [`note`](HeldBytes::note), but exact to the byte, for small amounts that rarely change.
    pub fn note_all(&mut self, who: &P, counted: &mut usize, bytes: usize) -> Result<()> {
        if bytes == *counted {
            return Ok(());
        }
        self.all = self.all - *counted + bytes;
        let peer = self.by_peer.entry(who.clone()).or_default();
        *peer = *peer - *counted + bytes;
        *counted = bytes;
        match *peer {
            0 => {
                self.by_peer.remove(who);
                Ok(())
            }
            held if held > self.one_peer => Err(self.too_much()),
            _ => Ok(()),
        }
    }

    /// Checks whether a peer may open another connection.
    ///
    /// # Errors
    /// `Exhausted` for a peer that already exceeds its limit.
    pub fn check(&self, who: &P) -> Result<()> {
        if self.by_peer.get(who).is_some_and(|held| *held > self.one_peer) {
            Err(self.too_much())
        } else {
            Ok(())
        }
    }

    /// Returns the peer to disconnect because all peers together hold too much: the one that holds
    /// most among those for which `can_go` is true.
    pub fn greediest(&self, can_go: impl Fn(&P) -> bool) -> Option<P> {
        if self.all <= self.all_peers {
            return None;
        }
        let can_go = self.by_peer.iter().filter(|(who, _)| can_go(who));
        can_go.max_by_key(|(_, held)| **held).map(|(who, _)| who.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_peer_has_a_budget_over_its_connections_and_the_greediest_is_disconnected_first() {
        let mut held = HeldBytes::default();
        let mut lanes = [0; 3];
        assert!(held.note(&1, &mut lanes[0], ONE_PEER).is_ok());
        assert!(held.note(&1, &mut lanes[1], STEP - 1).is_ok(), "too little to count");
        assert_eq!(held.note(&1, &mut lanes[1], STEP).unwrap_err().kind(), ErrorKind::Exhausted);
        assert!(held.note(&2, &mut lanes[2], ONE_PEER).is_ok(), "another peer has its own budget");
        let mut more = [0; 8];
        for (number, counted) in more.iter_mut().enumerate() {
            held.note(&(10 + number), counted, ONE_PEER / 2).ok();
        }
        assert_eq!(held.greediest(|_| true), Some(1));
        assert_eq!(
            held.greediest(|who| *who != 1),
            Some(2),
            "the first peer cannot be disconnected"
        );
        held.note(&1, &mut lanes[0], 0).ok();
        held.note(&1, &mut lanes[1], 0).ok();
        held.note(&2, &mut lanes[2], 0).ok();
        assert_eq!(held.greediest(|_| true), None);
        for (number, counted) in more.iter_mut().enumerate() {
            held.note(&(10 + number), counted, 0).ok();
        }
        assert!(held.is_empty());
    }

    #[test]
    fn exact_amounts_count_with_rounded_ones() {
        let (mut held, mut first, mut second) = (HeldBytes::of(STEP, 2 * STEP), 0, 0);
        assert!(held.note(&1, &mut first, STEP).is_ok());
        assert_eq!(held.note_all(&1, &mut second, 1).unwrap_err().kind(), ErrorKind::Exhausted);
        assert!(held.check(&1).is_err() && held.check(&2).is_ok());
        assert!(held.note_all(&1, &mut second, 0).is_ok() && held.check(&1).is_ok());
        assert_eq!((held.by_peer[&1], held.all), (STEP, STEP));
    }
}
