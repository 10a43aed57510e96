//! Makes prompts that share what the prompts of a trace shared.

use std::fmt::Write as _;

use crate::recording::trace::TraceRequest;

/// The first token id, and the number of ids: every tokenizer has them. A prompt of token ids has
/// the same length under each.
const FIRST_ID: u64 = 3;
const IDS: u64 = 90;

/// Appends the token ids of a request's prompt, as elements of a JSON list. Each block has the ids
/// that its name and the seed give, so equal blocks have equal ids. The rest depends on the number
/// of the request.
pub(super) fn write(
    into: &mut String,
    request: &TraceRequest,
    number: usize,
    block_tokens: usize,
    seed: u64,
) {
    let mut left = request.prompt_tokens;
    let blocks = request.blocks.iter().map(|block| (*block, block_tokens));
    let rest = (number as u64 ^ (1 << 63), usize::MAX);
    let mut comma = "";
    for (name, tokens) in blocks.chain([rest]) {
        let mut ids = Ids(spread(seed) ^ spread(name));
        let tokens = tokens.min(left);
        for _ in 0..tokens {
            let _ = write!(into, "{comma}{}", ids.next_id());
            comma = ",";
        }
        left -= tokens;
    }
}

/// A generator of token ids (splitmix64).
struct Ids(u64);

impl Ids {
    fn next_id(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        FIRST_ID + spread(self.0) % IDS
    }
}

/// Makes every bit of the result depend on every bit of the number.
fn spread(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn ids(blocks: &[u64], tokens: usize, number: usize, seed: u64) -> Vec<u64> {
        let mut text = "[".to_owned();
        let request = TraceRequest {
            at: Duration::ZERO,
            prompt_tokens: tokens,
            answer_tokens: 1,
            blocks: blocks.to_vec(),
        };
        write(&mut text, &request, number, 16, seed);
        serde_json::from_str(&(text + "]")).unwrap()
    }

    #[test]
    fn equal_blocks_give_equal_tokens_and_others_differ() {
        let first = ids(&[7, 8, 9], 50, 0, 1);
        assert_eq!(first.len(), 50);
        assert!(first.iter().all(|id| (3..93).contains(id)), "{first:?}");
        let second = ids(&[7, 8, 10], 50, 1, 1);
        assert_eq!(first[..32], second[..32]);
        assert_ne!(first[32..48], second[32..48]);
        let rest = |number| ids(&[7], 40, number, 1)[16..].to_vec();
        assert_ne!(rest(0), rest(1), "what no block names is shared with none");
        assert_eq!(ids(&[7, 8, 9], 50, 0, 1), first);
        assert_ne!(ids(&[7, 8, 9], 50, 0, 2)[..16], first[..16], "the seed matters");
        assert_eq!(ids(&[7, 8, 9], 40, 3, 1), first[..40], "the last block may be cut");
        assert_eq!(ids(&[], 5, 0, 1).len(), 5);
    }
}
