//! The backends that may serve a peer, and the state of the link over each.

use std::collections::HashMap;
use std::sync::Arc;

use crate::bound::Bindings;
use crate::fault_injection::injected;
use crate::identity::{Generation, LinkId, RegionId, RegionKey};
use crate::transport::{Link, LinkState, RemoteRegion};
use crate::{Error, ErrorKind};

/// A backend that may serve the peer.
pub(super) struct Candidate {
    pub(super) backend: &'static str,
    /// The position in the agent's list of transports.
    pub(super) transport: usize,
    pub(super) stage: LinkStage,
    /// The generation of the metadata that the link received last.
    pub(super) told: Generation,
    pub(super) imports: HashMap<RegionId, Imported>,
    pub(super) bindings: Bindings,
}

/// A region as a link imported it, with the owner's description at that time.
pub(super) struct Imported {
    pub(super) key: RegionKey,
    pub(super) len: u64,
    pub(super) region: Arc<dyn RemoteRegion>,
}

pub(super) enum LinkStage {
    Untried,
    Opening { id: LinkId, link: Option<Arc<dyn Link>>, early: Option<LinkState> },
    Up { id: LinkId, link: Arc<dyn Link> },
    Refused(Error),
}

/// Returns true if a link that was refused with this error may work later: a limit was reached,
/// here or at the peer, or a call failed. Other reasons lie in the two sides and their metadata.
pub(super) fn may_pass(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Exhausted | ErrorKind::Busy | ErrorKind::Native)
        && !injected("refused-for-good")
}

/// Returns one error for all backends when none of them serves, with the most informative kind.
pub(super) fn no_route(
    tried: Vec<(&'static str, Error)>,
    excluded: Vec<(&'static str, Error)>,
) -> Error {
    let telling = |kind| {
        matches!(
            kind,
            ErrorKind::PeerLost
                | ErrorKind::PeerRestarted
                | ErrorKind::Authentication
                | ErrorKind::Incompatible
        )
    };
    let kind = match &tried[..] {
        [(_, only)] if excluded.is_empty() => return only.clone(),
        _ => tried
            .iter()
            .map(|(_, error)| error.kind())
            .rfind(|kind| telling(*kind))
            .unwrap_or(ErrorKind::NoRoute),
    };
    let reasons: Vec<String> = tried
        .into_iter()
        .chain(excluded)
        .map(|(backend, error)| format!("{backend}: {}", error.sentence()))
        .collect();
    let reasons =
        if reasons.is_empty() { "no backend is open".to_owned() } else { reasons.join("; ") };
    Error::new(kind, format!("no backend serves this peer and memory: {reasons}"))
}
