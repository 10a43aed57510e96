//! Pseudo-random numbers that depend only on the seed.

/// A xorshift64 generator: small, and the same on every machine.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a generator. Neighbouring seeds give different sequences.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        const SPREADS: u64 = 0x9e37_79b9_7f4a_7c15;
        // Zero is a fixed point of xorshift.
        Random(Some(seed.wrapping_mul(SPREADS)).filter(|state| *state != 0).unwrap_or(SPREADS))
    }

    /// Returns a random number.
    pub fn word(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns a random number below `bound`; zero if `bound` is zero.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.word() % bound.max(1) as u64) as usize
    }
}
