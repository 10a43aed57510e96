//! The messages between engines, byte for byte as vLLM writes them.
//!
//! - The side channel: [`HandshakeRequest`], [`HandshakePayload`] and [`NixlAgentMetadata`].
//!   [`Listener`] is the answering side and [`Handshake`] the requesting side, both without a
//!   socket.
//! - [`CompatibilityFactors`] give the [`CompatibilityHash`] that both ends compare first.
//! - [`EngineNotification`]s accompany the data.
//! - [`mooncake`]: the two messages of the MooncakeConnector.
//! - [`nixl`]: the metadata of NIXL's agents, and long notifications of agents with the backend
//!   KVX.
//!
//! Every decoder accepts bytes from any sender. It checks sizes, counts and depth before it
//! allocates memory, and never panics. A decoded message encodes to the same bytes, with unknown
//! keys.

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
