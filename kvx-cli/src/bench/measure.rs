//! Measures one point.

use std::cell::RefCell;
use std::time::Duration;

use super::companion::{Companion, PointAnswer};
use super::content;
use super::cpu;
use super::figures::{Figures, Measurements};
use super::initiator::Plans;
use super::limits::Limit;
use super::points::{BenchOp, Point};
use super::rounds::{Effort, Party, interleave};
use super::session::Session;
use super::target::Ask;
use crate::Result;

/// The most bytes that are compared after a move, unless one transfer has more.
const VERIFIED: u64 = 64 << 20;

/// Measures a point in rounds, and calls `after_each` after each round.
pub(crate) fn point(
    session: &mut Session,
    point: &Point,
    mut beside: Option<&mut Companion>,
    effort: Effort,
    after_each: impl FnMut(),
) -> Result<Figures> {
    let Point { op, shape, memory, wait, .. } = *point;
    let mut measured = Measurements { verified: true, ..Measurements::default() };
    let mut plans = session.initiator(point.backend)?.plans(op, shape, memory)?;
    measured.plans.clone_from(&plans.took);
    fill_source(session, point)?;
    measured.verified &= verify(session, point, &mut plans)?;

    let Session { target, pools, mapped, data, .. } = session;
    let limits = Limit::all(point, pools, target, mapped, *data);
    let mut limits = limits.unwrap_or_else(|why| {
        eprintln!("no limit for {point}: {why}");
        Vec::new()
    });
    for limit in &mut limits {
        verify_limit(session, point, limit).map_err(|why| {
            format!("the limit {} of {point} moved the wrong bytes: {why}", limit.name)
        })?;
    }
    let beside_name = match beside.as_mut().map(|beside| beside.announce(point)).transpose()? {
        Some(PointAnswer::Ready(name)) => Some(name),
        Some(PointAnswer::Skips(why)) => {
            eprintln!("the companion program skips {point}: {why}");
            None
        }
        None => None,
    };

    let mut cpu_seconds = 0.0;
    {
        let Session { target, initiators, .. } = session;
        let process = target.pid();
        let ours = initiators
            .iter()
            .find(|(name, _)| *name == point.backend)
            .map(|(_, initiator)| initiator);
        let ours = ours.ok_or("no agent for this backend")?;
        let target = RefCell::new(target);
        let mut parties: Vec<Party<'_>> = vec![Box::new(|budget| {
            let before = cpu::ours_and(process);
            let round = ours.round(&mut plans, wait, budget, 1)?;
            cpu_seconds += cpu::ours_and(process).saturating_sub(before).as_secs_f64();
            Ok(round)
        })];
        let bare = limits.iter_mut().map(|limit| -> Party<'_> {
            let target = &target;
            Box::new(move |budget| limit.round(&mut target.borrow_mut(), budget, 1))
        });
        parties.extend(bare);
        if let (Some(beside), Some(_)) = (beside, &beside_name) {
            parties.push(Box::new(|budget| beside.round(shape.bytes(), budget)));
        }
        let mut done = interleave(&mut parties, effort, after_each)?.into_iter();
        measured.ours = done.next().unwrap_or_default();
        drop(parties);
        for (limit, rounds) in limits.iter().zip(&mut done) {
            let of_its_kind =
                if limit.bounds { &mut measured.limits } else { &mut measured.others };
            of_its_kind.push((limit.name, rounds));
        }
        measured.beside = beside_name.and_then(|name| Some((name, done.next()?)));
    }
    measured.cpu_seconds = cpu_seconds;

    measured.verified &= verify(session, point, &mut plans)?;
    Figures::of(point, &measured)
}

/// Moves the first lists once, and compares the bytes that arrived.
fn verify(session: &mut Session, point: &Point, plans: &mut Plans) -> Result<bool> {
    wipe_destination(session, point)?;
    plans.rewind();
    session.initiator(point.backend)?.round(
        plans,
        point.wait,
        Duration::ZERO,
        verified_lists(point),
    )?;
    let held = compare_destination(session, point);
    if let Err(why) = &held {
        eprintln!("WRONG BYTES: {point}: {why}");
    }
    Ok(held.is_ok())
}

/// Moves the first lists with a limit, and compares the bytes that arrived.
fn verify_limit(session: &mut Session, point: &Point, limit: &mut Limit) -> Result<()> {
    let lists = verified_lists(point);
    let Some(moves) = limit.moves else { return limit.verify(lists) };
    fill_source(session, &moves)?;
    wipe_destination(session, &moves)?;
    limit.round(&mut session.target, Duration::ZERO, lists)?;
    compare_destination(session, &moves)
}

/// Returns the number of lists that are compared.
pub(super) fn verified_lists(point: &Point) -> u64 {
    (VERIFIED / point.shape.bytes()).clamp(1, point.shape.lists.into())
}

/// Fills the source.
pub(crate) fn fill_source(session: &mut Session, point: &Point) -> Result<()> {
    let ((memory, _), bytes) =
        (point.memory.source_and_destination(point.op), point.shape.memory());
    match point.op {
        BenchOp::Read => session.target.ask(Ask::Fill { memory, bytes }).map(drop)?,
        BenchOp::Write => content::fill(session.pools.get(memory)?, bytes)?,
    }
    Ok(())
}

/// Zeroes the destination.
fn wipe_destination(session: &mut Session, point: &Point) -> Result<()> {
    let ((_, memory), bytes) =
        (point.memory.source_and_destination(point.op), point.shape.memory());
    match point.op {
        BenchOp::Read => content::wipe(session.pools.get(memory)?, bytes)?,
        BenchOp::Write => session.target.ask(Ask::Wipe { memory, bytes }).map(drop)?,
    }
    Ok(())
}

/// Compares the destination with the source.
fn compare_destination(session: &mut Session, point: &Point) -> Result<()> {
    let Point { op, memory, shape, .. } = *point;
    let ((_, memory), lists) = (memory.source_and_destination(op), verified_lists(point) as u32);
    match op {
        BenchOp::Read => content::check(session.pools.get(memory)?, shape, lists),
        BenchOp::Write => session.target.ask(Ask::Check { memory, shape, lists }).map(drop),
    }
}
