//! The promises of a transport or a link, as data. The conformance suite tests exactly these.

use std::fmt;
use std::time::Duration;

use crate::MemoryKind;

/// The barrier between a hostile peer and memory that it must not access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isolation {
    /// The network card, by its keys.
    Nic,
    /// The owner's own code checks each operation.
    Owner,
    /// The peer's good behaviour alone: trust the peers, or choose another transport.
    Cooperative,
}

/// The CPU use of a connected agent without work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Idle {
    /// Under 10 ms of CPU in 10 s.
    Asleep,
    /// Under 1 % of a core.
    Polls,
}

/// How remote access to a region ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Revocation {
    /// The owner ends the access alone, whatever its peers do.
    Owner,
    /// The access ends when each connected peer has confirmed or is dead. A stopped peer delays it.
    Confirmed,
    /// The access does not end while a peer lives: the memory stays quarantined.
    Never,
}

/// The scope of an unresolved page fault in registered host memory (userfaultfd, or a mapped file
/// whose server hangs): the work that it blocks.
///
/// Transfers still end by their deadlines, and other agents continue. The exception is a small read
/// that the posting thread copies itself, which may block that thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HungPageScope {
    /// The traffic between the two agents whose transfer needs the page, and whatever needs the
    /// same page.
    Peer,
    /// All work of the agent on the thread of this backend that touches the page. Its other peers
    /// may count as lost.
    Agent,
    /// Blocks no work, not even the transfers that need the page: registration pins the pages, and
    /// a card moves their bytes without page faults. A page that the program discards afterwards
    /// stays pinned, and transfers move its old bytes.
    None,
}

/// A value that may differ for reads and writes, usually a boolean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PerOp<T = bool> {
    /// For reads.
    pub read: T,
    /// For writes.
    pub write: T,
}

impl PerOp {
    /// For neither operation.
    pub const NEITHER: PerOp = PerOp::same(false);
    /// For both operations.
    pub const BOTH: PerOp = PerOp::same(true);
}

impl<T: Copy> PerOp<T> {
    /// Creates the same value for both operations.
    pub const fn same(value: T) -> Self {
        PerOp { read: value, write: value }
    }

    /// Returns the value for `op`.
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
    /// Every kind.
    pub const ALL: MemoryKinds = MemoryKinds::of(&MemoryKind::ALL);

    /// Creates the set of these kinds.
    pub const fn of(kinds: &[MemoryKind]) -> Self {
        let (mut bits, mut at) = (0, 0);
        while at < kinds.len() {
            bits |= 1 << kinds[at] as u8;
            at += 1;
        }
        MemoryKinds(bits)
    }

    /// Returns true if `kind` is in the set.
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

/// The promises of a transport; a link may promise more than its transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The barrier against a hostile peer that reads, and against one that writes.
    pub isolation: PerOp<Isolation>,
    /// The CPU use of an idle connection.
    pub idle: Idle,
    /// Operations that need the target's CPU, and so wait while the target is stopped.
    pub target_cpu: PerOp,
    /// How remote access to a region ends.
    pub revocation: Revocation,
    /// The time within which the loss of a killed peer is reported; `None` if only the deadline
    /// ends a transfer.
    pub peer_loss_within: Option<Duration>,
    /// Operations that settle after a cancel even if the peer is stopped.
    pub settles_without_peer: PerOp,
    /// The work that an unresolved page fault blocks, in memory that is not a kvx pool.
    pub hung_page: HungPageScope,
    /// True if data becomes visible at the target in the order in which it was posted. kvx never
    /// relies on it.
    pub ordered: bool,
    /// The kinds of memory that the transport reaches at the initiator.
    pub local: MemoryKinds,
    /// The kinds of memory that the transport reaches at the peer.
    pub remote: MemoryKinds,
}

impl Capabilities {
    /// Returns names and values, for tables and JSON.
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
