//! Turns of both ends, and the time that passes while they sleep.

use std::time::{Duration, Instant};

use kvx_core::ErrorKind;

use super::end::PEER_TIMEOUT;
use super::{Pair, Role, cut};
use crate::clock;
use crate::clock::virtual_time;

/// The longest that operations take while neither end is stopped.
const PROMPT: Duration = Duration::from_secs(3);
/// The number of turns within which an end that is awake falls asleep.
const TURNS: usize = 200_000;

impl Pair {
    /// Gives both ends a turn, which sends at most one packet if packets are counted, and checks
    /// the settled operations. Returns true if anything was done.
    pub(super) fn turn(&mut self) -> bool {
        let mut done = false;
        for who in [Role::Initiator, Role::Owner] {
            done |= self.turn_of(who);
        }
        done
    }

    pub(super) fn turn_of(&mut self, who: Role) -> bool {
        let most = if self.slow_copies { self.random.below(3) } else { usize::MAX };
        self.cancel_late();
        cut::allow(1);
        let done = self.end(who).turn(most);
        cut::allow(0);
        self.import();
        self.settle();
        done
    }

    /// Cancels the transfers whose deadline has passed, as core does.
    fn cancel_late(&mut self) {
        for at in 0..self.slots.len() {
            if self.deadline(at).is_some_and(|deadline| deadline <= clock::now()) {
                self.cancel(at);
            }
        }
    }

    /// Returns the time at which core cancels a transfer, if it runs and has not done so.
    fn deadline(&self, at: usize) -> Option<Instant> {
        let is_core_awake = self.link.is_some() && !self.initiator.is_stopped;
        let posted = self.slots[at].posted.as_ref().filter(|_| is_core_awake)?;
        (!posted.ends_by.contains(&ErrorKind::Cancelled)).then_some(posted.deadline)
    }

    /// Gives turns until the condition is true.
    pub(super) fn until(&mut self, what: &str, is_so: impl Fn(&Pair) -> bool) {
        let slow_copies = std::mem::replace(&mut self.slow_copies, false);
        let (by, mut turns) = (clock::now() + PROMPT, 0);
        while !is_so(self) {
            let is_late = clock::now() > by || turns > TURNS;
            assert!(!is_late, "this does not happen: {what}; {}", self.standing());
            turns += 1;
            if !self.turn() {
                let next = self.next_event();
                let next = next.unwrap_or_else(|| {
                    panic!("no end wakes for this: {what}; {}", self.standing())
                });
                virtual_time::advance_to(next);
            }
        }
        self.slow_copies = slow_copies;
    }

    /// Lets time pass.
    pub(super) fn pass(&mut self, time: Duration) {
        let slow_copies = std::mem::replace(&mut self.slow_copies, false);
        let (until, mut turns) = (clock::now() + time, 0);
        loop {
            turns = if self.turn() { turns + 1 } else { 0 };
            assert!(turns < TURNS, "an end never sleeps; {}", self.standing());
            if turns == 0 {
                match self.next_event().filter(|next| *next <= until) {
                    Some(next) => virtual_time::advance_to(next),
                    None => break,
                }
            }
        }
        virtual_time::advance_to(until);
        self.slow_copies = slow_copies;
    }

    /// Returns the time of the next timer or deadline.
    fn next_event(&self) -> Option<Instant> {
        let ends = [&self.initiator, &self.owner].into_iter().filter(|end| !end.is_stopped);
        let deadlines = (0..self.slots.len()).filter_map(|at| self.deadline(at));
        ends.filter_map(|end| end.sleeps_until).chain(deadlines).min()
    }

    /// Stops an end for a time. An initiator that waits for a stopped owner loses it after the
    /// timeout; an initiator that was stopped itself loses nobody, unless it was in the handshake.
    pub(super) fn stop(&mut self, who: Role, time: Duration) {
        let is_up = self.up().is_some();
        if who == Role::Owner && time >= PEER_TIMEOUT || !is_up {
            self.ends(&[ErrorKind::PeerLost]);
        }
        self.end(who).is_stopped = true;
        self.pass(time);
        self.end(who).is_stopped = false;
        if who == Role::Owner && time >= PEER_TIMEOUT + PROMPT {
            assert!(self.told.is_empty(), "a notification waits for a silent peer for ever");
            assert!(self.is_gone() || self.up().is_some(), "a silent peer is not noticed");
        }
    }
}
