//! Metrics of an engine's transfers for the program's recorder and log, under vLLM's names.

use std::collections::VecDeque;
use std::time::Duration;

use metrics::{
    Counter, Gauge, Histogram, Unit, describe_counter, describe_gauge, describe_histogram,
};

use super::refusal_log::RefusalLog;
use kvx_core::ErrorKind;
use kvx_vllm::engine::{
    FailureKind, METRICS, MOONCAKE_METRICS, Metric, Settings, Time, TransferFailure, TransferStats,
};

/// Blocks that are neither free nor loaded, because something may still write to them.
const HELD: &str = "kvx_held_blocks";
/// Blocks that are never free again, because nothing proves that writes to them have ended.
const QUARANTINED: &str = "kvx_quarantined_blocks";
/// Heartbeats and answers of peers for requests that no worker knows.
const UNKNOWN: &str = "kvx_unknown_requests";
/// The time until the side channel of a peer answers or fails, measured once for each connection.
pub(super) const HANDSHAKE: &str = "kvx_handshake_seconds";
/// Connections to engines that failed in their handshake or after it, by the kind of error.
const HANDSHAKE_FAILURES: &str = "kvx_handshake_failures";
/// The time from the first observation to the line in the log.
const EVERY: Duration = Duration::from_secs(10);
/// The maximum number of failed handshakes whose repetitions are left out of the log.
const MAX_HANDSHAKES: usize = 16;

/// Describes the connector's metrics to the installed recorder. Call it once after installing one.
/// [`METRICS`] has the bucket bounds, which exporters take in their own ways.
pub fn describe_metrics() {
    for Metric { name, buckets } in METRICS.into_iter().chain(MOONCAKE_METRICS) {
        let unit = match name {
            _ if name.ends_with("_seconds") => Unit::Seconds,
            _ if name.contains("bytes") => Unit::Bytes,
            _ => Unit::Count,
        };
        let text = "KV transfers of this engine, as vLLM's connector of this kind counts them";
        match buckets {
            Some(_) => describe_histogram!(name, unit, text),
            None => describe_counter!(name, unit, text),
        }
    }
    describe_histogram!(
        HANDSHAKE,
        Unit::Seconds,
        "Time until the side channel of a peer had answered"
    );
    describe_counter!(
        HANDSHAKE_FAILURES,
        Unit::Count,
        "Connections to engines that failed, by the kind of error"
    );
    describe_counter!(
        UNKNOWN,
        Unit::Count,
        "Heartbeats and answers of peers for requests that this engine does not know"
    );
    describe_gauge!(HELD, Unit::Count, "Blocks of failed loads that a transfer may still write to");
    describe_gauge!(
        QUARANTINED,
        Unit::Count,
        "Blocks that are kept because nothing proves their transfer ended"
    );
}

/// Counts a connection to an engine that has failed.
pub(super) fn count_handshake_failure(kind: ErrorKind) {
    metrics::counter!(HANDSHAKE_FAILURES, "kind" => kind.as_str()).increment(1);
}

/// The part of a turn that goes to the recorder and the log.
#[derive(Default)]
pub(super) struct Report {
    pub(super) failures: Vec<TransferFailure>,
    pub(super) stats: TransferStats,
    /// The number of heartbeats and answers of peers for requests that no worker knows.
    pub(super) unknown_requests: u64,
    /// The number of blocks that something may still write to.
    pub(super) held: usize,
    /// The number of blocks that are never released.
    pub(super) lost: usize,
}

/// The metrics of one engine, looked up once, and the contents of its next log line.
pub(super) struct Metrics {
    meters: Vec<(&'static str, Meter)>,
    held: Gauge,
    quarantined: Gauge,
    unknown: Counter,
    unknown_log: RefusalLog,
    /// The failed handshakes in the log, and until when their repetitions are left out; the oldest
    /// first.
    handshakes: VecDeque<(Time, TransferFailure)>,
    /// True if the metrics have the names of a MooncakeConnector.
    mooncake: bool,
    unsaid: TransferStats,
    /// When the next log line is due.
    due: Time,
}

enum Meter {
    Counter(Counter),
    Histogram(Histogram),
}

impl Metrics {
    /// Looks up the metrics of the installed recorder.
    pub(super) fn new(model: &str, engine: &str, settings: &Settings) -> Self {
        let labels = [("model_name", model.to_owned()), ("engine", engine.to_owned())];
        let meter = |metric: Metric| match metric.buckets {
            Some(_) => Meter::Histogram(metrics::histogram!(metric.name, &labels)),
            None => Meter::Counter(metrics::counter!(metric.name, &labels)),
        };
        let mooncake = settings.mooncake.is_some();
        let named: &[Metric] = if mooncake { &MOONCAKE_METRICS } else { &METRICS };
        Metrics {
            mooncake,
            meters: named.iter().copied().map(|metric| (metric.name, meter(metric))).collect(),
            held: metrics::gauge!(HELD, &labels),
            quarantined: metrics::gauge!(QUARANTINED, &labels),
            unknown: metrics::counter!(UNKNOWN, &labels),
            unknown_log: RefusalLog::default(),
            handshakes: VecDeque::new(),
            unsaid: TransferStats::default(),
            due: Time::default(),
        }
    }

    /// Writes a turn's report to the recorder and the log. Returns when to call again, if something
    /// is left to log.
    pub(super) fn write(&mut self, now: Time, report: &Report) -> Option<Time> {
        for failure in &report.failures {
            match self.repeats_handshake(now, failure) {
                true => tracing::debug!("{failure}"),
                false => tracing::warn!("{failure}"),
            }
        }
        if report.unknown_requests > 0 {
            self.unknown.increment(report.unknown_requests);
            if let Some(suppressed) = self.unknown_log.count() {
                let count = report.unknown_requests;
                tracing::debug!(count, suppressed, "peers named requests that are not known here");
            }
        }
        if !report.stats.is_empty() {
            self.record(now, &report.stats);
        }
        self.held.set(report.held as f64);
        self.quarantined.set(report.lost as f64);
        self.line(now)
    }

    /// Returns whether the log has a failed handshake already: heartbeats and loads of all workers
    /// try it again, each with the same result.
    fn repeats_handshake(&mut self, now: Time, failure: &TransferFailure) -> bool {
        use FailureKind::{
            HandshakeFailed, HandshakeSetupFailed, PushHandshakeFailed, PushRegHandshakeFailed,
        };
        if !matches!(
            failure.kind,
            HandshakeSetupFailed | HandshakeFailed | PushHandshakeFailed | PushRegHandshakeFailed
        ) {
            return false;
        }
        self.handshakes.retain(|(until, _)| now < *until);
        let repeats = self
            .handshakes
            .iter()
            .any(|(_, known)| (&known.engine, &known.error) == (&failure.engine, &failure.error));
        if !repeats {
            if self.handshakes.len() == MAX_HANDSHAKES {
                self.handshakes.pop_front();
            }
            self.handshakes.push_back((now + EVERY, failure.clone()));
        }
        repeats
    }

    /// Records the workers' statistics, and keeps them for the log.
    fn record(&mut self, now: Time, stats: &TransferStats) {
        let observations: Vec<_> = match self.mooncake {
            true => stats.mooncake_observations().collect(),
            false => stats.observations().collect(),
        };
        for (metric, value) in observations {
            match self.meters.iter().find(|(name, _)| *name == metric.name) {
                Some((_, Meter::Histogram(histogram))) => histogram.record(value),
                Some((_, Meter::Counter(counter))) => counter.increment(value as u64),
                None => {}
            }
        }
        if self.unsaid.is_empty() {
            self.due = now + EVERY;
        }
        self.unsaid.aggregate(stats.clone());
    }

    /// Writes the periodic line if it is due. Returns when to call again, if something is left to
    /// log.
    fn line(&mut self, now: Time) -> Option<Time> {
        if self.unsaid.is_empty() {
            return None;
        }
        if now < self.due {
            return Some(self.due);
        }
        // Taken even if no subscriber logs the line.
        let said = self.unsaid.take().reduce();
        tracing::info!("{said}");
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use kvx_testkit::RecordedMetrics;
    use kvx_vllm::engine::Transferred;

    fn settings() -> Settings {
        Settings::new("e", kvx_vllm::engine::Address { host: "h".into(), port: 1 })
    }

    fn at(seconds: u64) -> Time {
        Time::from_origin(Duration::from_secs(seconds))
    }

    fn stats() -> TransferStats {
        let mut stats = TransferStats::default();
        let (time, post) = (Duration::from_millis(20), Duration::from_millis(1));
        stats.record(Transferred { time, post, bytes: 4096, descriptors: 3 });
        stats.record_failure(FailureKind::NotificationFailed);
        stats
    }

    // vLLM 27, 48: metrics reach a recorder under vLLM's names and labels
    #[test]
    fn a_recorder_gets_vllms_names_and_labels() {
        let recorded = RecordedMetrics::default();
        metrics::with_local_recorder(&recorded, || {
            describe_metrics();
            Metrics::new("m", "e", &settings()).record(Time::default(), &stats());
        });
        let wanted = [
            ("vllm:nixl_bytes_transferred", 4096.0),
            ("vllm:nixl_num_descriptors", 3.0),
            ("vllm:nixl_num_failed_notifications", 1.0),
            ("vllm:nixl_num_failed_transfers", 1.0),
            ("vllm:nixl_post_time_seconds", 0.001),
            ("vllm:nixl_xfer_time_seconds", 0.02),
        ];
        let wanted =
            wanted.map(|(name, value)| (format!("{name} model_name=m engine=e"), vec![value]));
        assert_eq!(recorded.take(), BTreeMap::from(wanted));
        let described = recorded.described();
        assert!(
            METRICS.iter().all(|metric| described.iter().any(|name| name == metric.name)),
            "{described:?}"
        );
        assert!(
            [HELD, QUARANTINED, UNKNOWN, HANDSHAKE]
                .iter()
                .all(|metric| described.iter().any(|name| name == metric))
        );
    }

    #[test]
    fn gauges_show_the_last_value_and_counters_add_up() {
        let recorded = RecordedMetrics::default();
        let mut metrics =
            metrics::with_local_recorder(&recorded, || Metrics::new("m", "e", &settings()));
        let report = |held, lost| Report { held, lost, unknown_requests: 2, ..Report::default() };
        metrics.write(at(1), &report(4, 0));
        metrics.write(at(2), &report(1, 3));
        let recorded = recorded.take();
        assert_eq!(recorded["kvx_unknown_requests model_name=m engine=e"], [2.0, 2.0]);
        assert_eq!(recorded["kvx_held_blocks model_name=m engine=e"], [4.0, 1.0]);
        assert_eq!(recorded["kvx_quarantined_blocks model_name=m engine=e"], [0.0, 3.0]);
    }

    #[test]
    fn a_failed_handshake_is_logged_once_in_ten_seconds() {
        let mut metrics = Metrics::new("m", "e", &settings());
        let failure = TransferFailure::new(FailureKind::HandshakeSetupFailed, "one");
        let other = TransferFailure::new(FailureKind::HandshakeSetupFailed, "other");
        let read = TransferFailure::new(FailureKind::TransferFailed, "one");
        assert!(!metrics.repeats_handshake(at(1), &failure));
        assert!(metrics.repeats_handshake(at(2), &failure));
        assert!(!metrics.repeats_handshake(at(2), &read));
        assert!(!metrics.repeats_handshake(at(3), &other));
        assert!(metrics.repeats_handshake(at(4), &failure), "two peers fail in turn");
        assert!(metrics.repeats_handshake(at(5), &other));
        assert!(!metrics.repeats_handshake(at(11), &failure));
        assert!(!metrics.repeats_handshake(at(13), &other));
    }

    #[test]
    fn the_line_comes_ten_seconds_after_the_first_observation_and_not_without_one() {
        let mut metrics = Metrics::new("m", "e", &settings());
        assert_eq!(metrics.line(at(5)), None);
        metrics.record(at(6), &stats());
        metrics.record(at(9), &stats());
        assert_eq!(metrics.line(at(15)), Some(at(16)));
        assert_eq!(metrics.unsaid.reduce().transfers, 2);
        assert_eq!(metrics.line(at(16)), None);
        assert!(metrics.unsaid.is_empty(), "said");
    }
}
