//! The effect of a failed load on requests: which tokens stay valid, and what the log says about
//! it.

use std::collections::BTreeSet;
use std::fmt;

use crate::config::LoadFailurePolicy;

use crate::ids::RequestId;

/// A request as the engine holds it when a load fails. Requests may share blocks: the failure
/// affects every request that uses an invalid block.
#[derive(Clone, Copy, Debug)]
pub struct Holding<'a> {
    /// The request.
    pub request: &'a RequestId,
    /// The request's blocks from the first token on, in the model's only KV cache group.
    pub blocks: &'a [u32],
    /// The number of the request's tokens that count as computed, including loaded tokens.
    pub computed: u32,
}

/// A request that must not use some of its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Affected {
    /// The request.
    pub request: RequestId,
    /// The number of tokens before the first invalid block. Only these count as computed from now
    /// on.
    pub valid: u32,
    /// The number of tokens that no longer count.
    pub lost: u32,
}

/// The effect of one step's invalid blocks. Its `Display` text is the log line about them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovery {
    /// The policy for affected requests.
    pub policy: LoadFailurePolicy,
    /// The affected requests, in the order in which the caller passed them.
    pub affected: Vec<Affected>,
}

impl Recovery {
    /// Cuts each request to its longest valid prefix. Leaves out requests without an invalid block
    /// among their computed ones. Requests keep all their blocks. The engine computes the invalid
    /// ones again, and must not offer them in the prefix cache before.
    pub fn of<'a>(
        policy: LoadFailurePolicy,
        block_size: u32,
        invalid: &BTreeSet<u32>,
        requests: impl IntoIterator<Item = Holding<'a>>,
    ) -> Self {
        let affected = requests.into_iter().filter_map(|holding| {
            let used = holding.computed.div_ceil(block_size.max(1)) as usize;
            let used = &holding.blocks[..used.min(holding.blocks.len())];
            let valid = valid_prefix(used, invalid, block_size)?;
            Some(Affected {
                request: holding.request.clone(),
                valid,
                lost: holding.computed - valid,
            })
        });
        Recovery { policy, affected: affected.collect() }
    }
}

/// Returns the number of tokens before the first invalid block, or `None` if no block is invalid.
pub(super) fn valid_prefix(
    blocks: &[u32],
    invalid: &BTreeSet<u32>,
    block_size: u32,
) -> Option<u32> {
    let first = blocks.iter().position(|block| invalid.contains(block))?;
    Some(u32::try_from(first).unwrap_or(u32::MAX).saturating_mul(block_size))
}

impl fmt::Display for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let requests = self.affected.len();
        let tokens: u64 = self.affected.iter().map(|affected| u64::from(affected.lost)).sum();
        match self.policy {
            LoadFailurePolicy::Fail => {
                write!(
                    f,
                    "KV load failure: {requests} requests fail, {tokens} tokens were not loaded"
                )
            }
            LoadFailurePolicy::Recompute => {
                write!(
                    f,
                    "Recovered from KV load failure: {requests} requests compute {tokens} tokens \
                     themselves"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recovery(invalid: &[u32], requests: &[(&str, &[u32], u32)]) -> Vec<(String, u32, u32)> {
        let names: Vec<RequestId> = requests.iter().map(|(name, ..)| (*name).into()).collect();
        let holdings = requests.iter().zip(&names).map(|((_, blocks, computed), request)| {
            Holding { request, blocks, computed: *computed }
        });
        let invalid = invalid.iter().copied().collect();
        let recovery = Recovery::of(LoadFailurePolicy::Recompute, 16, &invalid, holdings);
        recovery
            .affected
            .into_iter()
            .map(|each| (each.request.to_string(), each.valid, each.lost))
            .collect()
    }

    #[test]
    fn a_request_keeps_the_tokens_before_its_first_invalid_block() {
        assert_eq!(recovery(&[7, 9], &[("a", &[3, 5, 7, 8, 9], 75)]), [("a".to_owned(), 32, 43)]);
        assert_eq!(recovery(&[3], &[("a", &[3, 5], 32)]), [("a".to_owned(), 0, 32)]);
    }

    // vLLM 31: an invalid block affects all requests that share it, and no others
    #[test]
    fn every_request_that_shares_an_invalid_block_is_affected_and_no_other() {
        let affected =
            recovery(&[7], &[("a", &[3, 7, 8], 48), ("b", &[3, 7], 32), ("c", &[3, 4], 32)]);
        assert_eq!(affected, [("a".to_owned(), 16, 32), ("b".to_owned(), 16, 16)]);
    }

    #[test]
    fn an_invalid_block_beyond_the_computed_tokens_affects_no_request() {
        assert_eq!(recovery(&[8], &[("a", &[3, 7, 8], 32)]), []);
    }

    // vLLM 31: each further failure cuts the computed tokens further
    #[test]
    fn each_further_failure_cuts_further() {
        assert_eq!(recovery(&[4], &[("a", &[1, 2, 3, 4], 64)]), [("a".to_owned(), 48, 16)]);
        assert_eq!(recovery(&[2], &[("a", &[1, 2, 3, 4], 48)]), [("a".to_owned(), 16, 32)]);
        assert_eq!(recovery(&[4], &[("a", &[1, 2, 3, 4], 16)]), []);
    }

    #[test]
    fn the_log_line_names_the_failure_the_requests_and_the_tokens() {
        let affected = vec![Affected { request: "a".into(), valid: 16, lost: 40 }];
        let line = |policy| Recovery { policy, affected: affected.clone() }.to_string();
        for line in [line(LoadFailurePolicy::Fail), line(LoadFailurePolicy::Recompute)] {
            assert!(
                line.contains("KV load failure")
                    && line.contains("1 requests")
                    && line.contains("40 tokens"),
                "{line}"
            );
        }
    }
}
