//! What the router remembers about requests that have ended: the timelines of some, for
//! `/requests`, and counts over the last 15 minutes, for `/status`.

mod flows;
mod legs;
mod trace;
mod view;
mod window;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

#[cfg(test)]
pub(crate) use flows::InstanceLegs;
pub(crate) use flows::Traffic;
pub(crate) use legs::{Leg, LegEnd, LegLog, Told};
pub(crate) use trace::trace;
pub(crate) use view::RequestView;
pub(crate) use window::{LastMinute, Summary};
use window::{Observation, Window};

use crate::metrics::RequestOutcome;

/// The most recent requests that are kept.
pub(crate) const LAST: usize = 1000;
/// The slow requests that are kept as well.
pub(crate) const SLOWEST: usize = 100;
/// How long a slow request is kept.
const SLOW_FOR: Duration = Duration::from_secs(60 * 60);

/// A request that has ended. Its texts have at most 256 bytes each.
#[derive(Debug)]
pub(crate) struct Timeline {
    pub(crate) id: String,
    pub(crate) path: String,
    pub(crate) model: Option<String>,
    pub(crate) route: Option<(&'static str, &'static str)>,
    pub(crate) outcome: RequestOutcome,
    pub(crate) status: u16,
    pub(crate) why: Option<String>,
    pub(crate) attempts: u32,
    pub(crate) arrived: Instant,
    pub(crate) queued: Duration,
    pub(crate) first_byte: Option<Duration>,
    pub(crate) total: Duration,
    pub(crate) bytes: u64,
    pub(crate) events: u64,
    /// The router's estimate, or the count that a tokenizer made.
    pub(crate) prompt_tokens: Option<u64>,
    /// The tokens of the answer, if its usage tells them.
    pub(crate) answer_tokens: Option<u64>,
    pub(crate) legs: Arc<LegLog>,
}

impl Timeline {
    /// Returns how long the client waited for its answer to begin, or for the end without one.
    pub(crate) fn wait(&self) -> Duration {
        self.first_byte.unwrap_or(self.total)
    }

    /// Returns the mean time between the events of the answer.
    pub(crate) fn per_event(&self) -> Option<Duration> {
        let gaps = u32::try_from(self.events.checked_sub(1)?).unwrap_or(u32::MAX);
        self.total.saturating_sub(self.first_byte?).checked_div(gaps)
    }

    /// Returns whether the request is a completion that was sent to instances. Others, for embeddings
    /// or tokens, have other times.
    fn is_completion(&self) -> bool {
        !matches!(self.route, None | Some(("passed", _)))
    }

    fn observation(&self) -> Observation {
        let answered = self.is_completion() && self.status < 400;
        Observation {
            is_failure: self.outcome.is_failure(),
            is_of_client: !self.outcome.is_failure() && self.outcome != RequestOutcome::Ok,
            first_byte: self.first_byte.filter(|_| answered),
            per_event: self.per_event().filter(|_| answered),
        }
    }
}

#[derive(Debug, Default)]
struct Kept {
    last: VecDeque<Arc<Timeline>>,
    slowest: Vec<Arc<Timeline>>,
    /// No faster request replaces one of `slowest` until one of them is too old.
    slow_limit: Option<(Duration, Instant)>,
    window: Window,
}

/// The past requests of a router, in bounded memory.
#[derive(Debug)]
pub(crate) struct History {
    started: Instant,
    /// The time of `started` since the Unix epoch.
    started_at: Duration,
    kept: Mutex<Kept>,
}

impl Default for History {
    fn default() -> Self {
        History {
            started: Instant::now(),
            started_at: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
            kept: Mutex::default(),
        }
    }
}

impl History {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request that has ended.
    pub(crate) fn add(&self, timeline: Timeline) {
        let ended = timeline.arrived + timeline.total;
        let observation = timeline.observation();
        let timeline = Arc::new(timeline);
        let at = ended.saturating_duration_since(self.started);
        let (oldest, fastest) = {
            let mut kept = self.kept();
            kept.window.add(at, &observation);
            let oldest = if kept.last.len() == LAST { kept.last.pop_front() } else { None };
            kept.last.push_back(Arc::clone(&timeline));
            (oldest, kept.add_slow(timeline, ended))
        };
        drop((oldest, fastest)); // their memory is freed without the lock
    }

    /// Returns the last requests, from the latest to the earliest.
    pub(crate) fn last(&self, limit: usize) -> Vec<Arc<Timeline>> {
        self.kept().last.iter().rev().take(limit).cloned().collect()
    }

    /// Returns the slowest requests of the last hour, from the slowest on.
    pub(crate) fn slowest(&self, limit: usize) -> Vec<Arc<Timeline>> {
        let mut slowest = self.kept().slowest.clone();
        let now = Instant::now();
        slowest.retain(|one| one.is_recent(now));
        slowest.sort_by_key(|one| std::cmp::Reverse(one.wait()));
        slowest.truncate(limit);
        slowest
    }

    /// Returns the counts and percentiles of the last 15 minutes.
    pub(crate) fn summary(&self) -> Summary {
        let window = self.kept().window.clone(); // summarized without the lock
        window.summary(self.started.elapsed())
    }

    /// Returns a time in microseconds since the Unix epoch, by the clock at the router's start.
    pub(crate) fn unix_micros(&self, time: Instant) -> u64 {
        (self.started_at + time.saturating_duration_since(self.started)).as_micros() as u64
    }
}

impl Timeline {
    /// Returns when the request leaves the list of slow ones.
    fn expires(&self) -> Instant {
        self.arrived + self.total + SLOW_FOR
    }

    fn is_recent(&self, now: Instant) -> bool {
        now < self.expires()
    }
}

impl Kept {
    /// Keeps a request if it is one of the slowest, and returns the one that it replaces.
    fn add_slow(&mut self, timeline: Arc<Timeline>, now: Instant) -> Option<Arc<Timeline>> {
        if self.slowest.len() < SLOWEST {
            self.slowest.push(timeline);
            return None;
        }
        let wait = timeline.wait();
        // Most requests are faster: they are not compared with each of the slowest.
        if self.slow_limit.is_some_and(|(least, until)| wait <= least && now < until) {
            return None;
        }
        // An old request is replaced by any other.
        let rank = |one: &Arc<Timeline>| (one.is_recent(now), one.wait());
        let least = self.slowest.iter_mut().min_by_key(|one| rank(one))?;
        let replaced = (rank(least) < (true, wait)).then(|| std::mem::replace(least, timeline));
        let waits = self.slowest.iter().map(|one| one.wait());
        let ends = self.slowest.iter().map(|one| one.expires());
        self.slow_limit = waits.min().zip(ends.min());
        replaced
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::fleet::instance::Role;

    /// Returns a request of two legs that began this long ago.
    pub(crate) fn timeline(id: &str, ago: Duration, wait: Duration) -> Timeline {
        let arrived = Instant::now().checked_sub(ago).unwrap();
        let legs = Arc::new(LegLog::new(arrived));
        for (role, name) in [(Role::Prefill, "p:1"), (Role::Decode, "d:1")] {
            let at = legs.begin(role, &name.into());
            let goes_on = role == Role::Decode;
            legs.end(at, LegEnd { outcome: "ok", goes_on, ..LegEnd::default() });
        }
        Timeline {
            id: id.to_owned(),
            path: "/v1/completions".to_owned(),
            model: Some("m".to_owned()),
            route: Some(("disaggregated", "")),
            outcome: RequestOutcome::Ok,
            status: 200,
            why: None,
            attempts: 1,
            arrived,
            queued: Duration::from_millis(1),
            first_byte: Some(wait),
            total: wait + Duration::from_millis(90),
            bytes: 100,
            events: 10,
            prompt_tokens: Some(7),
            answer_tokens: None,
            legs,
        }
    }

    #[test]
    fn the_last_thousand_and_the_slowest_hundred_of_an_hour_are_kept() {
        let history = History::default();
        let millis = Duration::from_millis;
        let hours = Duration::from_secs(2 * 60 * 60);
        history.add(timeline("old and slow", hours, Duration::from_secs(60)));
        // The slow ones come first and leave the list of the last ones.
        for count in (1..=5000).rev() {
            history.add(timeline(&count.to_string(), Duration::ZERO, millis(count)));
        }
        let ids = |of: Vec<Arc<Timeline>>| of.iter().map(|one| one.id.clone()).collect::<Vec<_>>();
        let expected = |range: std::ops::RangeInclusive<u64>| range.map(|n| n.to_string());
        assert_eq!(ids(history.last(9999)), expected(1..=1000).collect::<Vec<_>>());
        assert_eq!(ids(history.slowest(9999)), expected(4901..=5000).rev().collect::<Vec<_>>());
        assert_eq!((history.last(3).len(), history.slowest(3).len()), (3, 3));
        let kept = history.kept();
        assert_eq!((kept.last.len(), kept.slowest.len()), (LAST, SLOWEST));
        assert!(kept.last.capacity() <= 2 * LAST && kept.slowest.capacity() <= 2 * SLOWEST);
    }

    #[test]
    fn memory_is_bounded_by_the_number_of_requests() {
        let mut typical = timeline("0123456789abcdef0123456789abcdef", Duration::ZERO, SLOW_FOR);
        typical.model = Some("meta-llama/Llama-3.1-8B-Instruct".to_owned());
        let typical = typical.memory();
        assert!(typical < 768, "{typical} bytes for a request of two legs");
        // The longest texts, and many more legs than are kept.
        let longest = "x".repeat(256);
        let mut worst = timeline(&longest, Duration::ZERO, SLOW_FOR);
        worst.path.clone_from(&longest);
        (worst.model, worst.why) = (Some(longest.clone()), Some(longest.clone()));
        for _ in 0..1000 {
            let at = worst.legs.begin(Role::Prefill, &longest.as_str().into());
            worst.legs.end(at, LegEnd { outcome: "refused", failed: true, ..LegEnd::default() });
        }
        let worst = worst.memory();
        assert!(worst < 4 << 10, "{worst} bytes");
        let window = size_of::<window::Slot>() * window::SLOTS;
        assert!(window < 128 << 10, "{window} bytes");
    }
}
