//! The place of a subscription in the sequence of an instance's batches.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use kvx_vllm::events::{EventBatch, Publication};
use kvx_vllm::zmtp::Budget;
use tokio::time::Instant;

use super::replay::{ReplayedIndex, replay};
use super::steps::steps;
use super::{MESSAGE, SessionEnd, unreadable};
use crate::error::{Error, Result};
use crate::fleet::instance::State;
use crate::fleet::knowledge::index::EventIndex;
use crate::setup::EventSource;

/// The times between two replays: the shortest, and the longest after failed ones.
const PAUSES: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(300));
/// The time for batches that waited at the publisher.
const REPEATS: Duration = Duration::from_secs(5);
/// The most batches that wait for the end of a replay, and their bytes.
const WAITING: (usize, usize) = (16 << 10, MESSAGE.bytes);

type RunningReplay = Pin<Box<dyn Future<Output = (ReplayedIndex, Result<()>)> + Send>>;

/// The place in the sequence of an instance's batches.
pub(super) struct BatchCursor<'a> {
    state: &'a State,
    source: &'a EventSource,
    budget: Arc<Budget>,
    /// True once batches count. With a replay, that is when the publisher has answered a ping, and
    /// so has the subscription: what it published before is in the replay.
    has_begun: bool,
    /// The number of the next batch, if one has been seen.
    next: Option<u64>,
    /// The pings that were sent, and those that were answered.
    pings: u64,
    pongs: u64,
    /// The end of the time in which batches may arrive that the replay has contained.
    repeats: Option<RepeatsEnd>,
    running: Option<RunningReplay>,
    /// The batches that have arrived during the replay.
    waiting: WaitingBatches,
    /// The time of the next replay, if one is needed.
    replay_at: Option<Instant>,
    /// The index before a gap, which a replay of the missing batches completes.
    before_gap: Option<ReplayedIndex>,
    /// The pause after a failed replay.
    replay_pause: Duration,
    /// The end of the latest replay.
    last_replay: Option<Instant>,
}

/// The end of the time in which batches may be repeated.
enum RepeatsEnd {
    /// [`REPEATS`] after the answer to the ping of this number: ZeroMQ answers a ping before the
    /// batches that wait to be sent.
    Pong(u64),
    Time(Instant),
}

/// Batches with their numbers, in order.
#[derive(Default)]
struct WaitingBatches {
    batches: VecDeque<(u64, Vec<u8>)>,
    bytes: usize,
    /// True if batches after these were dropped.
    is_full: bool,
}

impl WaitingBatches {
    /// Adds a batch, unless too many wait.
    fn push(&mut self, number: u64, batch: &[u8]) {
        let bytes = self.bytes + batch.len();
        self.is_full |= self.batches.len() >= WAITING.0 || bytes > WAITING.1;
        if !self.is_full {
            self.bytes = bytes;
            self.batches.push_back((number, batch.to_owned()));
        }
    }

    fn pop(&mut self) -> Option<(u64, Vec<u8>)> {
        let (number, batch) = self.batches.pop_front()?;
        self.bytes -= batch.len();
        Some((number, batch))
    }
}

impl<'a> BatchCursor<'a> {
    pub(super) fn new(state: &'a State, source: &'a EventSource, budget: Arc<Budget>) -> Self {
        let has_begun = source.replay.is_none();
        if has_begun {
            let why = "it has no replay of earlier events; see events_replay";
            state.cache().begin(EventIndex::default(), Some(why.to_owned()));
        }
        BatchCursor {
            state,
            source,
            budget,
            has_begun,
            next: None,
            pings: 0,
            pongs: 0,
            repeats: None,
            running: None,
            waiting: WaitingBatches::default(),
            replay_at: None,
            before_gap: None,
            replay_pause: PAUSES.0,
            last_replay: None,
        }
    }

    /// Records that a ping was sent.
    pub(super) fn pinged(&mut self) {
        self.pings += 1;
    }

    /// Records the answer to a ping.
    pub(super) fn pong(&mut self) {
        self.pongs += 1;
        if !self.has_begun {
            self.start_replay();
        } else if matches!(self.repeats, Some(RepeatsEnd::Pong(ping)) if self.pongs >= ping) {
            self.repeats = Some(RepeatsEnd::Time(Instant::now() + REPEATS));
        }
    }

    /// Starts a replay if it is time.
    pub(super) fn replay_if_due(&mut self) {
        if self.replay_at.is_some_and(|at| at <= Instant::now()) {
            self.start_replay();
        }
    }

    /// Asks for the batches after a gap, or for all. Batches that arrive until its end wait.
    fn start_replay(&mut self) {
        if let (Some(endpoint), None) = (&self.source.replay, &self.running) {
            let start = self.before_gap.take().unwrap_or_default();
            let replay = replay(endpoint.clone(), Arc::clone(&self.budget), start);
            self.running = Some(Box::pin(replay));
            self.replay_at = None;
        }
    }

    /// Waits for the end of the running replay, for ever if there is none. The future may be
    /// dropped at any moment; [`replayed`](Self::replayed) takes its output.
    pub(super) async fn replay_end(&mut self) -> (ReplayedIndex, Result<()>) {
        match &mut self.running {
            Some(running) => running.await,
            None => std::future::pending().await,
        }
    }

    /// Takes the index of a replay, and the batches that have arrived since it began. If the replay
    /// has failed, the index stays as it is, until a later one.
    pub(super) async fn replayed(
        &mut self,
        (replayed, result): (ReplayedIndex, Result<()>),
    ) -> std::result::Result<(), SessionEnd> {
        self.running = None;
        let is_first = !std::mem::replace(&mut self.has_begun, true);
        self.last_replay = Some(Instant::now());
        match result {
            Ok(()) => {
                let why = "earlier events are missing in its replay";
                let why = replayed.lacks_some.then(|| why.to_owned());
                self.state.cache().begin(replayed.index, why);
                self.next = Some(replayed.next);
                self.repeats = Some(RepeatsEnd::Pong(self.pings + 1));
                self.replay_pause = PAUSES.0;
            }
            Err(error) => {
                // A later replay continues from here.
                self.before_gap = Some(replayed).filter(|index| !index.lacks_some);
                {
                    let mut cache = self.state.cache();
                    match is_first {
                        true => cache.begin(EventIndex::default(), Some(error.to_string())),
                        false => cache.why = Some(error.to_string()),
                    }
                }
                self.replay_at = Some(Instant::now() + self.replay_pause);
                self.replay_pause = (2 * self.replay_pause).min(PAUSES.1);
            }
        }
        while let Some((number, batch)) = self.waiting.pop() {
            self.notice_gap(number);
            self.apply(number, &batch).await?;
        }
        if std::mem::take(&mut self.waiting.is_full) {
            self.lose("too many batches of its events arrived during a replay".to_owned());
        }
        Ok(())
    }

    /// Takes a batch that has arrived.
    pub(super) async fn take(
        &mut self,
        one: Publication<'_>,
    ) -> std::result::Result<(), SessionEnd> {
        if self.running.is_none() && self.has_begun {
            self.notice_gap(one.sequence);
            self.replay_if_due();
        }
        match (&self.running, self.has_begun) {
            (Some(_), _) => self.waiting.push(one.sequence, one.batch),
            (None, true) => self.apply(one.sequence, one.batch).await?,
            (None, false) => {}
        }
        Ok(())
    }

    /// Records a gap before the batch with this number, if there is one.
    fn notice_gap(&mut self, number: u64) {
        if let Some(next) = self.next.filter(|next| number > *next) {
            self.lose(format!("{} batches of its events are missing", number - next));
            self.next = Some(number);
        }
    }

    /// Applies a batch in its turn.
    async fn apply(&mut self, number: u64, batch: &[u8]) -> std::result::Result<(), SessionEnd> {
        match self.next {
            // The first batch of all.
            None if number == 0 => self.state.cache().begin(EventIndex::default(), None),
            None => {}
            Some(next) if number < next => {
                match self.repeats {
                    Some(RepeatsEnd::Pong(_)) => return Ok(()),
                    Some(RepeatsEnd::Time(end)) if Instant::now() < end => return Ok(()),
                    _ => {}
                }
                let last = next - 1;
                return Err(Error::new(format!(
                    "the publisher has restarted: its number is {number} after {last}"
                ))
                .into());
            }
            Some(_) => {}
        }
        let batch = EventBatch::decode(batch).map_err(unreadable)?;
        self.repeats = None;
        self.next = Some(number.saturating_add(1));
        self.state.cache().counts.batches += 1;
        // Choices look into the cache between two steps.
        for step in steps(batch.events) {
            {
                let mut cache = self.state.cache();
                step.iter().for_each(|event| cache.apply(event));
            }
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    /// Records that the batches after the latest one are missing.
    fn lose(&mut self, why: String) {
        let mut cache = self.state.cache();
        if let (Some(next), Some(index)) = (self.next, cache.take_exact()) {
            self.before_gap = Some(ReplayedIndex { index, next, lacks_some: false });
        }
        cache.lose(&why);
        // Replays cost the engine time.
        let earliest = self.last_replay.map(|last| last + PAUSES.0);
        self.replay_at.get_or_insert(earliest.unwrap_or_else(Instant::now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn batches_that_waited_at_the_publisher_are_no_restart() {
        let state = State::default();
        let endpoint = ("127.0.0.1".to_owned(), 1);
        let source = EventSource { endpoint: endpoint.clone(), replay: Some(endpoint) };
        let mut cursor = BatchCursor::new(&state, &source, Budget::new(1 << 20));
        let batch = EventBatch::default().encode();
        let three = ReplayedIndex { next: 3, ..ReplayedIndex::default() };
        assert!(cursor.replayed((three, Ok(()))).await.is_ok());
        let publication = |sequence| Publication { sequence, batch: &batch };
        assert!(cursor.take(publication(1)).await.is_ok());
        cursor.pinged();
        cursor.pong();
        assert!(cursor.take(publication(2)).await.is_ok(), "ZeroMQ answers pings first");
        tokio::time::sleep(REPEATS).await;
        assert!(cursor.take(publication(0)).await.is_err(), "it has restarted");
    }

    #[test]
    fn the_batches_that_wait_are_bounded_and_have_no_hole() {
        let mut waiting = WaitingBatches::default();
        let large = vec![0; WAITING.1 / 2];
        (0..3).for_each(|number| waiting.push(number, &large));
        waiting.push(3, b"small");
        assert!(waiting.is_full);
        let numbers: Vec<_> = std::iter::from_fn(|| waiting.pop()).map(|(one, _)| one).collect();
        assert_eq!((numbers, waiting.bytes), (vec![0, 1], 0));

        let mut waiting = WaitingBatches::default();
        (0..=WAITING.0 as u64).for_each(|number| waiting.push(number, b""));
        assert_eq!((waiting.batches.len(), waiting.is_full), (WAITING.0, true));
    }
}
