//! The part of ZMTP 3 that engines speak to each other: sockets of ZeroMQ without its library.
//!
//! NULL mechanism; [`Router`] answers REQ and DEALER sockets, [`Client`] is one of them. Versions
//! 3.0 and 3.1. [`kvx_vllm::zmtp`] is the protocol as bytes; everything that a peer sends is bounded there
//! before memory is taken for it: frames in a message, bytes in a message, bytes of all messages of
//! a socket ([`Budget`]). Every wait has a deadline, but for the next message of a connection: the
//! one that is silent longest makes room for new ones.

mod client;
mod connection;
mod router;
#[cfg(test)]
mod tests;

pub(crate) use client::{Client, resolve};
pub(crate) use connection::Received;
pub(crate) use kvx_vllm::zmtp::{Budget, Message, MessageLimits, SocketType};
pub(crate) use router::{ConnectionHandler, Handler, Router, RouterConnection, RouterLimits};
