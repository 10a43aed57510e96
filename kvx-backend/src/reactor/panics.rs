//! Machines that panic on purpose, so that tests can check the consequences.

use std::sync::atomic::{AtomicU64, Ordering};

/// The number of turns until one panics, in any machine of this process; 0 means never.
static LEFT: AtomicU64 = AtomicU64::new(0);
/// The panic message.
pub const SAYS: &str = "a turn panics on purpose";

/// Makes the `number`th turn from now on panic, or none for 0. Returns true if a previously
/// requested panic has not happened yet.
pub fn panic_in(number: u64) -> bool {
    LEFT.swap(number, Ordering::Relaxed) > 0
}

/// Counts the turn that begins, and panics if it is due.
pub(super) fn take_turn() {
    let one_less = |left: u64| left.checked_sub(1);
    if LEFT.load(Ordering::Relaxed) > 0
        && LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less) == Ok(1)
    {
        std::panic::panic_any(SAYS);
    }
}
