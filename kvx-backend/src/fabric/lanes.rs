//! Several machines behind one transport. Each has its own thread and its own part of the library,
//! and a link uses all of them. A large transfer is cut into stripes, one for each lane. A small
//! one uses the lane of the thread that posts it, which is the lane that this thread drives while
//! it waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvx_core::backend::sync::Mutex;
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::backend::{Settle, Ticket};
use kvx_core::{Error, ErrorKind, Result};

/// The limit for the lanes of a transport, also of a peer's.
pub(super) const MAX_LANES: usize = 64;

/// The pieces of a transfer that one lane moves: those whose index modulo `of` is `lane`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stripe {
    pub(super) lane: usize,
    pub(super) of: usize,
}

impl Stripe {
    pub(super) const WHOLE: Stripe = Stripe { lane: 0, of: 1 };
}

/// A unique number of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Thread(usize);

impl Thread {
    /// Returns the number of the calling thread. Costs less than [`std::thread::current`].
    pub(super) fn this() -> Self {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static NUMBER: usize = next(&THREADS);
        }
        Thread(NUMBER.with(|number| *number))
    }
}

fn next(count: &AtomicUsize) -> usize {
    count.fetch_add(1, Ordering::Relaxed)
}

/// Returns the lane of this thread; threads are assigned to lanes in turn.
pub(super) fn own(lanes: usize) -> usize {
    // A separate counter: threads of reactors, and threads that post without lanes, do not take
    // part.
    static POSTERS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static TURN: usize = next(&POSTERS);
    }
    if lanes == 1 { 0 } else { TURN.with(|turn| turn % lanes) }
}

/// Encodes the addresses of a transport's lanes, as its section of the metadata.
pub(super) fn encode(addresses: impl ExactSizeIterator<Item = Result<Vec<u8>>>) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    out.put_u32(addresses.len() as u32);
    for address in addresses {
        let address = address?;
        out.put_u32(address.len() as u32);
        out.put(&address);
    }
    Ok(out)
}

/// Decodes the addresses of a section, at least one. Returns `Malformed` for an invalid section.
pub(super) fn decode(section: &[u8]) -> Result<Vec<&[u8]>> {
    let mut reader = Reader::new("addresses of a link", section);
    let count = reader.u32()? as usize;
    if count == 0 || count > MAX_LANES {
        return Err(reader.malformed("the number of lanes is 0 or too high"));
    }
    let mut addresses = Vec::with_capacity(count);
    for _ in 0..count {
        let len = reader.u32()? as usize;
        addresses.push(reader.bytes(len)?);
    }
    reader.end()?;
    Ok(addresses)
}

/// Returns a ticket for each lane that works on an operation; `done` settles when all of them have.
pub(super) fn tickets(done: Ticket, lanes: usize) -> Vec<Ticket> {
    if lanes == 1 {
        return vec![done];
    }
    let joint = JointTicket {
        lanes,
        settled: Mutex::new(JointState { done: Some(done), ..JointState::default() }),
    };
    let joint = Arc::new(joint);
    (0..lanes).map(|_| Ticket::of(Arc::clone(&joint) as Arc<dyn Settle>)).collect()
}

struct JointTicket {
    lanes: usize,
    settled: Mutex<JointState>,
}

#[derive(Default)]
struct JointState {
    lanes: usize,
    /// The number of lanes that returned `Unsupported`, and so have moved nothing.
    refused: usize,
    failed: Option<Error>,
    /// The caller's ticket; `None` once a lane has forgotten its own.
    done: Option<Ticket>,
}

impl Settle for JointTicket {
    fn settled(self: Arc<Self>, result: Result<()>) {
        let mut settled = self.settled.lock();
        settled.lanes += 1;
        if let Err(why) = result {
            settled.refused += usize::from(why.kind() == ErrorKind::Unsupported);
            settled.failed.get_or_insert(why);
        }
        if settled.lanes < self.lanes {
            return;
        }
        let (done, failed, refused) = (settled.done.take(), settled.failed.take(), settled.refused);
        drop(settled);
        let failed = failed.map(|why| {
            // `Unsupported` would mean that nothing has moved.
            let partly = why.kind() == ErrorKind::Unsupported && refused < self.lanes;
            if partly { why.with_kind(ErrorKind::Native) } else { why }
        });
        if let Some(done) = done {
            done.settle(failed.map_or(Ok(()), Err));
        }
    }

    fn forgotten(self: Arc<Self>) {
        let done = self.settled.lock().done.take();
        drop(done);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use kvx_core::Completion;

    fn joined(results: Vec<Option<Result<()>>>) -> Result<()> {
        let (end, done) = Completion::with_ticket();
        for (ticket, result) in tickets(done, results.len()).into_iter().zip(results) {
            match result {
                Some(result) => ticket.settle(result),
                None => drop(ticket),
            }
        }
        end.wait_blocking(Duration::ZERO)
    }

    #[test]
    fn an_operation_has_ended_when_every_lane_has() {
        let error = |kind| Err(Error::new(kind, "on purpose"));
        let kind = |results| joined(results).map_err(|why| why.kind());
        assert_eq!(kind(vec![Some(Ok(()))]), Ok(()));
        assert_eq!(kind(vec![Some(Ok(())), Some(Ok(()))]), Ok(()));
        assert_eq!(
            kind(vec![Some(Ok(())), Some(error(ErrorKind::PeerLost))]),
            Err(ErrorKind::PeerLost)
        );
        assert_eq!(
            kind(vec![Some(error(ErrorKind::Unsupported)), Some(error(ErrorKind::Unsupported))]),
            Err(ErrorKind::Unsupported)
        );
        assert_eq!(
            kind(vec![Some(error(ErrorKind::Unsupported)), Some(Ok(()))]),
            Err(ErrorKind::Native)
        );
        assert_eq!(kind(vec![None, Some(Ok(()))]), Err(ErrorKind::Forgotten));
        assert_eq!(kind(vec![Some(Ok(())), None]), Err(ErrorKind::Forgotten));
        let (end, done) = Completion::with_ticket();
        let mut both = tickets(done, 2);
        both.remove(0).settle(Ok(()));
        assert_eq!(
            end.wait_blocking(Duration::ZERO).unwrap_err().kind(),
            ErrorKind::TimedOut,
            "one of two has ended"
        );
        drop(both);
    }

    #[test]
    fn addresses_round_trip_and_other_bytes_are_rejected() {
        let section = encode([b"here".to_vec(), Vec::new()].into_iter().map(Ok)).unwrap();
        assert_eq!(decode(&section).unwrap(), [b"here".as_slice(), b""]);
        for len in 0..section.len() {
            assert_eq!(
                decode(&section[..len]).unwrap_err().kind(),
                ErrorKind::Malformed,
                "{len} bytes"
            );
        }
        assert!(decode(&[section.as_slice(), b"x"].concat()).is_err());
        assert!(decode(&[0; 4]).is_err() && decode(&u32::MAX.to_le_bytes()).is_err());
    }

    #[test]
    fn a_thread_keeps_its_lane() {
        assert_eq!(own(1), 0);
        assert_eq!(own(3), own(3));
        assert!(own(3) < 3);
    }
}
