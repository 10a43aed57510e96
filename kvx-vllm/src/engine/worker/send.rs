//! Blocks that wait for a peer: until it has fetched them, or does not want them any more.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::time::Duration;

use crate::config::LeaseTime;

use super::super::settings::ConsumerRule;
use crate::engine::deadlines::Deadlines;
use crate::ids::RequestId;
use crate::time::Time;

/// What a completion has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counted {
    /// It was the last one: the blocks may be freed.
    Last,
    /// Others are waited for.
    OneOfSeveral,
    /// The request is not known yet; the completion counts if it becomes known soon.
    Early,
    /// Nobody knows that request; its blocks may belong to another one by now.
    Unknown,
}

#[derive(Debug, Default)]
struct Completions {
    /// Who has said so: a repeated notification counts once.
    from: BTreeSet<Box<str>>,
    expected: usize,
}

impl Completions {
    fn add(&mut self, from: &str, expected: u32) -> bool {
        self.expected = self.expected.max(expected as usize);
        self.from.insert(from.into());
        self.from.len() >= self.expected
    }
}

/// Completions of a request that this worker has not been told of.
#[derive(Debug)]
struct EarlyCompletions {
    request: Box<str>,
    since: Time,
    completions: Completions,
}

/// How long early completions count, for how many requests they are remembered, and how long the
/// names of these may be. What peers can have this worker hold is bounded by the last two.
const EARLY_FOR: Duration = Duration::from_secs(2);
const MAX_EARLY: usize = 64;
const MAX_EARLY_NAME: usize = 256;

#[derive(Debug)]
struct KeptRequest {
    expires: Time,
    completions: Completions,
}

#[derive(Debug)]
pub(super) struct Sends {
    lease: Option<LeaseTime>,
    rule: ConsumerRule,
    tp_size: u32,
    kept: BTreeMap<RequestId, KeptRequest>,
    deadlines: Deadlines<RequestId>,
    /// Requests in prefill, with completions that have overtaken the word that their blocks are ready.
    prefilling: BTreeMap<RequestId, Completions>,
    /// The oldest first; `None` where no completion can be early. A rank in a process of its own is
    /// told of a publication by its engine, and a peer may read the blocks and say so before that
    /// message arrives.
    early: Option<VecDeque<EarlyCompletions>>,
    /// The last requests that were kept. A completion for one of them is late, not early.
    ended: VecDeque<RequestId>,
}

impl Sends {
    pub(super) fn new(lease: Option<LeaseTime>, rule: ConsumerRule, tp_size: u32) -> Self {
        Sends {
            lease,
            rule,
            tp_size,
            kept: BTreeMap::new(),
            deadlines: Deadlines::default(),
            prefilling: BTreeMap::new(),
            early: None,
            ended: VecDeque::new(),
        }
    }

    pub(super) fn prefilling(&mut self, now: Time, request: RequestId) {
        if !self.kept.contains_key(&request) {
            let early = self.take_early(now, request.as_str());
            self.prefilling.entry(request).or_insert_with(|| early.unwrap_or_default());
        }
    }

    pub(super) fn dropped(&mut self, request: &RequestId) {
        self.prefilling.remove(request);
    }

    /// The blocks are ready. True: all peers have had them already.
    pub(super) fn keep(&mut self, now: Time, request: RequestId, expires: Time) -> bool {
        let prefilling = self.prefilling.remove(&request);
        let completions =
            prefilling.or_else(|| self.take_early(now, request.as_str())).unwrap_or_default();
        if completions.expected > 0 && completions.from.len() >= completions.expected {
            return true;
        }
        self.deadlines.set(request.clone(), expires);
        self.kept.insert(request, KeptRequest { expires, completions });
        false
    }

    /// A peer has what it wanted.
    pub(super) fn completed(
        &mut self,
        now: Time,
        request: &str,
        written: u32,
        from: &str,
    ) -> Counted {
        let expected = self.rule.expected(written, self.tp_size);
        if let Some(completions) = self.prefilling.get_mut(request) {
            completions.add(from, expected);
            return Counted::OneOfSeveral;
        }
        let Some(kept) = self.kept.get_mut(request) else {
            return self.add_early(now, request, expected, from);
        };
        if !kept.completions.add(from, expected) {
            return Counted::OneOfSeveral;
        }
        self.remove(request);
        Counted::Last
    }

    /// From now on a completion may arrive before the request that it is for.
    pub(super) fn accept_early(&mut self) {
        self.early.get_or_insert_default();
    }

    /// Remembers a completion of a request that is not known yet.
    fn add_early(&mut self, now: Time, request: &str, expected: u32, from: &str) -> Counted {
        let is_late = self.ended.iter().any(|ended| ended.as_str() == request);
        let Some(all) = self.early.as_mut().filter(|_| !is_late) else { return Counted::Unknown };
        if request.len() > MAX_EARLY_NAME || from.len() > MAX_EARLY_NAME {
            return Counted::Unknown;
        }
        all.retain(|early| now < early.since + EARLY_FOR);
        let at = all.iter().position(|early| *early.request == *request).unwrap_or_else(|| {
            if all.len() == MAX_EARLY {
                all.pop_front();
            }
            let completions = Completions::default();
            all.push_back(EarlyCompletions { request: request.into(), since: now, completions });
            all.len() - 1
        });
        let completions = &mut all[at].completions;
        if completions.from.len() < MAX_EARLY {
            completions.add(from, expected);
        }
        Counted::Early
    }

    /// Takes the completions that arrived before the request did.
    fn take_early(&mut self, now: Time, request: &str) -> Option<Completions> {
        let all = self.early.as_mut()?;
        let at = all.iter().position(|early| *early.request == *request)?;
        let early = all.remove(at)?;
        (now < early.since + EARLY_FOR).then_some(early.completions)
    }

    /// Forgets a request whose blocks go.
    pub(super) fn remove(&mut self, request: &str) {
        if let Some((request, _)) = self.kept.remove_entry(request) {
            self.deadlines.clear(&request);
            self.note_ended(request);
        }
    }

    /// Notes that a request is kept no more.
    fn note_ended(&mut self, request: RequestId) {
        if self.early.is_some() {
            if self.ended.len() == MAX_EARLY {
                self.ended.pop_front();
            }
            self.ended.push_back(request);
        }
    }

    pub(super) fn keeps(&self, request: &str) -> bool {
        self.kept.contains_key(request)
    }

    /// All requests that are kept.
    pub(super) fn all(&self) -> impl Iterator<Item = &RequestId> {
        self.kept.keys()
    }

    /// A peer still wants a request. False: it is not kept under that name.
    pub(super) fn renew(&mut self, now: Time, request: &str) -> bool {
        let Some(lease) = self.lease else { return true };
        let Some((request, _)) = self.kept.get_key_value(request) else {
            return self.prefilling.contains_key(request);
        };
        let request = request.clone();
        if let Some(kept) = self.kept.get_mut(&request) {
            kept.expires = kept.expires.max(now + lease.extension());
            self.deadlines.set(request, kept.expires);
        }
        true
    }

    /// Requests of which this is the shared name.
    pub(super) fn of_shared_name<'a>(
        &'a self,
        shared: &'a str,
    ) -> impl Iterator<Item = &'a RequestId> {
        self.kept
            .range::<str, _>((Bound::Included(shared), Bound::Unbounded))
            .map(|(request, _)| request)
            .take_while(move |request| request.as_str().starts_with(shared))
            .filter(move |request| request.shared() == shared)
    }

    /// Takes a request that nobody came for in time.
    pub(super) fn take_expired(&mut self, now: Time) -> Option<RequestId> {
        let request = self.deadlines.take_reached(now)?;
        self.kept.remove(&request);
        self.note_ended(request.clone());
        Some(request)
    }

    pub(super) fn next_deadline(&self) -> Option<Time> {
        self.deadlines.next()
    }

    pub(super) fn len(&self) -> usize {
        self.kept.len() + self.prefilling.len()
    }
}
