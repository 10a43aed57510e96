//! Statistics of a worker's transfers: recorded per step, aggregated over workers, and exported.

use std::fmt;
use std::time::Duration;

use super::failure::FailureKind;

/// A metric under the name that vLLM gives it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Metric {
    /// The metric's Prometheus name. Labels are the model's name and the engine.
    pub name: &'static str,
    /// Upper bounds of a histogram's buckets; `None` for a counter.
    pub buckets: Option<&'static [f64]>,
}

/// Durations of transfers.
const XFER_TIME: Metric = Metric {
    name: "vllm:nixl_xfer_time_seconds",
    buckets: Some(&[0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0]),
};
/// Times to post a transfer.
const POST_TIME: Metric = Metric {
    name: "vllm:nixl_post_time_seconds",
    buckets: Some(&[0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0]),
};
/// Bytes of a transfer.
const BYTES: Metric = Metric {
    name: "vllm:nixl_bytes_transferred",
    buckets: Some(&[
        2048.0,
        8192.0,
        32768.0,
        131_072.0,
        524_288.0,
        2_097_152.0,
        8_388_608.0,
        33_554_432.0,
        134_217_728.0,
        536_870_912.0,
        2_147_483_648.0,
        8_589_934_592.0,
    ]),
};
/// Descriptors of a transfer.
const DESCRIPTORS: Metric = Metric {
    name: "vllm:nixl_num_descriptors",
    buckets: Some(&[
        10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 200.0, 400.0, 1000.0, 2000.0, 4000.0, 10000.0,
        20000.0, 50000.0,
    ]),
};
/// Transfers, handshakes and notifications that failed.
const FAILED_TRANSFERS: Metric = Metric { name: "vllm:nixl_num_failed_transfers", buckets: None };
/// Notifications that failed.
const FAILED_NOTIFICATIONS: Metric =
    Metric { name: "vllm:nixl_num_failed_notifications", buckets: None };
/// Requests whose blocks no peer fetched.
const EXPIRED: Metric = Metric { name: "vllm:nixl_num_kv_expired_reqs", buckets: None };
/// Completions for blocks that had been freed.
const AFTER_EXPIRY: Metric =
    Metric { name: "vllm:nixl_num_notifications_after_expiry", buckets: None };

/// All metrics of a NixlConnector.
pub const METRICS: [Metric; 8] = [
    XFER_TIME,
    POST_TIME,
    BYTES,
    DESCRIPTORS,
    FAILED_TRANSFERS,
    FAILED_NOTIFICATIONS,
    EXPIRED,
    AFTER_EXPIRY,
];

/// Requests for blocks that failed. Only MooncakeConnector counts them separately.
const FAILED_RECEIVES: Metric = Metric { name: "vllm:mooncake_num_failed_recvs", buckets: None };

/// The metrics of a MooncakeConnector. Only the writing side reports transfers.
pub const MOONCAKE_METRICS: [Metric; 6] = [
    Metric { name: "vllm:mooncake_xfer_time_seconds", ..XFER_TIME },
    Metric { name: "vllm:mooncake_bytes_transferred", ..BYTES },
    Metric { name: "vllm:mooncake_num_descriptors", ..DESCRIPTORS },
    Metric { name: "vllm:mooncake_num_failed_transfers", ..FAILED_TRANSFERS },
    FAILED_RECEIVES,
    Metric { name: "vllm:mooncake_num_kv_expired_reqs", ..EXPIRED },
];

/// A transfer that succeeded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transferred {
    /// The time from posting the transfer until its completion.
    pub time: Duration,
    /// The time to post the transfer.
    pub post: Duration,
    /// The number of bytes moved.
    pub bytes: u64,
    /// The number of contiguous pieces of memory, after merging neighbours.
    pub descriptors: u64,
}

/// Statistics since the last time they were taken.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TransferStats {
    pub(crate) transfers: Vec<Transferred>,
    pub(crate) failed_transfers: u64,
    pub(crate) failed_notifications: u64,
    pub(crate) failed_receives: u64,
    pub(crate) expired: u64,
    pub(crate) after_expiry: u64,
}

impl TransferStats {
    /// Records a transfer that succeeded.
    pub fn record(&mut self, transfer: Transferred) {
        self.transfers.push(transfer);
    }

    /// Records a failed step. Failed handshakes and notifications count as failed transfers too. A
    /// MooncakeConnector's failed requests for blocks count separately.
    pub fn record_failure(&mut self, kind: FailureKind) {
        if kind == FailureKind::LeaseExpired {
            return; // counted by `record_expired`
        }
        let receive = matches!(kind, FailureKind::QueryFailed | FailureKind::PullFailed);
        self.failed_transfers += u64::from(!receive);
        self.failed_receives += u64::from(receive);
        self.failed_notifications += u64::from(kind.is_notification());
    }

    /// Records that no peer fetched a request's blocks in time.
    pub fn record_expired(&mut self) {
        self.expired += 1;
    }

    /// Records a completion that arrived after the blocks were freed.
    pub fn record_after_expiry(&mut self) {
        self.after_expiry += 1;
    }

    /// Returns whether nothing was recorded. Failures alone make it false.
    pub fn is_empty(&self) -> bool {
        *self == TransferStats::default()
    }

    /// Adds the statistics of another worker.
    pub fn aggregate(&mut self, other: TransferStats) {
        self.transfers.extend(other.transfers);
        self.failed_transfers += other.failed_transfers;
        self.failed_notifications += other.failed_notifications;
        self.failed_receives += other.failed_receives;
        self.expired += other.expired;
        self.after_expiry += other.after_expiry;
    }

    /// Returns the statistics and resets them.
    #[must_use]
    pub fn take(&mut self) -> TransferStats {
        std::mem::take(self)
    }

    /// Returns every recorded value, for a program that exports metrics.
    pub fn observations(&self) -> impl Iterator<Item = (Metric, f64)> + '_ {
        let each = self.transfers.iter().flat_map(|transfer| {
            [
                (XFER_TIME, transfer.time.as_secs_f64()),
                (POST_TIME, transfer.post.as_secs_f64()),
                (BYTES, transfer.bytes as f64),
                (DESCRIPTORS, transfer.descriptors as f64),
            ]
        });
        let counted = [
            (FAILED_TRANSFERS, self.failed_transfers),
            (FAILED_NOTIFICATIONS, self.failed_notifications),
            (EXPIRED, self.expired),
            (AFTER_EXPIRY, self.after_expiry),
        ];
        each.chain(counts(counted))
    }

    /// Returns every recorded value under the names of a MooncakeConnector.
    pub fn mooncake_observations(&self) -> impl Iterator<Item = (Metric, f64)> + '_ {
        let [time, bytes, descriptors, failed, failed_receives, expired] = MOONCAKE_METRICS;
        let each = self.transfers.iter().flat_map(move |transfer| {
            [
                (time, transfer.time.as_secs_f64()),
                (bytes, transfer.bytes as f64),
                (descriptors, transfer.descriptors as f64),
            ]
        });
        let counted = [
            (failed, self.failed_transfers),
            (failed_receives, self.failed_receives),
            (expired, self.expired),
        ];
        each.chain(counts(counted))
    }

    /// Summarizes the statistics.
    pub fn reduce(&self) -> Summary {
        let count = self.transfers.len();
        let milliseconds = |time: fn(&Transferred) -> Duration| {
            let mut times: Vec<_> =
                self.transfers.iter().map(|each| time(each).as_secs_f64() * 1e3).collect();
            times.sort_unstable_by(f64::total_cmp);
            times
        };
        let (times, posts) = (milliseconds(|each| each.time), milliseconds(|each| each.post));
        let mean = |values: &[f64]| {
            if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / count as f64 }
        };
        let megabytes =
            self.transfers.iter().map(|each| each.bytes as f64).sum::<f64>() / f64::from(1 << 20);
        let seconds = times.iter().sum::<f64>() / 1e3;
        let descriptors = self.transfers.iter().map(|each| each.descriptors as f64).sum::<f64>();
        Summary {
            transfers: count as u64,
            time_ms: mean(&times),
            time_p90_ms: percentile_90(&times),
            post_ms: mean(&posts),
            post_p90_ms: percentile_90(&posts),
            megabytes: if count == 0 { 0.0 } else { megabytes / count as f64 },
            throughput: if seconds > 0.0 { megabytes / seconds } else { 0.0 },
            descriptors: if count == 0 { 0.0 } else { descriptors / count as f64 },
            failed_transfers: self.failed_transfers,
            expired: self.expired,
            after_expiry: self.after_expiry,
        }
    }
}

/// Returns the counts that are not zero.
fn counts<const N: usize>(counted: [(Metric, u64); N]) -> impl Iterator<Item = (Metric, f64)> {
    let counted = counted.into_iter().filter(|(_, count)| *count > 0);
    counted.map(|(metric, count)| (metric, count as f64))
}

/// Returns the 90th percentile of sorted values, interpolated between the two nearest ones.
fn percentile_90(sorted: &[f64]) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let place = 0.9 * last as f64;
    let (low, high) = (place.floor() as usize, place.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * place.fract()
}

/// A summary of [`TransferStats`]. Its `Display` text is vLLM's periodic log line. If no transfer
/// succeeded, all values but the counters are 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// The number of transfers that succeeded.
    pub transfers: u64,
    /// Mean duration in ms.
    pub time_ms: f64,
    /// The 90th percentile of the duration in ms.
    pub time_p90_ms: f64,
    /// Mean time to post in ms.
    pub post_ms: f64,
    /// The 90th percentile of the time to post in ms.
    pub post_p90_ms: f64,
    /// Mean size in MiB (2^20 bytes).
    pub megabytes: f64,
    /// Throughput in MiB per second of transfer.
    pub throughput: f64,
    /// Mean number of descriptors.
    pub descriptors: f64,
    /// The number of transfers, handshakes and notifications that failed.
    pub failed_transfers: u64,
    /// The number of requests whose blocks no peer fetched.
    pub expired: u64,
    /// The number of completions that arrived after the blocks were freed.
    pub after_expiry: u64,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "KV Transfer metrics: Num successful transfers={}, Avg xfer time (ms)={:.3}, P90 xfer time (ms)={:.3}, \
             Avg post time (ms)={:.3}, P90 post time (ms)={:.3}, Avg MB per transfer={:.3}, Throughput (MB/s)={:.3}, \
             Avg number of descriptors={:.1}, Num failed transfers={}, Num KV expired reqs={}, Num notifs after \
             expiry={}",
            self.transfers,
            self.time_ms,
            self.time_p90_ms,
            self.post_ms,
            self.post_p90_ms,
            self.megabytes,
            self.throughput,
            self.descriptors,
            self.failed_transfers,
            self.expired,
            self.after_expiry
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transfer(milliseconds: u64) -> Transferred {
        Transferred {
            time: Duration::from_millis(milliseconds),
            post: Duration::from_millis(1),
            bytes: 1 << 20,
            descriptors: 10,
        }
    }

    // vLLM 48: statistics are recorded, aggregated and reduced
    #[test]
    fn stats_are_recorded_aggregated_and_reduced() {
        let (mut one, mut two) = (TransferStats::default(), TransferStats::default());
        one.record(transfer(100));
        two.record(transfer(300));
        two.record_expired();
        one.aggregate(two);
        let line = one.reduce().to_string();
        assert_eq!(
            line,
            "KV Transfer metrics: Num successful transfers=2, Avg xfer time (ms)=200.000, P90 xfer time (ms)=280.000, \
             Avg post time (ms)=1.000, P90 post time (ms)=1.000, Avg MB per transfer=1.000, Throughput (MB/s)=5.000, \
             Avg number of descriptors=10.0, Num failed transfers=0, Num KV expired reqs=1, Num notifs after expiry=0"
        );
    }

    // vLLM 48: statistics start from zero after they are taken
    #[test]
    fn taken_stats_start_anew() {
        let mut stats = TransferStats::default();
        stats.record(transfer(1));
        assert!(!stats.take().is_empty());
        assert!(stats.is_empty());
        assert_eq!(
            stats.reduce().to_string().matches("=0").count(),
            11,
            "all are 0: {}",
            stats.reduce()
        );
    }

    // vLLM 48: statistics with failures only are not empty
    #[test]
    fn a_snapshot_of_failures_only_is_not_empty() {
        let mut stats = TransferStats::default();
        stats.record_after_expiry();
        assert!(!stats.is_empty());
        assert_eq!(stats.reduce().transfers, 0);
    }

    // vLLM 48: failed handshakes and notifications count as failed transfers
    #[test]
    fn handshakes_and_notifications_count_as_failed_transfers() {
        let mut stats = TransferStats::default();
        for kind in FailureKind::ALL {
            stats.record_failure(kind);
        }
        let of = |metric: Metric| {
            stats.observations().find(|(each, _)| *each == metric).map(|(_, value)| value)
        };
        assert_eq!(
            (of(FAILED_TRANSFERS), of(FAILED_NOTIFICATIONS)),
            (Some(11.0), Some(2.0)),
            "all failures but the two of a Mooncake decode"
        );
    }

    // vLLM 64: metrics have vLLM's names and values, with writes on the prefill and failed receives
    //     on the decode
    #[test]
    fn a_mooncake_connector_counts_writes_and_failed_receives() {
        let (mut writes, mut asks) = (TransferStats::default(), TransferStats::default());
        writes.record(transfer(20));
        writes.record_failure(FailureKind::SendFailed);
        asks.record_failure(FailureKind::PullFailed);
        asks.record_failure(FailureKind::QueryFailed);
        asks.record_expired();
        assert!(!asks.is_empty());
        writes.aggregate(asks);
        let observed: Vec<_> =
            writes.mooncake_observations().map(|(metric, value)| (metric.name, value)).collect();
        assert_eq!(
            observed,
            [
                ("vllm:mooncake_xfer_time_seconds", 0.02),
                ("vllm:mooncake_bytes_transferred", 1_048_576.0),
                ("vllm:mooncake_num_descriptors", 10.0),
                ("vllm:mooncake_num_failed_transfers", 1.0),
                ("vllm:mooncake_num_failed_recvs", 2.0),
                ("vllm:mooncake_num_kv_expired_reqs", 1.0),
            ]
        );
    }

    // vLLM 48: Prometheus metrics have vLLM's names, buckets and values
    #[test]
    fn every_value_goes_to_the_metric_that_vllm_names() {
        let mut stats = TransferStats::default();
        stats.record(transfer(20));
        stats.record_expired();
        let observed: Vec<_> =
            stats.observations().map(|(metric, value)| (metric.name, value)).collect();
        assert_eq!(
            observed,
            [
                ("vllm:nixl_xfer_time_seconds", 0.02),
                ("vllm:nixl_post_time_seconds", 0.001),
                ("vllm:nixl_bytes_transferred", 1_048_576.0),
                ("vllm:nixl_num_descriptors", 10.0),
                ("vllm:nixl_num_kv_expired_reqs", 1.0),
            ]
        );
        for metric in METRICS.into_iter().chain(MOONCAKE_METRICS) {
            assert!(metric.buckets.is_none_or(|bounds| bounds.is_sorted()), "{}", metric.name);
        }
    }
}
