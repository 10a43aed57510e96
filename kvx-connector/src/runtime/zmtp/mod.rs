//! The part of ZMTP 3 that engines speak to each other: sockets of ZeroMQ without its library.
//!
//! NULL mechanism; [`Router`] answers REQ and DEALER sockets, [`Client`] is one of them. Versions
//! 3.0 and 3.1. [`codec`] is the protocol as bytes; everything that a peer sends is bounded there
//! before memory is taken for it: frames in a message, bytes in a message, bytes of all messages of
//! a socket ([`Budget`]). Every wait has a deadline, but for the next message of a connection: the
//! one that is silent longest makes room for new ones.

mod budget;
mod client;
pub(crate) mod codec;
mod connection;
mod router;
#[cfg(test)]
mod tests;

pub(crate) use budget::Budget;
pub(crate) use client::{Client, resolve};
pub(crate) use codec::{MessageLimits, SocketType};
pub(crate) use connection::{Message, Received};
pub(crate) use router::{ConnectionHandler, Handler, Router, RouterConnection, RouterLimits};
