//! The metrics that `/metrics` returns: a recorder for the `metrics` facade, and its content in
//! Prometheus's text format.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata,
    SharedString, Unit,
};

use crate::kv::{self, METRICS, MOONCAKE_METRICS};
use crate::model::{ModelError, Result};

/// The bucket bounds of most durations, in seconds.
const SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
];

/// Returns the bucket bounds of a histogram; those of transfers come from the connector.
fn bounds(name: &str) -> &'static [f64] {
    let metric = METRICS.iter().chain(&MOONCAKE_METRICS).find(|metric| metric.name == name);
    metric.and_then(|metric| metric.buckets).unwrap_or(SECONDS)
}

/// Returns the name of a counter as Prometheus's clients, and vLLM, write it: with the suffix
/// `_total`.
fn of_counter(name: &str) -> String {
    if name.ends_with("_total") { name.to_owned() } else { format!("{name}_total") }
}

/// A recorder of this process's metrics. Clones share the metrics.
#[derive(Clone, Debug, Default)]
pub struct Recorder(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// The name of the model, a label of vLLM's metrics that the recording code does not set.
    model: String,
    described: Mutex<BTreeMap<String, String>>,
    /// Metrics by name and labels.
    counters: Mutex<BTreeMap<(String, String), Arc<AtomicU64>>>,
    gauges: Mutex<BTreeMap<(String, String), Arc<AtomicF64>>>,
    histograms: Mutex<BTreeMap<(String, String), Arc<HistogramData>>>,
}

impl Recorder {
    /// Returns a recorder for the engines of this model.
    pub fn new(model: &str) -> Self {
        Recorder(Arc::new(Inner { model: model.to_owned(), ..Inner::default() }))
    }

    /// Installs a recorder for this process.
    ///
    /// # Errors
    ///
    /// Fails if the process already has a recorder.
    pub fn install(model: &str) -> Result<Self> {
        let recorder = Recorder::new(model);
        let installed = metrics::set_global_recorder(recorder.clone());
        installed.map_err(ModelError::of)?;
        kv::describe_metrics();
        kv::describe_connector_metrics();
        Ok(recorder)
    }

    /// Returns the name and the labels as text.
    fn key(&self, key: &Key) -> (String, String) {
        let mut labels: Vec<(&str, &str)> =
            key.labels().map(|label| (label.key(), label.value())).collect();
        if key.name().starts_with("vllm:") && labels.iter().all(|(label, _)| *label != "model_name")
        {
            labels.push(("model_name", &self.0.model));
        }
        let quoted =
            |value: &str| value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let labels: Vec<String> =
            labels.iter().map(|(name, value)| format!("{name}=\"{}\"", quoted(value))).collect();
        (key.name().to_owned(), labels.join(","))
    }

    fn describe(&self, name: &str, words: SharedString) {
        locked(&self.0.described).insert(name.to_owned(), words.into_owned());
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl metrics::Recorder for Recorder {
    fn describe_counter(&self, key: KeyName, _: Option<Unit>, words: SharedString) {
        self.describe(&of_counter(key.as_str()), words);
    }

    fn describe_gauge(&self, key: KeyName, _: Option<Unit>, words: SharedString) {
        self.describe(key.as_str(), words);
    }

    fn describe_histogram(&self, key: KeyName, _: Option<Unit>, words: SharedString) {
        self.describe(key.as_str(), words);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let (name, labels) = self.key(key);
        let mut counters = locked(&self.0.counters);
        Counter::from_arc(Arc::new(CounterData(
            counters.entry((of_counter(&name), labels)).or_default().clone(),
        )))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(locked(&self.0.gauges).entry(self.key(key)).or_default().clone())
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        let spread = || Arc::new(HistogramData::new(bounds(key.name())));
        Histogram::from_arc(
            locked(&self.0.histograms).entry(self.key(key)).or_insert_with(spread).clone(),
        )
    }
}

impl fmt::Display for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let described = locked(&self.0.described).clone();
        let mut last = String::new();
        let mut head = |f: &mut fmt::Formatter<'_>, name: &str, kind: &str| {
            if last == name {
                return Ok(());
            }
            name.clone_into(&mut last);
            if let Some(words) = described.get(name) {
                writeln!(f, "# HELP {name} {}", words.replace('\n', " "))?;
            }
            writeln!(f, "# TYPE {name} {kind}")
        };
        for ((name, labels), count) in &*locked(&self.0.counters) {
            head(f, name, "counter")?;
            writeln!(f, "{name}{} {}", braced(labels), count.load(Relaxed))?;
        }
        for ((name, labels), level) in &*locked(&self.0.gauges) {
            head(f, name, "gauge")?;
            writeln!(f, "{name}{} {}", braced(labels), f64::from_bits(level.0.load(Relaxed)))?;
        }
        for ((name, labels), spread) in &*locked(&self.0.histograms) {
            head(f, name, "histogram")?;
            let comma = if labels.is_empty() { "" } else { "," };
            let mut sum = 0;
            let ends = spread.bounds.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
            for (end, count) in ends.zip(&spread.counts) {
                sum += count.load(Relaxed);
                writeln!(f, "{name}_bucket{{{labels}{comma}le=\"{end}\"}} {sum}")?;
            }
            let total = f64::from_bits(spread.sum.0.load(Relaxed));
            writeln!(
                f,
                "{name}_sum{} {total}\n{name}_count{} {sum}",
                braced(labels),
                braced(labels)
            )?;
        }
        Ok(())
    }
}

fn braced(labels: &str) -> String {
    if labels.is_empty() { String::new() } else { format!("{{{labels}}}") }
}

struct CounterData(Arc<AtomicU64>);

impl CounterFn for CounterData {
    fn increment(&self, value: u64) {
        self.0.fetch_add(value, Relaxed);
    }

    fn absolute(&self, value: u64) {
        self.0.fetch_max(value, Relaxed);
    }
}

/// An `f64`, stored as its bits.
#[derive(Debug, Default)]
struct AtomicF64(AtomicU64);

impl AtomicF64 {
    fn add(&self, value: f64) {
        let more = |bits| Some((f64::from_bits(bits) + value).to_bits());
        let _ = self.0.fetch_update(Relaxed, Relaxed, more);
    }
}

impl GaugeFn for AtomicF64 {
    fn increment(&self, value: f64) {
        self.add(value);
    }

    fn decrement(&self, value: f64) {
        self.add(-value);
    }

    fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Relaxed);
    }
}

#[derive(Debug)]
struct HistogramData {
    bounds: &'static [f64],
    /// One more count than there are bounds.
    counts: Vec<AtomicU64>,
    sum: AtomicF64,
}

impl HistogramData {
    fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        HistogramData { bounds, counts, sum: AtomicF64::default() }
    }
}

impl HistogramFn for HistogramData {
    fn record(&self, value: f64) {
        let at = self.bounds.partition_point(|bound| *bound < value);
        self.counts[at].fetch_add(1, Relaxed);
        self.sum.add(value);
    }
}

/// Merges the metrics of several processes, in Prometheus's text format. Keeps the first text as it
/// is, and adds the samples of the others that have a label `engine`: other samples could not be
/// told apart.
pub(super) fn merge(texts: &[String]) -> String {
    let mut families: BTreeMap<&str, (Vec<&str>, Vec<&str>)> = BTreeMap::new();
    for (at, text) in texts.iter().enumerate() {
        let mut name = "";
        for line in text.lines() {
            let Some(head) = line.strip_prefix("# ") else {
                if at == 0 || line.contains("engine=\"") {
                    families.entry(name).or_default().1.push(line);
                }
                continue;
            };
            name = head.split(' ').nth(1).unwrap_or_default();
            let heads = &mut families.entry(name).or_default().0;
            if !heads.contains(&line) {
                heads.push(line);
            }
        }
    }
    let lines = families.into_values().filter(|(_, lines)| !lines.is_empty());
    lines
        .flat_map(|(heads, lines)| heads.into_iter().chain(lines))
        .flat_map(|line| [line, "\n"])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_have_vllms_labels() {
        let recorder = Recorder::new("tiny \"m\"");
        metrics::with_local_recorder(&recorder, || {
            metrics::describe_counter!("vllm:prompt_tokens_total", "Tokens of prompts");
            metrics::counter!("vllm:prompt_tokens_total", "engine" => "0").increment(3);
            metrics::counter!("vllm:prompt_tokens_total", "engine" => "0").increment(4);
            metrics::counter!("kvx_transfers_total", "backend" => "SHM").increment(1);
            metrics::describe_counter!("vllm:nixl_num_kv_expired_reqs", "Nobody came for them");
            metrics::counter!("vllm:nixl_num_kv_expired_reqs", "engine" => "1").increment(5);
            metrics::gauge!("vllm:num_requests_running").set(2.0);
            metrics::histogram!("vllm:nixl_bytes_transferred", "engine" => "1").record(9000.0);
        });
        let text = recorder.to_string();
        for line in [
            "# HELP vllm:prompt_tokens_total Tokens of prompts",
            "# TYPE vllm:prompt_tokens_total counter",
            "# HELP vllm:nixl_num_kv_expired_reqs_total Nobody came for them",
            r#"vllm:nixl_num_kv_expired_reqs_total{engine="1",model_name="tiny \"m\""} 5"#,
            r#"vllm:prompt_tokens_total{engine="0",model_name="tiny \"m\""} 7"#,
            r#"kvx_transfers_total{backend="SHM"} 1"#,
            r#"vllm:num_requests_running{model_name="tiny \"m\""} 2"#,
            r#"vllm:nixl_bytes_transferred_bucket{engine="1",model_name="tiny \"m\"",le="8192"} 0"#,
            r#"vllm:nixl_bytes_transferred_bucket{engine="1",model_name="tiny \"m\"",le="32768"} 1"#,
            r#"vllm:nixl_bytes_transferred_sum{engine="1",model_name="tiny \"m\""} 9000"#,
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line}\n{text}");
        }
    }

    #[test]
    fn metrics_of_all_engines_are_one_text() {
        let here = "# TYPE a counter\na{engine=\"0\"} 1\n# TYPE b gauge\nb 2\n".to_owned();
        let there = "# TYPE a counter\na{engine=\"1\"} 3\n# TYPE b gauge\nb 4\n".to_owned();
        let one = "# TYPE a counter\na{engine=\"0\"} 1\na{engine=\"1\"} 3\n# TYPE b gauge\nb 2\n";
        assert_eq!(merge(&[here, there]), one);
    }
}
