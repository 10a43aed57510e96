//! What travels between engines, byte for byte as vLLM writes it.
//!
//! - The side channel: [`HandshakeRequest`], [`HandshakePayload`] and [`NixlAgentMetadata`]; [`Listener`] answers and
//!   [`Handshake`] asks, both without a socket.
//! - [`CompatibilityFactors`] give the [`CompatibilityHash`] that both ends compare first.
//! - [`EngineNotification`]s accompany the data.
//! - [`mooncake`]: the MooncakeConnector's own two messages.
//! - [`nixl`]: the metadata of NIXL's agents, and long notifications of those with the backend KVX.
//!
//! Every decoder takes bytes from anyone: sizes, counts and depth are bounded before memory is taken, and nothing
//! panics. What was read is written again with the same bytes, unknown keys included.

mod compatibility;
mod explain;
#[doc(hidden)]
pub mod fuzz;
mod handshake;
pub mod mooncake;
pub mod nixl;
mod notification;
mod push;
mod python_json;
mod record;

pub use compatibility::{CompatibilityFactors, CompatibilityHash, SpeculativeFactors};
pub use explain::{Difference, explain, explain_by_one};
pub use handshake::{
    ClockReading, Expectation, Handshake, HandshakePayload, HandshakeRequest, HandshakenPeer,
    KvxChallenge, KvxRequest, Listener, NixlAgentMetadata, PackedMember, Reply,
};
pub use notification::EngineNotification;
pub use push::{PushGrant, PushRegistration};
