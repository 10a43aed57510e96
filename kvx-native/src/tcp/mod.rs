//! TCP: between hosts, and between anything that shares no memory.

mod address;
mod auth;
mod chunk;
mod config;
mod conn;
mod ending;
mod error;
mod fetch;
mod frames;
mod input;
mod link;
mod linking;
mod listener;
mod memory;
mod output;
mod owning;
mod payload;
mod peers;
mod progress;
mod serve;
mod socket;
mod staging;
mod streams;
mod transport;
mod wake;

pub use transport::Tcp;
