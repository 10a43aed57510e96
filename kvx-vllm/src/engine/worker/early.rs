//! Completions that arrive before the requests that they are for.

use std::collections::VecDeque;
use std::time::Duration;

use super::send::Completions;
use crate::ids::RequestId;
use crate::time::Time;

/// The time for which an early completion counts.
const VALID_FOR: Duration = Duration::from_secs(2);
/// The maximum number of requests with early completions, of senders per request, and of ended
/// requests to remember.
const MAX_ENTRIES: usize = 64;
/// The maximum length of the name of a request or sender, in bytes. With [`MAX_ENTRIES`] it bounds
/// the memory that peers can make a worker use.
const MAX_NAME: usize = 256;

/// The completions of a request that the worker does not know yet.
#[derive(Clone, Debug)]
struct EarlyRequest {
    name: Box<str>,
    since: Time,
    completions: Completions,
}

/// Early completions, for a worker in another process than its engine. A message informs the worker
/// of each publication. A peer may read the blocks and send its completion before that message
/// arrives.
#[derive(Clone, Debug, Default)]
pub(super) struct EarlyCompletions {
    /// The oldest first.
    requests: VecDeque<EarlyRequest>,
    /// The last requests that ended. A completion for one of them is late, not early.
    ended: VecDeque<RequestId>,
}

impl EarlyCompletions {
    /// Remembers a completion. Returns false if it does not count, because it is late or a name is
    /// too long.
    pub(super) fn add(&mut self, now: Time, request: &str, expected: u32, from: &str) -> bool {
        if request.len() > MAX_NAME
            || from.len() > MAX_NAME
            || self.ended.iter().any(|ended| ended.as_str() == request)
        {
            return false;
        }
        self.requests.retain(|early| now < early.since + VALID_FOR);
        let known = self.requests.iter().position(|early| *early.name == *request);
        let at = known.unwrap_or_else(|| {
            if self.requests.len() == MAX_ENTRIES {
                self.requests.pop_front();
            }
            let completions = Completions::default();
            self.requests.push_back(EarlyRequest { name: request.into(), since: now, completions });
            self.requests.len() - 1
        });
        let completions = &mut self.requests[at].completions;
        if completions.senders() < MAX_ENTRIES {
            completions.add(from, expected);
        }
        true
    }

    /// Takes the completions of a request that has become known.
    pub(super) fn take(&mut self, now: Time, request: &str) -> Option<Completions> {
        let at = self.requests.iter().position(|early| *early.name == *request)?;
        let early = self.requests.remove(at)?;
        (now < early.since + VALID_FOR).then_some(early.completions)
    }

    /// Records that a request has ended.
    pub(super) fn note_end(&mut self, request: RequestId) {
        if self.ended.len() == MAX_ENTRIES {
            self.ended.pop_front();
        }
        self.ended.push_back(request);
    }
}
