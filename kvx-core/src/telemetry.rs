//! Metrics of transfers, through the `metrics` facade. Without a recorder they have no effect.

use std::time::Duration;

use metrics::{Counter, Histogram};

use crate::operation::{Op, Size};
use crate::{Error, ErrorKind};

/// Describes the metrics to the recorder. Call it once after installing one. An agent reports to
/// the recorder that is installed when the agent is built.
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
    describe_counter!(
        "kvx_failures_total",
        Unit::Count,
        "Operations that failed, by kind of error"
    );
    describe_histogram!(
        "kvx_post_seconds",
        Unit::Seconds,
        "Time that posting a transfer took its caller"
    );
    describe_histogram!(
        "kvx_transfer_seconds",
        Unit::Seconds,
        "Time from post to the end of a transfer"
    );
    describe_gauge!(
        "kvx_quarantined_bytes",
        Unit::Bytes,
        "Memory kept because remote access is not proven to have ended"
    );
}

/// The metrics of one backend of one agent, looked up once. A lookup per transfer would cost more
/// than a small read.
pub(crate) struct Meters {
    read: OpMeters,
    write: OpMeters,
    post: Histogram,
}

struct OpMeters {
    transfers: Counter,
    bytes: Counter,
    blocks: Counter,
    time: Histogram,
}

impl OpMeters {
    fn of(backend: &'static str, op: &'static str) -> Self {
        OpMeters {
            transfers: metrics::counter!("kvx_transfers_total", "backend" => backend, "op" => op),
            bytes: metrics::counter!("kvx_bytes_total", "backend" => backend, "op" => op),
            blocks: metrics::counter!("kvx_blocks_total", "backend" => backend, "op" => op),
            time: metrics::histogram!("kvx_transfer_seconds", "backend" => backend, "op" => op),
        }
    }
}

impl Meters {
    pub(crate) fn of(backend: &'static str) -> Self {
        Meters {
            read: OpMeters::of(backend, "read"),
            write: OpMeters::of(backend, "write"),
            post: metrics::histogram!("kvx_post_seconds", "backend" => backend),
        }
    }

    pub(crate) fn succeeded(&self, op: Op, size: Size, post: Duration, total: Duration) {
        let meters = match op {
            Op::Read => &self.read,
            Op::Write => &self.write,
        };
        meters.transfers.increment(1);
        meters.bytes.increment(size.bytes);
        meters.blocks.increment(size.blocks);
        meters.time.record(total);
        self.post.record(post);
    }
}

/// Creates the series that have no value before something fails: without them, `increase` over a
/// counter misses the first failure.
pub(crate) fn start() {
    for kind in ErrorKind::ALL {
        failures(*kind).increment(0);
    }
    metrics::gauge!("kvx_quarantined_bytes").increment(0.0);
}

pub(crate) fn failed(error: &Error) {
    failures(error.kind()).increment(1);
}

fn failures(kind: ErrorKind) -> Counter {
    metrics::counter!("kvx_failures_total", "kind" => label(kind))
}

/// Returns the metric label of an error kind. Two kinds share the label `denied`, which dashboards
/// rely on.
fn label(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Authentication | ErrorKind::PermissionDenied => "denied",
        kind => kind.as_str(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_failures_stay_as_they_were() {
        let mut labels: Vec<_> = ErrorKind::ALL.iter().copied().map(label).collect();
        labels.sort_unstable();
        labels.dedup();
        let known = [
            "busy",
            "cancelled",
            "closed",
            "denied",
            "exhausted",
            "forgotten",
            "forked",
            "incompatible",
            "invalid",
            "malformed",
            "native",
            "no_route",
            "not_compiled",
            "out_of_bounds",
            "overlap",
            "peer_lost",
            "peer_restarted",
            "revoked",
            "still_shared",
            "timed_out",
            "unavailable",
            "unknown_backend",
            "unregistered",
            "unsupported",
            "wrong_key",
        ];
        assert_eq!(labels, known);
    }
}
