//! One point, measured.

use std::time::Duration;

use super::Arguments;
use super::bare::Limit;
use super::beside::{Beside, Standing};
use super::content;
use super::cpu;
use super::figures::{Figures, Measured};
use super::initiator::Plans;
use super::points::{Op, Point};
use super::rounds::{Party, interleave};
use super::session::Session;
use super::target::Ask;
use crate::Result;

/// The most bytes that are compared after they were moved, unless one transfer has more.
const VERIFIED: u64 = 64 << 20;

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
    let mut plans = session.initiator(point.backend)?.plans(op, shape, memory)?;
    measured.plans.clone_from(&plans.took);
    prepare(session, point)?;
    measured.verified &= moves_right(session, point, &mut plans)?;

    let Session { target, pools, mapped, connections, .. } = session;
    let limit = Limit::of(point, pools, target, mapped, *connections);
    let mut limit = limit.unwrap_or_else(|why| {
        eprintln!("no limit beside {point}: {why}");
        None
    });
    let mut pace = f64::MAX;
    if let Some(limit) = &mut limit {
        wipe(session, point)?;
        pace = limit.round(&mut session.target, Duration::ZERO, pace, verified(point))?.pace();
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
            let round = ours.round(&mut plans, wait, budget, 1)?;
            cpu_seconds += cpu::ours_and(process).saturating_sub(before).as_secs_f64();
            Ok(round)
        })];
        if let Some(limit) = &mut limit {
            parties.push(Box::new(move |budget| {
                let round = limit.round(target, budget, pace, 1)?;
                pace = round.pace();
                Ok(round)
            }));
        }
        if let (Some(beside), Some(_)) = (beside, &beside_name) {
            parties.push(Box::new(|budget| beside.round(shape.bytes(), budget)));
        }
        let mut done = interleave(&mut parties, arguments.rounds, arguments.seconds, after_each)?.into_iter();
        measured.ours = done.next().unwrap_or_default();
        drop(parties);
        measured.limit = limit.as_ref().and_then(|limit| Some((limit.name, done.next()?)));
        measured.beside = beside_name.and_then(|name| Some((name, done.next()?)));
    }
    measured.cpu_seconds = cpu_seconds;

    measured.verified &= moves_right(session, point, &mut plans)?;
    Figures::of(point, &measured)
}

/// Moves the first lists once over, and compares what arrived.
fn moves_right(session: &mut Session, point: &Point, plans: &mut Plans) -> Result<bool> {
    wipe(session, point)?;
    plans.rewind();
    session.initiator(point.backend)?.round(plans, point.wait, Duration::ZERO, verified(point))?;
    let held = arrived(session, point);
    if let Err(why) = &held {
        eprintln!("WRONG BYTES: {point}: {why}");
    }
    Ok(held.is_ok())
}

/// How many lists are compared.
fn verified(point: &Point) -> u64 {
    (VERIFIED / point.shape.bytes()).clamp(1, point.shape.lists.into())
}

/// Fills the source.
pub(crate) fn prepare(session: &mut Session, point: &Point) -> Result<()> {
    let (memory, bytes) = (point.memory, point.shape.memory());
    match point.op {
        Op::Read => session.target.ask(Ask::Fill { memory, bytes }).map(drop)?,
        Op::Write => content::fill(session.pools.get(memory)?, bytes)?,
    }
    Ok(())
}

/// Empties the destination.
fn wipe(session: &mut Session, point: &Point) -> Result<()> {
    let (memory, bytes) = (point.memory, point.shape.memory());
    match point.op {
        Op::Read => content::wipe(session.pools.get(memory)?, bytes)?,
        Op::Write => session.target.ask(Ask::Wipe { memory, bytes }).map(drop)?,
    }
    Ok(())
}

/// Compares the destination with the source.
fn arrived(session: &mut Session, point: &Point) -> Result<()> {
    let Point { memory, shape, .. } = *point;
    let lists = verified(point) as u32;
    match point.op {
        Op::Read => content::check(session.pools.get(memory)?, shape, lists),
        Op::Write => session.target.ask(Ask::Check { memory, shape, lists }).map(drop),
    }
}
