//! A load whose blocks have arrived and are being checked: whoever compares them with their digests waits at their last
//! page, until it may have it.

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

/// How long a load's blocks may take to arrive.
const ARRIVAL: Duration = Duration::from_secs(2);
/// Who has not come to the page by then has checked it before it was taken away.
const CHECK: Duration = Duration::from_millis(50);

/// What a load is to bring.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Expected {
    pub(crate) prompt: u64,
    pub(crate) blocks: Vec<u32>,
    pub(crate) tokens: u32,
}

/// Of a load that has not begun, in the memory of the process that checks it.
struct Trap {
    memory: Arc<Memory>,
    /// What is to arrive where.
    expected: Vec<(usize, Vec<u8>)>,
    page: HungPage,
}

impl Trap {
    fn new(rank: &RankMemory, Expected { prompt, blocks, tokens }: &Expected) -> Result<Self> {
        let expected = rank.expected(*prompt, blocks, *tokens)?;
        let page = HungPage::of_file(&rank.memory, rank.last(blocks))?;
        Ok(Trap { memory: Arc::clone(&rank.memory), expected, page })
    }

    /// Waits until all has arrived, and takes the last page away. `None`: it did not arrive, or the check was over by
    /// then.
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

/// Errors: why no check can be held here, and the cure.
pub(crate) fn can_be_held() -> std::result::Result<(), (String, &'static str)> {
    let memory = Memory::pool(1).build().map(Arc::new);
    let page = memory.and_then(|memory| HungPage::of_file(&memory, 0));
    page.map(drop).map_err(|why| (why.to_string(), "Linux 5.14, and no filter of system calls"))
}

/// Who holds the checks of an engine.
pub(crate) enum Checks {
    /// The engine, in whose process they are.
    Here(Option<HungPage>),
    /// The process of its first rank.
    Apart(UnixStream),
}

impl Checks {
    /// Calls `begin` for a load, and holds its check if it can.
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
                // It has read the line, and the trap is set.
                let mut answer = [0];
                rank.read_exact(&mut answer).map_err(refused)?;
                begin()?;
                rank.read_exact(&mut answer).map_err(refused)?;
                Ok(answer == [1])
            }
        }
    }

    /// The page comes.
    pub(crate) fn let_go(&mut self) {
        match self {
            Checks::Here(held) => *held = None,
            // It may be gone, or stand still: then it reads this when it goes on.
            Checks::Apart(rank) => _ = writeln!(rank),
        }
    }
}

/// In the process of a rank: holds what it is told to, as long as its engine lives.
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
