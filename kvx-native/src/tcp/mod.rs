//! TCP: between hosts, and between anything that shares no memory.

mod address;
mod auth;
mod away;
mod buffers;
mod chunk;
mod config;
mod conn;
mod conns;
mod ending;
mod error;
mod failing;
mod fetch;
mod frames;
pub(crate) mod fuzz;
mod hung;
mod link;
mod linking;
mod listener;
mod memory;
mod owning;
mod payload;
mod peers;
mod progress;
mod seal;
mod serve;
mod socket;
mod staging;
mod streams;
mod transport;
mod wake;

pub use transport::Tcp;
