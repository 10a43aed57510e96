#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod admission;
mod body;
mod check;
mod compare;
mod endpoint;
mod error;
mod explain;
mod fleet;
#[doc(hidden)]
pub mod fuzz;
mod log;
mod metrics;
mod random;
mod recording;
mod relay;
mod release;
pub mod replay;
mod request;
mod serve;
#[doc(hidden)]
pub mod server;
mod setup;
mod sse;
mod upstream;

pub use check::check;
pub use compare::{ComparedAnswer, Comparison, compare};
pub use endpoint::EndpointError;
pub use error::{Error, Result};
pub use explain::{CandidateReport, Explanation, SideReport, explain};
pub use release::{BlockReleaser, KeptBlocks, ReleaseBlocks, ReleaseError, ReleaseFuture};
pub use serve::{Handle, Proxy, serve};
pub use setup::{
    AccessLog, ApiKey, Choice, ClientLimits, Fallback, Finding, FleetSecret, Health, InstanceSetup,
    Pool, PoolConnector, Retries, Setup, Timeouts, parse_duration, parse_size,
};

/// Entry points of the benchmark `choice`.
#[doc(hidden)]
pub mod bench {
    use std::time::Instant;

    use crate::fleet::choice::Requirements;

    /// A fleet whose instances are all up.
    #[derive(Debug)]
    pub struct HealthyFleet(crate::fleet::Fleet);

    fn wanted(tokens: u64, prefix: u64, chunks: &[u64]) -> Requirements<'_> {
        Requirements { tokens, prefix, chunks, model: None, avoid: &[], now: Instant::now() }
    }

    impl HealthyFleet {
        /// Builds the fleet of a configuration.
        pub fn new(setup: &crate::Setup) -> Self {
            let fleet = crate::fleet::Fleet::new(setup, None);
            fleet.all().for_each(|one| _ = one.state.healthy());
            HealthyFleet(fleet)
        }

        /// Chooses a prefill instance and a decode instance for it, and returns true if there are
        /// both.
        pub fn choose_pair(&self, tokens: u64, prefix: u64, chunks: &[u64]) -> bool {
            let wanted = wanted(tokens, prefix, chunks);
            let prefill = self.0.choose_prefill(&wanted);
            prefill
                .is_some_and(|prefill| self.0.choose_partner(&prefill.instance, &wanted).is_some())
        }
    }
}
