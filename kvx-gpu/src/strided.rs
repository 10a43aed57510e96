//! Blocks at equal distances on a device.

use std::sync::Arc;

/// An address on a device: a `CUdeviceptr` or a `hipDeviceptr_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePtr(pub u64);

/// The blocks of one side of a [permutation](super::Device::permute): at `base + index * stride`.
#[derive(Clone, Debug)]
pub struct StridedBlocks {
    /// The address of block 0.
    pub base: DevicePtr,
    /// The distance from block to block.
    pub stride: u64,
    /// The blocks, in order.
    pub selection: BlockSelection,
}

/// A choice of blocks.
#[derive(Clone, Debug)]
pub enum BlockSelection {
    /// This many blocks, from the first one on.
    First(usize),
    /// The blocks of these indices.
    Indices(Arc<[u32]>),
}

impl StridedBlocks {
    pub(super) fn count(&self) -> usize {
        match &self.selection {
            BlockSelection::First(count) => *count,
            BlockSelection::Indices(indices) => indices.len(),
        }
    }
}
