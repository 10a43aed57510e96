//! The required lengths of a region's blocks on both sides.

use kvx_core::{ErrorKind, Result};

use super::ranks::Heads;

/// Checks that the block lengths of one region on both sides match.
///
/// `ratio` is the number of the producer's blocks in one of the consumer's; the sizes are
/// tensor-parallel sizes. A replicated cache has the same bytes per token on every rank. A sharded
/// one has them per head, and a rank holds at least one head, even with more ranks than heads.
///
/// # Errors
/// `Incompatible`, with all numbers, if the lengths do not match, or if block sizes differ and the
/// producer has more ranks.
pub fn check_block_length(
    consumer_len: u64,
    producer_len: u64,
    heads: Heads,
    consumer_size: u32,
    producer_size: u32,
    ratio: u32,
) -> Result<()> {
    let (own, theirs) = (heads.per_rank(consumer_size), heads.per_rank(producer_size));
    if matches!(heads, Heads::Sharded(_)) && producer_size > consumer_size && ratio != 1 {
        return Err(ErrorKind::Incompatible.because(format!(
            "the consumer's blocks have {ratio} times the producer's tokens, with \
             {producer_size} producer ranks to {consumer_size} consumer ranks: give both sides \
             the same block size"
        )));
    }
    let expected = u128::from(consumer_len) * u128::from(theirs);
    if u128::from(producer_len) * u128::from(own) * u128::from(ratio) == expected {
        return Ok(());
    }
    Err(ErrorKind::Incompatible.because(format!(
        "blocks of {consumer_len} bytes at the consumer and {producer_len} at the producer do \
         not match: with {own} and {theirs} heads per rank ({consumer_size} and {producer_size} \
         ranks) and {ratio} producer blocks to one, the producer's must have {}",
        exactly(expected, u128::from(own) * u128::from(ratio))
    )))
}

fn exactly(bytes: u128, of: u128) -> String {
    match bytes % of {
        0 => format!("{} bytes", bytes / of),
        _ => "a whole number of bytes, which is impossible".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // vLLM 43: block lengths are checked for peers of different TP and block sizes
    #[test]
    fn lengths_follow_the_heads_of_a_rank() {
        let check = |own, theirs, heads, sizes: (u32, u32), ratio| {
            check_block_length(own, theirs, heads, sizes.0, sizes.1, ratio)
        };
        let of = Heads::Sharded;
        for (own, theirs, heads, sizes, ratio) in [
            (100, 200, of(8), (4, 2), 1),
            (400, 200, of(8), (1, 2), 1),
            // More ranks than heads: the block stops shrinking at one head.
            (100, 100, of(2), (8, 4), 1),
            (100, 200, of(4), (8, 2), 1),
            (400, 200, of(8), (4, 4), 2),
            (400, 400, of(8), (4, 2), 2),
            (640, 160, Heads::Replicated, (8, 2), 4),
            (640, 640, Heads::Replicated, (2, 8), 1),
            (640, 320, Heads::Replicated, (2, 8), 2),
        ] {
            check(own, theirs, heads, sizes, ratio).unwrap();
            for wrong in [theirs - 1, theirs + 1, theirs * 2] {
                let error = check(own, wrong, heads, sizes, ratio).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Incompatible);
                assert!(
                    error.to_string().contains(&format!("must have {theirs} bytes")),
                    "{error}"
                );
            }
        }
        let error = check(400, 100, of(8), (1, 2), 2).unwrap_err();
        assert!(error.to_string().contains("same block size"), "{error}");
        let error = check(401, 200, Heads::Replicated, (1, 1), 2).unwrap_err();
        assert!(error.to_string().contains("impossible"), "{error}");
    }
}
