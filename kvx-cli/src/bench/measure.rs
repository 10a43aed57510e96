//! One point, measured.

use super::Arguments;
use super::bare::Limit;
use super::beside::{Beside, Standing};
use super::content;
use super::cpu;
use super::figures::{Figures, Measured};
use super::points::{Op, Point};
use super::rounds::{Party, interleave};
use super::session::Session;
use super::target::Ask;
use crate::Result;

/// How often a plan is built to know what that costs.
const PLANS: usize = 5;

/// Measures a point in rounds, and calls `after_each` after each of them.
pub(crate) fn point(
    session: &mut Session,
    point: &Point,
    mut beside: Option<&mut Beside>,
    arguments: &Arguments,
    after_each: impl FnMut(),
) -> Result<Figures> {
    let Point { op, shape, memory, wait, .. } = *point;
    let mut measured = Measured { verified: true, ..Measured::default() };
    let mut plan = None;
    for _ in 0..PLANS {
        let (built, took) = session.initiator(point.backend)?.plan(op, shape, memory)?;
        measured.plans.push(took.as_secs_f64());
        plan = Some(built);
    }
    let plan = plan.ok_or("no plan was built")?;

    prepare(session, point)?;
    session.initiator(point.backend)?.round(&plan, wait, std::time::Duration::ZERO)?;
    measured.verified &= told(arrived(session, point));

    let Session { target, pools, mapped, connections, .. } = session;
    let limit = match Limit::of(point, pools, target, mapped, *connections) {
        Ok(limit) => limit,
        Err(why) => {
            eprintln!("no limit beside {point}: {why}");
            None
        }
    };
    let mut pace = f64::MAX;
    if let Some(limit) = &limit {
        wipe(session, point)?;
        pace = limit.round(&mut session.target, std::time::Duration::ZERO, pace)?.pace();
        arrived(session, point)
            .map_err(|why| format!("the limit of {point} moved the wrong bytes: {why}"))?;
    }
    let beside_name = match beside.as_mut().map(|beside| beside.announce(point)).transpose()? {
        Some(Standing::Ready(name)) => Some(name),
        Some(Standing::Skips(why)) => {
            eprintln!("nothing beside {point}: {why}");
            None
        }
        None => None,
    };

    let mut cpu_seconds = 0.0;
    {
        let Session { target, initiators, .. } = session;
        let process = target.pid();
        let ours = initiators.iter().find(|(name, _)| *name == point.backend).map(|(_, initiator)| initiator);
        let ours = ours.ok_or("no agent for this backend")?;
        let mut parties: Vec<Party<'_>> = vec![Box::new(|budget| {
            let before = cpu::ours_and(process);
            let round = ours.round(&plan, wait, budget)?;
            cpu_seconds += cpu::ours_and(process).saturating_sub(before).as_secs_f64();
            Ok(round)
        })];
        if let Some(limit) = &limit {
            parties.push(Box::new(move |budget| {
                let round = limit.round(target, budget, pace)?;
                pace = round.pace();
                Ok(round)
            }));
        }
        if let (Some(beside), Some(_)) = (beside, &beside_name) {
            parties.push(Box::new(|budget| beside.round(shape.bytes(), budget)));
        }
        let mut done = interleave(&mut parties, arguments.rounds, arguments.seconds, after_each)?.into_iter();
        measured.ours = done.next().unwrap_or_default();
        measured.limit = limit.as_ref().and_then(|limit| Some((limit.name, done.next()?)));
        measured.beside = beside_name.and_then(|name| Some((name, done.next()?)));
    }
    measured.cpu_seconds = cpu_seconds;

    wipe(session, point)?;
    session.initiator(point.backend)?.round(&plan, wait, std::time::Duration::ZERO)?;
    measured.verified &= told(arrived(session, point));
    Figures::of(point, &measured)
}

/// Fills the source and empties the destination.
fn prepare(session: &mut Session, point: &Point) -> Result<()> {
    let (memory, bytes) = (point.memory, point.shape.bytes());
    match point.op {
        Op::Read => session.target.ask(Ask::Fill { memory, bytes }).map(drop)?,
        Op::Write => content::fill(session.pools.get(memory)?, bytes)?,
    }
    wipe(session, point)
}

fn wipe(session: &mut Session, point: &Point) -> Result<()> {
    let (memory, bytes) = (point.memory, point.shape.bytes());
    match point.op {
        Op::Read => content::wipe(session.pools.get(memory)?, bytes)?,
        Op::Write => session.target.ask(Ask::Wipe { memory, bytes }).map(drop)?,
    }
    Ok(())
}

/// Compares the destination with the source.
fn arrived(session: &mut Session, point: &Point) -> Result<()> {
    let Point { memory, shape, .. } = *point;
    match point.op {
        Op::Read => content::check(session.pools.get(memory)?, shape),
        Op::Write => session.target.ask(Ask::Check { memory, shape }).map(drop),
    }
}

/// Whether it held; if not, standard error says why.
fn told(held: Result<()>) -> bool {
    if let Err(why) = &held {
        eprintln!("WRONG BYTES: {why}");
    }
    held.is_ok()
}
