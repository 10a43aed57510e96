#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod admission;
mod backoff;
mod body;
mod check;
mod compare;
mod discovery;
mod endpoint;
mod error;
mod etcd;
mod explain;
mod fleet;
#[doc(hidden)]
pub mod fuzz;
mod last_errors;
mod lines;
mod log;
mod metrics;
mod random;
mod recording;
pub mod registration;
mod relay;
mod release;
pub mod replay;
mod request;
mod resolver;
mod serve;
#[doc(hidden)]
pub mod server;
mod setup;
mod sse;
mod timeline;
mod tls_files;
mod trial;
mod upstream;
mod zmtp;

pub use check::check;
pub use compare::{ComparedAnswer, Comparison, compare};
pub use endpoint::EndpointError;
pub use error::{Error, Result};
pub use explain::{CandidateReport, Explanation, SideReport, explain};
pub use release::{BlockReleaser, KeptBlocks, ReleaseBlocks, ReleaseError, ReleaseFuture};
pub use serve::{Handle, Proxy, serve};
pub use setup::{
    AccessLog, ApiKey, Choice, ClientLimits, Discovery, EventSource, Fallback, Finding,
    FleetSecret, Health, InstanceSetup, KubernetesDiscovery, LabelSelector, Pool, PoolConnector,
    Retries, Role, Setup, Timeouts, parse_duration, parse_size,
};
pub use trial::{FleetTrial, InstanceReport, PairOutcome, PairReport, Transfer, try_fleet};

/// Entry points of the benchmark `choice`.
#[doc(hidden)]
pub mod bench {
    use std::time::Instant;

    use kvx_vllm::events::{BlockHash, BlockStored, CacheEvent};

    use crate::fleet::choice::Requirements;
    use crate::fleet::knowledge::index::EventIndex;
    use crate::fleet::tokens::PromptTokens;

    /// The tokens of a block of instances with events.
    const BLOCK: u32 = 16;

    /// A fleet whose instances are all up.
    #[derive(Debug)]
    pub struct HealthyFleet(crate::fleet::Fleet);

    fn wanted(tokens: u64, prefix: u64, chunks: &[u64]) -> Requirements<'_> {
        Requirements {
            tokens,
            prefix,
            chunks,
            token_ids: None,
            model: None,
            avoid: &[],
            now: Instant::now(),
        }
    }

    /// A prompt whose tokens are known, with the keys of its blocks.
    #[derive(Debug)]
    pub struct TokenizedPrompt(PromptTokens);

    impl TokenizedPrompt {
        /// Computes the keys.
        pub fn new(ids: Vec<u32>) -> Self {
            let prompt = PromptTokens::new(ids);
            prompt.keys(BLOCK);
            TokenizedPrompt(prompt)
        }
    }

    impl HealthyFleet {
        /// Builds the fleet of a configuration.
        pub fn new(setup: &crate::Setup) -> Self {
            let fleet = crate::fleet::Fleet::new(setup, None);
            fleet.all().for_each(|one| _ = one.state.healthy());
            HealthyFleet(fleet)
        }

        /// Publishes for a prefill instance that it has these prompts cached, and nothing else.
        pub fn cache(&self, instance: usize, prompts: &[Vec<u32>]) {
            let mut cache = self.0.prefill[instance].state.cache();
            cache.begin(EventIndex::default(), None);
            for (number, ids) in prompts.iter().enumerate() {
                let blocks = ids.len() as u64 / u64::from(BLOCK);
                let event = BlockStored {
                    hashes: (0..blocks).map(|at| BlockHash((number as u64) << 32 | at)).collect(),
                    tokens: ids.clone(),
                    block_size: BLOCK,
                    ..BlockStored::default()
                };
                cache.apply(&CacheEvent::Stored(Box::new(event)));
            }
        }

        /// Chooses as [`choose_pair`](Self::choose_pair) does, by the prompt's tokens.
        pub fn choose_pair_by_events(&self, prompt: &TokenizedPrompt) -> bool {
            let wanted =
                Requirements { token_ids: Some(&prompt.0), ..wanted(prompt.0.count(), 0, &[]) };
            self.choose(&wanted)
        }

        fn choose(&self, wanted: &Requirements<'_>) -> bool {
            let prefill = self.0.choose_prefill(wanted);
            prefill
                .is_some_and(|prefill| self.0.choose_partner(&prefill.instance, wanted).is_some())
        }

        /// Chooses a prefill instance and a decode instance for it, and returns true if there are
        /// both.
        pub fn choose_pair(&self, tokens: u64, prefix: u64, chunks: &[u64]) -> bool {
            self.choose(&wanted(tokens, prefix, chunks))
        }
    }
}
