//! The runtime of the protocol: sockets, agents, timers and a thread around the state machines of
//! kvx-vllm.
//!
//! A [`Connector`] serves one engine. It listens, asks, reads, and keeps and renews leases on its
//! own thread, so all of that continues however long a step of the engine takes. An engine with a
//! step loop calls the methods of `KVConnectorBase_V1`. One without takes [`Prefill`] and
//! [`Decode`]. Neither needs a runtime: the futures here run under any executor, and each has a
//! blocking twin. Ranks may run in processes of their own: they join with [`Rank::join`] after the
//! engine has called [`Connector::group`].
//!
//! Modules, lowest layer to highest. Each imports only those before it, and the tasks read or
//! change the state through `shared`:
//!
//! 1. values: `clock`, `slot`, `refusal_log`, `outcomes`, `metrics`, `trace`
//! 2. sockets: `zmtp`, `side`, `mooncake` (`http`, `proof`, `client`, `bootstrap`), `group`
//!    (`stream`)
//! 3. memory: `generations`, `scratch`, `digests`, `host_copies`, `grants`, `peer_regions`,
//!    `caches`, `setup`, `link`
//! 4. workers: `ranks`, `publication`, `saves`, `listening`, and the state of `group` and
//!    `mooncake`
//! 5. the state under one lock, and what all tasks share: `state`, `shared`
//! 6. tasks: `copies`, `requests`, `handshake`, `notify`, `push`, `transfer`, `register`,
//!    `shutdown`, `notifications`, and those of `group` and `mooncake`
//! 7. the thread that starts them: `dispatch`, `thread`
//! 8. the API of the engine: `connector`, `builder`, `rank`, `prefill`, `decode`, `dense`, `probe`,
//!    `release`

mod builder;
mod caches;
pub(crate) mod clock;
mod connector;
mod copies;
mod decode;
mod dense;
mod digests;
mod dispatch;
#[doc(hidden)]
pub mod fuzz;
mod generations;
mod grants;
mod group;
mod handshake;
mod host_copies;
mod link;
mod listening;
mod metrics;
mod mooncake;
mod notifications;
mod notify;
mod outcomes;
mod peer_regions;
mod prefill;
mod probe;
mod publication;
mod push;
mod rank;
mod ranks;
mod refusal_log;
mod register;
mod release;
mod requests;
mod saves;
mod scratch;
mod setup;
mod shared;
mod shutdown;
pub(crate) mod side;
mod slot;
mod state;
#[cfg(test)]
mod tests;
mod thread;
mod trace;
mod transfer;
pub(crate) mod zmtp;

pub use builder::{ConnectorBuilder, Group};
pub use connector::Connector;
pub use decode::{Decode, Fetch, HeldBlocks, LoadError, Loaded};
pub use dense::{DenseBlocks, DenseLease, DenseModel, DensePool, DenseView, DenseViewMut};
pub use group::JoinedRank;
pub use metrics::describe_metrics;
pub use outcomes::Released;
pub use prefill::{Lease, Prefill};
pub use probe::{Probe, probe};
pub use rank::Rank;
pub use release::Releaser;
