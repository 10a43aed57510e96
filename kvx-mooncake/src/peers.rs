//! Endpoints, and the peers' engines that they lead to.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Arc;

use kvx_backend::fabric::EndpointId;
use kvx_core::{ErrorKind, Result};

use crate::address;
use crate::ffi::SegmentId;

/// The phase of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Opening,
    Open,
    /// Reported to core; nothing more is posted.
    Broken,
}

/// The state of a notification to a foreign agent. Core repeats it until the agent accepts it.
#[derive(Debug, Default)]
pub(crate) enum NotificationState {
    #[default]
    None,
    Sending,
    Sent(Result<()>),
}

/// One end of a link.
pub(crate) struct Endpoint {
    pub(crate) to: Arc<str>,
    pub(crate) phase: Phase,
    pub(crate) foreign: bool,
    pub(crate) note: NotificationState,
}

/// An engine of a peer, shared by all endpoints that lead to it: it has one queue.
#[derive(Debug, Default)]
pub(crate) struct PeerEngine {
    pub(crate) segment: Option<SegmentId>,
    /// The number of endpoints that lead to the engine.
    pub(crate) endpoints: usize,
    /// The number of pieces in flight to the engine.
    pub(crate) pieces: usize,
    /// The number of bytes in flight.
    pub(crate) bytes: u64,
    /// True while the engine's segment is being fetched again.
    pub(crate) refreshing: bool,
    /// True while the peer is being probed.
    pub(crate) probing: bool,
}

/// Endpoints and peers of one engine.
#[derive(Default)]
pub(crate) struct Links {
    pub(crate) endpoints: HashMap<EndpointId, Endpoint>,
    pub(crate) peers: HashMap<Arc<str>, PeerEngine>,
}

impl Links {
    /// Adds an endpoint. Errors: `Malformed` for an invalid address.
    pub(crate) fn add(
        &mut self,
        id: EndpointId,
        address: &[u8],
        foreign: bool,
    ) -> Result<Arc<str>> {
        let address = address::checked(address)?;
        let to = match self.peers.get_key_value(address) {
            Some((to, _)) => Arc::clone(to),
            None => Arc::from(address),
        };
        self.peers.entry(Arc::clone(&to)).or_default().endpoints += 1;
        let endpoint = Endpoint {
            to: Arc::clone(&to),
            phase: Phase::Opening,
            foreign,
            note: NotificationState::None,
        };
        self.endpoints.insert(id, endpoint);
        Ok(to)
    }

    /// Removes an endpoint. Returns its destination if no other endpoint leads there.
    pub(crate) fn remove(&mut self, id: EndpointId) -> Option<Arc<str>> {
        let Endpoint { to, .. } = self.endpoints.remove(&id)?;
        let peer = self.peers.get_mut(&to)?;
        peer.endpoints -= 1;
        self.forget_unused(&to).then_some(to)
    }

    /// Removes a peer that no endpoint leads to and whose pieces have all ended. Returns whether it
    /// did.
    pub(crate) fn forget_unused(&mut self, to: &str) -> bool {
        let unused = self.peers.get(to).is_some_and(|peer| peer.endpoints == 0 && peer.pieces == 0);
        if unused {
            self.peers.remove(to);
        }
        unused
    }

    /// Returns the endpoints that lead to a peer.
    pub(crate) fn leading_to(&self, to: &str) -> Vec<EndpointId> {
        self.endpoints
            .iter()
            .filter(|(_, endpoint)| *endpoint.to == *to)
            .map(|(id, _)| *id)
            .collect()
    }
}

/// Encodes a notification for a foreign agent. Errors: `Unsupported` if the engine cannot carry it.
pub(crate) fn foreign_text(bytes: &[u8]) -> Result<CString> {
    let refused = |what| {
        let why = format!(
            "Mooncake's own notifications are text, and this one has {what}: send text to agents that are not kvx"
        );
        ErrorKind::Unsupported.because(why)
    };
    std::str::from_utf8(bytes).map_err(|_| refused("bytes that are not UTF-8"))?;
    CString::new(bytes).map_err(|_| refused("a NUL"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_stays_while_an_endpoint_leads_to_it_or_pieces_are_in_flight() {
        let mut links = Links::default();
        let [one, two] = [1, 2].map(EndpointId::from_number);
        let to = links.add(one, b"h:1", false).expect("an address");
        links.add(two, b"h:1", false).expect("an address");
        assert_eq!(links.leading_to("h:1").len(), 2);
        assert_eq!(links.remove(one), None);
        links.peers.get_mut("h:1").expect("it is there").pieces = 1;
        assert_eq!(links.remove(two), None);
        links.peers.get_mut("h:1").expect("it is there").pieces = 0;
        assert!(links.forget_unused(&to));
    }

    #[test]
    fn foreign_agents_get_text_only() {
        assert_eq!(foreign_text("grüß".as_bytes()).expect("text").as_bytes(), "grüß".as_bytes());
        for bad in [&b"a\0b"[..], &[0xff]] {
            assert_eq!(foreign_text(bad).unwrap_err().kind(), ErrorKind::Unsupported);
        }
    }
}
