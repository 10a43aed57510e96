//! The memory that peers have us hold: unfinished requests, descriptions, answers that are not taken,
//! notifications that there is no room for.

use std::collections::HashMap;

use kvx_core::{Error, Identity, Kind, Result};

/// The most for one peer, over all its connections.
const ONE_PEER: usize = 64 << 20;
/// The most for all peers together.
const ALL_PEERS: usize = 256 << 20;
/// What is less than this on a connection is not counted, nor are changes by less.
const STEP: usize = 64 << 10;

/// What is held for whom.
#[derive(Debug, Default)]
pub(super) struct HeldBytes {
    by_peer: HashMap<Identity, usize>,
    all: usize,
}

impl HeldBytes {
    /// A connection of `who` holds `bytes` now; `counted` is what was counted for it, and is brought up to date.
    /// Errors: `Exhausted` when that is too much for one peer.
    pub(super) fn note(&mut self, who: &Identity, counted: &mut usize, bytes: usize) -> Result<()> {
        let bytes = bytes / STEP * STEP;
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
            held if held > ONE_PEER => Err(too_much()),
            _ => Ok(()),
        }
    }

    /// The peer that is to go because all of them together hold too much: the one that holds most.
    pub(super) fn greediest(&self) -> Option<Identity> {
        if self.all <= ALL_PEERS {
            return None;
        }
        self.by_peer.iter().max_by_key(|(_, held)| **held).map(|(who, _)| who.clone())
    }
}

/// Why a connection ends.
pub(super) fn too_much() -> Error {
    let why = format!(
        "the peer has more than {ONE_PEER} bytes of unfinished requests, of answers that it does not take and of \
         notifications that wait, or holds most of the {ALL_PEERS} that are kept for all peers"
    );
    Error::new(Kind::Exhausted, why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvx_core::Incarnation;

    fn who(number: u8) -> Identity {
        Identity { name: "peer".into(), incarnation: Incarnation([number; 16]) }
    }

    #[test]
    fn each_peer_has_a_budget_over_its_connections_and_the_greediest_goes_first() {
        let mut held = HeldBytes::default();
        let mut lanes = [0; 3];
        assert!(held.note(&who(1), &mut lanes[0], ONE_PEER).is_ok());
        assert!(held.note(&who(1), &mut lanes[1], STEP - 1).is_ok(), "too little to count");
        assert_eq!(held.note(&who(1), &mut lanes[1], STEP).unwrap_err().kind(), Kind::Exhausted);
        assert!(held.note(&who(2), &mut lanes[2], ONE_PEER).is_ok(), "another has its own");
        let mut more = [0; 8];
        for (number, counted) in more.iter_mut().enumerate() {
            held.note(&who(10 + number as u8), counted, ONE_PEER / 2).ok();
        }
        assert_eq!(held.greediest(), Some(who(1)));
        held.note(&who(1), &mut lanes[0], 0).ok();
        held.note(&who(1), &mut lanes[1], 0).ok();
        held.note(&who(2), &mut lanes[2], 0).ok();
        assert_eq!(held.greediest(), None);
        for (number, counted) in more.iter_mut().enumerate() {
            held.note(&who(10 + number as u8), counted, 0).ok();
        }
        assert!(held.by_peer.is_empty() && held.all == 0);
    }
}
