//! Peers: remote agents.

mod binding;
mod candidates;
mod links;
mod loss;
mod posting;
mod requests;

use std::fmt;
use std::sync::Arc;

use crate::completion::Completion;
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

/// A remote agent. Cheap to clone; its links close when the last clone and the last transfer are
/// dropped.
///
/// A lost handle stays lost: connect again with the peer's new metadata.
#[derive(Clone)]
pub struct Peer(pub(crate) Arc<PeerInner>);

impl Peer {
    /// Returns the peer's name and incarnation.
    pub fn identity(&self) -> &Identity {
        &self.0.identity
    }

    /// Returns a region by name.
    ///
    /// # Errors
    /// `Unregistered`, with the names of the peer's regions, if there is none of this name;
    /// `Invalid` for a foreign peer, whose regions have no names; `Forked`.
    pub fn region(&self, name: &str) -> Result<PeerRegion> {
        crate::fork::check()?;
        let about = self.0.about();
        let metadata = about.metadata()?;
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
                        "the peer has no region {name:?} in generation {}; it has: {}. If the \
                         region was registered later, update the peer with newer metadata",
                        metadata.generation.0,
                        if names.is_empty() { "none".into() } else { names.join(", ") }
                    ),
                )
                .with_peer(Arc::clone(&self.0.identity.name)))
            }
        }
    }

    /// Returns a range of a foreign agent's memory, by address. kvx cannot check whether the agent
    /// has registered the range.
    ///
    /// # Errors
    /// `Invalid` if the peer is a kvx agent; `OutOfBounds` if `address + len` overflows.
    pub fn foreign(
        &self,
        address: u64,
        len: u64,
        kind: MemoryKind,
        device: u64,
    ) -> Result<PeerRegion> {
        if matches!(self.0.about(), About::Kvx(_)) {
            return Err(ErrorKind::Invalid
                .because("this peer is a kvx agent: name its region instead of an address"));
        }
        if address.checked_add(len).is_none() {
            return Err(ErrorKind::OutOfBounds.because(format!(
                "a range of {len} bytes from address {address:#x} ends beyond the last address: \
                 take both from the same agent's description of its memory"
            )));
        }
        let range = ForeignRange { address, len, kind, device };
        Ok(PeerRegion::new(self.0.identity.clone(), What::Foreign(range)))
    }

    /// Updates the peer with newer metadata of the same incarnation: regions that were registered
    /// or revoked since. Returns false if the metadata was not newer.
    ///
    /// # Errors
    /// `PeerRestarted` for metadata of another incarnation; `Invalid` for metadata of another agent
    /// and for a foreign peer; `Malformed`; `Incompatible`; an error of a backend that rejects the
    /// new metadata; `Forked`.
    pub fn update(&self, metadata: impl AsRef<[u8]>) -> Result<bool> {
        crate::fork::check()?;
        self.0.update(Metadata::decode(metadata.as_ref())?)
    }

    /// Returns a region of this peer from the bytes of
    /// [`Region::metadata`](crate::Region::metadata). The region may have been registered after the
    /// metadata that this handle knows.
    ///
    /// The handle stores nothing about the region, except what links prepare for plans;
    /// [`forget`](Peer::forget) releases that.
    ///
    /// # Errors
    /// `Malformed` if the bytes are not a region's metadata or name a backend that the peer does
    /// not list; `Incompatible` if the two sides have no version in common; `PeerRestarted` for a
    /// region of another incarnation; `Invalid` for a foreign peer; `Forked`.
    pub fn import_region(&self, metadata: impl AsRef<[u8]>) -> Result<PeerRegion> {
        crate::fork::check()?;
        let (incarnation, info) = decode_region(metadata.as_ref())?;
        let about = self.0.about();
        let backends = about.metadata()?.backends.len();
        if incarnation != self.0.identity.incarnation {
            return Err(Error::new(
                ErrorKind::PeerRestarted,
                "the region belongs to another incarnation of the peer: connect with the metadata \
                 of that incarnation",
            )
            .with_peer(Arc::clone(&self.0.identity.name)));
        }
        if info.exports.iter().any(|(at, _)| usize::from(*at) >= backends) {
            return Err(ErrorKind::Malformed.because(format!(
                "region {} names a backend that the peer does not list",
                info.name
            )));
        }
        Ok(PeerRegion::new(self.0.identity.clone(), What::Named(Arc::new(info))))
    }

    /// Releases what links have prepared for a region. Plans that use the region still work and
    /// prepare it again.
    pub fn forget(&self, region: &PeerRegion) {
        if crate::fork::check().is_ok() {
            self.0.forget(region.id());
        }
    }

    /// Starts a transfer with the default deadline of 30 seconds; see [`transfer`](Peer::transfer)
    /// for options.
    ///
    /// Returns at once; the transfer waits for the link and the network.
    ///
    /// # Errors
    /// `Busy` if the budget of transfers in flight is used up; `Invalid` if the plan is for another
    /// peer or another agent; `Revoked` if one of its local regions is revoked; `Closed`; `Forked`.
    /// All other errors are results of the transfer.
    pub fn post(&self, plan: &Plan) -> Result<Transfer> {
        self.transfer(plan).post()
    }

    /// Configures a transfer with its own deadline or with a notification that follows its data.
    pub fn transfer(&self, plan: &Plan) -> TransferBuilder {
        TransferBuilder {
            peer: Arc::clone(&self.0),
            plan: plan.clone(),
            deadline: None,
            notify: None,
        }
    }

    /// Sends a notification of at most 64 KiB. The completion ends when the peer's agent has it.
    ///
    /// # Errors
    /// `Invalid` if the notification is too long; `TimedOut` if the peer does not acknowledge it by
    /// the deadline; `Exhausted` if too many notifications (64 MiB) already wait for the peer;
    /// `PeerLost` and the other errors of [`ready`](Peer::ready); `Closed`; `Forked`.
    pub fn notify(&self, bytes: impl AsRef<[u8]>, deadline: impl Into<Deadline>) -> Completion<()> {
        let bytes = bytes.as_ref();
        let late = "the peer did not acknowledge the notification by the deadline";
        self.0.agent.begin(deadline.into(), late, |promise| match check_notification(bytes) {
            Ok(()) => {
                let ticket = Ticket::of(Arc::clone(promise) as _);
                self.0.dispatch(LinkRequest::Notify(bytes.into(), ticket));
            }
            Err(error) => _ = promise.finish(Err(error)),
        })
    }

    /// Waits until a link to the peer is up. Posting does not require it.
    ///
    /// # Errors
    /// `TimedOut` if no link is up by the deadline. If no backend can connect, an error with the
    /// reason of each: `PeerLost`, `PeerRestarted`, `Authentication` or `Incompatible` if a backend
    /// reported that, otherwise `NoRoute`. If only one backend was considered, its own error.
    /// `Closed`; `Forked`.
    pub fn ready(&self, deadline: impl Into<Deadline>) -> Completion<()> {
        let late = "no link to the peer came up by the deadline";
        self.0.agent.begin(deadline.into(), late, |promise| {
            self.0.dispatch(LinkRequest::Ready(Ticket::of(Arc::clone(promise) as _)));
        })
    }

    /// Returns the backend that serves the peer, and why the others do not.
    pub fn route(&self) -> Route {
        self.0.route()
    }

    /// Returns the capabilities of the link that serves this peer, while one is up. A link may
    /// promise more than its backend, whose capabilities hold for all its links.
    pub fn capabilities(&self) -> Option<Arc<Capabilities>> {
        self.0.capabilities()
    }

    /// Waits until the peer is lost and returns the reason, even while nothing is in flight.
    ///
    /// A killed peer is noticed within [`peer_loss_within`](Capabilities::peer_loss_within), if its
    /// link promises that. A peer that is silent while nothing is in flight is not lost.
    ///
    /// # Errors
    /// `TimedOut` if the peer is not lost at the deadline; `Closed` if this handle and its clones
    /// are dropped or the agent is shut down; `Forked`.
    pub fn loss(&self, deadline: impl Into<Deadline>) -> Completion<Error> {
        let late = "the peer was not lost by the deadline";
        self.0.agent.begin(deadline.into(), late, |promise| self.0.on_loss(promise))
    }

    /// Returns the reason why the peer is lost, if it is. Transfers may fail with that reason a
    /// moment earlier: await [`loss`](Peer::loss) to be notified.
    pub fn lost(&self) -> Option<Error> {
        self.0.lost()
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Peer({:?})", self.0.identity)
    }
}
