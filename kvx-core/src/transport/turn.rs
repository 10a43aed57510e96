//! The report of one turn of a transport.

use std::time::{Duration, Instant};

/// The outcome of one turn of a transport, and its requests for the next. Every layer passes it on
/// unchanged, so that a new request of a backend needs only a field here and its reader.
///
/// ```
/// use kvx_core::backend::Turn;
/// let turn = Turn { own_thread_only: true, ..Turn::did(3) };
/// assert_eq!((turn.done, turn.ends_unannounced), (3, false));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// The amount of work done; 0 if there was nothing to do.
    pub done: usize,
    /// How long to keep polling for work before sleeping, after a turn that did nothing. A wake-up
    /// costs about 15 µs; polling for longer pays off while bytes are on their way.
    pub look_for: Duration,
    /// The time at which polling ends, if that is earlier.
    pub look_until: Option<Instant>,
    /// True if other threads must not run a turn. They would miss their deadlines in a turn that
    /// can last as long as a peer likes.
    pub own_thread_only: bool,
    /// True to yield the core although there is more to do, because work whose latency counts
    /// arrives from time to time. The kernel takes a core that never yields only every few
    /// milliseconds.
    pub yields: bool,
    /// True if all that was started has ended within the turn. A sleeping reactor then knows of all
    /// remaining work: it sleeps on and is not asked for how long, which would cost system calls.
    pub left_nothing: bool,
    /// True if threads of the library move what is posted, and only polling finds the end. A caller
    /// that waits for at most [`INLINE_SEGMENTS`](super::INLINE_SEGMENTS) segments then calls
    /// [`Link::drive`](super::Link::drive) for up to a millisecond before it sleeps.
    pub ends_unannounced: bool,
}

impl Turn {
    /// Creates the report of a turn that did this amount of work and has no requests for the next.
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
