//! Measures the kernels of the first GPU that gather and scatter blocks, next to one copy of as
//! many bytes.

use std::sync::Arc;
use std::time::Duration;

use kvx::{Completion, Memory};
use kvx_core::backend::Ticket;
use kvx_gpu::DevicePtr;
use kvx_gpu::kernels::DeviceGrid;
use serde::Serialize;

use super::arguments::Arguments;
use super::content;
use super::deadlines::DEADLINE;
use super::device_limits::DeviceLimit;
use super::figures::Output;
use super::points::{Pattern, Shape};
use super::rounds::{Effort, Party, Ratio, Round, interleave, median, round, timed};
use crate::progress::Progress;
use crate::{Result, bytes, devices};

/// The printed record.
#[derive(Serialize)]
struct KernelRecord {
    mode: &'static str,
    kernel: &'static str,
    block: u64,
    count: u32,
    bytes: u64,
    gbps: f64,
    limit_name: &'static str,
    limit_gbps: f64,
    ratio: f64,
    ratio_min: f64,
    ratio_max: f64,
    verified: bool,
    rounds: usize,
}

/// Measures every size and number of blocks.
pub(crate) fn run(arguments: &Arguments, effort: Effort, output: &mut Output<'_>) -> Result<()> {
    let steps = 2 * arguments.block.len() * arguments.count.len();
    let about = Duration::from_secs_f64(effort.seconds).mul_f64(steps as f64);
    let mut progress = Progress::new(steps, about);
    for block in &arguments.block {
        for count in &arguments.count {
            let shape = Shape {
                block: *block,
                count: *count,
                lists: 1,
                pattern: Pattern::Scattered,
                seed: arguments.seed,
            };
            if shape.bytes() > arguments.max_total {
                eprintln!("left out: {} x{count}: more than --max-total", bytes::show(*block));
                continue;
            }
            for gather in [true, false] {
                let kernel = if gather { "gather" } else { "scatter" };
                let what = format!("{kernel} {} x{count}", bytes::show(*block));
                progress.show(&what);
                let record = measure(effort, shape, gather)?;
                progress.step(&what);
                progress.clear();
                output.record(&record, &sentence(&record))?;
                if !record.verified {
                    return Err(format!("{} moved the wrong bytes", record.kernel).into());
                }
            }
        }
    }
    Ok(())
}

fn measure(effort: Effort, shape: Shape, gather: bool) -> Result<KernelRecord> {
    let device = devices::first()?;
    let pool = || device.pool(shape.bytes() as usize).build();
    let (spread, packed) = (pool()?, pool()?);
    let order = shape.from();
    let indices: Arc<[u32]> = order.as_slice().into();
    let grid =
        [DeviceGrid { base: spread.address(), stride: shape.block, length: shape.block, at: 0 }];
    let at = DevicePtr(packed.address());
    let act = |done: Ticket| {
        // SAFETY: all blocks lie in the two pools, which outlive every wait.
        unsafe {
            match gather {
                true => device.gather(at, &grid, &indices, done),
                false => device.scatter(at, &grid, &indices, done),
            }
        }
    };
    let once = || -> kvx::Result<()> {
        let (moved, ticket) = Completion::with_ticket();
        act(ticket);
        moved.wait_blocking(DEADLINE)
    };

    let (source, destination): (&Memory, &Memory) =
        if gather { (&spread, &packed) } else { (&packed, &spread) };
    content::fill(source, shape.bytes())?;
    once()?;
    let in_order = (0..shape.count)
        .zip(order)
        .map(|(at, block)| if gather { (block, at) } else { (at, block) });
    let held = content::compare(destination, shape.block, in_order);
    if let Err(why) = &held {
        eprintln!("WRONG BYTES: {why}");
    }

    let copy = DeviceLimit::within(&device, shape)?;
    copy.verify(1)?;
    let mut parties: Vec<Party<'_>> = vec![
        Box::new(|budget| timed(budget, 1, |_, _| once())),
        Box::new(|budget| copy.round(0, budget, 1)),
    ];
    let done = interleave(&mut parties, effort, || ())?;
    let [ours, limit] = &done[..] else {
        return Err("a party's rounds are missing".into());
    };
    let rate = |rounds: &[Round]| {
        median(rounds.iter().map(|round| shape.bytes() as f64 / round.seconds_each() / 1e9))
    };
    let three = |value| round(value, 3);
    let ratio = Ratio::of(ours, limit).ok_or("no round was measured")?;
    Ok(KernelRecord {
        mode: "kernels",
        kernel: if gather { "gather" } else { "scatter" },
        block: shape.block,
        count: shape.count,
        bytes: shape.bytes(),
        gbps: three(rate(ours).unwrap_or_default()),
        limit_name: copy.name,
        limit_gbps: three(rate(limit).unwrap_or_default()),
        ratio: three(ratio.median),
        ratio_min: three(ratio.min),
        ratio_max: three(ratio.max),
        verified: held.is_ok(),
        rounds: effort.rounds,
    })
}

fn sentence(record: &KernelRecord) -> String {
    let KernelRecord {
        kernel,
        count,
        gbps,
        limit_name,
        limit_gbps,
        ratio,
        ratio_min,
        ratio_max,
        ..
    } = record;
    format!(
        "{kernel} of {} x{count}: {gbps} GB/s; {limit_name} {limit_gbps} GB/s, {ratio} ({ratio_min} to {ratio_max})",
        bytes::show(record.block)
    )
}
