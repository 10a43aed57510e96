//! A client of etcd's JSON gateway (`/v3/…`), for registrations.
//!
//! It needs no gRPC: requests and answers are JSON over HTTP/1.1. Numbers of 64 bits are strings
//! there, keys and values base64, and zeros and `false` are left out.

mod base64;
mod client;
mod messages;
mod watch;

pub(crate) use client::{CallError, Client};
pub(crate) use messages::KeyValue;
pub(crate) use watch::{Change, NOTICED_AFTER, Watch, WatchEnd};

/// Parses the bytes of an answer and of a watch's line.
pub(crate) fn fuzz(bytes: &[u8]) {
    messages::fuzz(bytes);
}
