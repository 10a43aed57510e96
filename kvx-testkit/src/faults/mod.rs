//! What becomes of work when something fails beside it: which error and when, whether a byte is
//! wrong, when its memory is free again, and whether the next transfer works.

mod scene;
mod trouble;

use std::time::{Duration, Instant};

use kvx_core::{ErrorKind, Grid, Op};

use self::scene::Scene;
pub use self::trouble::{Moment, Trouble};
use crate::check::{CUT_OFF, Failure, ensure};
use crate::executor::run;
use crate::setup::Setup;
use crate::stopwatch::Stopwatch;

/// The outcome of work during a failure.
#[derive(Clone, Debug)]
pub struct FaultReport {
    /// The number of transfers that arrived, and the errors of the others.
    pub results: String,
    /// When the last of them had ended, after the trouble began.
    pub after: Duration,
    /// When nothing touched this side's memory any more, after that. `None`: not while the trouble
    /// lasted, which only a backend may say whose transfers do not settle without the peer.
    pub settled: Option<Duration>,
    /// The memory was still touched when the trouble was over: it stays in quarantine.
    pub held: bool,
    /// The time from the end of the trouble until bytes had been moved both ways again.
    pub works: Duration,
}

/// So much after its deadline an end is late.
const GRACE: Duration = Duration::from_secs(1);
/// How often work is tried again when the trouble is over: a link that it has broken may be noticed
/// by the first.
const TRIES: usize = 3;
/// Bytes and number of a slot's blocks; transfers that are under way at once, each with a slot of
/// its own here.
const GRID: Grid = Grid::packed(4096, 512);
const SLOT: usize = 4096 * 512;
const SLOTS: usize = 24;
/// Transfers of one block each that are posted and cancelled.
const CANCELLED: u32 = 10_000;
/// More than there is room for in what a process has mapped already.
const LARGE: usize = 64 << 20;
/// The time to wait for bytes that arrive too late.
const LATE: Duration = Duration::from_millis(200);
/// The time limit for serving third peers, which nothing holds up.
const SERVED: Duration = Duration::from_secs(1);
/// The lifetime of a forked child, which holds what it has inherited.
const LIFE_OF_A_CHILD: Duration = Duration::from_secs(6);
/// The content of the peer's region for reads.
const SOURCE: u64 = 2;

/// Has this trouble at this moment, over the setup's backend, and tells what became of the work,
/// whose transfers have this `deadline`.
///
/// # Errors
/// A transfer that ended too late or in a way that the contract does not have, a wrong byte, memory
/// that does not come back, or a next transfer that does not work.
pub fn fault(
    setup: &Setup,
    trouble: Trouble,
    moment: Moment,
    deadline: Duration,
) -> Result<FaultReport, Failure> {
    // Its threads begin here, before there may be no memory for their stacks.
    drop(Stopwatch::start()?);
    let mut scene = Scene::new(setup, trouble, deadline)?;
    let op = if moment == Moment::Writing { Op::Write } else { Op::Read };
    let metadata = scene.metadata()?;
    let mut linked = None;
    if moment != Moment::Unlinked {
        let peer = scene.near.connect(&metadata)?;
        scene.works(&peer)?;
        linked = Some(peer);
    }
    let mut posted = match (&linked, moment) {
        (Some(peer), Moment::Reading | Moment::Writing) if trouble == Trouble::Cancelled => {
            scene.post_small(op, peer)?
        }
        (Some(peer), Moment::Reading | Moment::Writing) => scene.post(op, peer)?,
        _ => Vec::new(),
    };
    let (begun, watch) = (Instant::now(), Stopwatch::start()?);
    scene.begin(trouble, op)?;
    let peer = match linked {
        Some(peer) => peer,
        None => scene.near.connect(&metadata)?,
    };
    let mut refused = None;
    if posted.is_empty() {
        // A post may say at once what an answer would say later: a lost peer, files that cannot be
        // opened.
        match scene.post(op, &peer) {
            Ok(transfers) => posted = transfers,
            Err(error) => refused = Some(Err(error)),
        }
    }
    let waited = posted.iter_mut().map(|transfer| run(transfer).map(drop));
    let results: Vec<_> = waited.chain(refused).collect();
    let after = begun.elapsed();
    let limit =
        deadline + GRACE + if trouble == Trouble::Restarted { CUT_OFF } else { Duration::ZERO };
    let took = watch.read();
    ensure!(took.within(limit), "the work ended after {took}, {deadline:?} were its deadline");
    let settled = scene.settled(&posted, op, trouble)?;
    scene.check_results(&results, op, trouble, moment)?;
    if trouble == Trouble::HungPage {
        scene.others_go_on()?;
        scene.third_peers_go_on()?;
    }

    // Others have the memory now: nothing of what was given up may change it.
    let canary = settled.map(|_| scene.spoil()).transpose()?;
    let over = Instant::now();
    scene.end(trouble)?;
    scene.works_again(peer, trouble)?;
    let works = over.elapsed();
    let held = settled.is_none() && scene.settled(&posted, op, trouble)?.is_none();
    if let Some(seed) = canary {
        std::thread::sleep(LATE);
        scene.is_untouched(seed)?;
    }
    Ok(FaultReport { results: told(results), after, settled, held, works })
}

/// `18 arrived, 6 peer_lost`.
fn told(results: Vec<kvx_core::Result<()>>) -> String {
    let (mut arrived, mut failed) = (0, Vec::<(ErrorKind, u32)>::new());
    for result in results {
        match result.map_err(|error| error.kind()) {
            Ok(()) => arrived += 1,
            Err(kind) => match failed.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, count)) => *count += 1,
                None => failed.push((kind, 1)),
            },
        }
    }
    let arrived = (arrived > 0).then(|| format!("{arrived} arrived"));
    let failed = failed.into_iter().map(|(kind, count)| format!("{count} {}", kind.as_str()));
    arrived.into_iter().chain(failed).collect::<Vec<_>>().join(", ")
}
