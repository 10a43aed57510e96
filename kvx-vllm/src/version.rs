//! The versions of vLLM, and what differs between them.

use std::fmt;

/// A version of vLLM: whose defaults and rules a configuration follows (`kv_compat` of `kv_connector_extra_config`), and
/// whose forms are written, and expected of peers.
///
/// A version stands for the releases that its documentation names. Others, such as 0.12 to 0.15 and 0.18 to 0.19, have
/// none.
///
/// ```
/// use kvx_vllm::Version;
/// assert_eq!(Version::default(), Version::V0_33);
/// assert!(Version::V0_16 < Version::V0_20);
/// assert_eq!(Version::V0_32.connector_version(), 14);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// vLLM 0.9 and 0.10: a side channel port for each worker. Defaults only ([`spoken`](Self::spoken)).
    V0_9,
    /// vLLM 0.11.0, likewise. With the MooncakeConnector, its protocol before vLLM 0.16, which kvx does speak.
    V0_11,
    /// vLLM 0.16 and 0.17: flat block ids, handshake requests of two fields, blocks kept 480 s.
    V0_16,
    /// vLLM 0.20: block ids per KV cache group; a failed load fails the request.
    V0_20,
    /// vLLM 0.21: kernel blocks in a logical block, tokens in the answer; prefill may read back from decode.
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
    /// vLLM 0.32: pages of per-layer embeddings; four fields of `KVTransferConfig` fewer.
    V0_32,
    /// vLLM 0.33, the default: registrations have generations.
    #[default]
    V0_33,
}

impl Version {
    /// All of them, oldest first.
    pub const ALL: [Version; 13] = [
        Version::V0_9,
        Version::V0_11,
        Version::V0_16,
        Version::V0_20,
        Version::V0_21,
        Version::V0_22,
        Version::V0_26,
        Version::V0_28,
        Version::V0_29,
        Version::V0_30,
        Version::V0_31,
        Version::V0_32,
        Version::V0_33,
    ];

    /// Returns the name that is written in a configuration: `"0.33"`.
    pub fn as_str(self) -> &'static str {
        match self {
            Version::V0_9 => "0.9",
            Version::V0_11 => "0.11",
            Version::V0_16 => "0.16",
            Version::V0_20 => "0.20",
            Version::V0_21 => "0.21",
            Version::V0_22 => "0.22",
            Version::V0_26 => "0.26",
            Version::V0_28 => "0.28",
            Version::V0_29 => "0.29",
            Version::V0_30 => "0.30",
            Version::V0_31 => "0.31",
            Version::V0_32 => "0.32",
            Version::V0_33 => "0.33",
        }
    }
}

/// Configuration: what a version reads, and its defaults.
#[cfg(feature = "config")]
impl Version {
    /// Returns whether each worker of an engine has a side channel port of its own, rather than one for all of them.
    pub(crate) fn has_port_per_worker(self) -> bool {
        self <= Version::V0_11
    }

    /// Returns whether the workers of a MooncakeConnector meet at a bootstrap server.
    pub(crate) fn has_bootstrap_server(self) -> bool {
        self >= Version::V0_16
    }

    /// Returns whether `VLLM_KV_CACHE_LAYOUT` may name layouts other than NHD and HND.
    pub(crate) fn reads_layout_names(self) -> bool {
        self >= Version::V0_29
    }

    /// Returns whether `kv_role` `kv_both` is deprecated.
    pub(crate) fn deprecates_kv_both(self) -> bool {
        self >= Version::V0_32
    }
}

/// Protocol: what engines of a version say to each other.
#[cfg(feature = "params")]
impl Version {
    /// Those whose NixlConnector kvx speaks, oldest first.
    pub const SPOKEN: [Version; 11] = [
        Version::V0_16,
        Version::V0_20,
        Version::V0_21,
        Version::V0_22,
        Version::V0_26,
        Version::V0_28,
        Version::V0_29,
        Version::V0_30,
        Version::V0_31,
        Version::V0_32,
        Version::V0_33,
    ];

    /// Returns the version whose NixlConnector engines speak. vLLM 0.9 to 0.11 had no handshake that kvx speaks: under
    /// their defaults kvx engines speak the newest one to each other, on the ports of that time, and refuse a vLLM by
    /// name.
    pub fn spoken(self) -> Self {
        if Version::SPOKEN.contains(&self) { self } else { Version::default() }
    }

    /// Returns whether engines of this version speak as those since `first` do.
    pub(crate) fn speaks(self, first: Version) -> bool {
        self.spoken() >= first
    }

    /// Returns the version of vLLM as it names itself: of several, the first that is to be recommended.
    pub fn vllm_version(self) -> &'static str {
        match self.spoken() {
            Version::V0_16 => "0.16.0",
            Version::V0_20 => "0.20.0",
            Version::V0_21 => "0.21.0",
            Version::V0_22 => "0.22.1",
            Version::V0_26 => "0.26.0",
            Version::V0_28 => "0.28.0",
            Version::V0_29 => "0.29.0",
            Version::V0_30 => "0.30.0",
            Version::V0_31 => "0.31.0",
            Version::V0_32 => "0.32.0",
            Version::V0_33 | Version::V0_9 | Version::V0_11 => "0.33.0",
        }
    }

    /// Returns the version of its NixlConnector.
    pub fn connector_version(self) -> u32 {
        match self.spoken() {
            Version::V0_16 | Version::V0_20 => 2,
            Version::V0_21 => 3,
            Version::V0_22 => 4,
            Version::V0_26 => 5,
            Version::V0_28 => 7,
            Version::V0_29 => 9,
            Version::V0_30 => 11,
            Version::V0_31 => 13,
            Version::V0_32 => 14,
            Version::V0_33 | Version::V0_9 | Version::V0_11 => 15,
        }
    }

    /// Returns whether block ids are lists of one KV cache group each. Older versions have one flat list.
    pub fn blocks_per_group(self) -> bool {
        self.speaks(Version::V0_20)
    }

    /// Returns whether a prefill leases its blocks and reads heartbeats. Older versions keep blocks a fixed time, and a
    /// heartbeat ends their engine.
    pub fn leases(self) -> bool {
        self.speaks(Version::V0_22)
    }

    /// Returns whether a handshake asks for a pipeline rank and a tensor rank, and the reply carries the server's clock.
    /// An older listener does not survive such a request, nor a newer one the older request.
    pub fn asks_for_pipeline_rank(self) -> bool {
        self.speaks(Version::V0_26)
    }

    /// Returns whether the number in a completion counts the readers of the prefill rank that is notified. Older
    /// versions write the tensor-parallel size of the decode side.
    pub fn counts_readers(self) -> bool {
        self.speaks(Version::V0_29)
    }
}

/// Protocol: what is hashed, and what metadata has keys for.
#[cfg(feature = "protocol")]
impl Version {
    /// Returns whether the compatibility hash covers the hybrid cache manager.
    pub(crate) fn hashes_cache_manager(self) -> bool {
        self.speaks(Version::V0_20)
    }

    /// Returns whether the compatibility hash covers the transfer mode and speculative decoding.
    pub(crate) fn hashes_transfer_mode(self) -> bool {
        self.speaks(Version::V0_28)
    }

    /// Returns whether the compatibility hash covers blocks that span layers.
    pub(crate) fn hashes_cross_layers(self) -> bool {
        !self.speaks(Version::V0_29)
    }

    /// Returns whether metadata names layouts by their axes. Older versions know NHD and HND.
    pub(crate) fn names_layouts_by_axes(self) -> bool {
        self.speaks(Version::V0_29)
    }

    /// Returns whether metadata describes each region: its blocks, group, name and memory.
    pub(crate) fn describes_regions(self) -> bool {
        self.speaks(Version::V0_30)
    }

    /// Returns whether metadata lists the layers of regions that several share.
    pub(crate) fn lists_region_members(self) -> bool {
        self.speaks(Version::V0_31)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vLLM {}", self.as_str())
    }
}
