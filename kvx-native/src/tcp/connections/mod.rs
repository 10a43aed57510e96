//! Connections, and the lanes that they become after the handshake.

pub(crate) mod connection;
pub(crate) mod lane;
pub(crate) mod requests;
pub(crate) mod serve;
pub(crate) mod table;
