//! Finds the bytes of a producer's blocks that correspond to bytes of a consumer's.

use kvx_core::{Error, ErrorKind, Grid, Result};

use super::lengths::check_block_length;
use super::ranks::{Heads, Mapping};

/// A region of the consumer and its match on a producer's rank.
pub(super) struct RegionPair {
    pub(super) consumer: Grid,
    pub(super) producer: Grid,
    /// Tensor-parallel sizes of the consumer and the producer.
    pub(super) sizes: (u32, u32),
    pub(super) heads: Heads,
    /// 2 if K and V are halves of a block, else 1.
    pub(super) parts: u32,
    /// The number of the producer's blocks in one of the consumer's.
    pub(super) ratio: u32,
    /// True if a range of heads is a range of bytes.
    pub(super) contiguous: bool,
}

/// Grids of equal block length that hold the same bytes.
pub(super) struct Slice {
    /// The sub-block of each of the consumer's blocks; `None` if indices count sub-blocks.
    pub(super) phase: Option<u32>,
    pub(super) consumer: Grid,
    pub(super) producer: Grid,
}

impl RegionPair {
    /// Returns the slices from the producer's rank `source`; none if the mapping does not read from
    /// it.
    pub(super) fn slices(&self, mapping: &Mapping, source: u32) -> Result<Vec<Slice>> {
        let RegionPair { consumer, producer, ratio, .. } = *self;
        let (own_size, their_size) = self.sizes;
        check_block_length(
            consumer.length,
            producer.length,
            self.heads,
            own_size,
            their_size,
            ratio,
        )?;
        if self.heads.per_rank(own_size) != self.heads.per_rank(their_size) && !self.contiguous {
            return Err(ErrorKind::Incompatible.because(format!(
                "{own_size} and {their_size} ranks divide its blocks by heads, which only a \
                 layout with heads before tokens allows: use LBHNC"
            )));
        }
        let sources = mapping.attention_sources();
        let Some(slot) = sources.iter().position(|rank| *rank == source) else {
            return Ok(Vec::new());
        };
        let pieces = match self.heads {
            Heads::Replicated => 1,
            Heads::Sharded(_) => sources.len() as u64,
        };
        let (parts, smaller) = (u64::from(self.parts), u64::from(ratio));
        let (own_part, their_part) = (consumer.length / parts, producer.length / parts);
        if !consumer.length.is_multiple_of(parts * pieces * smaller)
            || !producer.length.is_multiple_of(parts)
        {
            return Err(self.outside("blocks cannot be divided evenly among the ranks"));
        }
        let len = own_part / pieces / smaller;
        let start = u64::from(mapping.rank_offset()).checked_mul(own_part / smaller);
        let Some(start) =
            start.filter(|start| start.checked_add(len).is_some_and(|end| end <= their_part))
        else {
            return Err(self.outside("the consumer's heads are outside the producer's blocks"));
        };
        let mut slices = Vec::new();
        for part in 0..parts {
            let own =
                consumer.base + part * own_part + if pieces > 1 { slot as u64 * len } else { 0 };
            let producer =
                Grid { base: producer.base + part * their_part + start, length: len, ..producer };
            if ratio == 1 {
                let consumer = Grid { base: own, length: len, ..consumer };
                slices.push(Slice { phase: None, consumer, producer });
            } else if parts == 1 && consumer.is_packed() {
                let Some(count) = consumer.count.checked_mul(ratio) else {
                    return Err(
                        self.outside("the consumer's sub-blocks cannot be counted in 32 bits")
                    );
                };
                let consumer = Grid { base: own, stride: len, length: len, count };
                slices.push(Slice { phase: None, consumer, producer });
            } else {
                slices.extend((0..ratio).map(|phase| {
                    let consumer =
                        Grid { base: own + u64::from(phase) * len, length: len, ..consumer };
                    Slice { phase: Some(phase), consumer, producer }
                }));
            }
        }
        Ok(slices)
    }

    fn outside(&self, sentence: &str) -> Error {
        ErrorKind::OutOfBounds.because(format!(
            "{sentence} (blocks of {} and {} bytes)",
            self.consumer.length, self.producer.length
        ))
    }
}
