//! The metrics of an engine.

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

/// The metrics of one engine, whose names are looked up once.
pub(super) struct EngineMetrics {
    pub(super) prompt_tokens: Counter,
    pub(super) generation_tokens: Counter,
    pub(super) prefix_queries: Counter,
    pub(super) prefix_hits: Counter,
    /// Tokens requested from a peer.
    pub(super) external_queries: Counter,
    pub(super) external_hits: Counter,
    pub(super) preemptions: Counter,
    /// Requests by finish reason.
    pub(super) ended_by_length: Counter,
    pub(super) ended_by_stop: Counter,
    pub(super) failed: Counter,
    pub(super) running: Gauge,
    pub(super) waiting: Gauge,
    pub(super) usage: Gauge,
    pub(super) blocks_kept: Gauge,
    pub(super) first_token: Histogram,
    pub(super) between_tokens: Histogram,
    pub(super) whole_request: Histogram,
}

impl EngineMetrics {
    /// Returns the metrics of the installed recorder, and sets those that stay.
    pub(super) fn of(engine: usize, block_size: usize) -> Self {
        let engine = engine.to_string();
        let cache = [("engine", engine.clone()), ("block_size", block_size.to_string())];
        gauge!("vllm:cache_config_info", &cache).set(1);
        let labels = [("engine", engine.clone())];
        let ended = |reason: &'static str| {
            let labels = [("finished_reason", reason.to_owned()), ("engine", engine.clone())];
            counter!("vllm:request_success_total", &labels)
        };
        EngineMetrics {
            prompt_tokens: counter!("vllm:prompt_tokens_total", &labels),
            generation_tokens: counter!("vllm:generation_tokens_total", &labels),
            prefix_queries: counter!("vllm:prefix_cache_queries_total", &labels),
            prefix_hits: counter!("vllm:prefix_cache_hits_total", &labels),
            external_queries: counter!("vllm:external_prefix_cache_queries_total", &labels),
            external_hits: counter!("vllm:external_prefix_cache_hits_total", &labels),
            preemptions: counter!("vllm:num_preemptions_total", &labels),
            ended_by_length: ended("length"),
            ended_by_stop: ended("stop"),
            failed: ended("error"),
            running: gauge!("vllm:num_requests_running", &labels),
            waiting: gauge!("vllm:num_requests_waiting", &labels),
            usage: gauge!("vllm:kv_cache_usage_perc", &labels),
            blocks_kept: gauge!("kvx_blocks_kept", &labels),
            first_token: histogram!("vllm:time_to_first_token_seconds", &labels),
            between_tokens: histogram!("vllm:inter_token_latency_seconds", &labels),
            whole_request: histogram!("vllm:e2e_request_latency_seconds", &labels),
        }
    }
}
