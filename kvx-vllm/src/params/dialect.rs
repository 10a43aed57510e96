//! Which vLLM is spoken: what differs on the wire between the versions.

use std::fmt;

/// The vLLM version whose forms are written, and expected of peers.
///
/// A dialect stands for the versions that its documentation names. Others, such as 0.12 to 0.15 and 0.18 to 0.19, are
/// not spoken.
///
/// ```
/// use kvx_vllm::Dialect;
/// assert_eq!(Dialect::default(), Dialect::V0_33);
/// assert!(Dialect::V0_16 < Dialect::V0_20);
/// assert_eq!(Dialect::V0_32.connector_version(), 14);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Dialect {
    /// vLLM 0.16 and 0.17: flat block ids, handshake requests of two fields, blocks kept 480 s.
    V0_16,
    /// vLLM 0.20: block ids per KV cache group.
    V0_20,
    /// vLLM 0.21: kernel blocks in a logical block, tokens in the answer.
    V0_21,
    /// vLLM 0.22 to 0.25: leases and heartbeats.
    V0_22,
    /// vLLM 0.26 and 0.27: handshake requests of three fields, the clock beside the reply.
    V0_26,
    /// vLLM 0.28: the transfer mode and speculative decoding are hashed.
    V0_28,
    /// vLLM 0.29: completions count readers; strides; new names of layouts.
    V0_29,
    /// vLLM 0.30: block counts, groups, names and memory of each region.
    V0_30,
    /// vLLM 0.31: members of regions, packed layouts.
    V0_31,
    /// vLLM 0.32: pages of per-layer embeddings.
    V0_32,
    /// vLLM 0.33, the default: registrations have generations.
    #[default]
    V0_33,
}

impl Dialect {
    /// All of them, oldest first.
    pub const ALL: [Dialect; 11] = [
        Dialect::V0_16,
        Dialect::V0_20,
        Dialect::V0_21,
        Dialect::V0_22,
        Dialect::V0_26,
        Dialect::V0_28,
        Dialect::V0_29,
        Dialect::V0_30,
        Dialect::V0_31,
        Dialect::V0_32,
        Dialect::V0_33,
    ];

    /// The version of vLLM as it names itself: of several, the first that is to be recommended.
    pub fn vllm_version(self) -> &'static str {
        match self {
            Dialect::V0_16 => "0.16.0",
            Dialect::V0_20 => "0.20.0",
            Dialect::V0_21 => "0.21.0",
            Dialect::V0_22 => "0.22.1",
            Dialect::V0_26 => "0.26.0",
            Dialect::V0_28 => "0.28.0",
            Dialect::V0_29 => "0.29.0",
            Dialect::V0_30 => "0.30.0",
            Dialect::V0_31 => "0.31.0",
            Dialect::V0_32 => "0.32.0",
            Dialect::V0_33 => "0.33.0",
        }
    }

    /// The version of its NixlConnector.
    pub fn connector_version(self) -> u32 {
        match self {
            Dialect::V0_16 | Dialect::V0_20 => 2,
            Dialect::V0_21 => 3,
            Dialect::V0_22 => 4,
            Dialect::V0_26 => 5,
            Dialect::V0_28 => 7,
            Dialect::V0_29 => 9,
            Dialect::V0_30 => 11,
            Dialect::V0_31 => 13,
            Dialect::V0_32 => 14,
            Dialect::V0_33 => 15,
        }
    }

    /// Whether block ids are lists of one KV cache group each. Older ones have one flat list.
    pub fn blocks_per_group(self) -> bool {
        self >= Dialect::V0_20
    }

    /// Whether a prefill leases its blocks and reads heartbeats. Older ones keep blocks a fixed time, and a heartbeat
    /// ends their engine.
    pub fn leases(self) -> bool {
        self >= Dialect::V0_22
    }

    /// Whether a handshake asks for a pipeline rank and a tensor rank, and the reply carries the server's clock. An
    /// older listener does not survive such a request, nor a newer one the older request.
    pub fn asks_for_pipeline_rank(self) -> bool {
        self >= Dialect::V0_26
    }

    /// Whether the number in a completion counts the readers of the prefill rank that is told. Older ones write the
    /// tensor parallel size of the decode side.
    pub fn counts_readers(self) -> bool {
        self >= Dialect::V0_29
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vLLM {}", self.vllm_version())
    }
}

#[cfg(feature = "protocol")]
impl From<crate::config::Compat> for Dialect {
    /// The dialect of a configuration's `kv_compat`. vLLM 0.9 to 0.11 had no handshake that kvx speaks: under their
    /// defaults kvx engines speak the newest dialect to each other, on the ports of that time, and refuse a vLLM by
    /// name.
    fn from(compat: crate::config::Compat) -> Self {
        use crate::config::Compat;
        match compat {
            Compat::V0_9 | Compat::V0_11 => Dialect::default(),
            Compat::V0_16 => Dialect::V0_16,
            Compat::V0_20 => Dialect::V0_20,
            Compat::V0_21 => Dialect::V0_21,
            Compat::V0_22 => Dialect::V0_22,
            Compat::V0_26 => Dialect::V0_26,
            Compat::V0_28 => Dialect::V0_28,
            Compat::V0_29 => Dialect::V0_29,
            Compat::V0_30 => Dialect::V0_30,
            Compat::V0_31 => Dialect::V0_31,
            Compat::V0_32 => Dialect::V0_32,
            Compat::V0_33 => Dialect::V0_33,
        }
    }
}
