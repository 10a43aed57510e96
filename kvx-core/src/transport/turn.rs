//! One turn of a transport, as it is reported.

use std::time::{Duration, Instant};

/// Reports what one turn of a transport has done and how the next is to be scheduled. Every layer passes it on whole,
/// so that a further wish of a backend needs a field here and its one reader.
///
/// ```
/// use kvx_core::backend::Turn;
/// let turn = Turn { own_thread_only: true, ..Turn::did(3) };
/// assert_eq!((turn.done, turn.ends_unannounced), (3, false));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// The amount of work that was done; 0 if there was nothing to do.
    pub done: usize,
    /// After a turn that did nothing: how long to go on looking for work before sleeping. A wake-up costs some 15 µs;
    /// to look for longer pays while bytes are on their way.
    pub look_for: Duration,
    /// The looking ends at this moment, if it is earlier.
    pub look_until: Option<Instant>,
    /// Other threads may have no turn. Where a turn can last as long as a peer likes, they would miss their deadlines
    /// in it.
    pub own_thread_only: bool,
    /// Whoever waits for this core goes first, although there is more to do: work whose latency counts comes by. A
    /// core that is never let go of is taken away only every few milliseconds.
    pub yields: bool,
    /// Whatever was begun has ended within the turn, so a sleeping reactor knows of all that is left. It sleeps on
    /// and is not asked for how long, which costs system calls.
    pub left_nothing: bool,
    /// Threads of the library move what is posted, and its end is only found by asking. A caller that waits for at
    /// most [`INLINE_SEGMENTS`](super::INLINE_SEGMENTS) pieces then calls [`Link::drive`](super::Link::drive) for up
    /// to a millisecond before it sleeps.
    pub ends_unannounced: bool,
}

impl Turn {
    /// A turn that did so much, and has no wishes for the next.
    pub const fn did(done: usize) -> Self {
        Turn {
            done,
            look_for: Duration::from_micros(20),
            look_until: None,
            own_thread_only: false,
            yields: false,
            left_nothing: false,
            ends_unannounced: false,
        }
    }
}
