//! Tests of the router inside a program: behaviour that only an embedding program sees, and clients
//! that need a library.

#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod client;
mod connections;
mod disaggregated;
#[cfg(feature = "tls")]
mod http2;
#[cfg(feature = "tls")]
mod listeners;
mod passing;
mod realtime;
mod release;
mod spans;
#[cfg(feature = "tls")]
mod tls;
mod upstream;

/// The timeout of every wait in these tests.
const CUT_OFF: std::time::Duration = std::time::Duration::from_secs(10);

/// Waits for a future to succeed.
async fn within<T, E: std::fmt::Debug>(waits: impl Future<Output = Result<T, E>>) -> T {
    tokio::time::timeout(CUT_OFF, waits).await.unwrap().unwrap()
}
