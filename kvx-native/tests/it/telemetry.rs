//! The metrics of transfers, failures and quarantined memory, as a recorder receives them.

use std::time::{Duration, Instant};

use kvx_core::{Agent, ErrorKind, Grid, Memory, Plan, Registry};
use kvx_native::Tcp;
use kvx_testkit::{RecordedMetrics, test};

fn sum(values: &[f64]) -> f64 {
    values.iter().sum()
}

fn count(values: &[f64]) -> f64 {
    values.len() as f64
}

#[test(own_process)]
fn a_recorder_receives_transfers_and_failures() {
    let recorded = RecordedMetrics::default();
    metrics::set_global_recorder(recorded.clone()).ok().unwrap();
    kvx_core::describe_metrics();
    let mut registry = Registry::new();
    registry.add(Tcp).unwrap();
    let agent = |name| Agent::builder(name).registry(registry.clone()).build().unwrap();
    let (owner, reader) = (agent("owner"), agent("reader"));
    for from_the_start in ["kvx_failures_total kind=revoked", "kvx_quarantined_bytes"] {
        let values = recorded.values(from_the_start);
        assert!(values.is_some_and(|values| sum(&values) == 0.0), "{from_the_start}");
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

    // A thread that waits for a transfer is woken before the recorder is notified.
    let end = Instant::now() + wait;
    for (name, of, wanted) in [
        ("kvx_transfers_total backend=TCP op=read", sum as fn(&[f64]) -> f64, 2.0),
        ("kvx_bytes_total backend=TCP op=read", sum, 4.0 * 4096.0),
        ("kvx_blocks_total backend=TCP op=read", sum, 4.0),
        ("kvx_post_seconds backend=TCP", count, 2.0),
        ("kvx_transfer_seconds backend=TCP op=read", count, 2.0),
        ("kvx_failures_total kind=revoked", sum, 1.0),
    ] {
        let value = || of(&recorded.values(name).unwrap_or_default());
        while value() != wanted && Instant::now() < end {
            std::thread::yield_now();
        }
        assert_eq!(value(), wanted, "{name}");
    }
}
