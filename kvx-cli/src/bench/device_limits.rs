//! The limits for device memory: bare copies by the driver, of as many bytes as a transfer.

use std::sync::Arc;
use std::time::Duration;

use kvx::{Memory, MemoryKind};
use kvx_core::DeviceAccess;
use kvx_gpu::Device;

use super::content::{self, ShapeBlocks};
use super::driver::{BareCopyDirection, BareDriver};
use super::points::{Pattern, Point, Shape};
use super::pools::PoolKind;
use super::rounds::{Round, timed};
use crate::{Result, devices};

/// A limit that copies between two separate memories, each as large as a side's.
pub(crate) struct DeviceLimit {
    pub(crate) name: &'static str,
    driver: BareDriver,
    way: BareCopyDirection,
    from: Arc<Memory>,
    to: Arc<Memory>,
    shape: Shape,
    blocks: ShapeBlocks,
    /// True for a call per block, instead of one call for all bytes of a transfer.
    block_by_block: bool,
}

impl DeviceLimit {
    /// Returns the limits of a point on the first device, each with a flag: true if it bounds the
    /// point, false if it is only shown next to it.
    pub(crate) fn all(point: &Point) -> Result<Vec<(Self, bool)>> {
        let (from, to) = point.memory.source_and_destination(point.op);
        if ![from, to].contains(&PoolKind::Device) {
            return Ok(Vec::new());
        }
        let device = devices::first()?;
        if (from, to) == (PoolKind::Device, PoolKind::Device) && point.backend != "TCP" {
            let copy = DeviceLimit::within(&device, point.shape)?;
            let one_by_one = copy.one_by_one(&device, point.shape)?;
            return Ok(vec![(copy, true), (one_by_one, false)]);
        }
        let mut limits = Vec::new();
        for (way, of) in [(BareCopyDirection::ToHost, from), (BareCopyDirection::ToDevice, to)] {
            if of == PoolKind::Device {
                limits.push((DeviceLimit::new(&device, way, point.shape)?, true));
            }
        }
        Ok(limits)
    }

    /// Returns the limit that is one copy within the device.
    pub(crate) fn within(device: &Arc<Device>, shape: Shape) -> Result<Self> {
        DeviceLimit::new(device, BareCopyDirection::Within, shape)
    }

    /// Returns the limit of a program without kernels, which copies the point's list block by
    /// block. It shares the memory of this limit, as the two alternate.
    fn one_by_one(&self, device: &Arc<Device>, shape: Shape) -> Result<Self> {
        Ok(DeviceLimit {
            name: "a call a block",
            driver: driver(device)?,
            way: self.way,
            from: Arc::clone(&self.from),
            to: Arc::clone(&self.to),
            shape,
            blocks: ShapeBlocks::of(shape),
            block_by_block: true,
        })
    }

    fn new(device: &Arc<Device>, way: BareCopyDirection, shape: Shape) -> Result<Self> {
        let len = shape.memory() as usize;
        let on_device = || device.pool(len).build();
        let on_host = || device.pinned(len);
        let (name, from, to) = match way {
            BareCopyDirection::Within => ("device copy", on_device()?, on_device()?),
            BareCopyDirection::ToHost => ("copy to host", on_device()?, on_host()?),
            BareCopyDirection::ToDevice => ("copy to device", on_host()?, on_device()?),
        };
        let driver = driver(device)?;
        // One copy moves a transfer's blocks in their order.
        let shape = Shape { pattern: Pattern::Adjacent, ..shape };
        let (from, to) = (Arc::new(from), Arc::new(to));
        Ok(DeviceLimit {
            name,
            driver,
            way,
            from,
            to,
            shape,
            blocks: ShapeBlocks::of(shape),
            block_by_block: false,
        })
    }

    /// Moves one list after the other, beginning with number `next`.
    pub(crate) fn round(&self, next: u64, budget: Duration, least: u64) -> Result<Round> {
        timed(budget, least, |nth, _| {
            let list = self.blocks.list(next + nth);
            let calls = if self.block_by_block { list.from.len() } else { 1 };
            let len = list.length * list.from.len() / calls;
            let at = |block: u32| (u64::from(block)) * list.length as u64;
            for (from, to) in list.from.iter().zip(list.to).take(calls) {
                let (from, to) = (self.from.address() + at(*from), self.to.address() + at(*to));
                // SAFETY: both memories have all blocks of the shape, and only this limit's rounds
                // use them, one at a time.
                unsafe { self.driver.copy(self.way, from, to, len) }?;
            }
            self.driver.wait()
        })
    }

    /// Moves the first lists once, and compares the bytes that arrived. Returns the seconds per
    /// list.
    pub(crate) fn verify(&self, lists: u64) -> Result<f64> {
        content::fill(&self.from, self.shape.memory())?;
        content::wipe(&self.to, self.shape.memory())?;
        let round = self.round(0, Duration::ZERO, lists)?;
        content::check(&self.to, self.shape, lists as u32)?;
        Ok(round.seconds_each())
    }
}

/// Opens the driver of a device.
fn driver(device: &Arc<Device>) -> Result<BareDriver> {
    Ok(match device.kind() {
        MemoryKind::Rocm => BareDriver::hip()?,
        _ => BareDriver::cuda()?,
    })
}
