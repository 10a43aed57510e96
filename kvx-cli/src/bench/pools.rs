//! The memory of one side.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use clap::Args;
use kvx::{Agent, Memory};
use kvx_gpu::Device;
use serde::{Deserialize, Serialize};

use crate::{Result, devices};

/// One of a side's memories.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PoolKind {
    /// Of kvx's own.
    Kvx,
    /// Brought along.
    Foreign,
    /// On the first GPU.
    Device,
}

impl PoolKind {
    /// The name under which it is registered.
    pub(crate) fn name(self) -> &'static str {
        match self {
            PoolKind::Kvx => "kvx",
            PoolKind::Foreign => "foreign",
            PoolKind::Device => "device",
        }
    }
}

/// Bytes of each memory of a side; it does not have those of none.
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
    /// So much of kvx's own, and nothing else.
    pub(crate) fn kvx(bytes: u64) -> Self {
        Sizes { kvx: bytes, ..Sizes::default() }
    }

    /// At least so much of that.
    pub(crate) fn need(&mut self, pool: PoolKind, bytes: u64) {
        let size = match pool {
            PoolKind::Kvx => &mut self.kvx,
            PoolKind::Foreign => &mut self.foreign,
            PoolKind::Device => &mut self.device,
        };
        *size = bytes.max(*size);
    }

    /// Of the host.
    pub(crate) fn on_host(self) -> u64 {
        self.kvx + self.foreign
    }

    /// On the GPU.
    pub(crate) fn on_device(self) -> u64 {
        self.device
    }

    /// For another process's command line.
    pub(crate) fn arguments(self) -> [String; 3] {
        [("kvx", self.kvx), ("foreign", self.foreign), ("device", self.device)]
            .map(|(name, bytes)| format!("--{name}={bytes}"))
    }
}

/// A side's memory, as far as the points need it.
pub(crate) struct Pools {
    kvx: Option<Arc<Memory>>,
    foreign: Option<Arc<Memory>>,
    device: Option<(Arc<Device>, Arc<Memory>)>,
}

/// How another process of this host reaches a pool without kvx.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct PoolLocation {
    /// Its process.
    pub(crate) process: u32,
    /// Its file there, for a pool of kvx's own.
    pub(crate) file: Option<i32>,
    /// Its address there.
    pub(crate) base: u64,
    /// Its size.
    pub(crate) len: usize,
}

impl Pools {
    /// Of these sizes, every page present; none of a kind whose size is zero.
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

    /// The GPU of this side.
    pub(crate) fn device(&self) -> Option<&Arc<Device>> {
        self.device.as_ref().map(|(device, _)| device)
    }

    /// An agent that can move all of it.
    pub(crate) fn agent(&self, name: &str) -> kvx::AgentBuilder {
        let builder = Agent::builder(format!("{name}-{}", std::process::id()));
        match self.device() {
            Some(device) => builder.device(Arc::clone(device) as _),
            None => builder,
        }
    }

    /// All that there are.
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

/// Memory as an engine might bring it along: anonymous, on transparent huge pages where the kernel
/// gives them.
fn anonymous(len: usize) -> Result<Memory> {
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(format!("{len} bytes of memory: {}", std::io::Error::last_os_error()).into());
    }
    // SAFETY: advice on the mapping just made. Without huge pages it fails, and nothing depends on
    // it.
    unsafe { libc::madvise(base, len, libc::MADV_HUGEPAGE) };
    // SAFETY: the mapping is `len` bytes that nobody else knows of.
    unsafe { std::ptr::write_bytes(base.cast::<u8>(), 1, len) };
    // SAFETY: the mapping stays until its owner is dropped, and nobody takes references into it.
    Ok(unsafe { Memory::adopt(base.cast(), len, ForeignMapping { base: base as u64, len }) })
}

struct ForeignMapping {
    base: u64,
    len: usize,
}

impl Drop for ForeignMapping {
    fn drop(&mut self) {
        // SAFETY: `anonymous` made the mapping, and it is unmapped once, when its memory is dropped
        // and no one can access it.
        unsafe { libc::munmap(self.base as *mut libc::c_void, self.len) };
    }
}
