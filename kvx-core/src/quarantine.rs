//! Memory that may still be touched by somebody: kept, counted and said, never freed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Memory;

static BYTES: AtomicU64 = AtomicU64::new(0);

/// Memory in quarantine. Dropping it says that the access is proven ended after all.
pub(crate) struct Quarantined(Arc<Memory>);

/// Puts memory into quarantine; says so once.
pub(crate) fn hold(memory: Arc<Memory>, region: &str, why: &str) -> Quarantined {
    let len = memory.len() as u64;
    let total = BYTES.fetch_add(len, Ordering::Relaxed) + len;
    metrics::gauge!("kvx_quarantined_bytes").set(total as f64);
    tracing::warn!(
        region,
        bytes = len,
        why,
        "memory is quarantined: a peer or a transport may still touch it"
    );
    Quarantined(memory)
}

/// Keeps memory in quarantine for the life of the process.
pub fn quarantine_for_ever(memory: Arc<Memory>, region: &str, why: &str) {
    std::mem::forget(hold(memory, region, why));
}

/// Bytes of memory that this process keeps because remote access to it is not proven ended.
pub fn quarantined_bytes() -> u64 {
    BYTES.load(Ordering::Relaxed)
}

impl Drop for Quarantined {
    fn drop(&mut self) {
        let len = self.0.len() as u64;
        let total = BYTES.fetch_sub(len, Ordering::Relaxed) - len;
        metrics::gauge!("kvx_quarantined_bytes").set(total as f64);
    }
}
