//! Polling for the end of a transfer on the thread of a caller that waits for it.

use std::time::Duration;

use crate::operation::Size;
use crate::sync::pause_between_looks;
use crate::transport::{INLINE_SEGMENTS, Turn};

/// The number of looks between two yields of the core.
const GLANCES: u32 = 16;

/// How a waiting caller polls before it sleeps. A wake-up costs as much as moving a few blocks.
pub(super) struct Looks {
    /// How long the caller polls while nothing moves.
    pub(super) patience: Duration,
    /// The pause after this many looks in a row that found nothing.
    pub(super) between: fn(u32),
}

impl Looks {
    /// Returns how to poll after a turn on the caller's thread, for a transfer of this size.
    pub(super) fn after(size: &Size, turn: &Turn) -> Self {
        if turn.ends_unannounced
            && size.segments <= INLINE_SEGMENTS
            && size.bytes <= INLINE_SEGMENTS << 20
        {
            // Enough for sixteen blocks of a library that takes 30 µs for each, twice over.
            return Looks { patience: Duration::from_millis(1), between: glance };
        }
        // About as long as a few blocks take at 2 GB/s. Polling for longer slows down other threads
        // that move many blocks.
        let expected = Duration::from_nanos(size.bytes / 2).min(Duration::from_micros(100));
        Looks { patience: Duration::from_micros(100) + expected, between: pause_between_looks }
    }
}

/// Pauses between two looks when a library's threads move the bytes; the last `looks` in a row
/// found nothing. Those threads take this core when they need it, so only every sixteenth look
/// yields.
fn glance(looks: u32) {
    if looks.is_multiple_of(GLANCES) {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_transfer_whose_end_nobody_tells_is_looked_for_until_it_can_have_ended() {
        let of = |segments, ends_unannounced| {
            let size = Size { bytes: segments << 12, blocks: segments, segments, description: 0 };
            Looks::after(&size, &Turn { ends_unannounced, ..Turn::did(0) }).patience
        };
        assert!(of(INLINE_SEGMENTS, true) > 4 * of(INLINE_SEGMENTS, false));
        assert_eq!(of(INLINE_SEGMENTS + 1, true), of(INLINE_SEGMENTS + 1, false));
    }
}
