//! Numbers that depend on the seed and on nothing else.

/// xorshift64: small, and the same everywhere.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Begun so that neighbouring seeds differ.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        const SPREADS: u64 = 0x9e37_79b9_7f4a_7c15;
        // Nothing but nought follows nought.
        Random(Some(seed.wrapping_mul(SPREADS)).filter(|state| *state != 0).unwrap_or(SPREADS))
    }

    /// Any number.
    pub fn word(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// One below `bound`; nought below nought.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.word() % bound.max(1) as u64) as usize
    }
}
