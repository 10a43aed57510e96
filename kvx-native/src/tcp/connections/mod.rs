//! Connections, and the lanes that they are once both ends know each other.

pub(crate) mod connection;
pub(crate) mod lane;
pub(crate) mod requests;
pub(crate) mod serve;
pub(crate) mod table;
