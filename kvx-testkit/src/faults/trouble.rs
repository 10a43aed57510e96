//! Kinds of failures, their moments, and the errors that work may end with meanwhile.

use std::fmt;

use kvx_core::{Capabilities, ErrorKind};

use crate::far::Limit;

/// A kind of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The peer's process is killed.
    Killed,
    /// The peer's process is killed, and a child that it has forked keeps open all that it had
    /// open.
    KilledBesideAChild,
    /// The peer's process is killed and replaced by another one with the same name, and with the
    /// same port if the backend has one.
    Restarted,
    /// The peer's process is stopped, and continues when the work has ended.
    Stopped,
    /// The peer's process is stopped, and is killed when the work has ended.
    StoppedThenKilled,
    /// The peer's agent is shut down.
    ShutDown,
    /// The peer revokes its regions.
    Revoked,
    /// The peer's process is denied a resource until the work has ended.
    Lacks(Limit),
    /// This process is denied a resource until the work has ended.
    LacksHere(Limit),
    /// The peer is disconnected from this side until the work has ended; for tests on separate
    /// hosts.
    CutOff,
    /// A page fault in the peer's region, which is memory of its program, stays unresolved until
    /// the work has ended.
    HungPage,
    /// This side cancels 10,000 transfers as soon as they are posted.
    Cancelled,
}

impl Trouble {
    /// All kinds.
    pub const ALL: [Trouble; 16] = [
        Trouble::Killed,
        Trouble::KilledBesideAChild,
        Trouble::Restarted,
        Trouble::Stopped,
        Trouble::StoppedThenKilled,
        Trouble::ShutDown,
        Trouble::Revoked,
        Trouble::Lacks(Limit::Files),
        Trouble::LacksHere(Limit::Files),
        Trouble::Lacks(Limit::Mappings),
        Trouble::LacksHere(Limit::Mappings),
        Trouble::Lacks(Limit::Threads),
        Trouble::LacksHere(Limit::Threads),
        Trouble::CutOff,
        Trouble::HungPage,
        Trouble::Cancelled,
    ];

    /// Returns the errors that work may end with meanwhile. Every backend enforces deadlines.
    pub(super) fn kinds(self, moment: Moment, capabilities: &Capabilities) -> &'static [ErrorKind] {
        let is_told = capabilities.peer_loss_within.is_some();
        match self {
            // A child that holds its parent's sockets may keep a new peer waiting.
            Trouble::Killed if is_told => &[ErrorKind::PeerLost],
            Trouble::KilledBesideAChild if is_told && moment != Moment::Unlinked => {
                &[ErrorKind::PeerLost]
            }
            Trouble::Killed
            | Trouble::KilledBesideAChild
            | Trouble::Stopped
            | Trouble::StoppedThenKilled => &[ErrorKind::PeerLost, ErrorKind::TimedOut],
            Trouble::Restarted => {
                &[ErrorKind::PeerLost, ErrorKind::PeerRestarted, ErrorKind::TimedOut]
            }
            // No process answers a new peer. A linked peer notices the shutdown, and the regions
            // are revoked first.
            Trouble::ShutDown if moment == Moment::Unlinked => {
                &[ErrorKind::PeerLost, ErrorKind::TimedOut]
            }
            Trouble::ShutDown => &[ErrorKind::PeerLost, ErrorKind::Revoked],
            Trouble::Revoked => &[ErrorKind::Revoked],
            Trouble::Lacks(_) | Trouble::LacksHere(_) => {
                &[ErrorKind::PeerLost, ErrorKind::TimedOut, ErrorKind::Exhausted]
            }
            Trouble::CutOff | Trouble::HungPage => &[ErrorKind::PeerLost, ErrorKind::TimedOut],
            Trouble::Cancelled => &[ErrorKind::Cancelled],
        }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Trouble::Lacks(what) => return write!(f, "has no {what} left"),
            Trouble::LacksHere(what) => return write!(f, "no {what} left here"),
            Trouble::CutOff => "cut off, then reached again",
            Trouble::HungPage => "has an unresolved page fault",
            Trouble::Killed => "killed",
            Trouble::KilledBesideAChild => "killed, a forked child lives on",
            Trouble::Restarted => "killed and started again",
            Trouble::Stopped => "stopped, goes on afterwards",
            Trouble::StoppedThenKilled => "stopped, killed afterwards",
            Trouble::ShutDown => "shut down",
            Trouble::Revoked => "takes its regions back",
            Trouble::Cancelled => "10,000 cancelled here",
        })
    }
}

/// The moment of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Before the link: only the metadata is known.
    Unlinked,
    /// After work, with nothing in flight.
    Idle,
    /// With reads in flight.
    Reading,
    /// With writes in flight.
    Writing,
}

impl Moment {
    /// All moments.
    pub const ALL: [Moment; 4] = [Moment::Unlinked, Moment::Idle, Moment::Reading, Moment::Writing];

    /// Returns whether the failure can happen at this moment.
    pub fn has(self, trouble: Trouble) -> bool {
        trouble != Trouble::Cancelled || matches!(self, Moment::Reading | Moment::Writing)
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Moment::Unlinked => "before the link",
            Moment::Idle => "idle",
            Moment::Reading => "reading",
            Moment::Writing => "writing",
        })
    }
}
