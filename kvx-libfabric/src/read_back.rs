//! Proves that written bytes have arrived, over providers that complete a write earlier.
//!
//! ofi_rxm accepts `FI_DELIVERY_COMPLETE` for every provider below it. Over verbs a write completes
//! when the target's card has acknowledged it, and its bytes may still be on their way to memory.
//! A card answers a read only after the writes that came before it over the same connection, and
//! the bus lets no read overtake writes to the same memory. So kvx reads the last byte that it
//! wrote to each registration over each connection, and reports the write after these reads.

use std::cell::UnsafeCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::sync::Arc;

use kvx_backend::fabric::{EndpointId, Event, JobId};
use kvx_core::{Error, Result};

use crate::ffi::{Domain, Range, Registration, RemoteRange};
use crate::keys;

/// The last byte that a job wrote to a registration over a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WrittenByte {
    pub(crate) rail: usize,
    pub(crate) remote: RemoteRange,
}

/// A read that is not posted yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitingRead {
    pub(crate) job: JobId,
    pub(crate) endpoint: EndpointId,
    pub(crate) byte: WrittenByte,
}

/// The reads of a job that have not ended.
struct UnendedReads {
    count: usize,
    failed: Option<Error>,
}

/// The reads of all jobs.
#[derive(Default)]
pub(crate) struct ReadBacks {
    written: HashMap<JobId, Vec<WrittenByte>>,
    waiting: VecDeque<WaitingRead>,
    unended: HashMap<JobId, UnendedReads>,
}

impl ReadBacks {
    /// Records pieces that a job has written on a rail.
    pub(crate) fn note_written(&mut self, job: JobId, rail: usize, pieces: &[Range]) {
        let written = self.written.entry(job).or_default();
        for Range { len, remote, .. } in pieces {
            let address = remote.address + (*len as u64).saturating_sub(1);
            let remote = RemoteRange { address, ..*remote };
            let is_same = |other: &WrittenByte| {
                let there = (other.rail, other.remote.peer, other.remote.key);
                there == (rail, remote.peer, remote.key)
            };
            match written.iter().rposition(is_same) {
                Some(at) => written[at].remote = remote,
                None => written.push(WrittenByte { rail, remote }),
            }
        }
    }

    /// Queues the reads of a job that writes nothing more. Returns whether there are any.
    pub(crate) fn start(&mut self, job: JobId, endpoint: EndpointId) -> bool {
        let written = self.forget(job);
        let count = written.len();
        self.waiting.extend(written.into_iter().map(|byte| WaitingRead { job, endpoint, byte }));
        if count > 0 {
            self.unended.insert(job, UnendedReads { count, failed: None });
        }
        count > 0
    }

    /// Forgets what a job has written.
    pub(crate) fn forget(&mut self, job: JobId) -> Vec<WrittenByte> {
        self.written.remove(&job).unwrap_or_default()
    }

    /// Returns the number of reads that are not posted yet.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Takes the next read to post.
    pub(crate) fn next(&mut self) -> Option<WaitingRead> {
        self.waiting.pop_front()
    }

    /// Puts a read back that the provider could not take now, behind the others. Those that wait
    /// keep their order if each is taken once.
    pub(crate) fn put_back(&mut self, read: WaitingRead) {
        self.waiting.push_back(read);
    }

    /// Records the end of a read. Returns the event that reports the end of the job's last one.
    pub(crate) fn end(&mut self, job: JobId, result: Result<()>) -> Option<Event> {
        let reads = self.unended.get_mut(&job)?;
        reads.count -= 1;
        if let Err(why) = result {
            reads.failed.get_or_insert(why);
        }
        if reads.count > 0 {
            return None;
        }
        let failed = self.unended.remove(&job)?.failed;
        Some(Event::Flushed { job, result: failed.map_or(Ok(()), Err) })
    }
}

/// The memory of a rail that bytes are read into. Their values are not used.
pub(crate) struct ScratchMemory {
    /// Dropped before the memory.
    registration: Option<Registration>,
    byte: Box<UnsafeCell<u64>>,
}

// SAFETY: only the provider accesses the bytes.
unsafe impl Send for ScratchMemory {}
// SAFETY: only the provider accesses the bytes.
unsafe impl Sync for ScratchMemory {}

impl ScratchMemory {
    /// Allocates the memory, and registers it if the provider requires that. Errors: libfabric's.
    pub(crate) fn new(domain: &Arc<Domain>) -> Result<Self> {
        let byte = Box::<UnsafeCell<u64>>::default();
        // SAFETY: the registration is dropped before the memory.
        let registration = unsafe { keys::register_local(domain, byte.get().cast(), 8) }?;
        Ok(ScratchMemory { registration, byte })
    }

    /// Returns the registration, if the provider requires one.
    pub(crate) fn registration(&self) -> Option<&Registration> {
        self.registration.as_ref()
    }

    /// Returns the range that a read of this remote byte fills.
    pub(crate) fn range(&self, remote: RemoteRange) -> Range {
        let none: *mut c_void = std::ptr::null_mut();
        let descriptor = self.registration.as_ref().map_or(none, Registration::descriptor);
        Range { local: self.byte.get().cast(), len: 1, descriptor, remote }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::PeerNumber;

    fn piece(key: u64, address: u64, len: usize) -> Range {
        let remote = RemoteRange { peer: PeerNumber::none(), address, key };
        Range { local: std::ptr::null_mut(), len, descriptor: std::ptr::null_mut(), remote }
    }

    #[test]
    fn the_last_byte_of_each_registration_and_connection_is_read() {
        let (job, endpoint) = (JobId::from_number(3), EndpointId::from_number(1));
        let mut reads = ReadBacks::default();
        reads.note_written(job, 0, &[piece(7, 4096, 100), piece(8, 0, 1), piece(7, 8192, 50)]);
        reads.note_written(job, 1, &[piece(7, 4096, 100)]);
        reads.note_written(JobId::from_number(4), 0, &[piece(9, 0, 8)]);
        assert!(reads.start(job, endpoint) && !reads.start(job, endpoint));
        assert_eq!(reads.waiting(), 3);
        let read = std::iter::from_fn(|| reads.next());
        let read: Vec<_> = read
            .map(|read| (read.job, read.byte.rail, read.byte.remote.key, read.byte.remote.address))
            .collect();
        assert_eq!(read, [(job, 0, 7, 8241), (job, 0, 8, 0), (job, 1, 7, 4195)]);
    }

    #[test]
    fn a_write_is_reported_after_its_last_read_with_the_first_error() {
        let (job, endpoint) = (JobId::from_number(3), EndpointId::from_number(1));
        let mut reads = ReadBacks::default();
        reads.note_written(job, 0, &[piece(7, 0, 1), piece(8, 0, 1), piece(9, 0, 1)]);
        assert!(reads.start(job, endpoint));
        let lost = || Err(crate::error::lost_link());
        assert!(reads.end(job, Ok(())).is_none() && reads.end(job, lost()).is_none());
        let Some(Event::Flushed { job: flushed, result }) = reads.end(job, Ok(())) else {
            panic!("the last read has ended");
        };
        assert_eq!((flushed, result.is_err()), (job, true));
        assert!(reads.end(job, Ok(())).is_none(), "the job has ended");
    }
}
