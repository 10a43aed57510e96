//! System calls of a test's thread that fail, or do less than they could, as the test wants it.
//!
//! A packet goes whole or not at all, and a file goes with its packet or not at all. Only copies
//! out of another process's memory may be short.

use std::cell::RefCell;

use kvx_testkit::Random;
use rustix::io::Errno;

/// A system call that may be cut.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::shm) enum Call {
    Connect,
    Accept,
    /// Of a packet, with a file or without.
    Send {
        file: bool,
    },
    Receive,
    Events,
}

/// How a run's calls are cut.
#[derive(Debug)]
enum Cut {
    /// By a seed.
    Random {
        random: Random,
        /// The kernel will not take files or packets for so many more calls.
        late: u32,
        /// Files are lost on their way, as the kernel loses them where a process has no descriptor
        /// left.
        loses_files: bool,
    },
    /// So many packets go, in either direction, then none until more are allowed.
    Counted { left: u32 },
}

#[derive(Debug, Default)]
struct State {
    cut: Option<Cut>,
    moved: u64,
    lost_files: u64,
    /// The next packet fails for good.
    fault_injection: bool,
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

fn begin(cut: Option<Cut>) {
    STATE.set(State { cut, ..State::default() });
}

/// The calls of this thread are cut from now on, by this seed.
pub(super) fn by(seed: u64, loses_files: bool) {
    begin(Some(Cut::Random { random: Random::seeded(seed), late: 0, loses_files }));
}

/// The calls of this thread move one packet, until more are [`allow`]ed.
pub(super) fn step_by_step() {
    begin(Some(Cut::Counted { left: 0 }));
}

/// How calls of a thread are cut that this one is about to start.
pub(in crate::shm) struct OfAnotherThread(Option<u64>);

/// By a seed that this thread's draws, if it is cut by one.
pub(in crate::shm) fn for_another_thread() -> OfAnotherThread {
    STATE.with_borrow_mut(|state| match &mut state.cut {
        Some(Cut::Random { random, .. }) => OfAnotherThread(Some(random.word())),
        _ => OfAnotherThread(None),
    })
}

impl OfAnotherThread {
    /// Within it.
    pub(in crate::shm) fn take_up(self) {
        if let Some(seed) = self.0 {
            by(seed, false);
        }
    }
}

/// The calls of this thread are what they are.
pub(super) fn off() {
    begin(None);
}

/// From now on one packet goes, or a client is accepted, and then nothing. No effect where a seed
/// cuts.
pub(super) fn allow(packets: u32) {
    STATE.with_borrow_mut(|state| {
        if let Some(Cut::Counted { left }) = &mut state.cut {
            *left = packets;
        }
    });
}

/// The next packet that is sent fails, and no other will go.
pub(super) fn break_next() {
    STATE.with_borrow_mut(|state| state.fault_injection = true);
}

/// Returns whether that is still to come.
pub(super) fn will_break() -> bool {
    STATE.with_borrow(|state| state.fault_injection)
}

/// How many packets and clients have come through since the cutting began.
pub(super) fn moved() -> u64 {
    STATE.with_borrow(|state| state.moved)
}

/// How many files were lost since then.
pub(super) fn lost_files() -> u64 {
    STATE.with_borrow(|state| state.lost_files)
}

/// Makes a call, or ends it with an error instead.
pub(in crate::shm) fn call<T>(
    call: Call,
    make: impl FnOnce() -> Result<T, Errno>,
) -> Result<T, Errno> {
    STATE.with_borrow_mut(|state| {
        state.cut.as_mut().map_or(Ok(()), |cut| cut.before(call))?;
        match call {
            Call::Send { .. } if std::mem::take(&mut state.fault_injection) => Err(Errno::NOMEM),
            _ => Ok(()),
        }
    })?;
    let made = make()?;
    if matches!(call, Call::Accept | Call::Send { .. } | Call::Receive) {
        STATE.with_borrow_mut(|state| {
            state.moved += 1;
            if let Some(Cut::Counted { left }) = &mut state.cut {
                *left -= 1;
            }
        });
    }
    Ok(made)
}

impl Cut {
    /// Errors: what the call ends with.
    fn before(&mut self, call: Call) -> Result<(), Errno> {
        let is_packet = matches!(call, Call::Send { .. } | Call::Receive);
        let (random, late) = match self {
            Cut::Counted { left: 0 } if is_packet || call == Call::Accept => {
                return Err(Errno::AGAIN);
            }
            Cut::Counted { .. } => return Ok(()),
            Cut::Random { random, late, .. } => (random, late),
        };
        if *late > 0 && is_packet {
            *late -= 1;
            return Err(Errno::AGAIN);
        }
        match (random.below(16), call) {
            (0..3, Call::Events) => Err(Errno::INTR),
            (0, Call::Connect) => Err(Errno::AGAIN),
            (0..6, Call::Accept) => {
                Err([Errno::AGAIN, Errno::INTR, Errno::CONNABORTED][random.below(3)])
            }
            (0..3, Call::Send { .. } | Call::Receive) => Err(Errno::AGAIN),
            (3..5, Call::Send { .. } | Call::Receive) => Err(Errno::INTR),
            (5, Call::Receive) => Err(Errno::CONNRESET),
            (6, Call::Receive) | (6..8, Call::Send { file: true }) => {
                *late = random.below(30) as u32;
                Err(Errno::AGAIN)
            }
            // The clock tells when these are tried again, in 20 ms.
            (8, Call::Send { file: true }) if random.below(3) == 0 => {
                Err([Errno::TOOMANYREFS, Errno::NOBUFS][random.below(2)])
            }
            _ => Ok(()),
        }
    }
}

/// Whether the file that has come is lost.
pub(in crate::shm) fn loses_file() -> bool {
    STATE.with_borrow_mut(|state| {
        let is_lost = match &mut state.cut {
            Some(Cut::Random { random, loses_files: true, .. }) => random.below(3) == 0,
            _ => false,
        };
        state.lost_files += u64::from(is_lost);
        is_lost
    })
}

/// What a copy out of another process's memory moves of these pieces. Errors: it is interrupted.
pub(in crate::shm) fn short(pieces: &[libc::iovec]) -> Result<Vec<libc::iovec>, Errno> {
    /// What is this short, such as a probe, the kernel copies whole.
    const LEAST: usize = 64;
    let mut short = pieces.to_vec();
    let bytes: usize = pieces.iter().map(|piece| piece.iov_len).sum();
    STATE.with_borrow_mut(|state| {
        let Some(Cut::Random { random, .. }) = &mut state.cut else { return Ok(short) };
        let mut left = match random.below(8) {
            _ if bytes < LEAST => bytes,
            0 => return Err(Errno::INTR),
            1..4 => 1 + random.below(bytes),
            _ => bytes,
        };
        for piece in &mut short {
            piece.iov_len = piece.iov_len.min(left);
            left -= piece.iov_len;
        }
        short.retain(|piece| piece.iov_len > 0);
        Ok(short)
    })
}
