//! The promises of a transport or a link, as data. The conformance suite asserts against exactly this.

use std::fmt;
use std::time::Duration;

use crate::MemoryKind;

/// The part that keeps a hostile peer from memory it was not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isolation {
    /// The network card, by its keys.
    Nic,
    /// The owner's own code checks each operation.
    Owner,
    /// Only well-behaved peers are kept out: trust them, or choose another transport.
    Cooperative,
}

/// The cost of a connected agent without work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Idle {
    /// Under 10 ms of CPU in 10 s.
    Asleep,
    /// Under 1 % of a core.
    Polls,
}

/// The way in which remote access to a region ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Revocation {
    /// By the owner alone, whatever its peers do.
    Owner,
    /// When each connected peer has confirmed, or is dead: a stopped peer delays it.
    Confirmed,
    /// Not possible while peers live: the memory stays quarantined.
    Never,
}

/// What waits while a page of registered host memory does not come: userfaultfd, or a mapped file whose server hangs.
/// Transfers end by their deadlines all the same, but for a small read that the posting thread copies itself, which may
/// keep that thread; and other agents go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HungPageScope {
    /// What goes on between the two agents whose transfer needs the page, and what needs the same page.
    Peer,
    /// All that the agent does over this backend whose thread touches the page: its other peers may count as lost.
    Agent,
}

/// Something that may differ for reads and writes; mostly a yes or no.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerOp<T = bool> {
    /// For reads.
    pub read: T,
    /// For writes.
    pub write: T,
}

impl PerOp {
    /// For neither.
    pub const NEITHER: PerOp = PerOp::same(false);
    /// For both.
    pub const BOTH: PerOp = PerOp::same(true);
}

impl<T: Copy> PerOp<T> {
    /// The same for both.
    pub const fn same(value: T) -> Self {
        PerOp { read: value, write: value }
    }

    /// The one for `op`.
    pub fn of(self, op: crate::Op) -> T {
        match op {
            crate::Op::Read => self.read,
            crate::Op::Write => self.write,
        }
    }
}

impl fmt::Display for PerOp<Isolation> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |isolation: Isolation| format!("{isolation:?}").to_lowercase();
        match (word(self.read), word(self.write)) {
            (read, write) if read == write => f.write_str(&read),
            (read, write) => write!(f, "{read} for reads, {write} for writes"),
        }
    }
}

impl fmt::Display for PerOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.read, self.write) {
            (true, true) => "read, write",
            (true, false) => "read",
            (false, true) => "write",
            (false, false) => "no",
        })
    }
}

/// A set of memory kinds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct MemoryKinds(u8);

impl MemoryKinds {
    /// Plain and pinned host memory.
    pub const HOST: MemoryKinds = MemoryKinds::of(&[MemoryKind::Host, MemoryKind::Pinned]);
    /// Every kind there is.
    pub const ALL: MemoryKinds = MemoryKinds::of(&MemoryKind::ALL);

    /// These kinds.
    pub const fn of(kinds: &[MemoryKind]) -> Self {
        let (mut bits, mut at) = (0, 0);
        while at < kinds.len() {
            bits |= 1 << kinds[at] as u8;
            at += 1;
        }
        MemoryKinds(bits)
    }

    /// True if `kind` is one of them.
    pub fn contains(self, kind: MemoryKind) -> bool {
        self.0 & (1 << kind as u8) != 0
    }
}

impl fmt::Display for MemoryKinds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut first = true;
        for kind in MemoryKind::ALL.into_iter().filter(|kind| self.contains(*kind)) {
            write!(f, "{}{kind}", if std::mem::take(&mut first) { "" } else { ", " })?;
        }
        Ok(())
    }
}

impl fmt::Debug for MemoryKinds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

/// The promises of a transport; a link may know more than its transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The part that keeps a hostile peer out: one that reads, and one that writes.
    pub isolation: PerOp<Isolation>,
    /// The cost of an idle connection.
    pub idle: Idle,
    /// Operations that need the target's CPU, and so wait while the target is stopped.
    pub target_cpu: PerOp,
    /// The way in which remote access to a region ends.
    pub revocation: Revocation,
    /// The time until a killed peer is known to be lost; `None`: only the deadline tells.
    pub peer_loss_within: Option<Duration>,
    /// Operations that settle after a cancel although the peer is stopped.
    pub settles_without_peer: PerOp,
    /// What waits for a page that does not come, of memory that is no pool of kvx's.
    pub hung_page: HungPageScope,
    /// True if data becomes visible at the target in the order it was posted. kvx never relies on it.
    pub ordered: bool,
    /// Kinds of the initiator's memory.
    pub local: MemoryKinds,
    /// Kinds of the peer's memory.
    pub remote: MemoryKinds,
}

impl Capabilities {
    /// Names and values, for tables and JSON.
    pub fn rows(&self) -> [(&'static str, String); 10] {
        [
            ("isolation", self.isolation.to_string()),
            ("idle", format!("{:?}", self.idle).to_lowercase()),
            ("target_cpu", self.target_cpu.to_string()),
            ("revocation", format!("{:?}", self.revocation).to_lowercase()),
            (
                "peer_loss_within",
                self.peer_loss_within
                    .map_or_else(|| "deadline".into(), |time| format!("{} s", time.as_secs_f64())),
            ),
            ("settles_without_peer", self.settles_without_peer.to_string()),
            ("hung_page", format!("{:?}", self.hung_page).to_lowercase()),
            ("ordered", if self.ordered { "yes" } else { "no" }.into()),
            ("local", self.local.to_string()),
            ("remote", self.remote.to_string()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_of_kinds_hold_what_they_were_given() {
        let set = MemoryKinds::of(&[MemoryKind::Host, MemoryKind::Cuda]);
        assert!(set.contains(MemoryKind::Cuda) && !set.contains(MemoryKind::Pinned));
        assert_eq!(set.to_string(), "host, cuda");
        assert!(MemoryKind::ALL.into_iter().all(|kind| MemoryKinds::ALL.contains(kind)));
    }
}
