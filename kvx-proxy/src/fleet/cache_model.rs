//! A model of an instance's prefix cache, made from the prompts that this router has sent there.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

/// The tokens in a chunk of a prompt.
pub(crate) const CHUNK_TOKENS: usize = 256;
/// The most chunks of an instance, 3 million tokens, which take up to 1.1 MB.
const MOST_CHUNKS: usize = 12 << 10;

/// Returns how many of a prompt's keys, from the first one on, a cache has. A cache that has one of
/// them must have all before it. The first looks are around `guess`.
pub(crate) fn cached_part<K>(keys: &[K], guess: usize, has: impl Fn(&K) -> bool) -> usize {
    let has_at = |count: usize| keys.get(count - 1).is_some_and(&has);
    // The first `cached` keys are there, and the last of `missing` is not.
    let (mut cached, mut missing) = (0, keys.len() + 1);
    if (1..=keys.len()).contains(&guess) {
        match has_at(guess) {
            true => cached = guess,
            false => missing = guess,
        }
    }
    let mut step = 1;
    while cached + step < missing {
        match has_at(cached + step) {
            true => cached += step,
            false => missing = cached + step,
        }
        step *= 2;
    }
    let unknown = &keys[cached..missing - 1];
    cached + unknown.partition_point(has)
}

/// The chunks of prompts that were sent to an instance most recently.
///
/// A chunk is named by a hash of the prompt up to its end, so a prompt is cached up to the last of
/// its chunks that is here. Whenever a chunk is used, all before it in the prompt are used later.
/// Thus a chunk is never removed before those that follow it.
#[derive(Debug, Default)]
pub(crate) struct CacheModel {
    /// The time of the last use of each chunk.
    used: HashMap<u64, u64, BuildHasherDefault<Unchanged>>,
    /// All uses in their order, of which only the last one of each chunk counts.
    uses: VecDeque<(u64, u64)>,
    now: u64,
}

impl CacheModel {
    /// Returns how many of a prompt's chunks, from the first one on, are cached.
    pub(crate) fn cached(&self, chunks: &[u64]) -> usize {
        cached_part(chunks, 0, |chunk| self.used.contains_key(chunk))
    }

    /// Adds a prompt that is sent to the instance.
    pub(crate) fn add(&mut self, chunks: &[u64]) {
        for chunk in chunks.iter().take(MOST_CHUNKS).rev() {
            self.now += 1;
            self.used.insert(*chunk, self.now);
            self.uses.push_back((*chunk, self.now));
        }
        while self.used.len() > MOST_CHUNKS {
            let Some((chunk, used)) = self.uses.pop_front() else { return };
            if self.used.get(&chunk) == Some(&used) {
                self.used.remove(&chunk);
            }
        }
        if self.uses.len() > 2 * MOST_CHUNKS {
            let CacheModel { used, uses, .. } = self;
            uses.retain(|(chunk, at)| used.get(chunk) == Some(at));
        }
    }
}

/// A hasher for keys that are hashes already, under a key that clients do not know.
#[derive(Debug, Default)]
pub(crate) struct Unchanged(u64);

impl Hasher for Unchanged {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use kvx_testkit::Random;

    use super::*;

    /// Returns a prompt's chunks, the first of which it shares with other prompts.
    fn prompt(shared: u64, number: u64, chunks: u64) -> Vec<u64> {
        (0..chunks).map(|at| if at < shared { at } else { number << 32 | at }).collect()
    }

    #[test]
    fn the_cached_part_is_found_with_few_looks() {
        for len in 0..70usize {
            let keys: Vec<usize> = (0..len).collect();
            for (cached, guess) in
                (0..=len).flat_map(|cached| (0..=len + 1).map(move |guess| (cached, guess)))
            {
                let looks = std::cell::Cell::new(0);
                let has = |key: &usize| {
                    looks.set(looks.get() + 1);
                    *key < cached
                };
                assert_eq!(cached_part(&keys, guess, has), cached, "of {len}, guess {guess}");
                let most = match guess {
                    0 => 2 * (cached + 1).ilog2() + 3,
                    right if right == cached => 2,
                    _ => 2 * (len + 1).ilog2() + 4,
                };
                assert!(looks.get() <= most, "{cached} of {len}, guess {guess}: {looks:?}");
            }
        }
    }

    #[test]
    fn a_prompt_is_cached_up_to_the_first_chunk_that_was_not_sent() {
        let mut model = CacheModel::default();
        assert_eq!(model.cached(&prompt(0, 1, 5)), 0);
        model.add(&prompt(3, 1, 5));
        assert_eq!(model.cached(&prompt(3, 1, 9)), 5);
        assert_eq!(model.cached(&prompt(3, 2, 9)), 3);
        assert_eq!(model.cached(&prompt(0, 2, 9)), 0);
        assert_eq!(model.cached(&[]), 0);
    }

    #[test]
    fn the_least_recently_sent_are_forgotten_from_their_ends_and_memory_is_bounded() {
        let mut model = CacheModel::default();
        let mut random = Random::seeded(1);
        for number in 0..3000 {
            model.add(&prompt(4, 1 + number % 700, 1 + random.below(100) as u64));
            assert!(model.used.len() <= MOST_CHUNKS && model.uses.len() <= 2 * MOST_CHUNKS);
            let asked = prompt(4, 1 + random.below(700) as u64, 100);
            let cached = asked.iter().map(|chunk| model.used.contains_key(chunk));
            assert!(cached.is_sorted_by(|before, after| before >= after), "there is a hole");
        }
        assert_eq!(model.used.len(), MOST_CHUNKS);
        assert_eq!(model.cached(&prompt(4, 1 + 2999 % 700, 1)), 1, "the last one is there");
        model.add(&prompt(0, 999, 3 * MOST_CHUNKS as u64));
        assert_eq!(model.cached(&prompt(0, 999, 3 * MOST_CHUNKS as u64)), MOST_CHUNKS);
    }
}
