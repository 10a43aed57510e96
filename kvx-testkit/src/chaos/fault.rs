//! The faults of the chaos transport.

/// Lists the faults, each with its effect, its name in code and its name in a variant of a
/// registry.
macro_rules! faults {
    ($($(#[$doc:meta])* $fault:ident $name:literal,)*) => {
        /// A fault of a chaos transport. Both ends of a pair have it, each where it applies.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Fault {
            $($(#[$doc])* $fault,)*
        }

        impl Fault {
            /// All faults.
            pub const ALL: &[Fault] = &[$(Fault::$fault),*];

            /// Returns the fault's name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Fault::$fault => $name,)*
                }
            }
        }
    };
}

faults! {
    // Faults of transfers.
    /// Tickets settle 20 ms late. Harmless: every clause must hold under it.
    Delay "delay",
    /// Tickets settle in another order than they were given. Harmless: every clause must hold under
    /// it.
    Reorder "reorder",
    /// A read changes one byte of its destination once more before it settles.
    WrongBytes "wrong bytes",
    /// A transfer settles with success but is never posted.
    Drop "drop",
    /// Every fifth transfer fails.
    FailNth "fail nth",
    /// A transfer of more than 65,536 blocks fails.
    FailLarge "fail large",
    /// A read omits the last grid of its set.
    SkipGrid "skip grid",
    /// A read swaps two of its blocks.
    SwapBlocks "swap blocks",
    /// A read writes one byte after each block.
    Smear "smear",
    /// A read moves only the first of the blocks that it merged.
    CutSegments "cut segments",
    /// A plan that is posted again settles at once and moves nothing.
    PostOnce "post once",
    /// Every 50th transfer settles with success but is never posted.
    Mix "mix",
    /// The destination of a read is written again 300 ms after the ticket has settled.
    WriteLate "write late",
    /// The ticket is dropped.
    ForgetTicket "forget the ticket",
    /// `post` blocks for 200 ms.
    BlockInPost "block in post",
    /// `cancel` is ignored, and the ticket is held until the peer has done its work.
    IgnoreCancel "ignore cancel",
    /// Failures are reported as success.
    HideFailure "hide failure",

    /// A transfer is posted only when all earlier ones have settled, whatever their peers.
    OneQueue "one queue",

    // Faults of regions.
    /// A revocation settles at once, without ending remote access.
    IgnoreRevoke "ignore revoke",
    /// `revoke` blocks for 2 s.
    BlockInRevoke "block in revoke",
    /// Each export is 48 KiB longer.
    FatExport "fat export",

    // Faults of notifications.
    /// Every fifth notification settles without being sent.
    DropNotification "drop notification",
    /// A notification is sent twice.
    DuplicateNotification "duplicate notification",
    /// A notification ends at its first NUL byte.
    TruncateAtNul "truncate at NUL",
    /// Notifications are no longer delivered once the queue was full.
    DropOnFull "drop on full",
    /// A notification arrives before the data that it follows: a transfer settles at once and moves
    /// its data 100 ms later.
    NotifyEarly "notify early",

    // Faults of links.
    /// The loss of a peer is not reported, and the work that it would fail stays in flight.
    DropPeerLoss "drop peer loss",
    /// A link does not describe how it reaches the peer.
    Mute "mute",
    /// An agent cannot link to itself.
    NoLoopback "no loopback",
    /// Shutting down one transport closes the links of all transports of the process.
    GlobalStop "global stop",

    // Faults of the process.
    /// A thread spins.
    Spin "spin",
    /// A signal handler is installed.
    TakeSignal "take a signal",
}

impl Fault {
    /// The harmless faults: every clause must hold under them.
    pub const HARMLESS: &[Fault] = &[Fault::Delay, Fault::Reorder];

    /// Returns the fault with this name.
    pub fn named(name: &str) -> Option<Fault> {
        Fault::ALL.iter().copied().find(|fault| fault.name() == name)
    }
}
