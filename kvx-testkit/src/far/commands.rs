//! The commands to a far end and its replies: lines of JSON between processes, plain values within
//! one.

use std::time::Duration;

use kvx_core::{ErrorKind, Notification};
use serde::{Deserialize, Serialize};

use super::limits::Limit;
use crate::backing::Backing;
use crate::process_state::{ProcessState, ResourceUsage};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Command {
    Agent(AgentSpec),
    Metadata { agent: usize },
    Register { agent: usize, name: String, len: usize, backing: Backing, seed: Option<u64> },
    RegisterNeighbours { agent: usize, names: [String; 2], len: usize, backing: Backing },
    Fill { region: usize, seed: u64 },
    CopyIn { region: usize, offset: usize, bytes: Vec<u8> },
    CopyOut { region: usize, offset: usize, len: usize },
    Sum { region: usize },
    Revoke { region: usize, within: Duration },
    DropRegion { region: usize },
    Connect { agent: usize, metadata: Vec<u8> },
    Notify { peer: usize, bytes: Vec<u8>, within: Duration },
    Post { peer: usize, post: PostSpec, times: u32 },
    Take { agent: usize, within: Duration },
    TakeMany { agent: usize, count: usize, within: Duration },
    Expect { agent: usize, bytes: Vec<u8>, senders: usize, within: Duration },
    Limit { what: Limit, more: bool },
    HangPage { region: Option<usize> },
    Fork { ends_after: Duration },
    Ready { peer: usize, within: Duration },
    DropPeer { peer: usize },
    Cpu,
    ResourceUsage,
    ProcessState,
    Quarantined,
    Shutdown { agent: usize, within: Duration },
}

/// The settings of a far end's agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct AgentSpec {
    pub(crate) name: String,
    pub(crate) backends: Vec<String>,
    pub(crate) options: String,
    pub(crate) secret: Option<[u8; 32]>,
    pub(crate) peer_timeout: Duration,
    pub(crate) inbox: (usize, usize),
}

/// A transfer for the far end to post: an operation between its region and the peer's, by index
/// lists.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PostSpec {
    /// True to write, false to read.
    pub write: bool,
    /// The number of the far end's region.
    pub region: usize,
    /// The name of the region at the peer.
    pub theirs: String,
    /// The length and the number of the packed blocks, on both sides.
    pub grid: (u64, u32),
    /// The far end's blocks.
    pub local: Vec<u32>,
    /// The peer's blocks.
    pub remote: Vec<u32>,
    /// The transfer's deadline.
    pub within: Duration,
    /// The notification to send after the data.
    pub notify: Option<Vec<u8>>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    Done,
    Number(u64),
    Bytes(Vec<u8>),
    Notifications(Vec<ReceivedNotification>),
    ProcessState(ProcessState),
    ResourceUsage(ResourceUsage),
    Senders(Vec<(String, [u8; 16])>),
    Failed { kind: String, sentence: String },
}

/// A notification that the far end received.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReceivedNotification {
    /// The sender's name.
    pub name: String,
    /// The sender's incarnation.
    pub incarnation: [u8; 16],
    /// The bytes.
    pub bytes: Vec<u8>,
}

impl From<Notification> for ReceivedNotification {
    fn from(taken: Notification) -> Self {
        let Notification { from, bytes } = taken;
        ReceivedNotification {
            name: from.name.to_string(),
            incarnation: from.incarnation.0,
            bytes: bytes.into_vec(),
        }
    }
}

/// Returns the error kind with this name.
pub(super) fn kind_of(word: &str) -> Option<ErrorKind> {
    ErrorKind::ALL.iter().copied().find(|kind| kind.as_str() == word)
}
