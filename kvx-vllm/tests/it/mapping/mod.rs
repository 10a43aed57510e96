//! The mapping between the memory of two engines, byte by byte.

mod cluster;
mod dense;
mod hostile;
mod mooncake;
mod moves;
mod peers;
mod permute;
mod regions;
pub(crate) mod rows;
