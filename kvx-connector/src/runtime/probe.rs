//! A look at somebody's side channel.

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
    /// The hash that both engines must agree on.
    pub hash: CompatibilityHash,
    /// The worker's memory, as far as it was told. An error: it cannot be read as the version's, or
    /// nothing was told.
    pub metadata: Result<NixlAgentMetadata>,
    /// Why a kvx tells nothing.
    pub refusal: Option<String>,
    /// Whether a kvx answers, and has proved to have the same secret if there is one. An error: it
    /// is a kvx, and only one end has a secret.
    pub kvx: Result<bool>,
    /// How long the first answer took.
    pub round_trip: Duration,
}

/// Asks the side channel at an address for one worker, in the form of `version`: vLLM's listener
/// does not survive a question in another version's form, or for a worker that does not exist.
/// Blocks for at most `limit` for each of connection and answers.
///
/// # Errors
///
/// Nobody answers, or something else than a side channel does.
pub fn probe(
    address: &Address,
    rank: WorkerRank,
    version: Version,
    secret: Option<Secret>,
    limit: Duration,
) -> Result<Probe> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Error::os("no runtime for the side channel", error))?;
    let asker = SideClient::new(Clock::new(), secret, SideChannels::OfEngine).with_limit(limit);
    let looked = runtime.block_on(asker.look(address, rank, version));
    // A name that is still being resolved is not waited for.
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
