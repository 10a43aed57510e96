//! Blocks that are kept for a peer until it has fetched them or no longer wants them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use crate::config::LeaseTime;

use super::super::settings::ConsumerRule;
use super::early::EarlyCompletions;
use crate::engine::deadlines::Deadlines;
use crate::ids::RequestId;
use crate::time::Time;

/// The effect of a router's release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReleaseEffect {
    /// The engine may free the blocks.
    Freed,
    /// Some decode wants the blocks: they stay until it has ended, or its lease has.
    Wanted,
    /// The request is not known, or its blocks are freed later.
    Nothing,
}

/// The effect of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counted {
    /// The completion was the last one: the engine may free the blocks.
    Last,
    /// The request needs further completions.
    OneOfSeveral,
    /// The request is not known yet; the completion counts if it becomes known soon.
    Early,
    /// The request is unknown. Its blocks may belong to another request by now.
    Unknown,
}

/// The completions of one request.
#[derive(Clone, Debug, Default)]
pub(super) struct Completions {
    /// The senders. A repeated notification counts once.
    from: BTreeSet<Box<str>>,
    /// The number of senders that complete the request; 0 before the first.
    expected: usize,
    /// True if a decode has sent a heartbeat for the request, so that it may be reading.
    is_wanted: bool,
}

impl Completions {
    pub(super) fn add(&mut self, from: &str, expected: u32) {
        self.expected = self.expected.max(expected as usize);
        self.from.insert(from.into());
    }

    pub(super) fn senders(&self) -> usize {
        self.from.len()
    }

    /// Returns whether all senders have completed.
    fn are_complete(&self) -> bool {
        self.expected > 0 && self.from.len() >= self.expected
    }
}

#[derive(Clone, Debug)]
struct KeptRequest {
    expires: Time,
    completions: Completions,
}

#[derive(Clone, Debug)]
pub(super) struct Sends {
    lease: Option<LeaseTime>,
    rule: ConsumerRule,
    tp_size: u32,
    kept: BTreeMap<RequestId, KeptRequest>,
    deadlines: Deadlines<RequestId>,
    /// Requests in prefill, with completions that arrived before the report that their blocks are
    /// ready.
    prefilling: BTreeMap<RequestId, Completions>,
    /// `None` if no completion can be early.
    early: Option<EarlyCompletions>,
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

    /// Keeps a request whose blocks are ready. Returns true if all its readers have already
    /// completed.
    pub(super) fn keep(&mut self, now: Time, request: RequestId, expires: Time) -> bool {
        let prefilling = self.prefilling.remove(&request);
        let completions =
            prefilling.or_else(|| self.take_early(now, request.as_str())).unwrap_or_default();
        if completions.are_complete() {
            self.note_end(request);
            return true;
        }
        self.deadlines.set(request.clone(), expires);
        self.kept.insert(request, KeptRequest { expires, completions });
        false
    }

    /// Records the completion of a peer.
    pub(super) fn completed(
        &mut self,
        now: Time,
        request: &str,
        written: u32,
        from: &str,
    ) -> Counted {
        let expected = self.rule.expected(written, self.tp_size);
        self.completed_by(now, request, expected, from)
    }

    fn completed_by(&mut self, now: Time, request: &str, expected: u32, from: &str) -> Counted {
        if let Some(completions) = self.prefilling.get_mut(request) {
            completions.add(from, expected);
            return Counted::OneOfSeveral;
        }
        let Some(kept) = self.kept.get_mut(request) else {
            let early = self.early.as_mut();
            return match early.is_some_and(|early| early.add(now, request, expected, from)) {
                true => Counted::Early,
                false => Counted::Unknown,
            };
        };
        kept.completions.add(from, expected);
        if !kept.completions.are_complete() {
            return Counted::OneOfSeveral;
        }
        self.remove(request);
        Counted::Last
    }

    /// Records that no decode will fetch the blocks of a request. Changes nothing if a decode has
    /// sent a heartbeat for them, or if one of several decode ranks has already fetched its part:
    /// the others may still read.
    pub(super) fn released(&mut self, now: Time, request: &str, from: &str) -> ReleaseEffect {
        let known = self.prefilling.get(request);
        let known = known.or_else(|| self.kept.get(request).map(|kept| &kept.completions));
        if known.is_some_and(|known| known.is_wanted || known.senders() > 0) {
            return ReleaseEffect::Wanted;
        }
        match self.completed_by(now, request, 1, from) {
            Counted::Last => ReleaseEffect::Freed,
            Counted::OneOfSeveral | Counted::Early | Counted::Unknown => ReleaseEffect::Nothing,
        }
    }

    /// Accepts completions that arrive before the requests that they are for.
    pub(super) fn accept_early(&mut self) {
        self.early.get_or_insert_default();
    }

    fn take_early(&mut self, now: Time, request: &str) -> Option<Completions> {
        self.early.as_mut()?.take(now, request)
    }

    /// Forgets a request whose blocks are released.
    pub(super) fn remove(&mut self, request: &str) {
        if let Some((request, _)) = self.kept.remove_entry(request) {
            self.deadlines.clear(&request);
            self.note_end(request);
        }
    }

    fn note_end(&mut self, request: RequestId) {
        if let Some(early) = &mut self.early {
            early.note_end(request);
        }
    }

    pub(super) fn keeps(&self, request: &str) -> bool {
        self.kept.contains_key(request)
    }

    /// Returns all requests that are kept.
    pub(super) fn all(&self) -> impl Iterator<Item = &RequestId> {
        self.kept.keys()
    }

    /// Renews the lease of a request that a peer still wants, and records that it does. Returns
    /// false if no request is kept under that name.
    pub(super) fn renew(&mut self, now: Time, request: &str) -> bool {
        let prefilling = self.prefilling.get_mut(request);
        let is_prefilling = prefilling.is_some();
        let kept = self.kept.get_mut(request).map(|kept| &mut kept.completions);
        prefilling.into_iter().chain(kept).for_each(|one| one.is_wanted = true);
        let Some(lease) = self.lease else { return true };
        let Some((request, _)) = self.kept.get_key_value(request) else { return is_prefilling };
        let request = request.clone();
        if let Some(kept) = self.kept.get_mut(&request) {
            kept.expires = kept.expires.max(now + lease.extension());
            self.deadlines.set(request, kept.expires);
        }
        true
    }

    /// Returns the requests with this shared name.
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

    /// Removes and returns a request whose lease has ended.
    pub(super) fn take_expired(&mut self, now: Time) -> Option<RequestId> {
        let request = self.deadlines.take_reached(now)?;
        self.kept.remove(&request);
        self.note_end(request.clone());
        Some(request)
    }

    pub(super) fn next_deadline(&self) -> Option<Time> {
        self.deadlines.next()
    }

    pub(super) fn len(&self) -> usize {
        self.kept.len() + self.prefilling.len()
    }
}
