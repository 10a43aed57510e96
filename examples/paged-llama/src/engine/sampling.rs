//! Samples tokens from logits.

use std::cmp::Ordering;

/// The sampling parameters of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// The temperature; 0 always samples the likeliest token.
    pub temperature: f32,
    /// Samples only from the likeliest tokens whose probabilities together reach this value.
    pub top_p: f32,
    /// Samples only from this many likeliest tokens; 0 for all.
    pub top_k: usize,
    /// Samples only from tokens with at least this fraction of the likeliest token's probability.
    pub min_p: f32,
    /// Subtracted from a token's logit for each of its occurrences in the answer.
    pub frequency_penalty: f32,
    /// Subtracted from the logit of each token in the answer.
    pub presence_penalty: f32,
    /// Divides positive logits of tokens in the prompt or the answer, and multiplies negative ones.
    pub repetition_penalty: f32,
    /// The seed: the same seed and prompt give the same tokens.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Returns parameters that always sample the likeliest token.
    pub fn greedy() -> Self {
        Sampling { temperature: 0.0, ..Sampling::default() }
    }

    /// Samples the token after `prompt` and `given`, never one of `banned`. The result depends on
    /// nothing else: neither on the batch nor on whether the request was preempted.
    pub(crate) fn choose(
        &self,
        logits: &[f32],
        prompt: &[u32],
        given: &[u32],
        banned: &[u32],
    ) -> u32 {
        let mut logits = logits.to_vec();
        self.penalise(&mut logits, prompt, given);
        for token in banned {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        if self.temperature < 1e-5 {
            return likeliest(&logits);
        }
        let mut random =
            Random(self.seed ^ (given.len() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let candidates = self.candidates(&logits);
        let total: f64 = candidates.iter().map(|(_, weight)| weight).sum();
        let mut left = random.below_one() * total;
        for (token, weight) in &candidates {
            left -= weight;
            if left < 0.0 {
                return *token;
            }
        }
        candidates.last().map_or(0, |(token, _)| *token)
    }

    fn penalise(&self, logits: &mut [f32], prompt: &[u32], given: &[u32]) {
        if self.repetition_penalty != 1.0 {
            let mut seen: Vec<u32> = prompt.iter().chain(given).copied().collect();
            seen.sort_unstable();
            seen.dedup();
            for token in seen {
                if let Some(logit) = logits.get_mut(token as usize) {
                    let divides = *logit > 0.0;
                    *logit = if divides {
                        *logit / self.repetition_penalty
                    } else {
                        *logit * self.repetition_penalty
                    };
                }
            }
        }
        if self.frequency_penalty != 0.0 || self.presence_penalty != 0.0 {
            let mut given = given.to_vec();
            given.sort_unstable();
            for run in given.chunk_by(|a, b| a == b) {
                if let Some(logit) = logits.get_mut(run[0] as usize) {
                    *logit -= self.frequency_penalty * run.len() as f32 + self.presence_penalty;
                }
            }
        }
    }

    /// Returns the tokens that may be sampled with their weights, likeliest first.
    fn candidates(&self, logits: &[f32]) -> Vec<(u32, f64)> {
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |logit: f32| f64::from((logit - highest) / self.temperature).exp();
        let mut all: Vec<_> =
            (0..).zip(logits).map(|(token, logit)| (token, weight(*logit))).collect();
        all.sort_by(|a: &(u32, f64), b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if self.top_k > 0 {
            all.truncate(self.top_k);
        }
        // The likeliest token has the weight one.
        all.retain(|(_, weight)| *weight > 0.0 && *weight >= f64::from(self.min_p));
        if self.top_p < 1.0 {
            let enough = f64::from(self.top_p) * all.iter().map(|(_, weight)| weight).sum::<f64>();
            let mut sum = 0.0;
            let count = all.iter().take_while(|(_, weight)| {
                let wanted = sum < enough;
                sum += weight;
                wanted
            });
            let count = count.count().max(1);
            all.truncate(count);
        }
        all
    }
}

fn likeliest(logits: &[f32]) -> u32 {
    let by_logit = |a: &(u32, &f32), b: &(u32, &f32)| a.1.total_cmp(b.1).then(b.0.cmp(&a.0));
    (0..).zip(logits).max_by(by_logit).map_or(0, |(token, _)| token)
}

/// A random number generator: splitmix64.
struct Random(u64);

impl Random {
    fn below_one(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A token's log probability, and those of the likeliest tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprob {
    /// The token's log probability.
    pub logprob: f32,
    /// The likeliest tokens with their log probabilities, likeliest first.
    pub top: Vec<(u32, f32)>,
}

impl Logprob {
    /// Returns the log probability, or with `raw` the logit, of `token` and of the `top` likeliest
    /// tokens.
    pub(crate) fn of(logits: &[f32], token: u32, top: usize, raw: bool) -> Self {
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|logit| f64::from(logit - highest).exp()).sum();
        let normal = f64::from(highest) + sum.ln();
        let logprob = |logit: f32| if raw { logit } else { (f64::from(logit) - normal) as f32 };
        let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        let by_logit = |a: &(u32, f32), b: &(u32, f32)| -> Ordering {
            b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
        };
        let top = top.min(all.len());
        if top > 0 && top < all.len() {
            all.select_nth_unstable_by(top - 1, by_logit);
        }
        all.truncate(top);
        all.sort_by(by_logit);
        let top = all.into_iter().map(|(token, logit)| (token, logprob(logit))).collect();
        Logprob {
            logprob: logits.get(token as usize).map_or(f32::NEG_INFINITY, |logit| logprob(*logit)),
            top,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn many(sampling: &Sampling, logits: &[f32]) -> Vec<u32> {
        (0..2000)
            .map(|seed| Sampling { seed, ..sampling.clone() }.choose(logits, &[], &[], &[]))
            .collect()
    }

    #[test]
    fn greedy_takes_the_first_of_the_likeliest_tokens() {
        assert_eq!(Sampling::greedy().choose(&[0.0, 3.0, 3.0, 1.0], &[], &[], &[]), 1);
        assert_eq!(Sampling::greedy().choose(&[0.0, 3.0, 3.0, 1.0], &[], &[], &[1]), 2);
    }

    #[test]
    fn a_seed_gives_the_same_tokens_and_another_seed_others() {
        let logits: Vec<f32> = (0..50).map(|at| (at as f32 * 0.7).sin()).collect();
        let run = |seed| {
            let sampling = Sampling { seed, ..Sampling::default() };
            let mut given = Vec::new();
            for _ in 0..20 {
                given.push(sampling.choose(&logits, &[], &given, &[]));
            }
            given
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
    }

    #[test]
    fn tokens_are_sampled_in_proportion_to_their_probability() {
        let logits = [0.6f32.ln(), 0.3f32.ln(), 0.1f32.ln()];
        let drawn = many(&Sampling::default(), &logits);
        let share = |token| drawn.iter().filter(|drawn| **drawn == token).count() as f64 / 2000.0;
        for (token, expected) in [(0, 0.6), (1, 0.3), (2, 0.1)] {
            assert!((share(token) - expected).abs() < 0.05, "{token}: {}", share(token));
        }
    }

    #[test]
    fn top_k_top_p_and_min_p_keep_the_likeliest() {
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.15f32.ln(), 0.05f32.ln()];
        for (sampling, left) in [
            (Sampling { top_k: 2, ..Sampling::default() }, vec![0, 1]),
            (Sampling { top_p: 0.81, ..Sampling::default() }, vec![0, 1, 2]),
            (Sampling { top_p: 0.01, ..Sampling::default() }, vec![0]),
            (Sampling { min_p: 0.4, ..Sampling::default() }, vec![0, 1]),
        ] {
            let mut drawn = many(&sampling, &logits);
            drawn.sort_unstable();
            drawn.dedup();
            assert_eq!(drawn, left, "{sampling:?}");
        }
    }

    #[test]
    fn penalties_count_the_tokens_of_the_answer() {
        let penalised = |sampling: Sampling, prompt: &[u32], given: &[u32]| {
            let mut logits = [2.0, -2.0, 1.0];
            sampling.penalise(&mut logits, prompt, given);
            logits
        };
        let frequency =
            Sampling { frequency_penalty: 0.5, presence_penalty: 0.25, ..Sampling::default() };
        assert_eq!(penalised(frequency, &[2], &[0, 0, 1]), [0.75, -2.75, 1.0]);
        let repetition = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        assert_eq!(penalised(repetition, &[0], &[1, 1]), [1.0, -4.0, 1.0]);
    }

    #[test]
    fn logprobs_are_those_of_the_unmodified_logits() {
        let logits = [0.5f32.ln() + 3.0, 0.3f32.ln() + 3.0, 0.2f32.ln() + 3.0];
        let said = Logprob::of(&logits, 2, 2, false);
        assert!((said.logprob - 0.2f32.ln()).abs() < 1e-5);
        assert_eq!(said.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [0, 1]);
        assert!((said.top[0].1 - 0.5f32.ln()).abs() < 1e-5);
        let raw = Logprob::of(&logits, 2, 1, true);
        assert_eq!((raw.logprob, &raw.top[..]), (logits[2], &[(0, logits[0])][..]));
    }
}
