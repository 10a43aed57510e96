//! Quarantine of memory that something may still touch: it is kept, counted and reported, but not
//! freed.

use std::sync::Arc;

use crate::{Memory, kept};

/// Memory in quarantine. Dropped once the access is proven to have ended.
pub(crate) struct Quarantined(Arc<Memory>);

/// Puts memory into quarantine; [`warn`] logs it.
pub(crate) fn hold(memory: Arc<Memory>) -> Quarantined {
    kept::count(memory.len() as u64);
    Quarantined(memory)
}

/// Logs that memory is in quarantine.
pub(crate) fn warn(memory: &Memory, region: &str, why: &str) {
    kept::say(memory.len() as u64, region, why);
}

/// Keeps memory in quarantine until the process ends.
pub fn quarantine_for_ever(memory: Arc<Memory>, region: &str, why: &str) {
    warn(&memory, region, why);
    std::mem::forget(hold(memory));
}

impl Drop for Quarantined {
    fn drop(&mut self) {
        kept::discount(self.0.len() as u64);
    }
}
