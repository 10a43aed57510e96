//! A recorder of metrics.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};

/// A recorder that keeps everything that it receives, in order.
#[derive(Clone, Debug, Default)]
pub struct RecordedMetrics {
    values: Arc<Mutex<BTreeMap<String, Vec<f64>>>>,
    described: Arc<Mutex<Vec<String>>>,
}

impl RecordedMetrics {
    /// Returns and forgets the values so far, by name and labels: `name label=value label=value`.
    /// A decrement is a negative value.
    pub fn take(&self) -> BTreeMap<String, Vec<f64>> {
        std::mem::take(&mut lock(&self.values))
    }

    /// Returns the values of a metric so far, by its name and labels.
    pub fn values(&self, name: &str) -> Option<Vec<f64>> {
        lock(&self.values).get(name).cloned()
    }

    /// Returns the names of the metrics that were described.
    pub fn described(&self) -> Vec<String> {
        lock(&self.described).clone()
    }

    fn describe(&self, name: &KeyName) {
        lock(&self.described).push(name.as_str().to_owned());
    }

    fn metric(&self, key: &Key) -> Arc<Metric> {
        let labels = key.labels().map(|label| format!(" {}={}", label.key(), label.value()));
        let name = format!("{}{}", key.name(), labels.collect::<String>());
        Arc::new(Metric { recorded: self.clone(), name })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Metric {
    recorded: RecordedMetrics,
    name: String,
}

impl Metric {
    fn push(&self, value: f64) {
        lock(&self.recorded.values).entry(self.name.clone()).or_default().push(value);
    }
}

impl CounterFn for Metric {
    fn increment(&self, value: u64) {
        self.push(value as f64);
    }
    fn absolute(&self, value: u64) {
        self.push(value as f64);
    }
}

impl GaugeFn for Metric {
    fn increment(&self, value: f64) {
        self.push(value);
    }
    fn decrement(&self, value: f64) {
        self.push(-value);
    }
    fn set(&self, value: f64) {
        self.push(value);
    }
}

impl HistogramFn for Metric {
    fn record(&self, value: f64) {
        self.push(value);
    }
}

impl Recorder for RecordedMetrics {
    fn describe_counter(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.describe(&name);
    }
    fn describe_gauge(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.describe(&name);
    }
    fn describe_histogram(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.describe(&name);
    }
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.metric(key))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.metric(key))
    }
    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.metric(key))
    }
}
