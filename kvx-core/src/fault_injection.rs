//! Switches that break the clauses which core alone keeps, on purpose: the conformance suite must
//! then fail.

#[cfg(all(feature = "break-for-tests", not(debug_assertions)))]
compile_error!(
    "feature \"break-for-tests\" breaks kvx on purpose: never enable it in a release build"
);

#[cfg(feature = "break-for-tests")]
mod imp {
    use crate::sync::Mutex;

    static BROKEN: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

    /// All switches.
    pub const BREAKS: &[&str] = &[
        "overlap",          // plans with overlapping destinations are accepted
        "bounds",           // grids are not checked against their region
        "deadline",         // transfers ignore their deadline
        "free-early",       // a transfer's memory is released before it has settled
        "forget-is-fine",   // a forgotten ticket counts as success and quarantines nothing
        "budget",           // no limit on transfers in flight
        "inbox",            // the queue of notifications has no bound
        "expect",           // `wait_for_senders` counts one sender twice
        "expect-keeps",     // notifications that `wait_for_senders` took stay queued
        "early-notify",     // a transfer's notification is sent when it is posted
        "stale-metadata",   // an older generation replaces a newer one
        "lost-again",       // a lost peer handle comes back to life
        "refused-for-good", // a link that was refused for a temporary reason is never retried
        "revoke-at-once",   // revoke returns the memory without asking transports
        "drop-frees",       // a dropped region frees its memory at once
        "unregistered",     // a region that the peer does not have is replaced by another
        "shutdown-leaves",  // shutdown ignores the work in flight
        "fork",             // a forked child's calls are not rejected
        "fork-keeps",       // a forked child keeps the sockets of its parent
        "report",           // reports count one block too many
        "zero",             // a plan of zero blocks never resolves
        "silent-fallback",  // a list of backends is ignored
        "sender",           // notifications lose their sender's incarnation
        "twice",            // notifications are delivered twice
        "wake",             // a transfer that resolves wakes no waiter
        "order",            // backends that must be named open without a list, last first
        "one-error",        // every backend that cannot be used counts as unavailable
        "notify-anyway",    // the notification of a failed transfer is sent anyway
        "any-invitation",   // every agent has the same invitation
        "any-key",          // every key matches every region
        "no-update",        // newer metadata is ignored
        "trust-lengths",    // a length in a message is trusted
        "read-only",        // read-only memory is written
        "loss-untold",      // the loss of a peer is not reported
        "critical",         // unknown sections are skipped even if critical
    ];

    /// Enables `switches` and disables all others, until the next call.
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
