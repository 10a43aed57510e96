//! The side channel of NixlConnector, on which engines tell each other where their memory is.
//!
//! [`SideServer`] answers and [`SideClient`] asks. [`kvx_vllm::wire`] decides about the contents.
//! This module has the sockets, the ports and the authentication ([`proof`]).

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
