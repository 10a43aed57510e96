//! The bytes that one rank of a Mooncake producer writes into one rank of a consumer.

use kvx_core::{ErrorKind, Result};

use super::ranks::{Heads, Tp};

/// A producer's rank and a consumer's rank, and their blocks of one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SenderPair {
    /// The producer's rank.
    pub producer: Tp,
    /// The consumer's rank.
    pub consumer: Tp,
    /// The bytes of a block at the producer.
    pub producer_len: u64,
    /// The bytes of a block at the consumer.
    pub consumer_len: u64,
    /// The KV heads of the whole model; `None` if blocks do not depend on heads (MLA, models with
    /// state-space layers).
    pub kv_heads: Option<u32>,
    /// True if several ranks of the producer hold the same bytes.
    pub producer_replicated: bool,
}

/// The range that is written for each block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SenderPlan {
    /// True if this rank writes: only one of several replicas does. The range is set in either
    /// case.
    pub sends: bool,
    /// The start of the range in the producer's block.
    pub source_offset: u64,
    /// The start of the range in the consumer's block.
    pub destination_offset: u64,
    /// The length of the range in bytes.
    pub len: u64,
}

impl SenderPair {
    /// Returns the plan of this pair.
    ///
    /// # Errors
    /// `Invalid` if neither size divides the other or the ranks are not a pair; `Incompatible` if
    /// the range exceeds a block.
    pub fn plan(&self) -> Result<SenderPlan> {
        let (p, d) = (self.producer, self.consumer);
        let paired = super::ranks::reader_ranks(p, d.size())?;
        if !paired.contains(&d.rank()) {
            return Err(ErrorKind::Invalid.because(format!(
                "producer rank {} of {} does not write to consumer rank {} of {}",
                p.rank(),
                p.size(),
                d.rank(),
                d.size()
            )));
        }
        let whole = |sends| SenderPlan {
            sends,
            source_offset: 0,
            destination_offset: 0,
            len: self.producer_len,
        };
        let plan = match (p.size(), d.size()) {
            (producer, consumer) if producer == consumer => whole(true),
            (producer, consumer) => match self.kv_heads {
                Some(heads) if self.producer_replicated != (consumer > heads) => {
                    self.by_head(heads)?
                }
                _ if self.producer_replicated && producer > consumer => {
                    whole(p.rank() % (producer / consumer) == 0)
                }
                _ if self.producer_replicated => whole(true),
                _ if producer > consumer => SenderPlan {
                    destination_offset: piece(p.rank() % (producer / consumer), self.producer_len)?,
                    ..whole(true)
                },
                _ => SenderPlan {
                    source_offset: piece(d.rank() % (consumer / producer), self.consumer_len)?,
                    len: self.consumer_len,
                    ..whole(true)
                },
            },
        };
        self.check(plan)
    }

    /// Plans a pair in which one side has whole heads per rank and the other has replicas of single
    /// heads.
    fn by_head(&self, heads: u32) -> Result<SenderPlan> {
        if heads == 0 {
            return Err(ErrorKind::Invalid.because("a cache needs at least one KV head"));
        }
        let (p, d) = (self.producer, self.consumer);
        let own = Heads::first(heads, p.rank(), p.size());
        let theirs = Heads::first(heads, d.rank(), d.size());
        let per_head = self.producer_len / u64::from(Heads::Sharded(heads).per_rank(p.size()));
        let replicas = (p.size() / heads).max(1);
        Ok(SenderPlan {
            sends: p.rank() % replicas == 0,
            source_offset: piece(theirs.saturating_sub(own), per_head)?,
            destination_offset: piece(own.saturating_sub(theirs), per_head)?,
            len: per_head,
        })
    }

    fn check(&self, plan: SenderPlan) -> Result<SenderPlan> {
        let within =
            |offset: u64, len: u64| offset.checked_add(plan.len).is_some_and(|end| end <= len);
        if plan.len > 0
            && within(plan.source_offset, self.producer_len)
            && within(plan.destination_offset, self.consumer_len)
        {
            return Ok(plan);
        }
        Err(ErrorKind::Incompatible.because(format!(
            "{} bytes at offset {} of a block of {} do not fit at offset {} of a block of {}",
            plan.len,
            plan.source_offset,
            self.producer_len,
            plan.destination_offset,
            self.consumer_len
        )))
    }
}

fn piece(number: u32, len: u64) -> Result<u64> {
    u64::from(number).checked_mul(len).ok_or_else(|| {
        ErrorKind::Incompatible
            .because(format!("piece {number} of {len} bytes is beyond any block"))
    })
}
