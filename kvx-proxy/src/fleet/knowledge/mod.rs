//! The router's knowledge about an instance's prefix cache: from the events that the instance
//! publishes, and from the prompts that the router has sent there.

pub(crate) mod drift;
pub(crate) mod index;

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasherDefault;
use std::time::{Duration, Instant};

use kvx_vllm::events::CacheEvent;

use self::drift::{Drift, Prediction};
use self::index::EventIndex;
use super::cache_model::{CHUNK_TOKENS, CacheModel, Unchanged, cached_part};
use super::tokens::{BlockKey, PromptTokens};

/// The time for which a prompt that was sent counts as cached before events say so.
const PENDING: Duration = Duration::from_secs(8);
/// The most chunks of such prompts.
const MAX_PENDING: usize = 8 << 10;

/// The source of the router's knowledge about an instance's cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum KnowledgeLevel {
    /// The prompts that it has sent there.
    #[default]
    History,
    /// Prompts that it has sent there, and incomplete events.
    Degraded,
    /// All events.
    Exact,
}

impl KnowledgeLevel {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            KnowledgeLevel::History => "history",
            KnowledgeLevel::Degraded => "degraded",
            KnowledgeLevel::Exact => "exact",
        }
    }
}

/// A prompt, as far as caches depend on it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PromptParts<'a> {
    /// Hashes of the text up to the end of each of its chunks.
    pub(crate) chunks: &'a [u64],
    /// The tokens, if they are known.
    pub(crate) tokens: Option<&'a PromptTokens>,
}

/// The router's knowledge about an instance's prefix cache.
#[derive(Debug, Default)]
pub(crate) struct CacheKnowledge {
    history: CacheModel,
    level: KnowledgeLevel,
    index: EventIndex,
    pending: PendingChunks,
    pub(crate) drift: Drift,
    pub(crate) counts: EventCounts,
    /// Why the knowledge is not exact, if the instance has events.
    pub(crate) why: Option<String>,
    /// Set when predictions have drifted, until the subscription has ended.
    has_drifted: bool,
}

/// Counts of an instance's events.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EventCounts {
    pub(crate) batches: u64,
    /// Gaps in the numbers of batches.
    pub(crate) gaps: u64,
    /// Subscriptions that have ended.
    pub(crate) losses: u64,
    pub(crate) drifts: u64,
    /// Blocks of earlier indices; see [`EventIndex`].
    pub(crate) orphans: u64,
    pub(crate) ignored: u64,
}

impl CacheKnowledge {
    pub(crate) fn level(&self) -> KnowledgeLevel {
        self.level
    }

    /// Returns the tokens of a block, if events have named one.
    pub(crate) fn block_size(&self) -> Option<u32> {
        self.index.block_size()
    }

    /// Returns the number of blocks that events have named.
    pub(crate) fn blocks(&self) -> usize {
        self.index.len()
    }

    /// Returns counts of all events.
    pub(crate) fn counts(&self) -> EventCounts {
        EventCounts {
            orphans: self.counts.orphans + self.index.orphans,
            ignored: self.counts.ignored + self.index.ignored,
            ..self.counts
        }
    }

    /// Predicts how many tokens of a prompt are cached.
    pub(crate) fn predict(&self, prompt: PromptParts<'_>) -> Prediction {
        let by_history = || (self.history.cached(prompt.chunks) * CHUNK_TOKENS) as u64;
        let by_events = || {
            let (tokens, size) = (prompt.tokens?, self.index.block_size()?);
            let keys = tokens.keys(size);
            // Engines remove the end of a prompt before its beginning. Where one has not, the
            // prediction may be too long.
            let cached = cached_part(&keys.blocks, tokens.guess(), |key| self.index.contains(*key));
            tokens.set_guess(cached);
            let pending = match self.pending.is_empty() {
                true => cached,
                false => {
                    let guess = cached / keys.blocks_per_chunk;
                    let chunks = cached_part(&keys.chunks, guess, |key| {
                        self.index.contains(*key) || self.pending.contains(*key)
                    });
                    cached.max(chunks * keys.blocks_per_chunk)
                }
            };
            Some((cached as u64 * u64::from(size), pending as u64 * u64::from(size)))
        };
        let epoch = self.drift.epoch();
        match (self.level, by_events()) {
            (KnowledgeLevel::Exact, Some((tokens, with_pending))) => {
                Prediction { tokens, with_pending, by: KnowledgeLevel::Exact, epoch }
            }
            (KnowledgeLevel::Degraded, Some((tokens, with_pending))) => {
                let tokens = tokens.max(by_history());
                let with_pending = with_pending.max(tokens);
                Prediction { tokens, with_pending, by: KnowledgeLevel::Degraded, epoch }
            }
            _ => {
                let tokens = by_history();
                Prediction { tokens, with_pending: tokens, by: KnowledgeLevel::History, epoch }
            }
        }
    }

    /// Records a prompt that is sent to the instance.
    pub(crate) fn sent(&mut self, prompt: PromptParts<'_>, now: Instant) {
        self.history.add(prompt.chunks);
        if self.level != KnowledgeLevel::History
            && let (Some(tokens), Some(size)) = (prompt.tokens, self.index.block_size())
        {
            self.pending.add(&tokens.keys(size).chunks, now);
        }
    }

    /// Forgets the chunks of prompts that were sent so long ago that events would have named them.
    pub(crate) fn expire(&mut self, now: Instant) {
        self.pending.expire(now);
    }

    /// Forgets the prompts that were sent: the instance may have restarted.
    pub(crate) fn forget_sent(&mut self) {
        self.drift.restart();
        self.history = CacheModel::default();
        self.pending = PendingChunks::default();
    }

    /// Forgets everything: only prompts that are sent from now on count.
    pub(crate) fn forget(&mut self, why: Option<String>) {
        self.forget_sent();
        self.replace_index(EventIndex::default());
        self.level = KnowledgeLevel::History;
        self.why = why;
    }

    fn replace_index(&mut self, index: EventIndex) {
        self.drift.restart();
        self.counts.orphans += self.index.orphans;
        self.counts.ignored += self.index.ignored;
        self.index = index;
    }

    /// Records that the router has subscribed, so that events count again after a drift.
    pub(crate) fn subscribed(&mut self) {
        self.has_drifted = false;
    }

    /// Replaces the index by that of a replay. `why` names a reason if the replay is incomplete.
    pub(crate) fn begin(&mut self, index: EventIndex, why: Option<String>) {
        if self.has_drifted {
            return;
        }
        self.replace_index(index);
        if why.is_none() {
            // The index replaces the history of sent prompts.
            self.forget_sent();
        }
        self.level = if why.is_none() { KnowledgeLevel::Exact } else { KnowledgeLevel::Degraded };
        self.why = why;
    }

    /// Applies an event that follows the one before.
    pub(crate) fn apply(&mut self, event: &CacheEvent) {
        if self.has_drifted {
            return;
        }
        if self.index.apply(event).is_err() {
            self.degrade("the instance has published more blocks than the router keeps");
        }
        // The cache is known to be empty now.
        if *event == CacheEvent::Cleared {
            self.forget_sent();
            self.level = KnowledgeLevel::Exact;
            self.why = None;
        }
    }

    /// Records a gap in the numbers of batches.
    pub(crate) fn lose(&mut self, why: &str) {
        self.counts.gaps += 1;
        self.degrade(why);
    }

    /// Removes and returns the index if it is exact. Record a gap after that.
    pub(crate) fn take_exact(&mut self) -> Option<EventIndex> {
        (self.level == KnowledgeLevel::Exact).then(|| std::mem::take(&mut self.index))
    }

    /// Records that events are missing. Blocks that they would have removed must not count.
    pub(crate) fn degrade(&mut self, why: &str) {
        if self.has_drifted {
            return;
        }
        self.forget_sent();
        self.index.clear();
        self.level = KnowledgeLevel::Degraded;
        self.why = Some(why.to_owned());
    }

    /// Records that events cannot be read. The prompts that were sent still count.
    pub(crate) fn ignore_events(&mut self, why: String) {
        self.replace_index(EventIndex::default());
        self.level = KnowledgeLevel::History;
        self.why = Some(why);
    }

    /// Compares a prediction with what the instance reports. Returns true if predictions have
    /// drifted: events do not count until the router has subscribed again.
    pub(crate) fn compare(&mut self, predicted: Prediction, reported: u64, prompt: u64) -> bool {
        let has_drifted = self.drift.compare(predicted, reported, prompt) && !self.has_drifted;
        if has_drifted {
            self.counts.drifts += 1;
            self.has_drifted = true;
            let why = "the instance reports other numbers of cached tokens than its events say";
            self.forget(Some(why.to_owned()));
        }
        has_drifted
    }

    /// Returns true if predictions have drifted since the subscription began.
    pub(crate) fn has_drifted(&self) -> bool {
        self.has_drifted
    }
}

/// The chunks of prompts that were sent lately: events may not have named their blocks yet. Their
/// keys are those of their last blocks.
#[derive(Debug, Default)]
struct PendingChunks {
    sent: HashMap<BlockKey, Instant, BuildHasherDefault<Unchanged>>,
    order: VecDeque<(BlockKey, Instant)>,
}

impl PendingChunks {
    fn is_empty(&self) -> bool {
        self.sent.is_empty()
    }

    fn contains(&self, key: BlockKey) -> bool {
        self.sent.contains_key(&key)
    }

    fn add(&mut self, keys: &[BlockKey], now: Instant) {
        for key in keys.iter().take(MAX_PENDING).rev() {
            self.sent.insert(*key, now);
            self.order.push_back((*key, now));
        }
        while self.order.len() > MAX_PENDING {
            self.pop();
        }
        self.expire(now);
    }

    fn expire(&mut self, now: Instant) {
        while self.order.front().is_some_and(|(_, sent)| *sent + PENDING <= now) {
            self.pop();
        }
    }

    fn pop(&mut self) {
        if let Some((key, sent)) = self.order.pop_front()
            && self.sent.get(&key) == Some(&sent)
        {
            self.sent.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use kvx_vllm::events::{BlockHash, BlockStored};

    use super::*;

    /// Returns the event in which the first blocks of a prompt are stored, of two tokens each.
    fn stored(blocks: u32) -> CacheEvent {
        CacheEvent::Stored(Box::new(BlockStored {
            hashes: (0..u64::from(blocks)).map(BlockHash).collect(),
            tokens: (0..2 * blocks).collect(),
            block_size: 2,
            ..BlockStored::default()
        }))
    }

    fn prompt() -> PromptTokens {
        PromptTokens::new((0..1000).collect())
    }

    fn predict(cache: &CacheKnowledge, parts: PromptParts<'_>) -> (u64, u64, KnowledgeLevel) {
        let Prediction { tokens, with_pending, by, .. } = cache.predict(parts);
        (tokens, with_pending, by)
    }

    #[test]
    fn exact_knowledge_and_what_was_sent_lately_count_and_history_does_not() {
        let (tokens, chunks, now) = (prompt(), [1, 2, 3], Instant::now());
        let parts = PromptParts { chunks: &chunks, tokens: Some(&tokens) };
        let mut cache = CacheKnowledge::default();
        cache.sent(parts, now);
        let by_history = 3 * CHUNK_TOKENS as u64;
        let by = KnowledgeLevel::History;
        let guess = |tokens| (tokens, tokens, by);
        assert_eq!(predict(&cache, parts), guess(by_history));
        cache.begin(EventIndex::default(), None);
        assert_eq!(predict(&cache, parts), guess(0));
        cache.sent(parts, now);
        assert_eq!(predict(&cache, parts), guess(by_history), "no size of blocks is known");
        cache.apply(&stored(3));
        let by = KnowledgeLevel::Exact;
        let exact = |tokens, with_pending| (tokens, with_pending, by);
        assert_eq!(predict(&cache, parts), exact(6, 6));
        assert_eq!(predict(&cache, PromptParts { tokens: None, ..parts }), guess(by_history));
        cache.sent(parts, now);
        assert_eq!(predict(&cache, parts), exact(6, 768), "siblings go there: three chunks");
        cache.expire(now + PENDING);
        assert_eq!(predict(&cache, parts), exact(6, 6));
        // The instance has removed all.
        cache.apply(&CacheEvent::Cleared);
        assert_eq!(predict(&cache, parts), exact(0, 0));
        assert_eq!(predict(&cache, PromptParts { tokens: None, ..parts }), guess(0));
    }

    #[test]
    fn answers_to_earlier_requests_are_no_drift_after_the_cache_has_begun_anew() {
        let tokens = prompt();
        let parts = PromptParts { chunks: &[], tokens: Some(&tokens) };
        let clear = |cache: &mut CacheKnowledge| cache.apply(&CacheEvent::Cleared);
        let restart = |cache: &mut CacheKnowledge| {
            cache.forget(None);
            cache.begin(EventIndex::default(), None);
        };
        for begin_anew in [clear, restart] {
            let mut cache = CacheKnowledge::default();
            cache.begin(EventIndex::default(), None);
            cache.apply(&stored(49));
            let in_flight: Vec<_> = (0..16).map(|_| cache.predict(parts)).collect();
            begin_anew(&mut cache);
            for predicted in in_flight {
                assert_eq!(predicted.tokens, 98);
                assert!(!cache.compare(predicted, 0, 100), "it was predicted for the old cache");
            }
            assert_eq!(cache.level(), KnowledgeLevel::Exact);
            cache.apply(&stored(49));
            let drifts = (0..16)
                .filter(|_| {
                    let predicted = cache.predict(parts);
                    cache.compare(predicted, 0, 100)
                })
                .count();
            assert_eq!(drifts, 1, "predictions for the new cache are compared");
        }
    }

    #[test]
    fn incomplete_knowledge_adds_to_history() {
        let (tokens, chunks) = (prompt(), [1]);
        let parts = PromptParts { chunks: &chunks, tokens: Some(&tokens) };
        let mut cache = CacheKnowledge::default();
        cache.begin(EventIndex::default(), Some("no replay".to_owned()));
        cache.apply(&stored(10));
        assert_eq!((cache.level(), cache.predict(parts).tokens), (KnowledgeLevel::Degraded, 20));
        cache.sent(parts, Instant::now());
        assert_eq!(cache.predict(parts).tokens, CHUNK_TOKENS as u64);
        cache.lose("a gap");
        assert_eq!((cache.predict(parts).tokens, cache.blocks()), (0, 0));
    }

    #[test]
    fn drift_falls_back_to_history() {
        let (tokens, chunks) = (prompt(), [1]);
        let parts = PromptParts { chunks: &chunks, tokens: Some(&tokens) };
        let mut cache = CacheKnowledge::default();
        cache.begin(EventIndex::default(), None);
        cache.apply(&stored(49));
        let mut drifted = 0;
        for _ in 0..16 {
            let predicted = cache.predict(parts);
            assert_eq!(predicted.tokens, 98);
            drifted += u32::from(cache.compare(predicted, 0, 100));
        }
        assert_eq!((drifted, cache.level()), (1, KnowledgeLevel::History));
        assert!(cache.has_drifted() && cache.why.is_some());
        assert_eq!(predict(&cache, parts), (0, 0, KnowledgeLevel::History));
        cache.sent(parts, Instant::now());
        assert!(cache.predict(parts).tokens > 0, "history counts again");
        cache.begin(EventIndex::default(), None);
        cache.lose("a gap");
        assert_eq!(cache.level(), KnowledgeLevel::History, "until the router subscribes again");
        cache.subscribed();
        cache.begin(EventIndex::default(), None);
        assert_eq!((cache.has_drifted(), cache.level()), (false, KnowledgeLevel::Exact));
    }

    #[test]
    fn unreadable_events_leave_history() {
        let (tokens, chunks) = (prompt(), [1]);
        let parts = PromptParts { chunks: &chunks, tokens: Some(&tokens) };
        let mut cache = CacheKnowledge::default();
        cache.begin(EventIndex::default(), None);
        cache.sent(parts, Instant::now());
        cache.apply(&stored(49));
        cache.ignore_events("a new format".to_owned());
        assert_eq!((cache.level(), cache.blocks()), (KnowledgeLevel::History, 0));
        assert_eq!(cache.predict(parts).tokens, CHUNK_TOKENS as u64);
    }

    #[test]
    fn too_many_blocks_are_not_kept() {
        let mut cache = CacheKnowledge::default();
        cache.begin(EventIndex::default(), None);
        cache.apply(&stored(index::MAX_BLOCKS as u32 + 1));
        assert_eq!((cache.level(), cache.blocks()), (KnowledgeLevel::Degraded, 0));
    }

    #[test]
    fn the_memory_of_sent_prompts_is_bounded() {
        let mut pending = PendingChunks::default();
        let now = Instant::now();
        for prompt in 0..100u64 {
            let keys: Vec<u64> = (0..2000).map(|at| prompt << 32 | at).collect();
            pending.add(&keys, now);
            assert!(pending.sent.len() <= MAX_PENDING && pending.order.len() <= MAX_PENDING);
        }
        pending.expire(now + PENDING);
        assert!(pending.is_empty());
    }
}
