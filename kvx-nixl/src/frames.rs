//! NIXL's notifications of any length, as kvx's of at most 64 KiB: whole behind one byte, or in parts.

use std::collections::VecDeque;

use crate::log::warn;
use kvx::Incarnation;
use kvx_core::transport::MAX_NOTIFICATION;

/// The longest that is sent, or put together.
pub(crate) const MAX: usize = 16 << 20;
const WHOLE: u8 = 0;
const PART: u8 = 1;
/// Tag, number of the notification, number of the part, how many there are.
const HEADER: usize = 1 + 8 + 4 + 4;
const ROOM: usize = MAX_NOTIFICATION - HEADER;
const MAX_PARTS: usize = MAX.div_ceil(ROOM);
/// Unfinished ones that are kept, over all senders: their parts are never all there if a transfer failed between them.
const MAX_UNFINISHED: usize = 64;
/// Of those, how many one sender may have before its own make room.
const MAX_UNFINISHED_OF_ONE: usize = 8;
/// Bytes of unfinished ones that are kept.
const MAX_KEPT: usize = 4 * MAX;

/// The frames of a notification; `None` when it is longer than [`MAX`]. The receiver gives it out when it has all of
/// them, so that one of them has to follow the data, whichever it is.
pub(crate) fn frames(number: u64, bytes: &[u8]) -> Option<Vec<Box<[u8]>>> {
    if bytes.len() < MAX_NOTIFICATION {
        return Some(vec![[&[WHOLE], bytes].concat().into()]);
    }
    if bytes.len() > MAX {
        return None;
    }
    let count = (bytes.len().div_ceil(ROOM) as u32).to_le_bytes();
    let frame = |(at, part): (usize, &[u8])| {
        [&[PART], &number.to_le_bytes()[..], &(at as u32).to_le_bytes(), &count, part].concat().into()
    };
    Some(bytes.chunks(ROOM).enumerate().map(frame).collect())
}

struct Unfinished {
    from: Incarnation,
    number: u64,
    parts: Vec<Option<Box<[u8]>>>,
    bytes: usize,
}

/// Puts parts together again.
#[derive(Default)]
pub(crate) struct Assembly {
    unfinished: VecDeque<Unfinished>,
    kept: usize,
}

/// What a frame was.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Got {
    /// The last one that was missing, or the only one.
    Notification(Box<[u8]>),
    /// A part, kept.
    Part,
    /// Nothing that a sender of ours writes.
    Nonsense,
}

impl Assembly {
    pub(crate) fn take(&mut self, from: Incarnation, frame: &[u8]) -> Got {
        match frame.split_first() {
            Some((&WHOLE, bytes)) => Got::Notification(bytes.into()),
            Some((&PART, rest)) => self.part(from, rest).unwrap_or(Got::Nonsense),
            _ => Got::Nonsense,
        }
    }

    fn part(&mut self, from: Incarnation, rest: &[u8]) -> Option<Got> {
        let (number, rest) = rest.split_first_chunk::<8>()?;
        let (at, rest) = rest.split_first_chunk::<4>()?;
        let (count, part) = rest.split_first_chunk::<4>()?;
        let number = u64::from_le_bytes(*number);
        let (at, count) = (u32::from_le_bytes(*at) as usize, u32::from_le_bytes(*count) as usize);
        let is_last = at + 1 == count;
        if !(2..=MAX_PARTS).contains(&count) || at >= count || part.is_empty() || part.len() > ROOM {
            return None;
        }
        if !is_last && part.len() != ROOM {
            return None;
        }
        let known = self.unfinished.iter().position(|it| it.from == from && it.number == number);
        let known = known.unwrap_or_else(|| {
            self.unfinished.push_back(Unfinished { from, number, parts: vec![None; count], bytes: 0 });
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
            return Some(Got::Notification(
                whole.parts.into_iter().flatten().collect::<Vec<_>>().concat().into(),
            ));
        }
        while self.unfinished.len() > MAX_UNFINISHED || self.kept > MAX_KEPT {
            // The sender's own first: nobody's long messages push out those of others while his fit.
            let own = self.unfinished.iter().filter(|it| it.from == from).count() > MAX_UNFINISHED_OF_ONE;
            let at = if own { self.unfinished.iter().position(|it| it.from == from)? } else { 0 };
            let oldest = self.unfinished.remove(at)?;
            self.kept -= oldest.bytes;
            warn(format_args!(
                "a notification of which {} bytes have come is dropped: too many are unfinished, and this is the oldest",
                oldest.bytes
            ));
        }
        Some(Got::Part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FROM: Incarnation = Incarnation([1; 16]);

    fn there_and_back(len: usize, turn: usize) -> usize {
        let bytes: Vec<u8> = (0..len).map(|at| (at / 7) as u8).collect();
        let mut frames = frames(5, &bytes).unwrap();
        assert!(frames.iter().all(|frame| frame.len() <= MAX_NOTIFICATION));
        let count = frames.len();
        frames.rotate_left(turn % count);
        let mut assembly = Assembly::default();
        let mut got = Vec::new();
        for frame in &frames {
            got.push(assembly.take(FROM, frame));
        }
        assert_eq!(got.pop(), Some(Got::Notification(bytes.into())));
        assert!(got.iter().all(|got| *got == Got::Part));
        assert_eq!((assembly.kept, assembly.unfinished.len()), (0, 0));
        count
    }

    #[test]
    fn notifications_of_any_length_arrive_in_any_order_of_their_parts() {
        for (len, parts) in
            [(0, 1), (1, 1), ((64 << 10) - 1, 1), (64 << 10, 2), (1 << 20, 17), (MAX, MAX_PARTS)]
        {
            assert_eq!(there_and_back(len, len / 3 + 1), parts, "{len}");
        }
        assert!(frames(1, &vec![0; MAX + 1]).is_none());
    }

    #[test]
    fn two_senders_with_one_number_are_apart() {
        let (a, b) = (vec![1; 100_000], vec![2; 100_000]);
        let (ours, theirs) = (frames(9, &a).unwrap(), frames(9, &b).unwrap());
        let other = Incarnation([2; 16]);
        let mut assembly = Assembly::default();
        assert_eq!(assembly.take(FROM, &ours[0]), Got::Part);
        assert_eq!(assembly.take(other, &theirs[1]), Got::Part);
        assert_eq!(assembly.take(FROM, &ours[1]), Got::Notification(a.into()));
        assert_eq!(assembly.take(other, &theirs[0]), Got::Notification(b.into()));
    }

    #[test]
    fn parts_that_are_never_whole_do_not_pile_up() {
        let mut assembly = Assembly::default();
        let big = vec![0; MAX];
        for number in 0..200 {
            for frame in &frames(number, &big).unwrap()[1..4] {
                assert_eq!(assembly.take(FROM, frame), Got::Part);
            }
            assert!(assembly.kept <= MAX_KEPT && assembly.unfinished.len() <= MAX_UNFINISHED);
        }
    }

    #[test]
    fn nonsense_is_nonsense() {
        let good = frames(1, &vec![0; 200_000]).unwrap();
        let mut assembly = Assembly::default();
        assert_eq!(assembly.take(FROM, &good[0]), Got::Part);
        assert_eq!(assembly.take(FROM, &good[0]), Got::Nonsense, "twice");
        for len in 0..=HEADER {
            assert_ne!(assembly.take(FROM, &good[1][..len]), Got::Part);
        }
        for byte in 9..HEADER {
            let mut odd = good[1].to_vec();
            odd[byte] ^= 0x80;
            assert_eq!(assembly.take(FROM, &odd), Got::Nonsense, "{byte}");
        }
        assert_eq!(assembly.take(FROM, &[7]), Got::Nonsense);
        assert_eq!(assembly.take(FROM, &[]), Got::Nonsense);
    }
}
