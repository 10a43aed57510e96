//! The amount of memory that is kept because something may still touch it: counts and log lines.

use std::sync::atomic::{AtomicU64, Ordering};

static BYTES: AtomicU64 = AtomicU64::new(0);

/// Counts memory that is kept from now on.
pub(crate) fn count(len: u64) {
    let total = BYTES.fetch_add(len, Ordering::Relaxed) + len;
    metrics::gauge!("kvx_quarantined_bytes").set(total as f64);
}

/// Counts memory that is never freed, and logs it.
pub(crate) fn note(len: u64, region: &str, why: &str) {
    count(len);
    say(len, region, why);
}

/// Subtracts memory that can be freed after all from the count.
pub(crate) fn discount(len: u64) {
    let total = BYTES.fetch_sub(len, Ordering::Relaxed) - len;
    metrics::gauge!("kvx_quarantined_bytes").set(total as f64);
}

/// Logs that memory is kept.
pub(crate) fn say(len: u64, region: &str, why: &str) {
    tracing::warn!(
        region,
        bytes = len,
        why,
        "memory is quarantined: a peer, a transport or a device may still touch it"
    );
}

/// Returns the number of bytes that this process keeps because remote access to them is not proven
/// to have ended.
pub fn quarantined_bytes() -> u64 {
    BYTES.load(Ordering::Relaxed)
}
