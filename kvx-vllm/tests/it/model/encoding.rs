//! The part of an engine's state that decides what the engine does next, as one number.
//!
//! It is a hash of the engine's `Debug` text, so it contains each field of each type except those
//! of `is_omitted`. Times and stamps count from now, and moves have no numbers. `Debug` prints how
//! many blocks a list has, not which: the model's own state has their numbers.

use std::fmt::{self, Debug, Write};
use std::hash::{DefaultHasher, Hasher};

/// The age from which on all past times are equal, in seconds. No engine of the model looks further
/// back: a handshake is repeated after at most 2 s, as an engine restarts at most twice.
const OLDEST: u64 = 2;

/// The moment from which an engine's state is seen.
#[derive(Clone, Copy)]
pub(super) struct Moment {
    /// The time, in seconds.
    pub(super) now: u64,
    /// The stamp of the prefill's pool.
    pub(super) stamp: u64,
}

/// Returns the hash of values as seen from a moment.
pub(super) fn digest(values: &[&dyn Debug], moment: Moment) -> u64 {
    let mut encoder = Encoder { moment, text: String::with_capacity(4096), state: Writing::Text };
    for value in values {
        write!(encoder, "{value:?};").expect("text can be appended to a string");
    }
    let mut hasher = DefaultHasher::new();
    hasher.write(encoder.text.as_bytes());
    hasher.finish()
}

/// Formats a moment as its distance from now.
pub(super) fn from_now(at: u64, now: u64) -> i64 {
    let (at, now) = (at.max(now.saturating_sub(OLDEST)) as i64, now as i64);
    at - now
}

/// Returns whether a field decides nothing: settings, log lines, statistics, the time of a report,
/// the time when a peer was last used (which counts only with `engine_ttl`), the number of the last
/// move (moves are known by their requests), and deadlines by key, which also stand by time.
fn is_omitted(field: &str) -> bool {
    matches!(
        field,
        "settings"
            | "stats"
            | "failures"
            | "unknown_requests"
            | "at"
            | "built_at"
            | "used"
            | "last_move"
            | "by_key"
    )
}

/// The piece of text that the encoder reads.
enum Writing {
    Text,
    /// The value of an omitted field, within this many brackets.
    Omitted(usize),
    /// The value of a `Time` so far, which ends with a bracket.
    Time(String),
    /// The value of a `MoveId`, which ends with a bracket.
    Move,
    /// The stamp of a `BlockReference` so far, which ends with a space.
    Stamp(String),
}

/// Receives the pieces of a `Debug` text. A derived `Debug` writes each name as a piece.
struct Encoder {
    moment: Moment,
    text: String,
    state: Writing,
}

impl Write for Encoder {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        match &mut self.state {
            Writing::Text => match piece {
                "Time" => self.state = Writing::Time(String::new()),
                "MoveId" => self.state = Writing::Move,
                "stamp" => self.state = Writing::Stamp(String::new()),
                name if is_omitted(name) => self.state = Writing::Omitted(0),
                _ => self.text.push_str(piece),
            },
            Writing::Omitted(depth) => {
                for byte in piece.bytes() {
                    match byte {
                        b'(' | b'[' | b'{' => *depth += 1,
                        b')' | b']' | b'}' if *depth > 0 => *depth -= 1,
                        b')' | b']' | b'}' | b',' if *depth == 0 => {
                            self.state = Writing::Text;
                            self.text.push_str(piece);
                            break;
                        }
                        _ => {}
                    }
                }
            }
            Writing::Time(time) => {
                time.push_str(piece);
                if time.ends_with(')') {
                    let seconds = match time.trim_matches(['(', ')']) {
                        "0ns" => 0,
                        time => time
                            .strip_suffix('s')
                            .and_then(|time| time.parse().ok())
                            .ok_or(fmt::Error)?,
                    };
                    self.state = Writing::Text;
                    let from_now = from_now(seconds, self.moment.now);
                    write!(self.text, "{from_now}")?;
                }
            }
            Writing::Move if piece.ends_with(')') => self.state = Writing::Text,
            Writing::Move => {}
            Writing::Stamp(stamp) => match piece.trim_matches([' ', '}', ':']) {
                "" if !stamp.is_empty() => {
                    let stamp: u64 = stamp.parse().map_err(|_| fmt::Error)?;
                    let behind = self.moment.stamp.wrapping_sub(stamp);
                    self.state = Writing::Text;
                    write!(self.text, "{behind}{piece}")?;
                }
                digits => stamp.push_str(digits),
            },
        }
        Ok(())
    }
}
