//! The ranks of a producer that a rank of a consumer reads from, and the piece of a block that each
//! of them holds.

use crate::ids::MAX_RANKS;
use kvx_core::{ErrorKind, Result};

/// A rank's position in the tensor parallelism of its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tp {
    rank: u32,
    size: u32,
    dcp: u32,
}

impl Tp {
    /// Creates rank `rank` of `size`. Errors: `Invalid` for sizes of 0 or above [`MAX_RANKS`], and
    /// ranks beyond the size.
    pub fn new(rank: u32, size: u32) -> Result<Self> {
        check_size("tensor-parallel", size)?;
        if rank >= size {
            return Err(ErrorKind::Invalid.because(format!(
                "tensor-parallel rank {rank} of {size} does not exist: ranks count from 0"
            )));
        }
        Ok(Tp { rank, size, dcp: 1 })
    }

    /// Sets decode context parallelism over `dcp` ranks: 1, or all tensor-parallel ranks. Errors:
    /// `Invalid`.
    pub fn with_dcp(self, dcp: u32) -> Result<Self> {
        check_dcp(self.size, dcp)?;
        Ok(Tp { dcp, ..self })
    }

    /// Returns the rank.
    pub fn rank(self) -> u32 {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn size(self) -> u32 {
        self.size
    }

    /// Returns the number of ranks that share a sequence under decode context parallelism; 1
    /// without it.
    pub fn dcp(self) -> u32 {
        self.dcp
    }
}

/// The distribution of a cache over the ranks of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Heads {
    /// One latent that every rank holds in full (MLA).
    Replicated,
    /// The model has this many KV heads, spread evenly. With more ranks than heads, neighbouring
    /// ranks hold the same head.
    Sharded(u32),
}

impl Heads {
    /// Returns the number of heads on one rank of `size`.
    pub fn per_rank(self, size: u32) -> u32 {
        match self {
            Heads::Replicated => 1,
            Heads::Sharded(heads) => (heads / size.max(1)).max(1),
        }
    }

    /// Returns the first head of a rank.
    pub(super) fn first(heads: u32, rank: u32, size: u32) -> u32 {
        (u64::from(rank) * u64::from(heads) / u64::from(size)) as u32
    }
}

/// The kind of the layers in a KV cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// Attention: blocks of tokens.
    Attention,
    /// A state-space model (Mamba): blocks are whole states.
    StateSpace,
}

/// The ranks of a producer that one rank of a consumer reads from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    attention: Vec<u32>,
    rank_offset: u32,
    consumers: u32,
}

impl Mapping {
    /// Creates the mapping from the consumer's rank `consumer` to a producer of `producer_size`
    /// ranks.
    ///
    /// # Errors
    /// `Invalid` for sizes of which neither divides the other, zero heads, and context parallelism
    /// with sharded heads.
    pub fn new(consumer: Tp, producer_size: u32, producer_dcp: u32, heads: Heads) -> Result<Self> {
        let handshake = handshake_ranks(consumer, producer_size, producer_dcp)?;
        if heads == Heads::Sharded(0) {
            return Err(ErrorKind::Invalid.because("a cache needs at least one KV head"));
        }
        if matches!(heads, Heads::Sharded(_)) && (consumer.dcp > 1 || producer_dcp > 1) {
            return Err(ErrorKind::Invalid.because(
                "decode context parallelism with sharded heads is not supported: it is defined for MLA only",
            ));
        }
        let attention = match heads {
            Heads::Replicated if producer_dcp > 1 => handshake,
            Heads::Replicated => vec![handshake[0]],
            Heads::Sharded(heads) => first_of_each_head(&handshake, heads, producer_size),
        };
        Ok(Mapping {
            attention,
            rank_offset: rank_offset(consumer, producer_size, heads),
            consumers: consumers(consumer, producer_size, producer_dcp),
        })
    }

    /// Returns the ranks that attention is read from, in the order of the pieces of the local
    /// block.
    pub fn attention_sources(&self) -> &[u32] {
        &self.attention
    }

    /// Returns the position of this rank's heads in the producer's block, in units of the local
    /// block's length.
    pub fn rank_offset(&self) -> u32 {
        self.rank_offset
    }

    /// Returns the number of consumer ranks that read from one producer rank: the number in the
    /// completion notification.
    pub fn consumers(&self) -> u32 {
        self.consumers
    }
}

/// Returns the ranks of a producer of `producer_size` ranks that one rank of a consumer has
/// handshakes with, in ascending order.
///
/// # Errors
/// `Invalid` if a size is 0 or above [`MAX_RANKS`], or neither of two sizes divides the other.
pub fn handshake_ranks(consumer: Tp, producer_size: u32, producer_dcp: u32) -> Result<Vec<u32>> {
    check_size("the peer's tensor-parallel", producer_size)?;
    check_dcp(producer_size, producer_dcp)?;
    divides("tensor-parallel", consumer.size, producer_size)?;
    divides("decode-context-parallel", consumer.dcp, producer_dcp)?;
    if producer_dcp > 1 {
        let own_shard = consumer.rank % consumer.dcp;
        return Ok(if consumer.dcp <= producer_dcp {
            (0..producer_size).filter(|rank| rank % consumer.dcp == own_shard).collect()
        } else {
            vec![own_shard % producer_dcp]
        });
    }
    if consumer.size >= producer_size {
        return Ok(vec![consumer.rank / (consumer.size / producer_size)]);
    }
    let each = producer_size / consumer.size;
    Ok((consumer.rank * each..(consumer.rank + 1) * each).collect())
}

/// Returns the consumer ranks that have handshakes with one rank of a producer: the inverse of
/// [`handshake_ranks`], for a producer that writes.
pub(super) fn reader_ranks(producer: Tp, consumer_size: u32) -> Result<Vec<u32>> {
    handshake_ranks(producer, consumer_size, 1)
}

fn first_of_each_head(ranks: &[u32], heads: u32, size: u32) -> Vec<u32> {
    let mut last = None;
    let mut first = ranks.to_vec();
    first.retain(|rank| {
        let head = Heads::first(heads, *rank, size);
        last.replace(head) != Some(head)
    });
    first
}

fn rank_offset(consumer: Tp, producer_size: u32, heads: Heads) -> u32 {
    let Heads::Sharded(heads) = heads else { return 0 };
    if consumer.size <= producer_size {
        return 0;
    }
    let each = consumer.size / producer_size;
    if consumer.size <= heads {
        return consumer.rank % each;
    }
    let own = Heads::first(heads, consumer.rank, consumer.size);
    own - Heads::first(heads, consumer.rank / each, producer_size)
}

fn consumers(consumer: Tp, producer_size: u32, producer_dcp: u32) -> u32 {
    match (consumer.dcp, producer_dcp) {
        (_, 1) => (consumer.size / producer_size).max(1),
        (1, _) => consumer.size,
        (own, theirs) => (own / theirs).max(1),
    }
}

fn check_size(what: &str, size: u32) -> Result<()> {
    match size {
        1..=MAX_RANKS => Ok(()),
        _ => Err(ErrorKind::Invalid
            .because(format!("{what} size {size} is not between 1 and {MAX_RANKS}"))),
    }
}

fn check_dcp(size: u32, dcp: u32) -> Result<()> {
    if dcp == 1 || dcp == size {
        return Ok(());
    }
    Err(ErrorKind::Invalid.because(format!(
        "decode-context-parallel size {dcp} of {size} ranks: a cache is either whole on every rank (1) or spread \
         over all of them ({size})"
    )))
}

fn divides(what: &str, own: u32, theirs: u32) -> Result<()> {
    if own.is_multiple_of(theirs) || theirs.is_multiple_of(own) {
        return Ok(());
    }
    Err(ErrorKind::Invalid
        .because(format!("{what} sizes {own} and {theirs}: one must be a multiple of the other")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offset(rank: u32, size: u32, producer: u32, heads: u32) -> u32 {
        let mapping =
            Mapping::new(Tp::new(rank, size).unwrap(), producer, 1, Heads::Sharded(heads));
        mapping.unwrap().rank_offset()
    }

    // vLLM 43: the heads of a draft model start at the right offset in the producer's block
    #[test]
    fn draft_heads_start_where_the_facts_say() {
        assert_eq!(offset(3, 8, 1, 8), 3);
        assert_eq!(offset(5, 8, 2, 8), 1);
        assert_eq!(offset(5, 16, 1, 8), 2);
        let offsets: Vec<u32> = (0..8).map(|rank| offset(rank, 8, 2, 4)).collect();
        assert_eq!(offsets, [0, 0, 1, 1, 0, 0, 1, 1]);
    }

    #[test]
    fn replicated_heads_are_read_once() {
        let of = |rank| Mapping::new(Tp::new(rank, 2).unwrap(), 8, 1, Heads::Sharded(4)).unwrap();
        assert_eq!(of(0).attention_sources(), [0, 2]);
        assert_eq!(of(1).attention_sources(), [4, 6]);
        assert_eq!(handshake_ranks(Tp::new(1, 2).unwrap(), 8, 1).unwrap(), [4, 5, 6, 7]);
    }

    // vLLM 43: a producer rank's consumer count equals the number of its readers
    #[test]
    fn every_producer_rank_counts_as_many_readers_as_it_has() {
        for consumer_size in [1, 2, 4, 8] {
            for producer_size in [1, 2, 4, 8] {
                for (consumer_dcp, producer_dcp) in
                    [(1, 1), (consumer_size, 1), (1, producer_size), (consumer_size, producer_size)]
                {
                    let readers: Vec<_> = (0..consumer_size)
                        .map(|rank| {
                            let tp = Tp::new(rank, consumer_size).unwrap();
                            let tp = tp.with_dcp(consumer_dcp).unwrap();
                            let heads = Heads::Replicated;
                            let mapping = Mapping::new(tp, producer_size, producer_dcp, heads);
                            let ranks = handshake_ranks(tp, producer_size, producer_dcp);
                            (mapping.unwrap(), ranks.unwrap())
                        })
                        .collect();
                    for rank in 0..producer_size {
                        // Both readers and the bare notifications of MLA notify a rank.
                        let notifying =
                            readers.iter().filter(|(_, ranks)| ranks.contains(&rank)).count();
                        assert!(
                            readers.iter().all(|(m, _)| m.consumers() as usize == notifying),
                            "{readers:?} at {rank}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn sizes_that_do_not_divide_are_rejected_with_both_sizes() {
        let error = handshake_ranks(Tp::new(0, 3).unwrap(), 2, 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("3 and 2"), "{error}");
        assert!(
            Tp::new(2, 2).is_err() && Tp::new(0, 0).is_err() && Tp::new(0, MAX_RANKS + 1).is_err()
        );
        assert!(handshake_ranks(Tp::new(0, 1).unwrap(), 0, 1).is_err());
        assert!(handshake_ranks(Tp::new(0, 1).unwrap(), u32::MAX, 1).is_err());
        assert!(handshake_ranks(Tp::new(0, 4).unwrap(), 4, 2).is_err());
        assert!(Mapping::new(Tp::new(0, 1).unwrap(), 1, 1, Heads::Sharded(0)).is_err());
        let sharded =
            Mapping::new(Tp::new(0, 4).unwrap().with_dcp(4).unwrap(), 4, 4, Heads::Sharded(8));
        assert_eq!(sharded.unwrap_err().kind(), ErrorKind::Invalid);
    }
}
