//! Tests a machine that panics in a turn: each transfer of its agent and of its peers ends, and
//! other agents continue.

use std::panic::PanicHookInfo;
use std::sync::Once;
use std::time::{Duration, Instant};

use kvx::{Agent, ErrorKind, Grid, Op, Plan, Region, Transfer};
use kvx_backend::reactor::panics::{SAYS, panic_in};
use kvx_testkit::{Failure, Mode, Setup, byte_at, run, skip, unique};

use crate::registry_of_facade;

/// The transfers of a round and their blocks: 2 MiB each, more than one turn moves.
const TRANSFERS: usize = 4;
const GRID: Grid = Grid::packed(4096, 512);
const LEN: usize = 4096 * 512;
const SEED: u64 = 5;
/// The deadline of a transfer, and the time by which it may end late.
const DEADLINE: Duration = Duration::from_millis(500);
const GRACE: Duration = Duration::from_secs(1);
/// The time after which a test gives up a wait.
const CUT_OFF: Duration = Duration::from_secs(10);
/// The deadline of an agent's shutdown; an agent whose machine is lost needs all of it.
const SHUTDOWN: Duration = Duration::from_millis(50);
/// The errors that a transfer may have: its agent is lost, its peer is lost, or the deadline has
/// passed.
const KINDS: [ErrorKind; 4] =
    [ErrorKind::PeerLost, ErrorKind::Forgotten, ErrorKind::Closed, ErrorKind::TimedOut];

/// More turns than two agents take until their transfers have ended.
const MANY: u64 = 1000;

/// Makes a machine panic in its first turn, then in every `step`th later turn, until the work ends
/// before the turn. Returns the number of panics, how the transfers ended, and the latest time at
/// which they had all ended.
fn panics(backend: &'static str, op: Op, step: u64) -> Result<(u64, String, Duration), Failure> {
    hide_what_is_on_purpose();
    let mut setup = Setup::new(registry_of_facade, "", backend, Mode::OneProcess);
    setup.peer_timeout = DEADLINE;
    let (mut turns, mut arrived, mut failed, mut latest) = (0, 0, 0, Duration::ZERO);
    for turn in (1..=MANY).step_by(step as usize) {
        panic_in(turn);
        let round =
            round(&setup, op).map_err(|why| Failure::new(format!("a panic in turn {turn}: {why}")));
        let is_over = panic_in(0);
        let (ends, took) = round?;
        let good = ends.iter().filter(|end| **end).count();
        (arrived, failed, latest) = (arrived + good, failed + ends.len() - good, latest.max(took));
        let other = self::round(&setup, op)
            .map_err(|why| Failure::new(format!("after a panic in turn {turn}: {why}")))?;
        if !other.0.iter().all(|arrived| *arrived) || other.0.is_empty() {
            return Err(Failure::new(format!(
                "after a panic in turn {turn} new agents do not work"
            )));
        }
        if is_over {
            break;
        }
        turns += 1;
    }
    Ok((turns, format!("{arrived} arrived, {failed} failed"), latest))
}

/// Runs transfers between two new agents. Returns which have arrived, and when the last had ended.
/// Returns no transfers if an agent was lost before they were posted.
fn round(setup: &Setup, op: Op) -> Result<(Vec<bool>, Duration), Failure> {
    let (near, far) = (setup.agent(&unique("near"))?, setup.agent(&unique("far"))?);
    let done = transfers(setup, op, &near, &far);
    for agent in [near, far] {
        let begun = Instant::now();
        // Memory of a lost machine stays quarantined.
        agent.shutdown(SHUTDOWN).wait_blocking(CUT_OFF).ok();
        if begun.elapsed() > SHUTDOWN + 2 * GRACE {
            return Err(Failure::new(format!("a shutdown took {:?}", begun.elapsed())));
        }
    }
    done
}

fn transfers(
    setup: &Setup,
    op: Op,
    near: &Agent,
    far: &Agent,
) -> Result<(Vec<bool>, Duration), Failure> {
    let registered = (|| {
        let ours = near.register("ours", setup.memory(TRANSFERS * LEN, SEED + 1).ok()?).ok()?;
        let theirs = far.register("theirs", setup.memory(TRANSFERS * LEN, SEED).ok()?).ok()?;
        Some((ours, theirs, near.connect(&far.metadata().ok()?).ok()?))
    })();
    // The lost machine may be the one that registers or connects.
    let Some((ours, theirs, peer)) = registered else { return Ok((Vec::new(), Duration::ZERO)) };
    let begun = Instant::now();
    let mut posted: Vec<(usize, Transfer)> = Vec::new();
    for at in 0..TRANSFERS {
        let grid = GRID.at((at * LEN) as u64);
        let local = ours.grid(grid)?.blocks(0..GRID.count);
        let remote = peer.region("theirs")?.grid(grid)?.blocks(0..GRID.count);
        let plan = Plan::of(op, [(local, remote)])?;
        match peer.transfer(&plan).deadline(DEADLINE).post() {
            Ok(transfer) => posted.push((at, transfer)),
            Err(why) => is_allowed(&why)?,
        }
    }
    let ends: Vec<_> =
        posted.iter_mut().map(|(at, transfer)| (*at, run(transfer).map(drop))).collect();
    let took = begun.elapsed();
    if took > DEADLINE + GRACE {
        return Err(Failure::new(format!("transfers ended after {took:?}")));
    }
    let (seed, target) = if op == Op::Read { (SEED, &ours) } else { (SEED + 1, &theirs) };
    for (at, end) in &ends {
        match end {
            Ok(()) => is_there(target, at * LEN, seed)?,
            Err(why) => is_allowed(why)?,
        }
    }
    Ok((ends.iter().map(|(_, end)| end.is_ok()).collect(), took))
}

fn is_allowed(why: &kvx::Error) -> Result<(), Failure> {
    if KINDS.contains(&why.kind()) {
        return Ok(());
    }
    Err(Failure::new(format!("{KINDS:?} were allowed, not {why:?}")))
}

fn is_there(region: &Region, at: usize, seed: u64) -> Result<(), Failure> {
    let mut content = vec![0; LEN];
    region.copy_out(at, &mut content)?;
    match content
        .iter()
        .enumerate()
        .all(|(offset, byte)| *byte == byte_at(seed, (at + offset) as u64))
    {
        true => Ok(()),
        false => Err(Failure::new("a transfer arrived with wrong bytes")),
    }
}

/// Hides the message and the backtrace of the intended panics, which would appear for each turn.
fn hide_what_is_on_purpose() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        let says = |info: &PanicHookInfo<'_>| info.payload().downcast_ref() == Some(&SAYS);
        std::panic::set_hook(Box::new(move |info| {
            if !says(info) {
                usual(info)
            }
        }));
    });
}

/// Runs one backend and operation, and prints the row of the table.
pub(crate) fn row(title: &str, backend: &'static str, op: Op, step: u64) -> Result<(), Failure> {
    let version = match kvx::registry().require(backend, &kvx::Options::default()) {
        Ok((_, found)) => found.version,
        Err(why) => {
            skip(title, &why.to_string(), "see the reason");
            return Ok(());
        }
    };
    let (turns, ended, latest) = panics(backend, op, step)?;
    if turns < 2 {
        return Err(Failure::new(format!("only {turns} turns panicked")));
    }
    let way = if op == Op::Read { "reading" } else { "writing" };
    let library = if matches!(backend, "SHM" | "TCP") { "" } else { &*version };
    let cells = format!("{turns} turns: {ended} | {} | - | -", latest.as_millis());
    println!("| {} | a turn panics | {way} | {cells} |", format!("{backend} {library}").trim());
    Ok(())
}
