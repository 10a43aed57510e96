//! Metrics by the `metrics` facade, and a `tracing` span per transfer: nothing without a recorder or a subscriber.

use std::time::Duration;

use crate::plan::Size;
use crate::{Error, Op};

/// Says what the metrics mean to a recorder; call it once after installing one.
pub fn describe_metrics() {
    use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
    describe_counter!(
        "kvx_transfers_total",
        Unit::Count,
        "Transfers that succeeded, by backend and operation"
    );
    describe_counter!(
        "kvx_bytes_total",
        Unit::Bytes,
        "Bytes of transfers that succeeded, by backend and operation"
    );
    describe_counter!(
        "kvx_blocks_total",
        Unit::Count,
        "Blocks of transfers that succeeded, by backend and operation"
    );
    describe_counter!("kvx_failures_total", Unit::Count, "Operations that failed, by kind of error");
    describe_histogram!("kvx_post_seconds", Unit::Seconds, "Time that posting a transfer took its caller");
    describe_histogram!("kvx_transfer_seconds", Unit::Seconds, "Time from post to the end of a transfer");
    describe_gauge!(
        "kvx_quarantined_bytes",
        Unit::Bytes,
        "Memory kept because remote access is not proven ended"
    );
}

pub(crate) fn succeeded(backend: &'static str, op: Op, size: Size, post: Duration, total: Duration) {
    let op = match op {
        Op::Read => "read",
        Op::Write => "write",
    };
    metrics::counter!("kvx_transfers_total", "backend" => backend, "op" => op).increment(1);
    metrics::counter!("kvx_bytes_total", "backend" => backend, "op" => op).increment(size.bytes);
    metrics::counter!("kvx_blocks_total", "backend" => backend, "op" => op).increment(size.blocks);
    metrics::histogram!("kvx_post_seconds", "backend" => backend).record(post);
    metrics::histogram!("kvx_transfer_seconds", "backend" => backend, "op" => op).record(total);
}

pub(crate) fn failed(error: &Error) {
    metrics::counter!("kvx_failures_total", "kind" => error.kind().as_str()).increment(1);
}
