//! Holds the digest check of a load whose blocks have arrived: the thread that computes the digests
//! blocks at the last page until the test supplies it.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx::{Memory, Result};
use kvx_testkit::HungPage;
use serde::{Deserialize, Serialize};

use crate::engines::engine::refused;
use crate::engines::model::RankMemory;

/// The time limit for the arrival of a load's blocks.
const ARRIVAL: Duration = Duration::from_secs(2);
/// The time after which a check that has not touched the page counts as finished before the page
/// was removed.
const CHECK: Duration = Duration::from_millis(50);

/// The blocks that a load must fill.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Expected {
    pub(crate) prompt: u64,
    pub(crate) blocks: Vec<u32>,
    pub(crate) tokens: u32,
}

/// A check to hold, of a load that has not begun. It lives in the process that checks.
struct Trap {
    memory: Arc<Memory>,
    /// The bytes expected at each offset.
    expected: Vec<(usize, Vec<u8>)>,
    page: HungPage,
}

impl Trap {
    fn new(rank: &RankMemory, Expected { prompt, blocks, tokens }: &Expected) -> Result<Self> {
        let expected = rank.expected(*prompt, blocks, *tokens)?;
        let page = HungPage::of_file(&rank.memory, rank.last(blocks))?;
        Ok(Trap { memory: Arc::clone(&rank.memory), expected, page })
    }

    /// Waits until all bytes have arrived, and removes the last page. Returns `None` if they did
    /// not arrive in time, or the check had already finished.
    fn spring(self) -> Result<Option<HungPage>> {
        let until = Instant::now() + ARRIVAL;
        let mut is = Vec::new();
        for (at, wanted) in &self.expected {
            is.resize(wanted.len(), 0);
            self.memory.copy_out(*at, &mut is)?;
            while is != *wanted {
                if Instant::now() >= until {
                    return Ok(None);
                }
                self.memory.copy_out(*at, &mut is)?;
            }
        }
        self.page.take_away()?;
        let until = Instant::now() + CHECK;
        while Instant::now() < until {
            if self.page.is_touched() {
                return Ok(Some(self.page));
            }
        }
        Ok(None)
    }
}

/// Returns the reason and the remedy if checks cannot be held on this machine.
pub(crate) fn can_be_held() -> std::result::Result<(), (String, &'static str)> {
    let memory = Memory::pool(1).build().map(Arc::new);
    let page = memory.and_then(|memory| HungPage::of_file(&memory, 0));
    page.map(drop).map_err(|why| (why.to_string(), "Linux 5.14, and no filter of system calls"))
}

/// The process that holds an engine's checks.
pub(crate) enum Checks {
    /// The engine itself, which also checks.
    Here(Option<HungPage>),
    /// The first rank, in a separate process.
    Apart(UnixStream),
}

impl Checks {
    /// Calls `begin` to start a load, and returns whether its check is held.
    pub(crate) fn hold(
        &mut self,
        rank: &RankMemory,
        expected: &Expected,
        begin: impl FnOnce() -> Result<()>,
    ) -> Result<bool> {
        match self {
            Checks::Here(held) => {
                let trap = Trap::new(rank, expected)?;
                begin()?;
                *held = trap.spring()?;
                Ok(held.is_some())
            }
            Checks::Apart(rank) => {
                let line = serde_json::to_string(expected).map_err(refused)?;
                writeln!(rank, "{line}").map_err(refused)?;
                // The rank has read the line and set the trap.
                let mut answer = [0];
                rank.read_exact(&mut answer).map_err(refused)?;
                begin()?;
                rank.read_exact(&mut answer).map_err(refused)?;
                Ok(answer == [1])
            }
        }
    }

    /// Supplies the page, so that the check continues.
    pub(crate) fn let_go(&mut self) {
        match self {
            Checks::Here(held) => *held = None,
            // The rank may be dead or stopped. A stopped rank reads this when it continues.
            Checks::Apart(rank) => _ = writeln!(rank),
        }
    }
}

/// Holds checks in a rank's process, as the engine requests, until the engine ends.
pub(crate) fn serve(memory: Arc<RankMemory>, engine: impl Into<OwnedFd>) {
    let engine = UnixStream::from(engine.into());
    std::thread::spawn(move || -> Result<()> {
        let mut held = None;
        let mut answers = engine.try_clone().map_err(refused)?;
        for line in BufReader::new(engine).lines() {
            let line = line.map_err(refused)?;
            drop(held.take());
            if line.is_empty() {
                continue;
            }
            let expected = serde_json::from_str(&line).map_err(refused)?;
            let trap = Trap::new(&memory, &expected)?;
            answers.write_all(&[2]).map_err(refused)?;
            held = trap.spring()?;
            answers.write_all(&[u8::from(held.is_some())]).map_err(refused)?;
        }
        Ok(())
    });
}
