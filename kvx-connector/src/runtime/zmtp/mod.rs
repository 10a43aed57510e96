//! The part of ZMTP 3 (versions 3.0 and 3.1, NULL mechanism) that engines use: sockets of ZeroMQ
//! without its library.
//!
//! [`Router`] answers REQ and DEALER sockets, and [`Client`] is one of them. [`kvx_vllm::zmtp`]
//! encodes and decodes the bytes, and bounds everything that a peer sends before it allocates
//! memory: frames in a message, bytes in a message, bytes of all messages of a socket ([`Budget`]).
//! Every wait has a deadline, except for the next message of a connection: when a new one needs a
//! place, one of the address that has most connections is closed.
//!
//! Peers that have authenticated have connections and budgets of their own, so that other peers
//! cannot use them up.

mod client;
mod connection;
mod connections;
mod router;
#[cfg(test)]
mod tests;

pub(crate) use client::{Client, resolve};
pub(crate) use connection::Received;
pub(crate) use connections::{PeerLimits, counted};
pub(crate) use kvx_vllm::zmtp::{Budget, Message, MessageLimits, SocketType};
pub(crate) use router::{ConnectionHandler, Handler, Router, RouterConnection, RouterLimits};
