//! Reads from an instance's metrics what became of its blocks.

use std::collections::BTreeMap;

/// Counters of an instance, summed over its engines.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Counters {
    pub(super) block_size: Option<u32>,
    pub(super) cache_type: Option<String>,
    /// Bytes of transfers, and their seconds, as vLLM's connectors count them.
    bytes: f64,
    seconds: f64,
    /// Prompt tokens that came from another instance, counted by their source or as hits.
    loaded_tokens: [f64; 2],
    refused: f64,
    /// Connections to other engines that failed, by the kind of error.
    failures: BTreeMap<String, f64>,
    /// Bytes that kvx moved, by backend.
    backends: BTreeMap<String, f64>,
}

/// The difference of two looks at an instance.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Counted {
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    pub(super) loaded_tokens: u64,
    pub(super) refused: bool,
    pub(super) failures: Vec<String>,
    pub(super) backends: Vec<String>,
}

/// The longest label that is kept, and the most of a metric.
const LONGEST_LABEL: usize = 64;
const MOST_LABELS: usize = 64;

impl Counters {
    /// Reads metrics in Prometheus' text format. Unknown lines are ignored.
    pub(super) fn parse(text: &str) -> Self {
        let mut found = Counters::default();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let end = line.find(['{', ' ']).unwrap_or(line.len());
            let (name, rest) = line.split_at(end);
            let (labels, value) = match rest.strip_prefix('{').and_then(|rest| rest.split_once('}'))
            {
                Some((labels, value)) => (labels, value),
                None => ("", rest),
            };
            let value = value.split_ascii_whitespace().next().and_then(|value| value.parse().ok());
            let Some(value) = value.filter(|value: &f64| value.is_finite() && *value >= 0.0) else {
                continue;
            };
            match name {
                "vllm:nixl_bytes_transferred_sum" | "vllm:mooncake_bytes_transferred_sum" => {
                    found.bytes += value;
                }
                "vllm:nixl_xfer_time_seconds_sum" | "vllm:mooncake_xfer_time_seconds_sum" => {
                    found.seconds += value;
                }
                "vllm:prompt_tokens_by_source_total"
                    if label(labels, "source") == Some("external_kv_transfer") =>
                {
                    found.loaded_tokens[0] += value;
                }
                "vllm:external_prefix_cache_hits_total" => found.loaded_tokens[1] += value,
                "vllm:kvx_num_refused_params" | "vllm:kvx_num_refused_params_total" => {
                    found.refused += value;
                }
                "vllm:cache_config_info" => {
                    found.block_size =
                        label(labels, "block_size").and_then(|size| size.parse().ok());
                    found.cache_type = label(labels, "cache_dtype").map(str::to_owned);
                }
                "kvx_bytes_total" => add(&mut found.backends, label(labels, "backend"), value),
                "kvx_handshake_failures_total" => {
                    add(&mut found.failures, label(labels, "kind"), value);
                }
                _ => {}
            }
        }
        found
    }

    /// Returns what was counted since an earlier look.
    pub(super) fn since(&self, before: &Counters) -> Counted {
        let grown = |now: f64, then: f64| (now - then).max(0.0);
        let loaded = (0..2).map(|at| grown(self.loaded_tokens[at], before.loaded_tokens[at]));
        Counted {
            bytes: grown(self.bytes, before.bytes) as u64,
            seconds: grown(self.seconds, before.seconds),
            loaded_tokens: loaded.fold(0.0, f64::max) as u64,
            refused: self.refused > before.refused,
            failures: increased(&self.failures, &before.failures),
            backends: increased(&self.backends, &before.backends),
        }
    }
}

/// Adds to a sum by label; at most [`MOST_LABELS`] are kept.
fn add(sums: &mut BTreeMap<String, f64>, label: Option<&str>, value: f64) {
    let Some(label) = label else { return };
    if sums.len() < MOST_LABELS || sums.contains_key(label) {
        *sums.entry(label.to_owned()).or_default() += value;
    }
}

/// Returns the labels whose sums have grown.
fn increased(now: &BTreeMap<String, f64>, before: &BTreeMap<String, f64>) -> Vec<String> {
    let grown =
        now.iter().filter(|(label, sum)| **sum > before.get(*label).copied().unwrap_or_default());
    grown.map(|(label, _)| label.clone()).collect()
}

/// Returns whether a character is not shown as it stands.
fn is_special(character: char) -> bool {
    character == '\\' || character.is_control()
}

/// Returns the value of a label. A value with escaped or control characters, or a long one, is
/// ignored.
fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    let mut rest = labels;
    while let Some((key, after)) = rest.split_once("=\"") {
        let (value, next) = after.split_once('"')?;
        if key.trim_start_matches([',', ' ']) == name {
            return (value.len() <= LONGEST_LABEL && !value.contains(is_special)).then_some(value);
        }
        rest = next;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "# HELP vllm:nixl_bytes_transferred bytes\n\
        vllm:nixl_bytes_transferred_sum{engine=\"0\"} 1024.0\n\
        vllm:nixl_bytes_transferred_sum{engine=\"1\"} 0\n\
        vllm:cache_config_info{block_size=\"16\",cache_dtype=\"auto\",engine=\"0\"} 1.0\n\
        vllm:prompt_tokens_by_source_total{engine=\"0\",source=\"local_compute\"} 9\n\
        kvx_bytes_total{backend=\"SHM\",op=\"read\"} 5\n\
        kvx_bytes_total{backend=\"TCP\",op=\"read\"} 5\n";
    const AFTER: &str = "vllm:nixl_bytes_transferred_sum{engine=\"0\"} 3072.0 1700000000\n\
        vllm:nixl_xfer_time_seconds_sum{engine=\"0\"} 0.5\n\
        vllm:prompt_tokens_by_source_total{engine=\"0\",source=\"external_kv_transfer\"} 512\n\
        vllm:external_prefix_cache_hits_total 512\n\
        vllm:kvx_num_refused_params_total 1\n\
        kvx_handshake_failures_total{kind=\"authentication\"} 1\n\
        kvx_bytes_total{backend=\"SHM\",op=\"read\"} 5\n\
        kvx_bytes_total{backend=\"TCP\",op=\"read\"} 55\n";

    #[test]
    fn the_difference_of_two_looks_says_what_moved_and_how() {
        let (before, after) = (Counters::parse(BEFORE), Counters::parse(AFTER));
        assert_eq!((before.block_size, before.cache_type.as_deref()), (Some(16), Some("auto")));
        let counted = after.since(&before);
        assert_eq!((counted.bytes, counted.loaded_tokens), (2048, 512));
        assert!(counted.refused && counted.seconds > 0.4);
        assert_eq!(
            (counted.backends, counted.failures),
            (vec!["TCP".to_owned()], vec!["authentication".to_owned()])
        );
        assert_eq!(before.since(&before), Counted::default());
        // An engine that was restarted counts from zero.
        assert_eq!(Counters::default().since(&after).bytes, 0);
    }

    #[test]
    fn any_text_is_read() {
        let long = "x".repeat(100);
        for text in [
            "",
            "{",
            "}",
            "vllm:nixl_bytes_transferred_sum",
            "vllm:nixl_bytes_transferred_sum NaN",
            "vllm:nixl_bytes_transferred_sum -5",
            "kvx_bytes_total{backend=\"",
            "kvx_bytes_total{backend=\"a\\\"b\"} 5",
            "kvx_bytes_total{backend=\"\u{1b}[2J\"} 5",
            &format!("kvx_bytes_total{{backend=\"{long}\"}} 5"),
        ] {
            assert_eq!(Counters::parse(text), Counters::default(), "{text}");
        }
    }
}
