//! Runs the ranks of an engine in separate processes. The engine computes and checks in their
//! memory, a file that both map.

use std::io::Write as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use kvx::connector::{Connector, Rank, WorkerRank};
use kvx::{ErrorKind, Result};
use kvx_testkit::{Child, Failure};
use serde::{Deserialize, Serialize};

use crate::engines::checking::{self, Checks};
use crate::engines::engine::refused;
use crate::engines::fleet::{self, CUT_OFF};
use crate::engines::model::{RankMemory, Shape};

/// The environment variable with the setup of a rank's process.
pub(crate) const VARIABLE: &str = "KVX_TEST_RANK";
/// The lifetime of a rank's process, longer than any test.
const LIFE: Duration = Duration::from_secs(600);

#[derive(Serialize, Deserialize)]
struct RankSetup {
    shape: Shape,
    rank: (u32, u32),
    path: PathBuf,
    /// Makes the process print the outcome of joining in one line, and exit.
    asks: bool,
}

/// Returns the path of the socket at which ranks join the engine with this process id. The engine
/// is killed and leaves it behind; `fleet::Engine` removes it on drop.
pub(crate) fn path(engine: u32) -> PathBuf {
    std::env::temp_dir().join(format!("kvx-engine-{engine}"))
}

/// Starts the first rank of the engine with this process id once more; it prints the outcome of
/// joining in one line.
pub(crate) fn again(engine: u32, shape: &Shape) -> std::result::Result<Child, Failure> {
    let setup = RankSetup { shape: shape.clone(), rank: (0, 0), path: path(engine), asks: true };
    Child::start_self(VARIABLE, &serde_json::to_string(&setup).expect("it is JSON"))
}

/// Starts all ranks of an engine, and waits until they have joined.
pub(crate) fn start(
    connector: &Connector,
    shape: &Shape,
) -> Result<(Vec<RankMemory>, Vec<std::process::Child>, Checks)> {
    let path = path(std::process::id());
    let joined = connector.group(&path, CUT_OFF);
    let program = std::env::current_exe().map_err(refused)?;
    let (mut memories, mut processes, mut checks) = (Vec::new(), Vec::new(), None);
    for rank in shape.ranks() {
        let (memory, file) = RankMemory::shared(shape, rank)?;
        let setup = RankSetup {
            shape: shape.clone(),
            rank: (rank.pp, rank.tp),
            path: path.clone(),
            asks: false,
        };
        let mut command = Command::new(&program);
        command.env(VARIABLE, serde_json::to_string(&setup).expect("it is JSON"));
        let (ours, theirs) = UnixStream::pair().map_err(refused)?;
        command.env_remove(fleet::VARIABLE).stdin(file).stdout(OwnedFd::from(theirs));
        processes.push(command.spawn().map_err(refused)?);
        checks.get_or_insert(Checks::Apart(ours));
        memories.push(memory);
    }
    let joined = joined.wait_blocking(2 * CUT_OFF);
    let checks = checks.ok_or_else(|| refused("the engine has no ranks"))?;
    joined.map(|()| (memories, processes, checks))
}

/// Runs a rank until its engine ends.
pub(crate) fn run(setup: &str) -> ! {
    let RankSetup { shape, rank: (pp, tp), path, asks } =
        serde_json::from_str(setup).expect("the engine writes the setup");
    let mut answers = kvx_testkit::answers_apart().expect("the standard output can be duplicated");
    let live = move || -> Result<()> {
        let rank = WorkerRank { pp, tp };
        let file = std::io::stdin().as_fd().try_clone_to_owned().map_err(refused)?;
        let joined = Rank::join(path, rank, kvx::registry(), CUT_OFF);
        if asks {
            let said = joined.map_or_else(|error| error.to_string(), |_| "joined".to_owned());
            return writeln!(answers, "{said}").map_err(refused);
        }
        let joined = joined?;
        let memory = Arc::new(RankMemory::adopt(&shape, rank, file)?);
        checking::serve(Arc::clone(&memory), answers);
        joined.register(memory.caches()?, [memory.memory.clone()])?;
        joined.ended_blocking(LIFE).unwrap_or_else(|| {
            Err(ErrorKind::TimedOut.because("the engine outlived the longest test"))
        })
    };
    match live() {
        Ok(()) => std::process::exit(0),
        Err(error) => {
            eprintln!("rank {tp}: {error}");
            std::process::exit(1);
        }
    }
}
