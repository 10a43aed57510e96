//! Registered memory that generations and digests of peers are read into.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::sync::Mutex;
use kvx_core::{Agent, Error, ErrorKind, Grid, Memory, Region, Result};

use super::generations::WORD;

/// Words that are read from a peer at once.
pub(super) const AT_ONCE: usize = 4096;
/// Reads of words that are under way at once; others wait.
const SLOTS: u32 = 32;

/// Registered memory that the words of peers are read into.
#[derive(Debug)]
pub(super) struct Scratch {
    region: Region,
    free: Mutex<Vec<u32>>,
    places: tokio::sync::Semaphore,
}

impl Scratch {
    pub(super) fn new(agent: &Agent) -> Result<Self> {
        let memory = Memory::pool(SLOTS as usize * AT_ONCE * WORD as usize).build()?;
        Ok(Scratch {
            region: agent.register("scratch", memory)?,
            free: Mutex::new((0..SLOTS).collect()),
            places: tokio::sync::Semaphore::new(SLOTS as usize),
        })
    }

    /// Waits for a place, but not longer than this. Errors: `Busy`.
    pub(super) async fn take(self: &Arc<Self>, limit: Duration) -> Result<ScratchPlace> {
        match tokio::time::timeout(limit, self.places.acquire()).await {
            Ok(permit) => permit.expect("nobody closes it").forget(),
            Err(_) => {
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!(
                        "{SLOTS} reads of peers' generations and digests are under way, and none has ended within {limit:?}"
                    ),
                ));
            }
        }
        let slot = self.free.lock().pop().expect("as many places as permits");
        Ok(ScratchPlace { scratch: Arc::clone(self), slot, lost: false })
    }
}

/// A place for [`AT_ONCE`] words; given back when it is dropped.
#[derive(Debug)]
pub(super) struct ScratchPlace {
    scratch: Arc<Scratch>,
    slot: u32,
    lost: bool,
}

impl ScratchPlace {
    pub(super) fn region(&self) -> &Region {
        &self.scratch.region
    }

    fn base(&self) -> u64 {
        u64::from(self.slot) * AT_ONCE as u64 * WORD
    }

    /// The place, by so many words.
    pub(super) fn grid(&self, words: usize) -> Grid {
        Grid::packed(words as u64 * WORD, (AT_ONCE / words) as u32).at(self.base())
    }

    /// Its first words.
    pub(super) fn words(&self, count: usize) -> Result<Vec<u64>> {
        let mut bytes = vec![0; count * WORD as usize];
        self.scratch.region.copy_out(self.base() as usize, &mut bytes)?;
        let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
        Ok(bytes.chunks_exact(WORD as usize).map(word).collect())
    }

    /// A transfer may touch it for ever: it is never used again.
    pub(super) fn lose(mut self) {
        self.lost = true;
    }
}

impl Drop for ScratchPlace {
    fn drop(&mut self) {
        if !self.lost {
            self.scratch.free.lock().push(self.slot);
            self.scratch.places.add_permits(1);
        }
    }
}
