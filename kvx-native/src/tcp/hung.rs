//! Tells why an agent serves nobody: its thread waits for a page within one connection's system call.
//!
//! Nobody wakes for that. Whoever gives a transfer up, which mostly its deadline does, looks.

use std::time::{Duration, Instant};

use kvx_core::Identity;
use kvx_core::sync::Mutex;

/// No turn of a connection takes so long, also on a machine where many share a core.
const HUNG: Duration = Duration::from_secs(1);

/// What the machine is at.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<Option<CurrentTurn>>);

#[derive(Debug)]
struct CurrentTurn {
    /// Whom the connection leads to, if that is known.
    with: Option<Identity>,
    since: Instant,
    told: bool,
}

/// A turn that is under way.
pub(super) struct Entered<'a>(&'a Turns);

impl Turns {
    /// The machine begins a turn of a connection.
    pub(super) fn enter(&self, with: Option<&Identity>, since: Instant) -> Entered<'_> {
        *self.0.lock() = Some(CurrentTurn { with: with.cloned(), since, told: false });
        Entered(self)
    }

    /// Warns, once a turn, if the one that is under way hangs. Says whether it did.
    pub(super) fn look(&self, now: Instant) -> bool {
        let mut turn = self.0.lock();
        let Some(CurrentTurn { with, since, told }) = turn.as_mut() else { return false };
        let hung_for = now.saturating_duration_since(*since);
        if hung_for < HUNG || std::mem::replace(told, true) {
            return false;
        }
        let (peer, hung_for) = (with.clone(), hung_for.as_secs_f64());
        drop(turn); // a subscriber is the program's
        tracing::warn!(
            ?peer,
            hung_for,
            "TCP: this agent's thread waits for a page that does not come, of memory that it sends to this peer or \
             receives from it (userfaultfd, a file whose server hangs): all other peers wait with it"
        );
        true
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let over = self.0.0.lock().take();
        drop(over); // without the lock
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_that_hangs_is_told_of_once() {
        let (turns, begun) = (Turns::default(), Instant::now());
        let later = begun + 2 * HUNG;
        assert!(!turns.look(later), "nothing is under way");
        let entered = turns.enter(None, begun);
        assert!(!turns.look(begun) && turns.look(later) && !turns.look(later));
        drop(entered);
        assert!(!turns.look(later));
        let _again = turns.enter(None, begun);
        assert!(turns.look(later));
    }
}
