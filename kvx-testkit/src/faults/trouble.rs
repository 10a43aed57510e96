//! Kinds of failures, their moments, and the errors that work may end with meanwhile.

use std::fmt;

use kvx_core::{Capabilities, ErrorKind};

use crate::far::Limit;

/// A kind of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The peer's process is killed.
    Killed,
    /// The same, and a child that it has forked holds all that it had open.
    KilledBesideAChild,
    /// The same, and another takes its place: of the same name, and at its port where the backend
    /// has one.
    Restarted,
    /// The peer's process stands still, and goes on when the work has ended.
    Stopped,
    /// The peer's process stands still, and is killed when the work has ended.
    StoppedThenKilled,
    /// The peer's agent is shut down.
    ShutDown,
    /// The peer takes its regions back.
    Revoked,
    /// The peer's process can have no more of something, until the work has ended.
    Lacks(Limit),
    /// This process can have no more of something, until the work has ended.
    LacksHere(Limit),
    /// The peer is cut off from this side, until the work has ended: for tests on hosts of their
    /// own.
    CutOff,
    /// A page of the peer's region, which is memory of its program's own, does not come until the
    /// work has ended.
    HungPage,
    /// This side gives 10,000 transfers up as soon as they are posted.
    Cancelled,
}

impl Trouble {
    /// All of them.
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

    /// Returns the errors that work may end with meanwhile. Every backend keeps deadlines.
    pub(super) fn kinds(self, moment: Moment, capabilities: &Capabilities) -> &'static [ErrorKind] {
        let is_told = capabilities.peer_loss_within.is_some();
        match self {
            // A child that holds its parent's sockets may keep a stranger waiting.
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
            // Nobody answers a stranger. Who is linked hears of it, and its regions are taken back
            // first.
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
            Trouble::HungPage => "has a page that does not come",
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

/// When it fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The metadata is known, and nothing else.
    Unlinked,
    /// After work, with nothing under way.
    Idle,
    /// With reads under way.
    Reading,
    /// With writes under way.
    Writing,
}

impl Moment {
    /// All of them.
    pub const ALL: [Moment; 4] = [Moment::Unlinked, Moment::Idle, Moment::Reading, Moment::Writing];

    /// Returns whether this failure can happen at this moment.
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
