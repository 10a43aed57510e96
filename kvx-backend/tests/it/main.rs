//! The integration tests of kvx-backend.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod loader;
