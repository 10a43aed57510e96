//! Observes the prefix caches of servers by their metrics.

use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use crate::endpoint::{Endpoint, EndpointClient, client};
use crate::error::{Error, Result};
use crate::upstream::{WHOLE, whole, words};

/// The time that a server may take for its metrics.
const ANSWER: Duration = Duration::from_secs(30);

/// Tokens of prompts that servers looked up in their prefix caches, as vLLM counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct CacheCounts {
    /// The tokens that were looked up.
    pub queries: f64,
    /// The tokens that were cached.
    pub hits: f64,
}

impl CacheCounts {
    pub(super) fn add(&mut self, more: CacheCounts) {
        self.queries += more.queries;
        self.hits += more.hits;
    }
}

/// Returns what all servers counted between two readings of [`ObservedCaches::counts`].
pub(super) fn difference(before: &[CacheCounts], after: &[CacheCounts]) -> Result<CacheCounts> {
    let mut counts = CacheCounts::default();
    for (before, after) in before.iter().zip(after) {
        let more =
            CacheCounts { queries: after.queries - before.queries, hits: after.hits - before.hits };
        if more.queries < 0.0 || more.hits < 0.0 {
            return Err(Error::new("a server whose cache is observed has restarted"));
        }
        counts.add(more);
    }
    Ok(counts)
}

/// Servers whose caches are observed.
pub(super) struct ObservedCaches {
    servers: Vec<Endpoint>,
    client: EndpointClient,
}

impl ObservedCaches {
    pub(super) fn new(urls: &[String]) -> Result<Self> {
        let servers = urls.iter().map(|url| Endpoint::new(url)).collect::<Result<Vec<_>>>()?;
        Ok(ObservedCaches { client: client(&servers)?, servers })
    }

    /// Returns the counts of each server since it started.
    pub(super) async fn counts(&self) -> Result<Vec<CacheCounts>> {
        let mut counts = Vec::new();
        for server in &self.servers {
            let text = self.metrics(server).await;
            let counted = text.and_then(|text| {
                read(&text).ok_or_else(|| "it has no vllm:prefix_cache_queries_total".to_owned())
            });
            counts.push(counted.map_err(|why| {
                Error::new(format!("cannot read the cache's metrics at {}: {why}", server.url()))
            })?);
        }
        Ok(counts)
    }

    async fn metrics(&self, server: &Endpoint) -> std::result::Result<String, String> {
        let until = Instant::now() + ANSWER;
        let request = server.request(None, "/metrics", None).map_err(|error| error.message)?;
        let response = timeout_at(until, self.client.request(request)).await;
        let response = response.map_err(|_| "no answer in time")?.map_err(|error| words(&error))?;
        if !response.status().is_success() {
            return Err(format!("status {}", response.status().as_u16()));
        }
        let body = whole(response.into_body(), WHOLE, until).await;
        let body = body.map_err(|fault| fault.to_string())?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }
}

/// Reads the counts of all engines of a server from its metrics.
fn read(text: &str) -> Option<CacheCounts> {
    let sum = |name: &str| {
        let values = text.lines().filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            let value = rest.strip_prefix(' ').or_else(|| {
                rest.starts_with('{').then(|| rest.rsplit_once("} ").map(|(_, value)| value))?
            })?;
            value.split_ascii_whitespace().next()?.parse::<f64>().ok()
        });
        values.reduce(|sum, value| sum + value)
    };
    let queries = sum("vllm:prefix_cache_queries_total")?;
    Some(CacheCounts { queries, hits: sum("vllm:prefix_cache_hits_total")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_a_restarted_server_are_no_difference() {
        let counts = |pairs: &[(f64, f64)]| -> Vec<CacheCounts> {
            pairs
                .iter()
                .map(|(queries, hits)| CacheCounts { queries: *queries, hits: *hits })
                .collect()
        };
        let before = counts(&[(10.0, 5.0), (100.0, 50.0)]);
        let more = difference(&before, &counts(&[(30.0, 6.0), (100.0, 50.0)])).unwrap();
        assert_eq!(more, CacheCounts { queries: 20.0, hits: 1.0 });
        let error = difference(&before, &counts(&[(900.0, 500.0), (4.0, 0.0)])).unwrap_err();
        assert!(error.to_string().contains("has restarted"), "{error}");
    }

    #[test]
    fn counts_of_all_engines_are_added() {
        let text = "# HELP vllm:prefix_cache_queries_total x\n\
                    vllm:prefix_cache_queries_total{engine=\"0\",model_name=\"a} b\"} 1.5e3\n\
                    vllm:prefix_cache_queries_total{engine=\"1\"} 500 1700000000\n\
                    vllm:prefix_cache_queries_total_other 9\n\
                    vllm:prefix_cache_hits_total 40\n";
        assert_eq!(read(text), Some(CacheCounts { queries: 2000.0, hits: 40.0 }));
        assert_eq!(read("vllm:prefix_cache_hits_total 40\n"), None);
    }
}
