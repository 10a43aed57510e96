//! Memory that may still be touched by somebody: kept, counted and said, never freed.

use std::sync::Arc;

use crate::{Memory, kept};

/// Memory in quarantine. Dropping it says that the access is proven ended after all.
pub(crate) struct Quarantined(Arc<Memory>);

/// Puts memory into quarantine; [`warn`] says so.
pub(crate) fn hold(memory: Arc<Memory>) -> Quarantined {
    kept::count(memory.len() as u64);
    Quarantined(memory)
}

/// Says that memory is in quarantine.
pub(crate) fn warn(memory: &Memory, region: &str, why: &str) {
    kept::say(memory.len() as u64, region, why);
}

/// Keeps memory in quarantine for the life of the process.
pub fn quarantine_for_ever(memory: Arc<Memory>, region: &str, why: &str) {
    warn(&memory, region, why);
    std::mem::forget(hold(memory));
}

impl Drop for Quarantined {
    fn drop(&mut self) {
        kept::discount(self.0.len() as u64);
    }
}
