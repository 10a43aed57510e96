//! Kernels: their code is recognised by its text, and a launch runs the reference implementation.

use std::sync::Arc;

use kvx_core::backend::Hop;
use kvx_gpu::kernels::{DeviceGrid, ENTRIES, Swap, THREADS};

use crate::argument::In;
use crate::binary;
use crate::code::{Answer, Code};
use crate::handles::Handles;
use crate::memory::{Memory, memory};
use crate::reference::{self, BlockLayout};
use crate::stream::Stream;

/// A loaded module, with the entries that its text contains.
pub(crate) struct Module(Vec<&'static str>);

pub(crate) static MODULES: Handles<Module> = Handles::new();

/// An entry of a module.
pub(crate) struct Function(pub(crate) &'static str);

pub(crate) static FUNCTIONS: Handles<Function> = Handles::new();

/// The first line of the code that the stand-in's compiler generates.
pub(crate) const COMPILED: &str = "// compiled by the kvx stand-in\n";

impl Module {
    /// Loads an image of CUDA: PTX, or a binary of NVRTC. Fails with `INVALID_IMAGE`.
    pub(crate) fn from_image(image: In<u8>) -> Answer<Arc<Self>> {
        match binary::bytes(&image)? {
            Some(bytes) => Ok(Arc::new(Module(binary::entries(&bytes)))),
            None => Module::from_ptx(&image.text()?),
        }
    }

    /// Loads PTX. Fails with `INVALID_IMAGE`.
    fn from_ptx(text: &str) -> Answer<Arc<Self>> {
        let is_ptx = [".version ", ".target "].iter().all(|part| text.contains(part));
        if is_ptx { Ok(Module::with(text, ".visible .entry ")) } else { Err(Code::INVALID_IMAGE) }
    }

    /// Loads code of the stand-in's compiler. Fails with `INVALID_IMAGE`.
    pub(crate) fn from_code(text: &str) -> Answer<Arc<Self>> {
        if text.starts_with(COMPILED) {
            Ok(Module::with(text, ""))
        } else {
            Err(Code::INVALID_IMAGE)
        }
    }

    fn with(text: &str, head: &str) -> Arc<Self> {
        let entries = ENTRIES.into_iter().filter(|entry| text.contains(&format!("{head}{entry}(")));
        Arc::new(Module(entries.collect()))
    }

    /// Returns an entry. Fails with `NOT_FOUND`.
    pub(crate) fn function(&self, name: &str) -> Answer<Arc<Function>> {
        self.0
            .iter()
            .find(|entry| **entry == name)
            .map(|entry| Arc::new(Function(entry)))
            .ok_or(Code::NOT_FOUND)
    }
}

/// Reads the parameters of a launch: a list of pointers to 64-bit numbers, as long as the entry's
/// list.
pub(crate) fn parameters_of(entry: &str, list: &In<In<u64>>) -> Answer<Vec<u64>> {
    let count = match entry {
        "kvx_hops" => 2,
        "kvx_permute" => 11,
        _ => 5,
    };
    (0..count).map(|at| list.at(at)?.get()).collect()
}

/// Submits a launch to a stream. Fails with `INVALID_VALUE` for grids that devices reject, and for
/// another number of threads than the kernels require.
pub(crate) fn launch(
    stream: &Arc<Stream>,
    entry: &'static str,
    grid: [u32; 3],
    block: [u32; 3],
    parameters: Vec<u64>,
) -> Answer {
    let [x, y, z] = grid;
    let takes =
        (1..=i32::MAX as u32).contains(&x) && [y, z].iter().all(|len| (1..=65_535).contains(len));
    if !takes || block != [THREADS, 1, 1] {
        return Err(Code::INVALID_VALUE);
    }
    stream.push(Box::new(move || run(entry, &parameters).ok_or(Code::ILLEGAL_ADDRESS)));
    Ok(())
}

/// Runs the reference implementation of a kernel. Returns `None` if it accesses invalid memory.
fn run(entry: &str, parameters: &[u64]) -> Option<()> {
    let memory = memory();
    match (entry, parameters) {
        ("kvx_gather" | "kvx_scatter", &[packed, grids, grid_count, indices, count]) => {
            let indices = words(&memory, indices, usize::try_from(count).ok()?)?;
            for [base, stride, length, at] in table(&memory, grids, grid_count)? {
                let len = length.checked_mul(count)?;
                let grid = DeviceGrid { base, stride, length, at: 0 };
                let packed = packed.checked_add(at)?;
                if entry == "kvx_gather" {
                    write(&memory, packed, &gathered(&memory, grid, &indices)?)?;
                } else {
                    scattered(
                        &memory,
                        grid,
                        &indices,
                        &read(&memory, packed, usize::try_from(len).ok()?)?,
                    )?;
                }
            }
        }
        ("kvx_hops", &[hops, count]) => {
            for [from, to, len] in table(&memory, hops, count)? {
                let source = read(&memory, from, usize::try_from(len).ok()?)?;
                let mut target = vec![0; source.len()];
                let hop = Hop { from: 0, to: 0, len: source.len() };
                reference::hops(&source, &mut target, &[hop]).ok()?;
                write(&memory, to, &target)?;
            }
        }
        (
            "kvx_permute",
            &[
                to,
                to_stride,
                to_indices,
                from,
                from_stride,
                from_indices,
                count,
                outer,
                rows,
                columns,
                run,
            ],
        ) => {
            let swap = Swap { outer, rows, columns, run };
            let length = swap.length()?;
            let chosen = |address: u64| match address {
                0 => Some((0..u32::try_from(count).ok()?).collect()),
                address => words(&memory, address, usize::try_from(count).ok()?),
            };
            let [to_indices, from_indices] = [chosen(to_indices)?, chosen(from_indices)?];
            let grid = DeviceGrid { base: from, stride: from_stride, length, at: 0 };
            let source = gathered(&memory, grid, &from_indices)?;
            let mut target = vec![0; source.len()];
            let packed = BlockLayout { base: 0, stride: length, indices: None };
            reference::permute((&source, packed), (&mut target, packed), from_indices.len(), swap)
                .ok()?;
            let grid = DeviceGrid { base: to, stride: to_stride, length, at: 0 };
            scattered(&memory, grid, &to_indices, &target)?;
        }
        _ => return None,
    }
    Some(())
}

/// Returns the blocks of a grid that the indices select, one after the other.
fn gathered(memory: &Memory, grid: DeviceGrid, indices: &[u32]) -> Option<Vec<u8>> {
    let mut packed = vec![0; usize::try_from(grid.length).ok()?.checked_mul(indices.len())?];
    let region = region(memory, grid, indices)?;
    // SAFETY: the memory was found above, and the lock keeps it allocated. As on a device, the
    // program ensures that nothing writes to it meanwhile.
    let region = unsafe { std::slice::from_raw_parts(region.0, region.1) };
    reference::gather(region, &[DeviceGrid { base: 0, ..grid }], indices, &mut packed).ok()?;
    Some(packed)
}

/// Writes packed blocks to the places in a grid that the indices select.
fn scattered(memory: &Memory, grid: DeviceGrid, indices: &[u32], packed: &[u8]) -> Option<()> {
    let region = region(memory, grid, indices)?;
    // SAFETY: the memory was found above, and the lock keeps it allocated. As on a device, the
    // program ensures that nothing else accesses it meanwhile.
    let region = unsafe { std::slice::from_raw_parts_mut(region.0, region.1) };
    reference::scatter(region, &[DeviceGrid { base: 0, ..grid }], indices, packed).ok()
}

/// Returns the memory from the base of a grid to the end of the last selected block.
fn region(memory: &Memory, grid: DeviceGrid, indices: &[u32]) -> Option<(*mut u8, usize)> {
    let Some(last) = indices.iter().max() else {
        return Some((std::ptr::NonNull::dangling().as_ptr(), 0));
    };
    let len = u64::from(*last).checked_mul(grid.stride)?.checked_add(grid.length)?;
    let len = usize::try_from(len).ok()?;
    Some((memory.reachable(grid.base, len).ok()?, len))
}

/// Reads rows of 64-bit numbers.
fn table<const N: usize>(memory: &Memory, address: u64, count: u64) -> Option<Vec<[u64; N]>> {
    let len = usize::try_from(count).ok()?.checked_mul(N * 8)?;
    // Devices read only aligned numbers.
    if !address.is_multiple_of(8) {
        return None;
    }
    let bytes = read(memory, address, len)?;
    let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
    Some(
        bytes
            .chunks_exact(N * 8)
            .map(|row| std::array::from_fn(|at| word(&row[at * 8..][..8])))
            .collect(),
    )
}

fn words(memory: &Memory, address: u64, count: usize) -> Option<Vec<u32>> {
    if !address.is_multiple_of(4) {
        return None;
    }
    let bytes = read(memory, address, count.checked_mul(4)?)?;
    let word = |bytes: &[u8]| u32::from_ne_bytes(bytes.try_into().expect("four bytes"));
    Some(bytes.chunks_exact(4).map(word).collect())
}

fn read(memory: &Memory, address: u64, len: usize) -> Option<Vec<u8>> {
    if len == 0 {
        return Some(Vec::new());
    }
    let start = memory.reachable(address, len).ok()?;
    let mut bytes = vec![0; len];
    // SAFETY: the memory was found above, and the lock keeps it allocated; the vector has the same
    // length.
    unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(start, len) };
    Some(bytes)
}

fn write(memory: &Memory, address: u64, bytes: &[u8]) -> Option<()> {
    if bytes.is_empty() {
        return Some(());
    }
    let start = memory.reachable(address, bytes.len()).ok()?;
    // SAFETY: the memory was found above, and the lock keeps it allocated; it has the same length
    // as `bytes`.
    unsafe { start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    Some(())
}
