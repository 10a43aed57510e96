//! The versions of vLLM and the differences between them.

use std::fmt;

/// A version of vLLM (`kv_compat` of `kv_connector_extra_config`). It selects the defaults and
/// rules of a configuration, and the message forms that kvx writes and expects from peers.
///
/// A variant stands for the releases that its documentation names. No variant covers other
/// releases, such as 0.12 to 0.15 and 0.18 to 0.19.
///
/// ```
/// # mod kvx { pub mod connector { pub use kvx_vllm::Version; } }
/// use kvx::connector::Version;
/// assert_eq!(Version::default(), Version::V0_33);
/// assert!(Version::V0_16 < Version::V0_20);
/// assert_eq!(Version::V0_32.connector_version(), 14);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// vLLM 0.9 and 0.10: a side channel port for each worker. Defaults only (see
    /// [`spoken`](Self::spoken)).
    V0_9,
    /// vLLM 0.11.0: as 0.9. kvx also speaks its MooncakeConnector protocol, from before vLLM 0.16.
    V0_11,
    /// vLLM 0.16 and 0.17: flat block ids, handshake requests of two fields, blocks kept 480 s.
    V0_16,
    /// vLLM 0.20: block ids per KV cache group; a failed load fails the request.
    V0_20,
    /// vLLM 0.21: handshakes report the kernel blocks in a logical block, and answers the number of
    /// tokens; the prefill side may read from the decode side.
    V0_21,
    /// vLLM 0.22 to 0.25: leases and heartbeats.
    V0_22,
    /// vLLM 0.26 and 0.27: handshake requests of three fields, replies with the server's clock.
    V0_26,
    /// vLLM 0.28: the transfer mode and speculative decoding are hashed.
    V0_28,
    /// vLLM 0.29: completions count readers; strides; new names of layouts.
    V0_29,
    /// vLLM 0.30: block counts, groups, names and memory of each region.
    V0_30,
    /// vLLM 0.31: members of regions, packed layouts.
    V0_31,
    /// vLLM 0.32: pages of per-layer embeddings; four fewer fields in `KVTransferConfig`.
    V0_32,
    /// vLLM 0.33, the default: registrations have generations.
    #[default]
    V0_33,
}

impl Version {
    /// All versions, oldest first.
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

    /// Returns the version as a configuration writes it: `"0.33"`.
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

/// Configuration: the settings that a version reads, and their defaults.
#[cfg(feature = "config")]
impl Version {
    /// Returns whether each worker of an engine has its own side channel port, rather than one port
    /// for all.
    pub(crate) fn has_port_per_worker(self) -> bool {
        self <= Version::V0_11
    }

    /// Returns whether the workers of a MooncakeConnector register with a bootstrap server.
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

/// Protocol: the messages between engines of a version.
#[cfg(feature = "params")]
impl Version {
    /// The versions whose NixlConnector kvx speaks, oldest first.
    pub const SPOKEN: [Version; 11] = {
        let [_v0_9, _v0_11, spoken @ ..] = Version::ALL;
        spoken
    };

    /// Returns the version whose NixlConnector protocol engines of this version speak. kvx does not
    /// speak the handshake of vLLM 0.9 to 0.11. Under those defaults, kvx engines speak the newest
    /// protocol with each other on the ports of that version, and reject a vLLM peer with an error
    /// that names its version.
    pub fn spoken(self) -> Self {
        if Version::SPOKEN.contains(&self) { self } else { Version::default() }
    }

    /// Returns whether engines of this version speak the protocol as of `first` or later.
    pub(crate) fn speaks(self, first: Version) -> bool {
        self.spoken() >= first
    }

    /// Returns vLLM's own version number. If a variant covers several releases, it is the oldest
    /// that kvx recommends.
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

    /// Returns the version number of the NixlConnector.
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

    /// Returns whether block ids have one list for each KV cache group. Older versions have one
    /// flat list.
    pub fn blocks_per_group(self) -> bool {
        self.speaks(Version::V0_20)
    }

    /// Returns whether a prefill engine leases its blocks and reads heartbeats. Older versions keep
    /// blocks for a fixed time, and a heartbeat ends their engine.
    pub fn leases(self) -> bool {
        self.speaks(Version::V0_22)
    }

    /// Returns whether a handshake asks for a pipeline rank and a tensor rank, and the reply
    /// carries the server's clock. Such a request ends an older listener, and the older request
    /// ends a newer listener.
    pub fn asks_for_pipeline_rank(self) -> bool {
        self.speaks(Version::V0_26)
    }

    /// Returns whether the number in a completion counts the readers of the prefill rank that is
    /// notified. Older versions write the tensor-parallel size of the decode side.
    pub fn counts_readers(self) -> bool {
        self.speaks(Version::V0_29)
    }
}

/// Protocol: the input of the hash, and the keys of metadata.
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
