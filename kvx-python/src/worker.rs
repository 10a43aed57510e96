//! The half in the process of a worker.

use std::sync::Arc;
use std::time::Duration;

use kvx::connector::{
    Caches, Heads, JoinedRank, KvLayout, KvTensors, LayerCache, MemoryType, Rank, RequestId,
    WorkerRank,
};
use kvx::{HugePages, Memory};
use kvx_core::backend::sync::Mutex;
use kvx_vllm::engine::StepReport;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::{Process, log_to_stderr, python_error, socket};

/// How long a worker waits for its scheduler, which exists only after all workers have loaded and
/// warmed up the model.
const TO_JOIN: Duration = Duration::from_secs(3600);
/// How long the worker has to leave. vLLM gives it 5 s.
const TO_LEAVE: Duration = Duration::from_secs(3);

/// Memory for the KV cache that other processes of this host can map.
#[pyclass(frozen, module = "kvx._kvx")]
pub(crate) struct Pool(Arc<Memory>);

#[pymethods]
impl Pool {
    /// Allocates memory. It is zero.
    #[new]
    fn new(py: Python<'_>, len: usize) -> PyResult<Self> {
        py.detach(|| {
            log_to_stderr();
            Memory::pool(len)
                .huge_pages(HugePages::Prefer)
                .build()
                .map(|memory| Pool(Arc::new(memory)))
        })
        .map_err(|error| python_error(&error))
    }

    /// The address of the memory, which stays allocated as long as this object or its
    /// registration.
    fn address(&self) -> u64 {
        self.0.address()
    }
}

/// The half in the process of a worker. Its methods have the names of vLLM's.
#[pyclass(frozen, module = "kvx._kvx")]
pub(crate) struct Worker {
    socket: String,
    rank: WorkerRank,
    process: Process,
    membership: Arc<Mutex<Membership>>,
    reported: Mutex<StepReport>,
}

/// The state of the worker's connection to the scheduler.
enum Membership {
    Joining,
    Joined(JoinedRank),
    /// It could not join, or it has left.
    Ended(Option<kvx::Error>),
}

/// A layer's name, address, blocks, bytes of a block, bytes to the next block, group, and heads; 0
/// heads if each rank has all of them.
type Layer = (String, u64, u32, u64, u64, u32, u32);

#[pymethods]
impl Worker {
    /// Creates the half of a worker whose scheduler listens at the socket of this name.
    #[new]
    fn new(socket: String, tp: u32, pp: u32) -> Self {
        log_to_stderr();
        Worker {
            socket,
            rank: WorkerRank { pp, tp },
            process: Process::current(),
            membership: Arc::new(Mutex::new(Membership::Joining)),
            reported: Mutex::default(),
        }
    }

    /// Registers the caches, in the background: the scheduler exists only later.
    ///
    /// They lie in `pool`, or in memory at `address` of `len` bytes that `owner` keeps alive, on
    /// this CUDA or ROCm device or on the host.
    #[expect(clippy::too_many_arguments, reason = "`vllm.py` passes them by name")]
    #[pyo3(signature = (*, layers, layout, block_tokens, kernel_per_logical, transposed_keys, address, len, owner, pool, device))]
    fn register_kv_caches(
        &self,
        py: Python<'_>,
        layers: Vec<Layer>,
        layout: &str,
        block_tokens: u32,
        kernel_per_logical: u32,
        transposed_keys: bool,
        address: u64,
        len: usize,
        owner: Py<PyAny>,
        pool: Option<Py<Pool>>,
        device: Option<(String, usize)>,
    ) -> PyResult<()> {
        self.process.check()?;
        let memory_type = if device.is_some() { MemoryType::Vram } else { MemoryType::Dram };
        let layers = layers.into_iter().map(|layer| {
            let (name, start, blocks, block_len, block_stride, group, heads) = layer;
            LayerCache {
                name: name.into(),
                tensors: KvTensors::Together(start),
                blocks,
                block_len,
                block_stride,
                group,
                heads: if heads == 0 { Heads::Replicated } else { Heads::Sharded(heads) },
                memory: memory_type,
            }
        });
        let layout = KvLayout::from_wire(layout).map_err(|error| python_error(&error))?;
        let number = device.as_ref().map_or(0, |(_, number)| *number as u64);
        let caches =
            Caches::of_layers(layers.collect(), layout, block_tokens, kernel_per_logical, number)
                .map_err(|error| python_error(&error))?;
        let caches = if transposed_keys { caches.with_transposed_keys() } else { caches };
        let memory = match (pool, device) {
            (Some(pool), _) => Arc::clone(&pool.get().0),
            (None, None) => {
                // SAFETY: `owner` is the tensor's storage, which keeps these bytes in place. Python
                // has no references into them; torch's kernels read and write them while peers do,
                // as vLLM's protocol of leases orders it.
                Arc::new(unsafe { Memory::adopt(address as *mut u8, len, owner) })
            }
            (None, Some(device)) => py
                .detach(|| on_device(device, address, len, owner))
                .map_err(|error| python_error(&error))?,
        };
        let path = socket::path(&self.socket).map_err(|error| python_error(&error))?;
        let (rank, membership) = (self.rank, Arc::clone(&self.membership));
        let joins = move || {
            let joined = Rank::join(&path, rank, kvx::registry(), TO_JOIN)
                .and_then(|joined| joined.register(caches, [memory]).map(|()| joined));
            let joined = joined.map_or_else(
                |error| {
                    tracing::error!("this worker could not join its scheduler: {error}");
                    Membership::Ended(Some(error))
                },
                Membership::Joined,
            );
            let mut membership = membership.lock();
            if matches!(*membership, Membership::Joining) {
                *membership = joined;
            }
        };
        let started = std::thread::Builder::new().name("kvx-join".into()).spawn(joins);
        started.map(drop).map_err(|error| PyRuntimeError::new_err(error.to_string()))
    }

    /// Takes the scheduler's report of this step.
    fn bind_connector_metadata(&self, report: &[u8]) -> PyResult<()> {
        self.process.check()?;
        self.take(report)
    }

    /// Returns the requests whose blocks were sent, whose load has ended, and those of the latter
    /// whose load has failed.
    fn get_transfer_results(&self) -> PyResult<(Vec<String>, Vec<String>, Vec<String>)> {
        self.process.check()?;
        let notes = match &*self.membership.lock() {
            Membership::Ended(Some(error)) => return Err(python_error(error)),
            Membership::Joined(joined) => {
                if let Some(ended) = joined.ended_blocking(Duration::ZERO) {
                    let why =
                        ended.err().map_or_else(|| "it has ended".into(), |why| why.to_string());
                    return Err(PyRuntimeError::new_err(format!(
                        "this worker has lost its scheduler: {why}; restart this vLLM"
                    )));
                }
                joined.notes()
            }
            Membership::Joining | Membership::Ended(None) => Vec::new(),
        };
        notes.iter().try_for_each(|note| self.take(note))?;
        let mut reported = self.reported.lock();
        let names = |list: &mut Vec<RequestId>| {
            std::mem::take(list).iter().map(RequestId::to_string).collect()
        };
        let sent = names(&mut reported.sent);
        Ok((sent, names(&mut reported.received), names(&mut reported.failed)))
    }

    /// Leaves the scheduler. Nothing touches the memory afterwards.
    fn shutdown(&self, py: Python<'_>) -> PyResult<()> {
        self.process.check()?;
        py.detach(|| {
            let left = std::mem::replace(&mut *self.membership.lock(), Membership::Ended(None));
            if let Membership::Joined(joined) = left
                && let Err(why) = joined.leave(TO_LEAVE).wait_blocking(TO_LEAVE)
            {
                tracing::warn!("this worker did not leave in time: {why}");
            }
        });
        Ok(())
    }
}

impl Worker {
    fn take(&self, report: &[u8]) -> PyResult<()> {
        let report = StepReport::decode(report).map_err(|error| python_error(&error))?;
        self.reported.lock().append(report);
        Ok(())
    }
}

/// Adopts memory of a device of this kind (`cuda` or `rocm`) and number.
fn on_device(
    (kind, number): (String, usize),
    address: u64,
    len: usize,
    owner: Py<PyAny>,
) -> kvx::Result<Arc<Memory>> {
    let invalid = |why: String| kvx::ErrorKind::Invalid.because(why);
    macro_rules! adopt {
        ($module:ident) => {{
            let devices = kvx::$module::devices().map_err(|why| invalid(why.to_string()))?;
            let device = devices.get(number).ok_or_else(|| {
                invalid(format!(
                    "kvx sees {} {kind} devices, and the cache lies on {number}",
                    devices.len()
                ))
            })?;
            // SAFETY: `owner` is the tensor's storage, which keeps these bytes in place.
            unsafe { device.adopt(kvx::$module::DevicePtr(address), len, owner) }
        }};
    }
    let memory = match kind.as_str() {
        "cuda" => adopt!(cuda),
        "rocm" => adopt!(rocm),
        _ => Err(invalid(format!("kvx has no backend for memory of {kind} devices"))),
    };
    memory.map(Arc::new)
}
