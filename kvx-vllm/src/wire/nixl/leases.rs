//! The leases of an engine in registered memory, by which the backend KVX in a decode's NIXL
//! confirms its reads.
//!
//! NIXL's users read blocks and compare no generations. The backend KVX does it for them: the
//! notification of a read names the request at the prefill, and the prefill keeps a table of the
//! requests whose blocks peers may read. It removes a request before the engine may reuse any of
//! its blocks. So a reader that finds the request after its data has arrived has read the blocks of
//! that request.
//!
//! The table follows the generation counters in the region [`GENERATIONS_REGION`], at its end. It has
//! buckets of eight entries of 16 bytes. A request is in one of two buckets; its SHA-256 determines
//! them and its entry.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use sha2::{Digest as _, Sha256};

/// The name of the region with an engine's generation counters: the pool's first, then one for each
/// logical block. Behind them lie the engine's leases, except on ranks on other hosts.
pub const GENERATIONS_REGION: &str = "generations";
/// The length of the table in 64-bit words: 256 KiB. With 8,192 requests, the chance that both
/// buckets of one are full is negligible.
pub const LEASE_TABLE_WORDS: usize = BUCKETS * BUCKET_WORDS;
/// The length of a bucket in bytes.
pub const BUCKET_LEN: u64 = (BUCKET_WORDS * WORD) as u64;

const WORD: usize = size_of::<u64>();
const BUCKETS: usize = 2048;
const ENTRY_WORDS: usize = 2;
const BUCKET_WORDS: usize = 8 * ENTRY_WORDS;

/// The place of a request in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseKey {
    buckets: [usize; 2],
    /// The entry. The first word is never 0, which marks a free entry.
    entry: [u64; ENTRY_WORDS],
}

impl LeaseKey {
    /// Returns the place of the request with this id at the prefill.
    pub fn of(request: &str) -> Self {
        let digest = Sha256::digest(request);
        let word = |at: usize| {
            let bytes = digest[at * WORD..][..WORD].try_into().expect("a digest has four words");
            u64::from_le_bytes(bytes)
        };
        let places = word(0);
        let bucket = |bits: u64| (bits % BUCKETS as u64) as usize;
        LeaseKey { buckets: [bucket(places), bucket(places >> 32)], entry: [word(1) | 1, word(2)] }
    }

    /// Returns the offsets of the request's two buckets in a region of `len` bytes, which ends with
    /// the table. `None`: the region is too short for one.
    pub fn offsets(&self, len: u64) -> Option<[u64; 2]> {
        let table = len.checked_sub((LEASE_TABLE_WORDS * WORD) as u64)?;
        Some(self.buckets.map(|bucket| table + bucket as u64 * BUCKET_LEN))
    }

    /// Returns whether the request is in one of these buckets, as they were read.
    pub fn is_in(&self, buckets: &[u8]) -> bool {
        let entry = self.entry.map(u64::to_ne_bytes).concat();
        buckets.chunks_exact(ENTRY_WORDS * WORD).any(|found| *found == *entry)
    }
}

/// The owner's side of the table. One thread at a time changes it; peers read it at any time.
#[derive(Debug)]
pub struct LeaseTable<'a>(&'a [AtomicU64]);

impl<'a> LeaseTable<'a> {
    /// Wraps the last [`LEASE_TABLE_WORDS`] of `words`, which are 0 at first. `None` if there are fewer.
    pub fn at_end_of(words: &'a [AtomicU64]) -> Option<Self> {
        Some(LeaseTable(words.get(words.len().checked_sub(LEASE_TABLE_WORDS)?..)?))
    }

    /// Adds a request. Call it before a peer can know the request's blocks. Returns false if there
    /// is no free entry; readers then take the request for one that has ended.
    pub fn add(&self, key: &LeaseKey) -> bool {
        if self.entries(key).any(|entry| is(entry, key)) {
            return true;
        }
        let free = |bucket: &usize| self.bucket(*bucket).filter(|entry| is_free(entry)).count();
        let emptier = key.buckets.iter().max_by_key(|bucket| free(bucket));
        let Some(entry) =
            emptier.and_then(|bucket| self.bucket(*bucket).find(|entry| is_free(entry)))
        else {
            return false;
        };
        entry[1].store(key.entry[1], Ordering::Relaxed);
        entry[0].store(key.entry[0], Ordering::Release);
        true
    }

    /// Removes a request. Call it before the engine may reuse any of its blocks.
    pub fn remove(&self, key: &LeaseKey) {
        for entry in self.entries(key).filter(|entry| is(entry, key)) {
            entry[0].store(0, Ordering::Relaxed);
            entry[1].store(0, Ordering::Relaxed);
        }
        // Readers must see this before any data that is written after it.
        fence(Ordering::SeqCst);
    }

    fn entries(&self, key: &LeaseKey) -> impl Iterator<Item = &'a [AtomicU64]> {
        let [first, second] = key.buckets;
        self.bucket(first).chain(self.bucket(second))
    }

    fn bucket(&self, bucket: usize) -> impl Iterator<Item = &'a [AtomicU64]> + use<'a> {
        self.0[bucket * BUCKET_WORDS..][..BUCKET_WORDS].chunks_exact(ENTRY_WORDS)
    }
}

fn is_free(entry: &[AtomicU64]) -> bool {
    entry[0].load(Ordering::Relaxed) == 0
}

fn is(entry: &[AtomicU64], key: &LeaseKey) -> bool {
    entry.iter().zip(key.entry).all(|(word, wanted)| word.load(Ordering::Relaxed) == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counters of three blocks, then the table.
    fn words() -> Vec<AtomicU64> {
        (0..4 + LEASE_TABLE_WORDS).map(|_| AtomicU64::new(0)).collect()
    }

    /// Reads the buckets of a request as a peer does.
    fn found(words: &[AtomicU64], request: &str) -> bool {
        let key = LeaseKey::of(request);
        let bucket = |at: u64| {
            let words = words[at as usize / WORD..][..BUCKET_WORDS].iter();
            words.flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect::<Vec<u8>>()
        };
        let len = (words.len() * WORD) as u64;
        key.is_in(&key.offsets(len).unwrap().map(bucket).concat())
    }

    #[test]
    fn a_request_is_found_from_its_lease_to_the_end_of_it() {
        let words = words();
        let table = LeaseTable::at_end_of(&words).unwrap();
        assert!(!found(&words, "cmpl-u-0-1a2b3c4d"));
        assert!(table.add(&LeaseKey::of("cmpl-u-0-1a2b3c4d")));
        assert!(table.add(&LeaseKey::of("cmpl-u-0-1a2b3c4d")), "twice is once");
        assert!(found(&words, "cmpl-u-0-1a2b3c4d") && !found(&words, "cmpl-u-0-1a2b3c4e"));
        table.remove(&LeaseKey::of("cmpl-u-0-1a2b3c4e"));
        assert!(found(&words, "cmpl-u-0-1a2b3c4d"));
        table.remove(&LeaseKey::of("cmpl-u-0-1a2b3c4d"));
        assert!(words.iter().all(|word| word.load(Ordering::Relaxed) == 0), "nothing is left");
    }

    #[test]
    fn eight_thousand_requests_fit_and_one_too_many_is_reported() {
        let words = words();
        let table = LeaseTable::at_end_of(&words).unwrap();
        let name = |at: usize| format!("chatcmpl-{at}");
        for at in 0..8192 {
            assert!(table.add(&LeaseKey::of(&name(at))), "{at}");
        }
        assert!((0..8192).all(|at| found(&words, &name(at))));
        assert!(!found(&words, &name(8192)));
        let refused = (8192..).find(|at| !table.add(&LeaseKey::of(&name(*at)))).unwrap();
        assert!(!found(&words, &name(refused)));
        assert!(words[..4].iter().all(|word| word.load(Ordering::Relaxed) == 0), "the counters");
    }

    #[test]
    fn a_region_without_room_for_a_table_has_none() {
        assert_eq!(LeaseKey::of("r").offsets((LEASE_TABLE_WORDS * WORD) as u64 - 1), None);
        assert!(LeaseTable::at_end_of(&words()[..LEASE_TABLE_WORDS - 1]).is_none());
        assert!(!LeaseKey::of("r").is_in(&[0; 2 * BUCKET_LEN as usize]));
    }
}
