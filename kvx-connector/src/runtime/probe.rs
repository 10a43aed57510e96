//! Asks a side channel for one worker of its engine.

use std::time::Duration;

use kvx_core::{Error, Result, Secret};

use super::clock::Clock;
use super::side::{PeerKind, ProbeAnswer, SideClient};
use kvx_vllm::Version;
use kvx_vllm::engine::{Address, SideChannels, WorkerRank};
use kvx_vllm::wire::{CompatibilityHash, HandshakePayload, NixlAgentMetadata};

/// The answer of a side channel for one worker of its engine.
#[derive(Clone, Debug)]
pub struct Probe {
    /// The hash that must be the same on both engines.
    pub hash: CompatibilityHash,
    /// The worker's memory, as far as the peer discloses it. An error if the answer does not fit
    /// the version or is empty.
    pub metadata: Result<NixlAgentMetadata>,
    /// The reason why a kvx engine sent no metadata, if it did not.
    pub refusal: Option<String>,
    /// True if the peer is a kvx engine that has proved to have the same secret, if there is one.
    /// An error if only one of the two ends has a secret.
    pub kvx: Result<bool>,
    /// The time until the first answer.
    pub round_trip: Duration,
}

/// Asks the side channel at an address for one worker, in the form of `version`.
///
/// Choose both with care: vLLM's listener ends on a question in another version's form, or for a
/// worker that does not exist. The call blocks for at most `limit` for the connection and for each
/// answer.
///
/// # Errors
/// - `PeerLost`, `TimedOut`: nobody answers.
/// - `Malformed`, `Incompatible`, `Unsupported`: the peer is not a side channel, or one of another
///   version.
/// - `Authentication`: the peer has another secret.
pub fn probe(
    address: &Address,
    rank: WorkerRank,
    version: Version,
    secret: Option<Secret>,
    limit: Duration,
) -> Result<Probe> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime
        .map_err(|error| Error::os("could not start a runtime for the side channel", error))?;
    let asker = SideClient::new(Clock::new(), secret, SideChannels::OfEngine).with_limit(limit);
    let looked = runtime.block_on(asker.look(address, rank, version));
    // Do not wait for a name that is still being resolved.
    runtime.shutdown_background();
    let ProbeAnswer { payload, standing, round_trip } = looked?;
    let HandshakePayload { compatibility_hash, agent_metadata_bytes, refusal, .. } = payload;
    Ok(Probe {
        hash: compatibility_hash,
        metadata: NixlAgentMetadata::decode(&agent_metadata_bytes, version),
        refusal,
        kvx: standing.map(|standing| standing != PeerKind::Foreign),
        round_trip,
    })
}
