//! Registered memory, and the keys of peers' memory.

use std::sync::Arc;

use kvx_backend::checksum;
use kvx_backend::error::closed;
use kvx_backend::fabric::Registrar;
use kvx_backend::registrations::{Registration, RegistrationHandle, Registrations};
use kvx_core::backend::RemoteSpec;
use kvx_core::backend::sync::Mutex;
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{ErrorKind, Memory, MemoryKind, MemoryKinds, RegionId, Result};
use slab::Slab;

use crate::error;
use crate::ffi::bindings_1_13::*;
use crate::ffi::{self, Endpoint, MapParams, MappedMemory, RemoteKey, UcxContext, Version, pad};

/// The maximum length of a packed key from a peer.
const MAX_KEY: usize = 64 << 10;
/// The offset of the memory kind in a packed key, after a map of memory domains, in all versions
/// from 1.13 to `KIND_KNOWN`.
const KIND_AT: usize = 8;
const KIND_KNOWN: Version = Version::new(1, 23, u32::MAX);

/// Returns UCX's constant for a kind of memory.
fn memory_type(kind: MemoryKind) -> ucs_memory_type_t {
    match kind {
        MemoryKind::Host | MemoryKind::Pinned => UCS_MEMORY_TYPE_HOST,
        MemoryKind::Cuda => UCS_MEMORY_TYPE_CUDA,
        MemoryKind::Rocm => UCS_MEMORY_TYPE_ROCM,
    }
}

/// Returns the registration parameters of a region. UCX detects the device that its memory belongs
/// to.
fn mapping(memory: &Memory) -> MapParams {
    MapParams::new(memory.as_ptr(), memory.len(), Some(memory_type(memory.kind())))
}

/// Returns the kinds of memory in UCX's bit set.
pub(crate) fn kinds(types: u64) -> MemoryKinds {
    let moves = |kind: &MemoryKind| kind.is_host() || types & (1 << memory_type(*kind)) != 0;
    let kinds: Vec<MemoryKind> = MemoryKind::ALL.into_iter().filter(moves).collect();
    MemoryKinds::of(&kinds)
}

/// A local region.
pub(crate) struct Local {
    handle: Handle,
    registration: Arc<Registration<MappedMemory>>,
}

/// The handle that operations on a region take. It is valid until the region is unmapped;
/// operations have ended by then.
#[derive(Clone, Copy)]
struct Handle(ucp_mem_h);

// SAFETY: a handle that is only passed to UCX, which locks the context behind it.
unsafe impl Send for Handle {}
// SAFETY: a handle that is only passed to UCX, which locks the context behind it.
unsafe impl Sync for Handle {}

impl Local {
    pub(crate) fn handle(&self) -> ucp_mem_h {
        self.handle.0
    }

    /// Ends the registration. The machine ensures that operations on it have ended. Errors: UCX
    /// keeps the registration, and peers may still access the memory.
    pub(crate) fn unmap(&self) -> Result<()> {
        self.registration.end()
    }
}

impl RegistrationHandle for MappedMemory {
    fn close(self) -> Result<()> {
        self.unmap().map_err(|status| error::native("UCX could not end a registration", status))
    }
}

/// A context and its registrations. No registration outlives its memory or the agent's last worker.
pub(crate) struct MemoryRegistrar {
    /// `None` after the last worker has ended.
    open: Mutex<Option<OpenContext>>,
    registrations: Registrations<MappedMemory>,
}

struct OpenContext {
    context: Arc<UcxContext>,
    /// The number of workers that have not ended.
    workers: usize,
}

impl MemoryRegistrar {
    pub(crate) fn new(context: Arc<UcxContext>, workers: usize) -> Self {
        let open = Mutex::new(Some(OpenContext { context, workers }));
        MemoryRegistrar { open, registrations: Registrations::default() }
    }

    fn context(&self) -> Result<Arc<UcxContext>> {
        self.open.lock().as_ref().map(|open| Arc::clone(&open.context)).ok_or_else(closed)
    }

    /// Records that a worker has ended, with none of its operations in flight. After the last
    /// worker, ends all registrations and releases the context.
    pub(crate) fn worker_ended(&self) {
        let open = self.open.lock().take_if(|open| {
            open.workers -= 1;
            open.workers == 0
        });
        if open.is_some() {
            self.registrations.close();
        }
    }
}

// SAFETY: `Local` keeps the registration until the region is revoked or the agent ends; core keeps
// the memory until then.
unsafe impl Registrar<Local> for MemoryRegistrar {
    fn register(&self, _: RegionId, memory: &Arc<Memory>) -> Result<(Local, Vec<u8>)> {
        let refused = |what: &'static str| {
            move |status| {
                error::native(format!("UCX could not {what} {} memory", memory.kind()), status)
            }
        };
        let context = self.context()?;
        // SAFETY: core keeps the memory until the region is released, after `unmap`.
        let mapped = unsafe { context.map(&mapping(memory)) }.map_err(refused("register"))?;
        let key = mapped.key().map_err(refused("make a key for"))?;
        let mut export = Vec::with_capacity(key.0.len() + 16);
        export.put_u64(memory.address());
        export.put(&key.0);
        let handle = Handle(mapped.raw());
        let registration = self.registrations.add(vec![mapped]);
        Ok((Local { handle, registration }, checksum::append(export)))
    }
}

/// A peer's region as one endpoint knows it: its base address, and the number of its key.
pub(crate) struct Remote {
    pub(crate) base: u64,
    pub(crate) key: usize,
    unused: Arc<Mutex<Vec<usize>>>,
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.unused.lock().push(self.key);
    }
}

/// The keys of peers. UCX requires that the thread that uses the worker drops them while the worker
/// is alive.
#[derive(Default)]
pub(crate) struct RemoteKeys {
    keys: Slab<RemoteKey>,
    unused: Arc<Mutex<Vec<usize>>>,
}

impl RemoteKeys {
    /// Returns the key of a [`Remote`].
    #[inline]
    pub(crate) fn of(&self, remote: &Remote) -> &RemoteKey {
        &self.keys[remote.key]
    }

    /// Unpacks the key of a granted region for `endpoint`. Errors: `Malformed`, `Unsupported`.
    ///
    /// # Safety
    /// As for [`Endpoint::unpack`].
    pub(crate) unsafe fn unpack(
        &mut self,
        endpoint: &Endpoint,
        region: &RemoteSpec<'_>,
    ) -> Result<Remote> {
        self.drop_unused();
        let export = checksum::strip("UCX key", region.export)?;
        let mut reader = Reader::new("UCX key", export);
        let base = reader.u64()?;
        if base.checked_add(region.len).is_none() || reader.left() > MAX_KEY {
            return Err(reader.malformed("its address, length or key is invalid"));
        }
        let packed = reader.bytes(reader.left())?;
        // UCX uses the kind as an index without a bounds check.
        let is_known = ffi::LIBRARY.opened().is_some_and(|library| library.version() <= KIND_KNOWN);
        if is_known
            && packed.get(KIND_AT).map(|kind| u32::from(*kind)) != Some(memory_type(region.kind))
        {
            return Err(reader.malformed("it is for another kind of memory"));
        }
        // SAFETY: guaranteed by the caller.
        let key = unsafe { endpoint.unpack(&pad(packed)) }.map_err(|status| {
            error::native("UCX reaches this region of the peer over none of its lanes", status)
                .with_kind(ErrorKind::Unsupported)
        })?;
        Ok(Remote { base, key: self.keys.insert(key), unused: Arc::clone(&self.unused) })
    }

    /// Drops the keys that are no longer used.
    pub(crate) fn drop_unused(&mut self) {
        let unused = std::mem::take(&mut *self.unused.lock());
        for key in unused {
            self.keys.try_remove(key);
        }
    }

    /// Drops all keys.
    pub(crate) fn clear(&mut self) {
        self.keys.clear();
    }
}

#[cfg(test)]
mod tests {
    use kvx_core::Options;
    use kvx_core::backend::RegionKey;
    use kvx_testkit::TestDevice;

    use super::*;
    use crate::callbacks::{CallbackNotes, endpoint_failed};
    use crate::config::Config;
    use crate::ffi::Worker;
    use crate::versions;

    #[test]
    fn ucx_gets_the_address_and_the_kind_of_device_memory() {
        let typed = u64::from(UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE);
        let told = |memory: &Memory| {
            let MapParams(params) = mapping(memory);
            assert_eq!((params.address as u64, params.length), (memory.address(), memory.len()));
            assert_eq!(params.field_mask & typed, typed);
            params.memory_type
        };
        let device = |kind| TestDevice::new(kind).allocate(4096);
        assert_eq!(told(&device(MemoryKind::Cuda)), UCS_MEMORY_TYPE_CUDA);
        assert_eq!(told(&device(MemoryKind::Rocm)), UCS_MEMORY_TYPE_ROCM);
        assert_eq!(told(&Memory::owned(vec![0; 4096])), UCS_MEMORY_TYPE_HOST);
    }

    #[test]
    fn a_context_moves_host_memory_and_the_kinds_that_it_reports() {
        assert_eq!(kinds(0), MemoryKinds::HOST);
        assert_eq!(kinds(1 << UCS_MEMORY_TYPE_HOST), MemoryKinds::HOST);
        let cuda = kinds(1 << UCS_MEMORY_TYPE_CUDA);
        assert!(cuda.contains(MemoryKind::Cuda) && !cuda.contains(MemoryKind::Rocm));
        assert!(kinds(1 << UCS_MEMORY_TYPE_ROCM).contains(MemoryKind::Rocm));
    }

    const PAGE: u64 = 4096;

    /// Calls `body` with the export of a region of [`PAGE`] bytes, and with a function that unpacks
    /// an export for a region of the given length and kind.
    fn exported(body: impl FnOnce(&[u8], &mut dyn FnMut(&[u8], u64, MemoryKind) -> Result<()>)) {
        let library = ffi::LIBRARY.open().expect("the parent has found it");
        let settings = Config::read(&Options::new()).unwrap().settings(library.path());
        let context = UcxContext::new(library, &settings).expect("a context");
        let (near, far) = (Worker::new(&context).unwrap(), Worker::new(&context).unwrap());
        let notes = Box::<CallbackNotes>::default();
        let target = (&raw const *notes).cast_mut().cast();
        let address = far.address().unwrap();
        // SAFETY: the notes outlive the worker, which destroys its endpoints.
        let endpoint = unsafe { near.connect(&address, endpoint_failed, target) }.unwrap();
        let (mut keys, registrar) = (RemoteKeys::default(), MemoryRegistrar::new(context, 1));
        let memory = Arc::new(Memory::owned(vec![0; PAGE as usize]));
        let (_local, export) = registrar.register(RegionId(1), &memory).unwrap();
        body(&export, &mut |export, len, kind| {
            let region = RemoteSpec { id: RegionId(1), key: RegionKey([0; 16]), len, kind, export };
            // SAFETY: one thread, and the endpoint is open.
            unsafe { keys.unpack(&endpoint, &region) }.map(drop)
        });
        keys.clear();
        drop((near, far));
        registrar.worker_ended();
    }

    #[test]
    fn ucx_is_shown_no_key_that_was_altered_or_is_none() {
        versions::on_each("memory::tests::ucx_is_shown_no_key_that_was_altered_or_is_none", |_| {
            exported(|export, unpack| {
                let mut refused = |export: &[u8], len, kind| {
                    assert_eq!(
                        unpack(export, len, kind).map_err(|why| why.kind()),
                        Err(ErrorKind::Malformed)
                    );
                };
                let bytes = export.len() - 8;
                for at in 0..export.len() {
                    refused(&export[..at], PAGE, MemoryKind::Host);
                    let mut altered = export.to_vec();
                    altered[at] ^= 0x80;
                    refused(&altered, PAGE, MemoryKind::Host);
                }
                // With a valid checksum, kvx still rejects bytes that no key has.
                let resealed = |alter: &dyn Fn(&mut Vec<u8>)| {
                    let mut bytes = export[..bytes].to_vec();
                    alter(&mut bytes);
                    checksum::append(bytes)
                };
                for kind in 1..=u8::MAX {
                    refused(&resealed(&|bytes| bytes[8 + KIND_AT] = kind), PAGE, MemoryKind::Host);
                }
                refused(&resealed(&|bytes| bytes.truncate(8 + KIND_AT)), PAGE, MemoryKind::Host);
                refused(
                    &resealed(&|bytes| bytes.resize(8 + MAX_KEY + 1, 0)),
                    PAGE,
                    MemoryKind::Host,
                );
                refused(&resealed(&|bytes| bytes[..8].fill(0xff)), PAGE, MemoryKind::Host);
                refused(export, PAGE, MemoryKind::Cuda);
                for kind in [MemoryKind::Host, MemoryKind::Pinned] {
                    assert_eq!(unpack(export, PAGE, kind).map_err(|why| why.to_string()), Ok(()));
                }
            });
        });
    }
}
