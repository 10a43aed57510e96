//! How much memory is kept because somebody may still touch it: counted and said.

use std::sync::atomic::{AtomicU64, Ordering};

static BYTES: AtomicU64 = AtomicU64::new(0);

/// Counts memory that is kept from now on.
pub(crate) fn count(len: u64) {
    let total = BYTES.fetch_add(len, Ordering::Relaxed) + len;
    metrics::gauge!("kvx_quarantined_bytes").set(total as f64);
}

/// Counts memory that is never freed, and says so.
pub(crate) fn note(len: u64, region: &str, why: &str) {
    count(len);
    say(len, region, why);
}

/// Takes memory out of the count: it is free after all.
pub(crate) fn discount(len: u64) {
    let total = BYTES.fetch_sub(len, Ordering::Relaxed) - len;
    metrics::gauge!("kvx_quarantined_bytes").set(total as f64);
}

/// Says that memory is kept.
pub(crate) fn say(len: u64, region: &str, why: &str) {
    tracing::warn!(
        region,
        bytes = len,
        why,
        "memory is quarantined: a peer, a transport or a device may still touch it"
    );
}

/// Bytes of memory that this process keeps because remote access to it is not proven ended.
pub fn quarantined_bytes() -> u64 {
    BYTES.load(Ordering::Relaxed)
}
