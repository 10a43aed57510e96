//! Fault injection into the system calls of a test's thread: they fail, or do less than they could.
//!
//! A packet is sent completely or not at all, as is a file with its packet. Only copies out of
//! another process's memory may be short.

use std::cell::RefCell;

use kvx_testkit::Random;
use rustix::io::Errno;

/// A system call that may fail.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::shm) enum Call {
    Connect,
    Accept,
    /// Sends a packet, with a file or without.
    Send {
        file: bool,
    },
    Receive,
    Events,
}

/// The way in which a run's calls fail.
#[derive(Debug)]
enum Cut {
    /// By a seed.
    Random {
        random: Random,
        /// The number of further calls for which the kernel takes no files or packets.
        late: u32,
        /// True if files get lost on their way, as the kernel loses them if a process has no
        /// descriptor left.
        loses_files: bool,
    },
    /// This number of packets is transferred, in either direction, then none until more are
    /// allowed.
    Counted { left: u32 },
}

#[derive(Debug, Default)]
struct State {
    cut: Option<Cut>,
    moved: u64,
    lost_files: u64,
    /// True if the next packet fails for good.
    fault_injection: bool,
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

fn begin(cut: Option<Cut>) {
    STATE.set(State { cut, ..State::default() });
}

/// Makes the calls of this thread fail by this seed.
pub(super) fn by(seed: u64, loses_files: bool) {
    begin(Some(Cut::Random { random: Random::seeded(seed), late: 0, loses_files }));
}

/// Makes the calls of this thread transfer no packets until some are [`allow`]ed.
pub(super) fn step_by_step() {
    begin(Some(Cut::Counted { left: 0 }));
}

/// Ends the fault injection of this thread.
pub(super) fn off() {
    begin(None);
}

/// Allows this number of packets or accepted clients, and then none. No effect with a seed.
pub(super) fn allow(packets: u32) {
    STATE.with_borrow_mut(|state| {
        if let Some(Cut::Counted { left }) = &mut state.cut {
            *left = packets;
        }
    });
}

/// Makes the next packet fail, and all packets after it.
pub(super) fn break_next() {
    STATE.with_borrow_mut(|state| state.fault_injection = true);
}

/// Returns true if that has not happened yet.
pub(super) fn will_break() -> bool {
    STATE.with_borrow(|state| state.fault_injection)
}

/// Returns the number of packets and clients since the fault injection began.
pub(super) fn moved() -> u64 {
    STATE.with_borrow(|state| state.moved)
}

/// Returns the number of files lost since then.
pub(super) fn lost_files() -> u64 {
    STATE.with_borrow(|state| state.lost_files)
}

/// Makes a call, or returns an injected error instead.
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
    /// Returns the error with which the call is to fail.
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
            // These are tried again by the timer, in 20 ms.
            (8, Call::Send { file: true }) if random.below(3) == 0 => {
                Err([Errno::TOOMANYREFS, Errno::NOBUFS][random.below(2)])
            }
            _ => Ok(()),
        }
    }
}

/// Returns true if the file that has arrived is lost.
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

/// Returns the part of these pieces that a copy out of another process's memory moves, or the error
/// of an interruption.
pub(in crate::shm) fn short(pieces: &[libc::iovec]) -> Result<Vec<libc::iovec>, Errno> {
    /// The size below which the kernel always copies completely, such as a probe.
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
