//! The side channel of NixlConnector: how engines tell each other where their memory is.
//!
//! [`SideServer`] answers, [`SideClient`] asks. What is said is decided in [`kvx_vllm::wire`]; here
//! are the sockets, the ports, and who is let in ([`proof`]).

mod ask;
mod hosts;
mod proof;
mod server;
mod settings;

#[cfg(test)]
mod tests;

#[cfg(test)]
pub(crate) use ask::HandshakeOutcome;
pub(crate) use ask::{PeerKind, ProbeAnswer, SideClient, handshake_failure};
pub(crate) use hosts::tcp_bind;
pub(crate) use server::SideServer;
pub(crate) use settings::SideSettings;
