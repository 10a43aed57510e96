//! NIXL's notifications of any length as kvx notifications of at most 64 KiB: unchanged, or in
//! parts.
//!
//! Parts begin with a mark that is not valid UTF-8. So a kvx agent without NIXL support and an
//! agent with the backend KVX can exchange short notifications unchanged. A notification that
//! itself begins with the mark is sent as one part.

use std::collections::VecDeque;

use kvx_core::Incarnation;
use kvx_core::backend::MAX_NOTIFICATION;
use kvx_core::backend::wire::{Reader, Writer};

/// The longest notification that is sent or assembled, in bytes.
pub const MAX_NOTE: usize = 16 << 20;
const MARK: [u8; 4] = *b"\xf8kvx";
/// The length of a part's header: the mark, the number of the notification, the number of the part,
/// the number of parts.
const HEADER: usize = MARK.len() + 8 + 4 + 4;
const ROOM: usize = MAX_NOTIFICATION - HEADER;
const MAX_PARTS: usize = MAX_NOTE.div_ceil(ROOM);
/// The most unfinished notifications that are kept, over all senders. Parts are missing forever if
/// a transfer fails between them.
const MAX_UNFINISHED: usize = 64;
/// The most bytes of unfinished notifications that are kept.
const MAX_KEPT: usize = 4 * MAX_NOTE;

/// Returns the kvx notifications that carry one NIXL notification, or `None` if it is longer than
/// [`MAX_NOTE`]. The receiver delivers it once it has all parts, so it is enough that any one of
/// them follows the data. `number` distinguishes the notifications of one sender.
pub fn notes(number: u64, bytes: &[u8]) -> Option<Vec<Box<[u8]>>> {
    if bytes.len() <= MAX_NOTIFICATION && !bytes.starts_with(&MARK) {
        return Some(vec![bytes.into()]);
    }
    if bytes.len() > MAX_NOTE {
        return None;
    }
    let count = bytes.len().div_ceil(ROOM) as u32;
    let note = |(at, part): (usize, &[u8])| {
        let mut note = Vec::with_capacity(HEADER + part.len());
        note.put(&MARK);
        note.put_u64(number);
        note.put_u32(at as u32);
        note.put_u32(count);
        note.put(part);
        note.into()
    };
    Some(bytes.chunks(ROOM).enumerate().map(note).collect())
}

struct UnfinishedNotification {
    from: Incarnation,
    number: u64,
    parts: Vec<Option<Box<[u8]>>>,
    bytes: usize,
}

/// An assembly of many senders' notifications from their parts.
#[derive(Default)]
pub struct Assembly {
    unfinished: VecDeque<UnfinishedNotification>,
    kept: usize,
}

/// The result of a kvx notification.
#[derive(Debug, PartialEq, Eq)]
pub enum Got {
    /// A whole NIXL notification: the last missing part of it, or a notification without parts.
    Whole(Box<[u8]>),
    /// A part, which was kept.
    Part,
    /// A part, which was kept. To stay within the limits, an unfinished notification with this many
    /// received bytes was dropped: the oldest of the sender that holds most.
    Instead(usize),
    /// Not a notification that [`notes`] creates.
    Nonsense,
}

impl Assembly {
    /// Takes a kvx notification.
    pub fn take(&mut self, from: Incarnation, note: &[u8]) -> Got {
        match note.strip_prefix(&MARK) {
            None => Got::Whole(note.into()),
            Some(rest) => self.part(from, rest).unwrap_or(Got::Nonsense),
        }
    }

    fn part(&mut self, from: Incarnation, rest: &[u8]) -> Option<Got> {
        let mut reader = Reader::new("part of a notification", rest);
        let (number, at, count) =
            (reader.u64().ok()?, reader.u32().ok()? as usize, reader.u32().ok()? as usize);
        let part = reader.bytes(reader.left()).ok()?;
        if !(1..=MAX_PARTS).contains(&count) || at >= count || part.is_empty() || part.len() > ROOM
        {
            return None;
        }
        if at + 1 < count && part.len() != ROOM {
            return None;
        }
        let known = self.unfinished.iter().position(|it| it.from == from && it.number == number);
        let known = known.unwrap_or_else(|| {
            self.unfinished.push_back(UnfinishedNotification {
                from,
                number,
                parts: vec![None; count],
                bytes: 0,
            });
            self.unfinished.len() - 1
        });
        let one = &mut self.unfinished[known];
        if one.parts.len() != count || one.parts[at].is_some() {
            return None;
        }
        one.parts[at] = Some(part.into());
        one.bytes += part.len();
        self.kept += part.len();
        if one.parts.iter().all(Option::is_some) {
            let whole = self.unfinished.remove(known)?;
            self.kept -= whole.bytes;
            return Some(Got::Whole(
                whole.parts.into_iter().flatten().collect::<Vec<_>>().concat().into(),
            ));
        }
        if self.unfinished.len() <= MAX_UNFINISHED && self.kept <= MAX_KEPT {
            return Some(Got::Part);
        }
        self.make_room().map(Got::Instead)
    }

    /// Drops the oldest unfinished notification of the sender that holds most. So a sender cannot
    /// displace the notifications of others while it holds more than they do.
    fn make_room(&mut self) -> Option<usize> {
        let of = |from: Incarnation| {
            let own = self.unfinished.iter().filter(|it| it.from == from);
            own.fold((0, 0), |(count, bytes), it| (count + 1, bytes + it.bytes))
        };
        // Compares count and bytes as fractions of their limits, and takes the larger.
        let weight = |from| {
            let (count, bytes) = of(from);
            (count * (MAX_KEPT / MAX_UNFINISHED)).max(bytes)
        };
        let heaviest = self.unfinished.iter().map(|it| it.from).max_by_key(|from| weight(*from))?;
        let at = self.unfinished.iter().position(|it| it.from == heaviest)?;
        let oldest = self.unfinished.remove(at)?;
        self.kept -= oldest.bytes;
        Some(oldest.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FROM: Incarnation = Incarnation([1; 16]);
    const OTHER: Incarnation = Incarnation([2; 16]);

    fn there_and_back(bytes: &[u8], turn: usize) -> usize {
        let mut notes = notes(5, bytes).unwrap();
        assert!(notes.iter().all(|note| note.len() <= MAX_NOTIFICATION));
        let count = notes.len();
        notes.rotate_left(turn % count);
        let mut assembly = Assembly::default();
        let mut got: Vec<_> = notes.iter().map(|note| assembly.take(FROM, note)).collect();
        assert_eq!(got.pop(), Some(Got::Whole(bytes.into())));
        assert!(got.iter().all(|got| *got == Got::Part));
        assert_eq!((assembly.kept, assembly.unfinished.len()), (0, 0));
        count
    }

    #[test]
    fn notifications_of_any_length_arrive_in_any_order_of_their_parts() {
        for (len, parts) in [
            (0, 1),
            (1, 1),
            (64 << 10, 1),
            ((64 << 10) + 1, 2),
            (1 << 20, 17),
            (MAX_NOTE, MAX_PARTS),
        ] {
            let bytes: Vec<u8> = (0..len).map(|at| (at / 7) as u8).collect();
            assert_eq!(there_and_back(&bytes, len / 3 + 1), parts, "{len}");
        }
        assert!(notes(1, &vec![0; MAX_NOTE + 1]).is_none());
    }

    #[test]
    fn bytes_without_the_mark_stay_unchanged_and_the_mark_itself_is_sent_as_a_part() {
        assert_eq!(notes(1, b"HB:one,two").unwrap(), [Box::from(&b"HB:one,two"[..])]);
        let marked = [&MARK[..], b" and more"].concat();
        assert_ne!(*notes(1, &marked).unwrap()[0], marked[..]);
        assert_eq!(there_and_back(&marked, 0), 1);
        let long = [&MARK[..], &[3; MAX_NOTIFICATION - 4]].concat();
        assert_eq!(there_and_back(&long, 1), 2);
    }

    #[test]
    fn equal_numbers_of_two_senders_do_not_collide() {
        let (a, b) = (vec![1; 100_000], vec![2; 100_000]);
        let (ours, theirs) = (notes(9, &a).unwrap(), notes(9, &b).unwrap());
        let mut assembly = Assembly::default();
        assert_eq!(assembly.take(FROM, &ours[0]), Got::Part);
        assert_eq!(assembly.take(OTHER, &theirs[1]), Got::Part);
        assert_eq!(assembly.take(FROM, &ours[1]), Got::Whole(a.into()));
        assert_eq!(assembly.take(OTHER, &theirs[0]), Got::Whole(b.into()));
    }

    #[test]
    fn unfinished_notifications_are_bounded_and_do_not_displace_those_of_others() {
        let mut assembly = Assembly::default();
        let note = vec![7; 100_000];
        let others = notes(0, &note).unwrap();
        assert_eq!(assembly.take(OTHER, &others[0]), Got::Part);
        for (len, parts) in [(MAX_NOTE, 1..40), (100_000, 0..1)] {
            let big = vec![0; len];
            let mut dropped = 0;
            for number in 0..200 {
                for part in &notes(number, &big).unwrap()[parts.clone()] {
                    let got = assembly.take(FROM, part);
                    dropped += usize::from(matches!(got, Got::Instead(bytes) if bytes > 0));
                    assert!(matches!(got, Got::Part | Got::Instead(_)), "{got:?}");
                    assert!(
                        assembly.kept <= MAX_KEPT && assembly.unfinished.len() <= MAX_UNFINISHED
                    );
                }
            }
            assert!(dropped > 100, "{dropped}");
        }
        assert_eq!(assembly.take(OTHER, &others[1]), Got::Whole(note.into()));
    }

    #[test]
    fn invalid_parts_are_recognised() {
        let good = notes(1, &vec![0; 200_000]).unwrap();
        let mut assembly = Assembly::default();
        assert_eq!(assembly.take(FROM, &good[0]), Got::Part);
        assert_eq!(assembly.take(FROM, &good[0]), Got::Nonsense, "twice");
        for len in MARK.len()..=HEADER {
            assert_eq!(assembly.take(FROM, &good[1][..len]), Got::Nonsense);
        }
        for byte in HEADER - 8..HEADER {
            let mut odd = good[1].to_vec();
            odd[byte] ^= 0x80;
            assert_eq!(assembly.take(FROM, &odd), Got::Nonsense, "{byte}");
        }
    }
}
