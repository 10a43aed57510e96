//! Switches that break, on purpose, the clauses that core alone keeps: the conformance suite must then fail.

#[cfg(all(feature = "break-for-tests", not(debug_assertions)))]
compile_error!(
    "feature \"break-for-tests\" breaks kvx on purpose: never enable it in a release build"
);

#[cfg(feature = "break-for-tests")]
mod imp {
    use crate::sync::Mutex;

    static BROKEN: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

    /// Every switch there is.
    pub const BREAKS: &[&str] = &[
        "overlap",          // plans with overlapping destinations are accepted
        "bounds",           // grids are not checked against their region
        "deadline",         // transfers ignore their deadline
        "free-early",       // a transfer's memory is let go before it has settled
        "forget-is-fine",   // a forgotten ticket counts as success and quarantines nothing
        "budget",           // no limit on transfers in flight
        "inbox",            // the queue of notifications has no bound
        "expect",           // `wait_for_senders` counts one sender twice
        "expect-keeps",     // what `wait_for_senders` took stays in the queue
        "early-notify",     // a transfer's notification is sent when it is posted
        "stale-metadata",   // an older generation replaces a newer one
        "lost-again",       // a lost peer handle comes back to life
        "refused-for-good", // a link that was refused for lack of something is never tried again
        "revoke-at-once",   // revoke gives the memory back without asking transports
        "drop-frees",       // a dropped region frees its memory at once
        "unregistered",     // a region that the peer does not have is made up
        "shutdown-leaves",  // shutdown forgets the work in flight
        "fork",             // a forked child's calls are let through
        "fork-keeps",       // a forked child keeps the sockets of its parent
        "report",           // reports count one block too many
        "zero",             // a plan of zero blocks never resolves
        "silent-fallback",  // a list of backends does not restrict
        "sender",           // notifications lose their sender's incarnation
        "twice",            // notifications are delivered twice
        "wake",             // a transfer that resolves wakes nobody
        "order",            // backends that must be named are opened without a list, the last first
        "one-error",        // every backend that cannot be used is unavailable
        "notify-anyway",    // the notification of a failed transfer is sent all the same
        "any-invitation",   // every agent has the same invitation
        "any-key",          // every key fits every region
        "no-update",        // newer metadata is not taken
        "trust-lengths",    // a length in a message is believed
        "read-only",        // memory that may only be read is written
        "loss-untold",      // nobody is told of the loss of a peer
        "critical",         // unknown sections are skipped even if they are critical
    ];

    /// Breaks `switches` and nothing else, until the next call.
    pub fn break_only(switches: &[&'static str]) {
        for switch in switches {
            assert!(BREAKS.contains(switch), "{switch} is not a switch");
        }
        *BROKEN.lock() = switches.to_vec();
    }

    pub(crate) fn injected(switch: &'static str) -> bool {
        debug_assert!(BREAKS.contains(&switch));
        BROKEN.lock().contains(&switch)
    }
}

#[cfg(not(feature = "break-for-tests"))]
mod imp {
    #[inline(always)]
    pub(crate) const fn injected(_switch: &'static str) -> bool {
        false
    }
}

pub(crate) use imp::injected;
#[cfg(feature = "break-for-tests")]
pub use imp::{BREAKS, break_only};
