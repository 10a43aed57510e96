//! Whether notifications flow, so that going on to look for the next one pays: a core that sleeps takes most of a
//! notification's way to wake up.

use std::time::{Duration, Instant};

/// Notifications flow while each comes this soon after the one before: 64 MiB at 8 GB/s, and the word that they are there.
pub(crate) const GAP: Duration = Duration::from_millis(10);
/// They must have flowed for so long: the last look, in vain for [`GAP`], is a small part of what went before.
const PROOF: Duration = GAP.saturating_mul(10);
/// Two looks that are further apart than this were kept apart: somebody else has work for the core, or this thread has had a long turn.
const TAKEN: Duration = Duration::from_millis(1);

/// Notifications of which each came within [`GAP`] of the one before.
pub(crate) struct Flow {
    /// Since when they flow, and looks are close to each other.
    since: Instant,
    last: Instant,
    /// The last look, if nobody has slept since.
    looked: Option<Instant>,
}

impl Flow {
    /// The first one.
    pub(crate) fn begin(now: Instant) -> Self {
        Flow { since: now, last: now, looked: None }
    }

    /// One more.
    pub(crate) fn heard(&mut self, now: Instant) {
        if now.duration_since(self.last) > GAP {
            self.since = now;
        }
        self.last = now;
    }

    /// Somebody has looked. Says whether they may flow still.
    pub(crate) fn looked(&mut self, now: Instant) -> bool {
        let before = self.looked.replace(now);
        if before.is_some_and(|before| now.duration_since(before) > TAKEN) {
            self.since = now;
        }
        now.duration_since(self.last) <= GAP
    }

    /// A sleep follows.
    pub(crate) fn slept(&mut self) {
        self.looked = None;
    }

    /// Whether to look for the next instead of sleeping.
    pub(crate) fn is_worth_a_core(&self) -> bool {
        self.looked.is_some_and(|now| now.duration_since(self.since) >= PROOF)
    }
}

#[cfg(test)]
impl Flow {
    /// One that is worth a core, if another comes within an hour.
    pub(crate) fn proven() -> Self {
        const LONG: Duration = Duration::from_secs(3600);
        let now = Instant::now();
        let since = now.checked_sub(PROOF).expect("the machine has run for longer");
        Flow { since, last: now + LONG, looked: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// One each `gap` for `long`, and a look each `between`.
    fn after(gap: Duration, long: Duration, between: Duration) -> (Flow, Instant) {
        let begun = Instant::now();
        let (mut flow, mut now) = (Flow::begin(begun), begun);
        while now < begun + long {
            let next = now + gap;
            while now + between < next {
                now += between;
                flow.looked(now);
            }
            now = next;
            flow.heard(now);
            flow.looked(now);
        }
        (flow, now)
    }

    #[test]
    fn what_has_flowed_for_long_enough_is_looked_for_until_it_ebbs() {
        let (young, _) = after(3 * MS, PROOF / 2, MS / 2);
        assert!(!young.is_worth_a_core(), "a burst is none");
        let (mut flow, now) = after(3 * MS, PROOF, MS / 2);
        assert!(flow.is_worth_a_core());
        assert!(flow.looked(now + MS / 2), "the next may come");
        flow.slept();
        assert!(!flow.looked(now + GAP + MS), "none came");
        flow.heard(now + GAP + MS);
        flow.looked(now + GAP + MS);
        assert!(!flow.is_worth_a_core(), "it begins anew");
    }

    #[test]
    fn a_drip_is_no_flow() {
        assert!(!after(GAP + MS, 10 * PROOF, MS / 2).0.is_worth_a_core());
    }

    #[test]
    fn a_core_that_others_want_is_left_to_them() {
        let (mut flow, now) = after(3 * MS, PROOF, MS / 2);
        flow.looked(now + TAKEN + MS);
        assert!(!flow.is_worth_a_core(), "it was taken between two looks");
        let (mut flow, now) = after(3 * MS, PROOF, MS / 2);
        flow.slept();
        flow.looked(now + TAKEN + MS);
        assert!(flow.is_worth_a_core(), "whoever has slept was not kept from looking");
        assert!(!after(3 * MS, 10 * PROOF, 2 * MS).0.is_worth_a_core(), "it is taken all the time");
    }
}
