//! How much is posted at once: less, while messages go beside transfers.
//!
//! Over shared memory a post copies before it returns, and a message waits for its end. UCX copies 512 KiB at a time, so
//! that shorter slices cost throughput.

use std::time::{Duration, Instant};

/// The most bytes of a piece, and of a slice of a transfer that has several.
pub(crate) const LONG: u64 = 512 << 10;
/// The same while messages flow. 64 KiB gain nothing over it.
pub(crate) const SHORT: u64 = 128 << 10;
/// The most bytes of a transfer that may be one slice.
const WHOLE: u64 = 1 << 20;
/// A message within this time of the last one: they flow, until none has come for as long. One now and then costs no throughput.
const FLOWS_WITHIN: Duration = Duration::from_millis(20);

/// Whether messages flow beside slices that copy within their post. None goes beside those of a transfer that its poster
/// awaits before it speaks.
#[derive(Default)]
pub(crate) struct Slicing {
    /// The last slice has copied, and its transfer goes on, unless it has failed since.
    copies: bool,
    /// When a message last went after such a one.
    told: Option<Instant>,
    /// Another had gone not long before.
    flows: bool,
}

impl Slicing {
    /// A slice was posted. `ended`: it has within the post. `last`: its transfer has no other after it.
    pub(crate) fn posted(&mut self, ended: bool, last: bool) {
        self.copies = ended && !last;
    }

    /// A message was sent.
    pub(crate) fn told(&mut self) {
        if self.copies {
            self.flows = self.is_recent();
            self.told = Some(Instant::now());
        }
    }

    fn is_recent(&self) -> bool {
        self.told.is_some_and(|told| told.elapsed() < FLOWS_WITHIN)
    }

    /// The most bytes of the next slice of a transfer of so many bytes.
    pub(crate) fn most(&mut self, transfer: u64) -> u64 {
        self.flows = self.flows && self.is_recent();
        match () {
            () if self.flows && transfer > SHORT => SHORT,
            () if transfer <= WHOLE => WHOLE,
            () => LONG,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
