//! What happens to work during a failure: the errors and when they occur, whether a byte is wrong,
//! when its memory is free again, and whether the next transfer works.

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
    /// When the last transfer had ended, after the failure began.
    pub after: Duration,
    /// When nothing touched this side's memory any more, after that. `None` if something did as
    /// long as the failure lasted, which is permitted only to backends whose transfers do not
    /// settle without the peer.
    pub settled: Option<Duration>,
    /// True if the memory was still touched when the failure was over, and so stays in quarantine.
    pub held: bool,
    /// The time from the end of the failure until bytes had been moved both ways again.
    pub works: Duration,
}

/// How long after its deadline an end counts as in time.
const GRACE: Duration = Duration::from_secs(1);
/// How often work is tried again after the failure. The first attempt may only detect a link that
/// the failure has broken.
const TRIES: usize = 3;
/// The blocks of a slot; then the bytes of a slot, and the number of concurrent transfers, each of
/// which has its own slot here.
const GRID: Grid = Grid::packed(4096, 512);
const SLOT: usize = 4096 * 512;
const SLOTS: usize = 24;
/// Transfers of one block each that are posted and cancelled.
const CANCELLED: u32 = 10_000;
/// More than fits into what a process has already mapped.
const LARGE: usize = 64 << 20;
/// The time to wait for bytes that arrive too late.
const LATE: Duration = Duration::from_millis(200);
/// The time limit for serving third peers, which nothing blocks.
const SERVED: Duration = Duration::from_secs(1);
/// The lifetime of a forked child, which keeps open what it has inherited.
const LIFE_OF_A_CHILD: Duration = Duration::from_secs(6);
/// The content of the peer's region for reads.
const SOURCE: u64 = 2;

/// Causes this failure at this moment, over the setup's backend. Returns what happened to the work,
/// whose transfers have this `deadline`.
///
/// # Errors
/// A transfer that ended too late or in a way that the contract does not permit, a wrong byte,
/// memory that is not freed, or a next transfer that does not work.
pub fn fault(
    setup: &Setup,
    trouble: Trouble,
    moment: Moment,
    deadline: Duration,
) -> Result<FaultReport, Failure> {
    // Starts the stopwatch's threads now, before there may be no memory for their stacks.
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
        // A post may fail at once with what the transfer would report later: a lost peer, files
        // that cannot be opened.
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

    // Reuses the memory: transfers that were given up must not change it any more.
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

/// Formats the results, such as `18 arrived, 6 peer_lost`.
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
