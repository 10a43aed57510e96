//! Registered memory that receives the generations and digests of peers.

use std::sync::Arc;
use std::time::Duration;

use kvx_core::backend::sync::Mutex;
use kvx_core::{Agent, ErrorKind, Grid, Memory, Region, Result};

use super::generations::WORD;

/// The number of words that one read fetches.
pub(super) const AT_ONCE: usize = 4096;
/// The number of reads that run at the same time. Others wait.
const SLOTS: u32 = 32;

/// Registered memory that receives generation counters and digests of peers.
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

    /// Waits for a free slot, for at most `limit`. Errors: `Busy`.
    pub(super) async fn take(self: &Arc<Self>, limit: Duration) -> Result<ScratchPlace> {
        match tokio::time::timeout(limit, self.places.acquire()).await {
            Ok(permit) => permit.expect("nobody closes it").forget(),
            Err(_) => {
                return Err(ErrorKind::Busy.because(format!(
                    "{SLOTS} reads of peers' generations and digests are under way, and none has \
                     ended within {limit:?}"
                )));
            }
        }
        let slot = self.free.lock().pop().expect("there are as many slots as permits");
        Ok(ScratchPlace { scratch: Arc::clone(self), slot, lost: false })
    }
}

/// A slot for [`AT_ONCE`] words. It is free again when this is dropped.
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

    /// Returns the slot as a grid of units of `words` words.
    pub(super) fn grid(&self, words: usize) -> Grid {
        Grid::packed(words as u64 * WORD, (AT_ONCE / words) as u32).at(self.base())
    }

    /// Returns the first words of the slot.
    pub(super) fn words(&self, count: usize) -> Result<Vec<u64>> {
        let mut bytes = vec![0; count * WORD as usize];
        self.scratch.region.copy_out(self.base() as usize, &mut bytes)?;
        let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
        Ok(bytes.chunks_exact(WORD as usize).map(word).collect())
    }

    /// Marks the slot as never usable again, because a transfer may touch it at any later time.
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
