//! Adopts a KV cache that candle has allocated. kvx reads blocks of another agent's tensor into it,
//! and candle computes with them. Nothing copies data between kvx and candle.
//!
//! Only tensors on the CPU: candle allocates those on CUDA devices from the driver's memory pools,
//! which no fabric library can register (`docs/library/gpu.md`). Not tried on a device.

use std::cell::Cell;
use std::error::Error;
use std::time::Duration;

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Tensor};
use kvx::{Agent, Grid, GridSet, Memory, Plan, Region};

const SOON: Duration = Duration::from_secs(10);

const LAYERS: usize = 2;
const BLOCKS: usize = 64;
/// Values per block: tokens, times heads, times the dimensions of a head.
const VALUES: usize = 16 * 4 * 64;
const BLOCK_BYTES: u64 = (VALUES * size_of::<f32>()) as u64;

fn main() -> Result<(), Box<dyn Error>> {
    let prefill = kvx::agent("prefill-0").build()?;
    let decode = kvx::agent("decode-0").build()?;
    // All values of block 20 in layer 1 are 1020.
    let values: Vec<f32> = (0..LAYERS * BLOCKS)
        .map(|at| (at / BLOCKS * 1000 + at % BLOCKS) as f32)
        .flat_map(|value| std::iter::repeat_n(value, VALUES))
        .collect();
    let theirs = Tensor::from_vec(values, (LAYERS, BLOCKS, VALUES), &Device::Cpu)?;
    let ours = Tensor::zeros((LAYERS, BLOCKS, VALUES), DType::F32, &Device::Cpu)?;
    let _filled = adopt(&prefill, &theirs)?;
    let cache = adopt(&decode, &ours)?;

    // The blocks of a layer are a grid; all layers share one list of blocks.
    let peer = decode.connect(prefill.metadata()?)?;
    let remote = peer.region("kv")?;
    let local = layers().map(|layer| cache.grid(layer)).collect::<kvx::Result<Vec<_>>>()?;
    let remote = layers().map(|layer| remote.grid(layer)).collect::<kvx::Result<Vec<_>>>()?;
    let (local, remote) = (GridSet::join(local)?, GridSet::join(remote)?);
    let plan = Plan::read(local.blocks([3, 9]), remote.blocks([20, 17]))?;
    let report = peer.post(&plan)?.wait_blocking(SOON)?;
    println!("{} bytes over {} in {:?}", report.bytes, report.backend, report.transfer_time);

    // candle sees the blocks that arrived; their neighbours are unchanged.
    let mean = |layer: usize, block: usize| ours.get(layer)?.get(block)?.mean_all()?.to_scalar::<f32>();
    for (layer, block, value) in [(0, 3, 20.0), (0, 9, 17.0), (1, 3, 1020.0), (1, 9, 1017.0), (0, 4, 0.0)] {
        let found = mean(layer, block)?;
        println!("layer {layer}, block {block}: {found}");
        if found != value {
            return Err(format!("layer {layer}, block {block} holds {found}, not {value}").into());
        }
    }
    decode.shutdown(SOON).join()?;
    prefill.shutdown(SOON).join()?;
    Ok(())
}

fn layers() -> impl Iterator<Item = Grid> {
    (0..LAYERS as u64).map(|at| Grid::packed(BLOCK_BYTES, BLOCKS as u32).at(at * BLOCKS as u64 * BLOCK_BYTES))
}

/// Registers the bytes of a CPU tensor. The tensor stays candle's, and the region keeps it alive.
fn adopt(agent: &Agent, tensor: &Tensor) -> Result<Region, Box<dyn Error>> {
    let found = Bytes::default();
    tensor.inplace_op1(&found)?;
    let (base, len) = found.0.get().ok_or("candle did not pass the tensor's storage")?;
    // SAFETY: the clone of the tensor keeps its storage alive, and candle never moves it. candle
    // accesses it only during its operations, and this program runs none on the cache during a
    // transfer.
    Ok(agent.register("kv", unsafe { Memory::adopt(base, len, tensor.clone()) })?)
}

/// Finds the bytes of a tensor, through an in-place operation: candle lends it writable storage.
#[derive(Default)]
struct Bytes(Cell<Option<(*mut u8, usize)>>);

impl InplaceOp1 for Bytes {
    fn name(&self) -> &'static str {
        "adopt"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        if !layout.is_contiguous() || layout.start_offset() != 0 {
            candle_core::bail!("only whole, contiguous tensors can be adopted: call contiguous() first");
        }
        let CpuStorage::F32(values) = storage else { candle_core::bail!("only tensors of f32 can be adopted") };
        self.0.set(Some((values.as_mut_ptr().cast(), size_of_val(values.as_slice()))));
        Ok(())
    }
}
