//! The handshake over the side channel.

mod clock;
mod expectation;
mod kvx_request;
mod listener;
mod metadata;
mod payload;
mod request;
mod requester;

pub use clock::ClockReading;
pub use expectation::Expectation;
pub use kvx_request::{KvxChallenge, KvxRequest};
pub use listener::{Listener, Reply};
pub use metadata::{NixlAgentMetadata, PackedMember};
pub use payload::HandshakePayload;
pub use request::HandshakeRequest;
pub use requester::{Handshake, HandshakenPeer};
