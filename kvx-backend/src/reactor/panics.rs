//! Machines that panic on purpose, for tests of what becomes of the rest.

use std::sync::atomic::{AtomicU64, Ordering};

/// Turns until one panics, by whichever machine of this process it is; 0: none will.
static LEFT: AtomicU64 = AtomicU64::new(0);
/// What it says.
pub const SAYS: &str = "a turn panics on purpose";

/// Has the turn panic that is the `number`th from now on. With 0 none does. Says whether the one
/// before is still to come.
pub fn panic_in(number: u64) -> bool {
    LEFT.swap(number, Ordering::Relaxed) > 0
}

/// A turn begins.
pub(super) fn take_turn() {
    let one_less = |left: u64| left.checked_sub(1);
    if LEFT.load(Ordering::Relaxed) > 0
        && LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less) == Ok(1)
    {
        std::panic::panic_any(SAYS);
    }
}
