//! The faults of the chaos transport.

/// Lists the faults: what each does, its name in code, its name in a variant of a registry.
macro_rules! faults {
    ($($(#[$doc:meta])* $fault:ident $name:literal,)*) => {
        /// What a chaos transport does wrong. Both ends of a pair do it, each where it applies to
        /// them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Fault {
            $($(#[$doc])* $fault,)*
        }

        impl Fault {
            /// Every fault there is.
            pub const ALL: &[Fault] = &[$(Fault::$fault),*];

            /// Its name, in words.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Fault::$fault => $name,)*
                }
            }
        }
    };
}

faults! {
    // What happens to a transfer.
    /// Tickets settle 20 ms late. Breaks nothing: every clause must hold under it.
    Delay "delay",
    /// Tickets settle in another order than they were given. Breaks nothing: every clause must hold
    /// under it.
    Reorder "reorder",
    /// A read changes one byte of its destination once more before it settles.
    WrongBytes "wrong bytes",
    /// A transfer settles with success and is never posted.
    Drop "drop",
    /// Every fifth transfer fails.
    FailNth "fail nth",
    /// A transfer of more than 65,536 blocks fails.
    FailLarge "fail large",
    /// A read leaves the last grid of its set out.
    SkipGrid "skip grid",
    /// A read exchanges two of its blocks.
    SwapBlocks "swap blocks",
    /// A read writes one byte after each block.
    Smear "smear",
    /// A read moves only the first block of those that it merged.
    CutSegments "cut segments",
    /// A plan that is posted again settles at once and moves nothing.
    PostOnce "post once",
    /// Every 50th transfer settles with success and is never posted.
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

    /// A transfer is posted when those before it have settled, whomever they lead to.
    OneQueue "one queue",

    // What happens to a region.
    /// A revocation settles at once, and nobody is kept out.
    IgnoreRevoke "ignore revoke",
    /// `revoke` blocks for 500 ms.
    BlockInRevoke "block in revoke",
    /// Each export is 48 KiB longer.
    FatExport "fat export",

    // What happens to a notification.
    /// Every fifth settles without being sent.
    DropNotification "drop notification",
    /// Sent twice.
    DuplicateNotification "duplicate notification",
    /// Ends at its first NUL byte.
    TruncateAtNul "truncate at NUL",
    /// Nothing is delivered again once the queue was full.
    DropOnFull "drop on full",
    /// Arrives before the data that it follows: a transfer settles at once, and moves its data 100
    /// ms later.
    NotifyEarly "notify early",

    // What happens to a link.
    /// The loss of a peer is not reported, and what it would fail stays in flight.
    DropPeerLoss "drop peer loss",
    /// A link does not say how it reaches the peer.
    Mute "mute",
    /// An agent cannot link to itself.
    NoLoopback "no loopback",
    /// Shutting one transport down loses the links of all transports of the process.
    GlobalStop "global stop",

    // What happens to the process.
    /// A thread spins.
    Spin "spin",
    /// A signal handler is installed.
    TakeSignal "take a signal",
}

impl Fault {
    /// Faults that break nothing: every clause must hold under them.
    pub const HARMLESS: &[Fault] = &[Fault::Delay, Fault::Reorder];

    /// The fault of this name.
    pub fn named(name: &str) -> Option<Fault> {
        Fault::ALL.iter().copied().find(|fault| fault.name() == name)
    }
}
