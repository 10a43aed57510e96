//! Which vLLM is spoken: what differs on the wire between the versions.

use std::fmt;

/// The vLLM version whose forms are written, and expected of peers.
///
/// A dialect stands for its version and those after it, up to the next one named here.
///
/// ```
/// use kvx_connector::Dialect;
/// assert_eq!(Dialect::default(), Dialect::V0_33);
/// assert!(Dialect::V0_16 < Dialect::V0_20);
/// assert_eq!(Dialect::V0_32.connector_version(), 14);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Dialect {
    /// vLLM 0.16: flat block ids, handshake requests of two fields.
    V0_16,
    /// vLLM 0.20: block ids per KV cache group, handshake requests of two fields.
    V0_20,
    /// vLLM 0.32: leases, pipeline ranks in the handshake, the clock beside the reply.
    V0_32,
    /// vLLM 0.33, the default: registrations have generations.
    #[default]
    V0_33,
}

impl Dialect {
    /// All of them, oldest first.
    pub const ALL: [Dialect; 4] = [Dialect::V0_16, Dialect::V0_20, Dialect::V0_32, Dialect::V0_33];

    /// The version of vLLM as it names itself.
    pub fn vllm_version(self) -> &'static str {
        match self {
            Dialect::V0_16 => "0.16.0",
            Dialect::V0_20 => "0.20.0",
            Dialect::V0_32 => "0.32.0",
            Dialect::V0_33 => "0.33.0",
        }
    }

    /// The version of its NixlConnector.
    pub fn connector_version(self) -> u32 {
        match self {
            Dialect::V0_16 | Dialect::V0_20 => 2,
            Dialect::V0_32 => 14,
            Dialect::V0_33 => 15,
        }
    }

    /// Whether block ids are lists of one KV cache group each. Older ones have one flat list.
    pub fn blocks_per_group(self) -> bool {
        self >= Dialect::V0_20
    }

    /// Whether a handshake asks for a pipeline rank and a tensor rank, and the reply carries the server's clock.
    /// Older ones ask for a tensor rank only, and their listener does not survive the newer request.
    pub fn asks_for_pipeline_rank(self) -> bool {
        self >= Dialect::V0_32
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vLLM {}", self.vllm_version())
    }
}

#[cfg(feature = "protocol")]
impl TryFrom<kvx_config::Compat> for Dialect {
    type Error = kvx_core::Error;

    /// The dialect of a configuration's `kv_compat`.
    ///
    /// # Errors
    ///
    /// vLLM 0.9 and 0.11 have no handshake that carries a compatibility hash: kvx takes their defaults but does not
    /// speak with them.
    fn try_from(compat: kvx_config::Compat) -> Result<Self, Self::Error> {
        use kvx_config::Compat;
        match compat {
            Compat::V0_16 => Ok(Dialect::V0_16),
            Compat::V0_20 => Ok(Dialect::V0_20),
            Compat::V0_32 => Ok(Dialect::V0_32),
            Compat::V0_33 => Ok(Dialect::V0_33),
            old => Err(kvx_core::Error::new(
                kvx_core::Kind::Unsupported,
                format!(
                    "kvx speaks with vLLM 0.16 and later, not with {old}: upgrade the peer, or set kv_compat to \
                     its version"
                ),
            )),
        }
    }
}
