//! The blocks of two lists that hold the same tokens.

use std::ops::Range;

use kvx_core::{ErrorKind, Indices, Result};

/// The most units in a logical block. Index arithmetic relies on it.
const MAX_UNITS: u32 = 65_536;

/// The common division of a sequence on both sides, into units of equal size: the producer's kernel
/// blocks. A logical block of either side is a whole number of units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Units {
    consumer: u32,
    producer: u32,
    tokens: u32,
}

/// The ends of both lists in a sequence, in tokens from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// The number of tokens that the producer's list covers.
    pub producer: u32,
    /// The number of tokens that the consumer wants in the end; at most `producer`.
    pub wanted: u32,
}

/// The blocks that the lists of a group omit at their front.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Clip {
    /// The producer's list begins with the sequence. The consumer's list omits the blocks that it
    /// has cached.
    Whole,
    /// Both lists are clipped to the last blocks of a sliding window.
    Window,
}

/// The common part of two lists, in units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aligned {
    units: Units,
    /// The number of units of the consumer's list before the first common one.
    pub consumer_skip: u64,
    /// The number of units of the producer's list before the first common one.
    pub producer_skip: u64,
    /// The number of common units.
    pub count: u64,
}

impl Units {
    /// Creates a division with `consumer` and `producer` units in a logical block of each side and
    /// `tokens` in a unit. Errors: `Invalid` for 0, and for more than 65,536 units in a block.
    pub fn new(consumer: u32, producer: u32, tokens: u32) -> Result<Self> {
        let known = 1..=MAX_UNITS;
        if !known.contains(&consumer) || !known.contains(&producer) || tokens == 0 {
            return Err(ErrorKind::Invalid.because(format!(
                "blocks of {consumer} and {producer} units of {tokens} tokens: a block has 1 to \
                 {MAX_UNITS} units, a unit at least 1 token"
            )));
        }
        Ok(Units { consumer, producer, tokens })
    }

    /// Creates a division for blocks of equal size on both sides.
    pub fn equal(tokens: u32) -> Result<Self> {
        Units::new(1, 1, tokens)
    }

    /// Returns the units in a logical block of the consumer.
    pub fn consumer(self) -> u32 {
        self.consumer
    }

    /// Returns the common part of a consumer's and a producer's list, given their numbers of
    /// logical blocks.
    ///
    /// A consumer with a cached prefix lists only the blocks that it lacks. Both lists end with the
    /// same token, and the producer's list is cut at the front, by whole blocks of the consumer.
    /// Without `tokens`, the producer's list is taken to be the whole sequence. With them, a
    /// producer's list that starts or ends elsewhere is paired exactly too.
    ///
    /// # Errors
    /// `OutOfBounds` if the consumer lists blocks that the producer's list does not reach;
    /// `Invalid` if `tokens.wanted` is beyond `tokens.producer`.
    pub fn align(
        self,
        consumer: usize,
        producer: usize,
        tokens: Option<Tokens>,
        clip: Clip,
    ) -> Result<Aligned> {
        let aligned = Aligned { units: self, consumer_skip: 0, producer_skip: 0, count: 0 };
        if consumer == 0 {
            return Ok(aligned);
        }
        let (own, theirs) = (i64::from(self.consumer), i64::from(self.producer));
        let (listed, offered) = (len(consumer)?, len(producer)?);
        let too_short = || {
            ErrorKind::OutOfBounds.because(format!(
                "{consumer} blocks to fill, but the producer's list of {producer} does not reach \
                 that far (units per block: {own} and {theirs})"
            ))
        };
        let (producer_end, wanted_end) = match tokens {
            None => (offered * theirs, offered * theirs),
            Some(tokens) if tokens.wanted <= tokens.producer => {
                (self.end_of(tokens.producer), self.end_of(tokens.wanted))
            }
            Some(tokens) => {
                return Err(ErrorKind::Invalid.because(format!(
                    "{} tokens wanted, but the producer has {}",
                    tokens.wanted, tokens.producer
                )));
            }
        };
        // A list that is longer than its tokens has spare blocks at its end, not at its front.
        let producer_start = (div_ceil(producer_end, theirs) - offered).max(0) * theirs;
        let consumer_start = div_ceil(wanted_end, own) - listed;
        if consumer_start < 0 && clip == Clip::Whole && tokens.is_none() {
            return Err(too_short());
        }
        let consumer_start =
            if tokens.is_some() { consumer_start.max(0) } else { consumer_start } * own;
        if consumer_start < producer_start && clip == Clip::Whole {
            return Err(too_short());
        }
        let start = consumer_start.max(producer_start);
        let end = wanted_end
            .min(producer_end)
            .min(consumer_start + listed * own)
            .min(producer_start + offered * theirs);
        if start >= end {
            return Ok(aligned);
        }
        Ok(Aligned {
            consumer_skip: (start - consumer_start) as u64,
            producer_skip: (start - producer_start) as u64,
            count: (end - start) as u64,
            ..aligned
        })
    }

    fn end_of(self, tokens: u32) -> i64 {
        i64::from(tokens.div_ceil(self.tokens))
    }
}

impl Aligned {
    /// Returns the consumer's units, as indices of a grid of units. Errors: `OutOfBounds` for
    /// indices beyond 32 bits.
    pub fn of_consumer(&self, list: &Indices) -> Result<Indices> {
        expand(list, self.units.consumer, self.consumer_skip..self.consumer_skip + self.count)
    }

    /// Returns the producer's units, as indices of a grid of units. Errors: as
    /// [`of_consumer`](Aligned::of_consumer).
    pub fn of_producer(&self, list: &Indices) -> Result<Indices> {
        expand(list, self.units.producer, self.producer_skip..self.producer_skip + self.count)
    }
}

/// Splits every block of a list into `each` smaller ones, and returns the indices of a `part` of
/// the result. Block `b` becomes `b * each` and the `each - 1` that follow. Shares the list if
/// `each` is 1.
///
/// # Errors
/// `OutOfBounds` if an index exceeds 32 bits or the part ends beyond the list.
pub fn expand(list: &Indices, each: u32, part: Range<u64>) -> Result<Indices> {
    let available = list.len() as u64 * u64::from(each);
    if part.start > part.end || part.end > available {
        return Err(ErrorKind::OutOfBounds.because(format!(
            "units {} to {} are outside a list of {available}",
            part.start, part.end
        )));
    }
    if each == 1 {
        return Ok(list.slice(part.start as usize..part.end as usize));
    }
    if let Some(max) = list.max()
        && (u64::from(max) + 1) * u64::from(each) > u64::from(u32::MAX)
    {
        return Err(ErrorKind::OutOfBounds.because(format!(
            "block {max} splits into {each} smaller ones whose indices do not fit into 32 bits"
        )));
    }
    let mut expanded = Vec::with_capacity((part.end - part.start) as usize);
    let mut at = part.start;
    while at < part.end {
        let (block, first) = ((at / u64::from(each)) as usize, (at % u64::from(each)) as u32);
        let until = u64::from(each - first).min(part.end - at) as u32;
        let start = list.at(block) * each + first;
        expanded.extend(start..start + until);
        at += u64::from(until);
    }
    Ok(expanded.into())
}

/// Returns the number of blocks that a sliding window of `window` tokens can touch: one more than
/// it fills, as it may begin inside a block.
pub fn window_blocks(window: u32, block_tokens: u32) -> u32 {
    window.div_ceil(block_tokens.max(1)).saturating_add(1)
}

fn len(list: usize) -> Result<i64> {
    u32::try_from(list).map(i64::from).map_err(|_| {
        ErrorKind::Invalid.because(format!("a list of {list} blocks exceeds the limit of 2^32-1"))
    })
}

fn div_ceil(a: i64, b: i64) -> i64 {
    (a + b - 1) / b
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(indices: &Indices) -> Vec<u32> {
        (0..indices.len()).map(|at| indices.at(at)).collect()
    }

    fn pair(
        units: Units,
        consumer: &[u32],
        producer: &[u32],
        tokens: Option<(u32, u32)>,
    ) -> (Vec<u32>, Vec<u32>) {
        let tokens = tokens.map(|(producer, wanted)| Tokens { producer, wanted });
        let aligned = units.align(consumer.len(), producer.len(), tokens, Clip::Whole).unwrap();
        let of = aligned.of_consumer(&consumer.into()).unwrap();
        (list(&of), list(&aligned.of_producer(&producer.into()).unwrap()))
    }

    #[test]
    fn a_cached_prefix_cuts_the_producers_list_at_the_front() {
        let units = Units::equal(16).unwrap();
        assert_eq!(pair(units, &[7, 8], &[1, 2, 3, 4], None), (vec![7, 8], vec![3, 4]));
        assert_eq!(pair(units, &[], &[1, 2], None), (vec![], vec![]));
        assert_eq!(
            units.align(3, 2, None, Clip::Whole).unwrap_err().kind(),
            ErrorKind::OutOfBounds
        );
    }

    #[test]
    fn equal_blocks_share_the_list() {
        let shared: std::sync::Arc<[u32]> = [1, 2, 3].into();
        let aligned = Units::equal(16).unwrap().align(2, 3, None, Clip::Whole).unwrap();
        let cut = aligned.of_producer(&shared.clone().into()).unwrap();
        assert_eq!(list(&cut), [2, 3]);
        assert_eq!(std::sync::Arc::strong_count(&shared), 2);
    }

    #[test]
    fn larger_blocks_of_the_consumer_are_cut_into_the_producers() {
        let units = Units::new(4, 1, 4).unwrap();
        let ten: Vec<u32> = (1..=10).collect();
        assert_eq!(pair(units, &[1, 2, 3], &ten, None), ((4..14).collect(), ten.clone()));
        // One block is cached: its four units are skipped although the last block is not full.
        assert_eq!(pair(units, &[2, 3], &ten, None), ((8..14).collect(), (5..=10).collect()));
    }

    // vLLM 45: logical blocks expand to kernel blocks by each side's own ratio
    #[test]
    fn kernel_blocks_expand_with_each_sides_own_ratio() {
        // Logical blocks of 32 and 64 tokens, kernel blocks of 16 at both.
        let units = Units::new(2, 4, 16).unwrap();
        assert_eq!(
            pair(units, &[5, 6, 7], &[1, 2], Some((90, 90))),
            ((10..16).collect(), (4..10).collect())
        );
        assert_eq!(
            pair(units, &[7], &[1, 2], Some((90, 90))),
            ((14..16).collect(), (8..10).collect())
        );
        assert_eq!(list(&expand(&[3, 9].into(), 2, 0..4).unwrap()), [6, 7, 18, 19]);
    }

    // vLLM 46: a load is capped to the prompt when the producer has more tokens, with a partial
    //     last block
    #[test]
    fn a_consumer_may_want_less_than_the_producer_has() {
        let units = Units::equal(16).unwrap();
        assert_eq!(pair(units, &[7, 8], &[1, 2, 3, 4], Some((60, 33))), (vec![7, 8], vec![2, 3]));
        let more = Some(Tokens { producer: 10, wanted: 11 });
        assert_eq!(units.align(1, 1, more, Clip::Whole).unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn spare_blocks_at_the_end_are_left_alone() {
        let units = Units::equal(16).unwrap();
        assert_eq!(pair(units, &[7, 8, 9], &[1, 2, 3], Some((17, 17))), (vec![7, 8], vec![1, 2]));
    }

    // vLLM 45: sliding windows: clipped block lists are paired at their common end
    #[test]
    fn windows_are_paired_at_their_common_end() {
        // A window of 16 tokens: 2 blocks of 16 at the consumer, 5 of 4 at the producer, after 42
        // tokens.
        assert_eq!((window_blocks(16, 16), window_blocks(16, 4)), (2, 5));
        let units = Units::new(4, 1, 4).unwrap();
        let tokens = Some(Tokens { producer: 42, wanted: 42 });
        let aligned = units.align(2, 5, tokens, Clip::Window).unwrap();
        // The consumer's blocks are tokens 16..48, the producer's 24..44.
        assert_eq!((aligned.consumer_skip, aligned.producer_skip, aligned.count), (2, 0, 5));
        assert!(units.align(2, 5, tokens, Clip::Whole).is_err());
    }

    #[test]
    fn indices_beyond_32_bits_are_errors() {
        let error = expand(&[u32::MAX / 2].into(), 4, 0..4).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
        assert!(
            Units::new(0, 1, 1).is_err()
                && Units::new(1, 65_537, 1).is_err()
                && Units::new(1, 1, 0).is_err()
        );
        assert!(expand(&[1].into(), 4, 3..5).is_err());
    }
}
