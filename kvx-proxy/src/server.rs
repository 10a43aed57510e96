//! The protection of listeners, which `kvx serve` shares with the proxy.

pub use crate::serve::keys::Keys;
