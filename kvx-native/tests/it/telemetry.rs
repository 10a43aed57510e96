//! The metrics of transfers, failures and quarantined memory, as a recorder receives them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvx_core::{Agent, ErrorKind, Grid, Memory, Plan, Registry};
use kvx_native::Tcp;
use kvx_testkit::test;
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata,
    SharedString, Unit,
};

/// A recorder with sums of counters, last values of gauges, and numbers of records of histograms,
/// by name and labels.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<BTreeMap<String, f64>>>);

struct Cell(Told, String);

impl Cell {
    fn change(&self, change: impl FnOnce(&mut f64)) {
        change(self.0.0.lock().expect("no test panics with it").entry(self.1.clone()).or_default());
    }
}

impl CounterFn for Cell {
    fn increment(&self, value: u64) {
        self.change(|sum| *sum += value as f64);
    }
    fn absolute(&self, value: u64) {
        self.change(|sum| *sum = value as f64);
    }
}

impl GaugeFn for Cell {
    fn increment(&self, value: f64) {
        self.change(|last| *last += value);
    }
    fn decrement(&self, value: f64) {
        self.change(|last| *last -= value);
    }
    fn set(&self, value: f64) {
        self.change(|last| *last = value);
    }
}

impl HistogramFn for Cell {
    fn record(&self, _: f64) {
        self.change(|count| *count += 1.0);
    }
}

impl Told {
    fn cell(&self, key: &Key) -> Arc<Cell> {
        let labels: Vec<String> =
            key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        Arc::new(Cell(self.clone(), format!("{} {}", key.name(), labels.join(" "))))
    }

    fn value(&self, name: &str) -> f64 {
        self.0.lock().expect("no test panics with it").get(name).copied().unwrap_or_default()
    }

    /// Fails unless the value becomes `wanted`: a thread that waits for a transfer is woken before
    /// the recorder is notified.
    fn becomes(&self, name: &str, wanted: f64) {
        let end = Instant::now() + Duration::from_secs(10);
        while self.value(name) != wanted && Instant::now() < end {
            std::thread::yield_now();
        }
        assert_eq!(self.value(name), wanted, "{name}");
    }
}

impl metrics::Recorder for Told {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.cell(key))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.cell(key))
    }
    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.cell(key))
    }
}

#[test(own_process)]
fn a_recorder_receives_transfers_and_failures() {
    let told = Told::default();
    metrics::set_global_recorder(told.clone()).ok().unwrap();
    kvx_core::describe_metrics();
    let mut registry = Registry::new();
    registry.add(Tcp).unwrap();
    let agent = |name| Agent::builder(name).registry(registry.clone()).build().unwrap();
    let (owner, reader) = (agent("owner"), agent("reader"));
    for from_the_start in ["kvx_failures_total kind=revoked", "kvx_quarantined_bytes "] {
        let shown = told.0.lock().unwrap().get(from_the_start).copied();
        assert_eq!(shown, Some(0.0), "{from_the_start}");
    }
    let region = owner.register("kv", Memory::owned(vec![7; 64 << 10])).unwrap();
    let local = reader.register("kv", Memory::owned(vec![0; 64 << 10])).unwrap();
    let peer = reader.connect(owner.metadata().unwrap()).unwrap();
    let grid = Grid::packed(4096, 16);
    let plan = Plan::read(
        local.grid(grid).unwrap().blocks([1, 5]),
        peer.region("kv").unwrap().grid(grid).unwrap().blocks([2, 9]),
    )
    .unwrap();
    let wait = Duration::from_secs(10);
    for _ in 0..2 {
        peer.post(&plan).unwrap().wait_blocking(wait).unwrap();
    }
    region.revoke(wait).wait_blocking(wait).unwrap();
    assert_eq!(
        peer.post(&plan).unwrap().wait_blocking(wait).unwrap_err().kind(),
        ErrorKind::Revoked
    );

    told.becomes("kvx_transfers_total backend=TCP op=read", 2.0);
    told.becomes("kvx_bytes_total backend=TCP op=read", 4.0 * 4096.0);
    told.becomes("kvx_blocks_total backend=TCP op=read", 4.0);
    told.becomes("kvx_post_seconds backend=TCP", 2.0);
    told.becomes("kvx_transfer_seconds backend=TCP op=read", 2.0);
    told.becomes("kvx_failures_total kind=revoked", 1.0);
}
