//! The backends that may serve a peer, and how far the link over each has come.

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
    /// Position in the agent's list of transports.
    pub(super) transport: usize,
    pub(super) stage: LinkStage,
    /// The generation of the metadata that the link was last told.
    pub(super) told: Generation,
    pub(super) imports: HashMap<RegionId, Imported>,
    pub(super) bindings: Bindings,
}

/// What a link made of a region, as its owner described it then.
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

/// True if a link that was refused with this may come up later: a limit was reached, here or at the peer, or a call
/// failed. Other reasons lie in the two ends and their metadata.
pub(super) fn may_pass(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Exhausted | ErrorKind::Busy | ErrorKind::Native)
        && !injected("refused-for-good")
}

/// One error for all backends, of which none serves; of the kind that tells most.
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
