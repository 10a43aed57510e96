//! The connector's metrics, in the form of vLLM's `NixlKVConnectorStats`.

use std::collections::BTreeMap;
use std::sync::{Arc, Once};

use kvx_core::backend::sync::Mutex;
use metrics::{
    Counter, CounterFn, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};

/// The histograms of a transfer, which always get as many values as each other, and the names of
/// their lists in vLLM.
const HISTOGRAMS: [(&str, &str); 4] = [
    ("vllm:nixl_xfer_time_seconds", "transfer_duration"),
    ("vllm:nixl_post_time_seconds", "post_duration"),
    ("vllm:nixl_bytes_transferred", "bytes_transferred"),
    ("vllm:nixl_num_descriptors", "num_descriptors"),
];
const FAILED_TRANSFERS: &str = "vllm:nixl_num_failed_transfers";
const FAILED_NOTIFICATIONS: &str = "vllm:nixl_num_failed_notifications";
/// Further counters, and the names of their lists in vLLM.
const COUNTERS: [(&str, &str); 2] = [
    ("vllm:nixl_num_kv_expired_reqs", "num_kv_expired_reqs"),
    ("vllm:nixl_num_notifications_after_expiry", "num_notifications_after_expiry"),
];
/// The greatest number of transfers that are kept for vLLM, which takes them at each step.
const MOST: usize = 100_000;

/// The metrics since vLLM took them last.
struct Recorded {
    values: BTreeMap<&'static str, Vec<f64>>,
    counts: BTreeMap<&'static str, u64>,
}

static RECORDED: Mutex<Recorded> =
    Mutex::new(Recorded { values: BTreeMap::new(), counts: BTreeMap::new() });

/// Lets kvx record its metrics here, once per process.
pub(crate) fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        if metrics::set_global_recorder(StatsRecorder).is_err() {
            tracing::warn!(
                "another library of this process records kvx's metrics, so vLLM shows no transfers"
            );
        }
    });
}

/// Takes what vLLM's `NixlKVConnectorStats` has in its lists.
pub(crate) fn take() -> BTreeMap<&'static str, Vec<f64>> {
    let mut recorded = RECORDED.lock();
    let mut taken = BTreeMap::new();
    let lengths = HISTOGRAMS.map(|(name, _)| recorded.values.get(name).map_or(0, Vec::len));
    let whole = lengths.into_iter().min().unwrap_or_default();
    for (name, list) in HISTOGRAMS.iter().filter(|_| whole > 0) {
        let values = recorded.values.entry(name).or_default();
        taken.insert(*list, values.drain(..whole).collect());
    }
    // Failed notifications count as failed transfers too, and vLLM adds the lists up.
    let notifications = recorded.counts.remove(FAILED_NOTIFICATIONS).unwrap_or_default();
    let failed = recorded.counts.remove(FAILED_TRANSFERS).unwrap_or_default();
    let failed = [
        ("num_failed_transfers", failed.saturating_sub(notifications)),
        ("num_failed_notifications", notifications),
    ];
    let counts = COUNTERS.map(|(name, list)| (list, recorded.counts.remove(name).unwrap_or(0)));
    for (list, count) in failed.into_iter().chain(counts).filter(|(_, count)| *count > 0) {
        taken.insert(list, vec![1.0; usize::try_from(count).unwrap_or(MOST).min(MOST)]);
    }
    taken
}

struct StatsRecorder;

/// A metric with this name.
struct Meter(&'static str);

impl HistogramFn for Meter {
    fn record(&self, value: f64) {
        let mut recorded = RECORDED.lock();
        let values = recorded.values.entry(self.0).or_default();
        if values.len() < MOST {
            values.push(value);
        }
    }
}

impl CounterFn for Meter {
    fn increment(&self, value: u64) {
        *RECORDED.lock().counts.entry(self.0).or_default() += value;
    }

    fn absolute(&self, value: u64) {
        RECORDED.lock().counts.insert(self.0, value);
    }
}

impl Recorder for StatsRecorder {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let names = COUNTERS.map(|(name, _)| name);
        let mut names = names.into_iter().chain([FAILED_TRANSFERS, FAILED_NOTIFICATIONS]);
        names
            .find(|name| *name == key.name())
            .map_or_else(Counter::noop, |name| Counter::from_arc(Arc::new(Meter(name))))
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        let mut names = HISTOGRAMS.into_iter().map(|(name, _)| name);
        names
            .find(|name| *name == key.name())
            .map_or_else(Histogram::noop, |name| Histogram::from_arc(Arc::new(Meter(name))))
    }
}
