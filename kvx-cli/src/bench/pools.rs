//! The memory of one side.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use clap::Args;
use kvx::{Agent, Memory};
use kvx_gpu::Device;
use serde::{Deserialize, Serialize};

use crate::{Result, devices};

/// A kind of memory of a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PoolKind {
    /// Allocated by kvx.
    Kvx,
    /// Allocated by the program.
    Foreign,
    /// On the first GPU.
    Device,
}

impl PoolKind {
    /// Returns the name under which it is registered.
    pub(crate) fn name(self) -> &'static str {
        match self {
            PoolKind::Kvx => "kvx",
            PoolKind::Foreign => "foreign",
            PoolKind::Device => "device",
        }
    }
}

/// The bytes of each memory of a side; zero means that the side does not have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Args)]
pub(crate) struct Sizes {
    #[arg(long)]
    kvx: u64,
    #[arg(long)]
    foreign: u64,
    #[arg(long)]
    device: u64,
}

impl Sizes {
    /// Returns the sizes for a kvx pool only.
    pub(crate) fn kvx(bytes: u64) -> Self {
        Sizes { kvx: bytes, ..Sizes::default() }
    }

    /// Raises the size of a pool to at least `bytes`.
    pub(crate) fn need(&mut self, pool: PoolKind, bytes: u64) {
        let size = match pool {
            PoolKind::Kvx => &mut self.kvx,
            PoolKind::Foreign => &mut self.foreign,
            PoolKind::Device => &mut self.device,
        };
        *size = bytes.max(*size);
    }

    /// Returns the bytes of host memory.
    pub(crate) fn on_host(self) -> u64 {
        self.kvx + self.foreign
    }

    /// Returns the bytes of GPU memory.
    pub(crate) fn on_device(self) -> u64 {
        self.device
    }

    /// Returns the arguments for another process's command line.
    pub(crate) fn arguments(self) -> [String; 3] {
        [("kvx", self.kvx), ("foreign", self.foreign), ("device", self.device)]
            .map(|(name, bytes)| format!("--{name}={bytes}"))
    }
}

/// The memories of a side that the points need.
pub(crate) struct Pools {
    kvx: Option<Arc<Memory>>,
    foreign: Option<Arc<Memory>>,
    device: Option<(Arc<Device>, Arc<Memory>)>,
}

/// The location of a pool, by which another process of this host reaches it without kvx.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct PoolLocation {
    /// The process id.
    pub(crate) process: u32,
    /// The file descriptor there, for a kvx pool.
    pub(crate) file: Option<i32>,
    /// The address there.
    pub(crate) base: u64,
    /// The size in bytes.
    pub(crate) len: usize,
}

impl Pools {
    /// Allocates pools of these sizes, with every page present; none for a size of zero.
    pub(crate) fn of(sizes: Sizes) -> Result<Self> {
        let some = |bytes: u64| (bytes > 0).then_some(bytes as usize);
        let kvx = some(sizes.kvx).map(|len| Memory::pool(len).build()).transpose()?;
        let foreign = some(sizes.foreign).map(anonymous).transpose()?;
        let on_device = |len| {
            let device = devices::first()?;
            let pool = device.pool(len).build()?;
            Result::Ok((device, Arc::new(pool)))
        };
        let device = some(sizes.device).map(on_device).transpose()?;
        Ok(Pools { kvx: kvx.map(Arc::new), foreign: foreign.map(Arc::new), device })
    }

    pub(crate) fn get(&self, pool: PoolKind) -> Result<&Arc<Memory>> {
        let memory = match pool {
            PoolKind::Kvx => self.kvx.as_ref(),
            PoolKind::Foreign => self.foreign.as_ref(),
            PoolKind::Device => self.device.as_ref().map(|(_, memory)| memory),
        };
        memory.ok_or_else(|| "this side has no memory of that kind".into())
    }

    /// Returns the GPU of this side.
    pub(crate) fn device(&self) -> Option<&Arc<Device>> {
        self.device.as_ref().map(|(device, _)| device)
    }

    /// Returns a builder of an agent that can move all pools.
    pub(crate) fn agent(&self, name: &str) -> kvx::AgentBuilder {
        let builder = Agent::builder(format!("{name}-{}", std::process::id()));
        match self.device() {
            Some(device) => builder.device(Arc::clone(device) as _),
            None => builder,
        }
    }

    /// Returns all pools that exist.
    pub(crate) fn all(&self) -> impl Iterator<Item = (PoolKind, &Arc<Memory>)> {
        [PoolKind::Kvx, PoolKind::Foreign, PoolKind::Device]
            .into_iter()
            .filter_map(|pool| Some((pool, self.get(pool).ok()?)))
    }

    pub(crate) fn location(&self, pool: PoolKind) -> Result<PoolLocation> {
        let memory = self.get(pool)?;
        let file = memory.shared_file().map(|file| file.as_raw_fd());
        Ok(PoolLocation {
            process: std::process::id(),
            file,
            base: memory.address(),
            len: memory.len(),
        })
    }
}

/// Allocates memory as an engine might: anonymous, on transparent huge pages if the kernel provides
/// them.
fn anonymous(len: usize) -> Result<Memory> {
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(format!("{len} bytes of memory: {}", std::io::Error::last_os_error()).into());
    }
    // SAFETY: advice on the mapping just made, which this function owns. It fails without huge
    // pages, and nothing depends on it.
    unsafe { libc::madvise(base, len, libc::MADV_HUGEPAGE) };
    // SAFETY: the mapping has `len` bytes, and only this function knows its address.
    unsafe { std::ptr::write_bytes(base.cast::<u8>(), 1, len) };
    // SAFETY: the mapping stays until its owner is dropped, and this program takes no references
    // into it.
    Ok(unsafe { Memory::adopt(base.cast(), len, ForeignMapping { base: base as u64, len }) })
}

struct ForeignMapping {
    base: u64,
    len: usize,
}

impl Drop for ForeignMapping {
    fn drop(&mut self) {
        // SAFETY: `anonymous` made the mapping. It is unmapped once, when its memory is dropped and
        // nothing can access it.
        unsafe { libc::munmap(self.base as *mut libc::c_void, self.len) };
    }
}
