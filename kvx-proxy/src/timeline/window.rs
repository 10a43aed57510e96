//! Counts and percentiles over the last 15 minutes, in a ring of slots of 15 seconds.

use std::time::Duration;

use serde::Serialize;

const SLOT: Duration = Duration::from_secs(15);
pub(super) const SLOTS: usize = 60;
/// The slots of the last minute.
const RECENT: u64 = 4;
/// The buckets of a histogram: from 100 µs to 28 minutes, each 9% wider than the one before.
const BUCKETS: usize = 192;
const LEAST_MICROS: f64 = 100.0;
const PER_OCTAVE: f64 = 8.0;

/// A histogram of times.
type Counts = [u32; BUCKETS];

fn bucket(time: Duration) -> usize {
    // A conversion of a float saturates.
    let octaves = (time.as_secs_f64() * 1e6 / LEAST_MICROS).log2();
    ((octaves * PER_OCTAVE) as usize).min(BUCKETS - 1)
}

/// Returns the middle of a bucket in milliseconds.
fn millis(bucket: usize) -> f64 {
    let micros = LEAST_MICROS * ((bucket as f64 + 0.5) / PER_OCTAVE).exp2();
    // Three digits are more than a bucket knows.
    let scale = 10f64.powi(2 - micros.log10().floor() as i32);
    (micros * scale).round() / scale / 1e3
}

/// What one request adds.
#[derive(Debug, Default)]
pub(super) struct Observation {
    pub(super) is_failure: bool,
    /// True if the client ended the request, or sent a wrong one.
    pub(super) is_of_client: bool,
    pub(super) first_byte: Option<Duration>,
    pub(super) per_event: Option<Duration>,
}

#[derive(Clone, Debug)]
pub(super) struct Slot {
    /// The number of the slot since the start.
    number: u64,
    ended: u32,
    failed: u32,
    of_clients: u32,
    first_byte: Counts,
    per_event: Counts,
}

const EMPTY: Slot = Slot {
    number: 0,
    ended: 0,
    failed: 0,
    of_clients: 0,
    first_byte: [0; BUCKETS],
    per_event: [0; BUCKETS],
};

/// A ring of slots.
#[derive(Clone, Debug)]
pub(super) struct Window(Vec<Slot>);

impl Default for Window {
    fn default() -> Self {
        Window(vec![EMPTY; SLOTS])
    }
}

/// The percentiles of a time.
#[derive(Debug, Serialize, PartialEq)]
pub(crate) struct Percentiles {
    count: u64,
    p50_ms: Option<f64>,
    p90_ms: Option<f64>,
    p99_ms: Option<f64>,
}

impl Percentiles {
    fn of<'a>(counts: impl Iterator<Item = &'a Counts>) -> Self {
        let mut all = [0u64; BUCKETS];
        for counts in counts {
            all.iter_mut().zip(counts).for_each(|(sum, count)| *sum += u64::from(*count));
        }
        let count: u64 = all.iter().sum();
        let at = |part: f64| {
            let wanted = ((count as f64 * part).ceil() as u64).max(1);
            let mut below = 0;
            let reached = |count: &u64| {
                below += count;
                below >= wanted
            };
            all.iter().position(reached).map(millis)
        };
        Percentiles { count, p50_ms: at(0.5), p90_ms: at(0.9), p99_ms: at(0.99) }
    }
}

/// What has ended in the last minute.
#[derive(Debug, Serialize, PartialEq)]
pub(crate) struct LastMinute {
    pub(crate) ended: u64,
    pub(crate) failed: u64,
    pub(crate) of_clients: u64,
}

impl LastMinute {
    /// Returns true if at least half of the requests failed, other than by their clients' fault.
    pub(crate) fn is_failing(&self) -> bool {
        self.failed >= 3 && 2 * self.failed >= self.ended - self.of_clients
    }
}

/// The last 15 minutes.
#[derive(Debug, Serialize)]
pub(crate) struct Summary {
    /// The seconds for which there are counts: fewer than 900 after the start.
    seconds: f64,
    slot_seconds: u64,
    ttft: Percentiles,
    time_per_token: Percentiles,
    pub(crate) last_minute: LastMinute,
    /// The requests that ended in each slot, from the earliest to the one in progress.
    ended: Vec<u32>,
    failed: Vec<u32>,
    /// The median time to the first byte of each slot.
    ttft_p50_ms: Vec<Option<f64>>,
}

impl Window {
    /// Adds a request that ended at this time since the start.
    pub(super) fn add(&mut self, at: Duration, one: &Observation) {
        let number = at.as_secs() / SLOT.as_secs();
        let Some(slot) = self.0.get_mut((number % SLOTS as u64) as usize) else { return };
        if slot.number < number {
            *slot = Slot { number, ..EMPTY };
        } else if slot.number > number {
            return; // older than the window
        }
        slot.ended += 1;
        slot.failed += u32::from(one.is_failure);
        slot.of_clients += u32::from(one.is_of_client);
        one.first_byte.into_iter().for_each(|time| slot.first_byte[bucket(time)] += 1);
        one.per_event.into_iter().for_each(|time| slot.per_event[bucket(time)] += 1);
    }

    /// Summarizes the slots up to now.
    pub(super) fn summary(&self, now: Duration) -> Summary {
        let current = now.as_secs() / SLOT.as_secs();
        let first = (current + 1).saturating_sub(SLOTS as u64);
        let slots: Vec<&Slot> = (first..=current)
            .map(|number| {
                let slot = &self.0[(number % SLOTS as u64) as usize];
                if slot.number == number { slot } else { &EMPTY }
            })
            .collect();
        let recent = &slots[slots.len().saturating_sub(RECENT as usize)..];
        let sum = |of: fn(&Slot) -> u32| recent.iter().map(|slot| u64::from(of(slot))).sum();
        Summary {
            seconds: (now - SLOT * first as u32).as_secs_f64(),
            slot_seconds: SLOT.as_secs(),
            ttft: Percentiles::of(slots.iter().map(|slot| &slot.first_byte)),
            time_per_token: Percentiles::of(slots.iter().map(|slot| &slot.per_event)),
            last_minute: LastMinute {
                ended: sum(|slot| slot.ended),
                failed: sum(|slot| slot.failed),
                of_clients: sum(|slot| slot.of_clients),
            },
            ended: slots.iter().map(|slot| slot.ended).collect(),
            failed: slots.iter().map(|slot| slot.failed).collect(),
            ttft_p50_ms: slots
                .iter()
                .map(|slot| Percentiles::of(std::iter::once(&slot.first_byte)).p50_ms)
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn percentiles_are_within_a_bucket_of_the_times() {
        let mut window = Window::default();
        for count in 1..=1000 {
            let first_byte = Some(Duration::from_millis(count));
            let per_event = Some(Duration::from_micros(10 * count));
            window
                .add(seconds(3), &Observation { first_byte, per_event, ..Observation::default() });
        }
        let Summary { ttft, time_per_token, .. } = window.summary(seconds(20));
        let near = |is: Option<f64>, wanted: f64| {
            let is = is.unwrap();
            assert!((is / wanted - 1.0).abs() < 0.06, "{is} for {wanted}");
        };
        assert_eq!((ttft.count, time_per_token.count), (1000, 1000));
        near(ttft.p50_ms, 500.0);
        near(ttft.p90_ms, 900.0);
        near(ttft.p99_ms, 990.0);
        near(time_per_token.p50_ms, 5.0);
        for extreme in [Duration::ZERO, Duration::MAX] {
            let first_byte = Some(extreme);
            window.add(seconds(3), &Observation { first_byte, ..Observation::default() });
        }
        assert_eq!(window.summary(seconds(20)).ttft.count, 1002);
    }

    #[test]
    fn slots_are_forgotten_after_fifteen_minutes() {
        let mut window = Window::default();
        let failed = Observation { is_failure: true, ..Observation::default() };
        let by_client = Observation { is_of_client: true, ..Observation::default() };
        assert_eq!(window.summary(seconds(0)).ended, [0]);
        for at in [1, 16, 899] {
            window.add(seconds(at), &failed);
        }
        let summary = window.summary(seconds(899));
        assert_eq!((summary.ended.len(), summary.ended.iter().sum::<u32>()), (60, 3));
        assert_eq!((summary.ended[0], summary.failed[1], summary.ended[59]), (1, 1, 1));
        assert!(!summary.last_minute.is_failing(), "one failure is not enough");
        window.add(seconds(901), &failed);
        window.add(seconds(902), &failed);
        window.add(seconds(903), &by_client);
        let summary = window.summary(seconds(903));
        assert_eq!(summary.ended.iter().sum::<u32>(), 5, "the first slot is forgotten");
        assert_eq!(summary.last_minute, LastMinute { ended: 4, failed: 3, of_clients: 1 });
        assert!(summary.last_minute.is_failing());
        assert_eq!(
            summary.ttft,
            Percentiles { count: 0, p50_ms: None, p90_ms: None, p99_ms: None }
        );
        window.add(seconds(1), &failed);
        assert_eq!(window.summary(seconds(903)).ended.iter().sum::<u32>(), 5, "too old");
        assert!(!window.summary(seconds(990)).last_minute.is_failing(), "a minute has passed");
        assert_eq!(window.summary(seconds(9000)).ended.iter().sum::<u32>(), 0);
    }
}
