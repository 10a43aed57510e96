//! The router inside a process of its user's: what only a program that embeds it sees, and clients that only a library
//! can be.

#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod client;
mod connections;
mod disaggregated;
#[cfg(feature = "tls")]
mod http2;
mod passing;
mod realtime;
mod spans;
#[cfg(feature = "tls")]
mod tls;
mod upstream;

/// Whatever a test waits for, it does not wait longer.
const CUT_OFF: std::time::Duration = std::time::Duration::from_secs(10);

/// Waits for something to go well.
async fn within<T, E: std::fmt::Debug>(waits: impl Future<Output = Result<T, E>>) -> T {
    tokio::time::timeout(CUT_OFF, waits).await.unwrap().unwrap()
}
