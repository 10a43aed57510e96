//! Peers: remote agents.

mod binding;
mod candidates;
mod links;
mod loss;
mod posting;
mod requests;

use std::fmt;
use std::sync::Arc;

use crate::completion::{Completion, Promise};
use crate::fault_injection::injected;
use crate::identity::Identity;
use crate::metadata::{Metadata, decode_region};
use crate::plan::Plan;
use crate::region::{PeerRegion, What};
use crate::route::Route;
use crate::ticket::Ticket;
use crate::transfer::Transfer;
use crate::transport::ForeignRange;
use crate::{Capabilities, Deadline, Error, ErrorKind, MemoryKind, Result};

pub(crate) use links::{About, PeerInner};
pub use posting::TransferBuilder;
use posting::check_notification;
pub(crate) use requests::{LinkRequest, NeedsLink};

/// A remote agent. Cheap to clone; the links close when the last clone and the last transfer are gone.
///
/// Once lost, a handle stays lost: connect again with the peer's new metadata.
#[derive(Clone)]
pub struct Peer(pub(crate) Arc<PeerInner>);

impl Peer {
    /// Its name and incarnation.
    pub fn identity(&self) -> &Identity {
        &self.0.identity
    }

    /// A region by name. Errors: `Unregistered`, with the names there are.
    pub fn region(&self, name: &str) -> Result<PeerRegion> {
        crate::fork::check()?;
        let About::Kvx(metadata) = self.0.about() else {
            return Err(Error::new(
                ErrorKind::Invalid,
                "a foreign agent has no named regions: use Peer::foreign",
            ));
        };
        let found = metadata.regions.iter().find(|region| *region.name == *name);
        let found = found
            .or_else(|| if injected("unregistered") { metadata.regions.first() } else { None });
        match found {
            Some(info) => {
                Ok(PeerRegion::new(self.0.identity.clone(), What::Named(Arc::clone(info))))
            }
            None => {
                let names: Vec<_> =
                    metadata.regions.iter().take(16).map(|region| &*region.name).collect();
                Err(Error::new(
                    ErrorKind::Unregistered,
                    format!(
                        "the peer has no region {name:?} in generation {}; it has: {}. If it was registered later, \
                         update the peer with newer metadata",
                        metadata.generation.0,
                        if names.is_empty() { "none".into() } else { names.join(", ") }
                    ),
                )
                .with_peer(Arc::clone(&self.0.identity.name)))
            }
        }
    }

    /// A range of a foreign agent's memory, by address. What kvx cannot know of it, it cannot check.
    pub fn foreign(
        &self,
        address: u64,
        len: u64,
        kind: MemoryKind,
        device: u64,
    ) -> Result<PeerRegion> {
        if matches!(self.0.about(), About::Kvx(_)) {
            return Err(Error::new(
                ErrorKind::Invalid,
                "this peer is a kvx agent: name its region instead of an address",
            ));
        }
        let range = ForeignRange { address, len, kind, device };
        Ok(PeerRegion::new(self.0.identity.clone(), What::Foreign(range)))
    }

    /// Takes newer metadata of the same incarnation: regions registered or revoked since. Says whether it was newer.
    ///
    /// # Errors
    /// `PeerRestarted` for another incarnation, `Malformed`, `Incompatible`, `Invalid` for another agent's metadata.
    pub fn update(&self, metadata: impl AsRef<[u8]>) -> Result<bool> {
        crate::fork::check()?;
        self.0.update(Metadata::decode(metadata.as_ref())?)
    }

    /// A region of this peer, from what [`Region::metadata`](crate::Region::metadata) gave there: also one that was
    /// registered after the metadata which this handle knows. The handle keeps nothing of it but what links make of
    /// it for plans, until [`forget`](Peer::forget).
    ///
    /// # Errors
    /// `Malformed`, `Incompatible`; `PeerRestarted` for a region of another incarnation; `Invalid` for a foreign peer.
    pub fn import_region(&self, metadata: impl AsRef<[u8]>) -> Result<PeerRegion> {
        crate::fork::check()?;
        let (incarnation, info) = decode_region(metadata.as_ref())?;
        let About::Kvx(known) = self.0.about() else {
            return Err(Error::new(
                ErrorKind::Invalid,
                "a foreign agent has no named regions: use Peer::foreign",
            ));
        };
        if incarnation != self.0.identity.incarnation {
            return Err(Error::new(
                ErrorKind::PeerRestarted,
                "the region is of another incarnation of the peer: connect with the metadata that came with it",
            )
            .with_peer(Arc::clone(&self.0.identity.name)));
        }
        if info.exports.iter().any(|(at, _)| usize::from(*at) >= known.backends.len()) {
            return Err(Error::new(
                ErrorKind::Malformed,
                format!("region {} names a backend that is not there", info.name),
            ));
        }
        Ok(PeerRegion::new(self.0.identity.clone(), What::Named(Arc::new(info))))
    }

    /// Lets go of what links made of a region. Plans on it go on and make it anew.
    pub fn forget(&self, region: &PeerRegion) {
        if crate::fork::check().is_ok() {
            self.0.forget(region.id());
        }
    }

    /// Starts a transfer with the default deadline of 30 seconds; see [`transfer`](Peer::transfer) for more.
    ///
    /// Returns at once: what it waits for (a link, the network) is waited for by the transfer. Errors: `Busy`,
    /// `Invalid`, `Revoked`, `Closed`, `Forked`; everything else is the transfer's result.
    pub fn post(&self, plan: &Plan) -> Result<Transfer> {
        self.transfer(plan).post()
    }

    /// A transfer with a deadline of its own, or with a notification that follows its data.
    pub fn transfer(&self, plan: &Plan) -> TransferBuilder {
        TransferBuilder {
            peer: Arc::clone(&self.0),
            plan: plan.clone(),
            deadline: None,
            notify: None,
        }
    }

    /// Sends a notification. The completion ends when the peer's agent has it. Errors: `Invalid` above 64 KiB.
    pub fn notify(&self, bytes: impl AsRef<[u8]>, deadline: impl Into<Deadline>) -> Completion<()> {
        let bytes = bytes.as_ref();
        if let Err(error) = self.0.agent.check_open().and_then(|()| check_notification(bytes)) {
            return Completion::ready(Err(error));
        }
        let promise = Promise::new();
        let late = || {
            Error::new(
                ErrorKind::TimedOut,
                "the peer did not take the notification by the deadline",
            )
        };
        promise.by(&self.0.agent.clock, deadline.into(), late);
        self.0.dispatch(LinkRequest::Notify(bytes.into(), Ticket::of(Arc::clone(&promise) as _)));
        Completion::of(promise)
    }

    /// Ends when a link to the peer is up; with the reasons when none comes up. Posting does not need it.
    pub fn ready(&self, deadline: impl Into<Deadline>) -> Completion<()> {
        if let Err(error) = self.0.agent.check_open() {
            return Completion::ready(Err(error));
        }
        let promise = Promise::new();
        let late =
            || Error::new(ErrorKind::TimedOut, "no link to the peer came up by the deadline");
        promise.by(&self.0.agent.clock, deadline.into(), late);
        self.0.dispatch(LinkRequest::Ready(Ticket::of(Arc::clone(&promise) as _)));
        Completion::of(promise)
    }

    /// Which backend serves the peer, and why not another.
    pub fn route(&self) -> Route {
        self.0.route()
    }

    /// The promises of the link that serves this peer, while one is up. It knows more than its backend, which
    /// promises what holds for each of its links.
    pub fn capabilities(&self) -> Option<Arc<Capabilities>> {
        self.0.capabilities()
    }

    /// Ends when the peer is lost, with the reason, also while nothing is in flight to it. A killed peer is noticed
    /// within [`peer_loss_within`](Capabilities::peer_loss_within) if its link promises that; one that is silent
    /// without work is not lost.
    ///
    /// # Errors
    /// `TimedOut` when it is not lost at the deadline; `Closed` when this handle and its clones are dropped meanwhile.
    pub fn loss(&self, deadline: impl Into<Deadline>) -> Completion<Error> {
        if let Err(error) = self.0.agent.check_open() {
            return Completion::ready(Err(error));
        }
        let promise = Promise::new();
        let late = || Error::new(ErrorKind::TimedOut, "the peer was not lost by the deadline");
        promise.by(&self.0.agent.clock, deadline.into(), late);
        self.0.on_loss(&promise);
        Completion::of(promise)
    }

    /// The reason why the peer is lost, if it is. Transfers may fail with it a moment before this says so: await
    /// [`loss`](Peer::loss) to be told.
    pub fn lost(&self) -> Option<Error> {
        self.0.lost()
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Peer({:?})", self.0.identity)
    }
}
