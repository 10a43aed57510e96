//! Registered memory, and the keys of peers' memory.

use std::ffi::{c_int, c_void};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvx_backend::checksum;
use kvx_backend::error::closed;
use kvx_backend::fabric::Registrar;
use kvx_backend::registrations::{Registration, RegistrationHandle, Registrations};
use kvx_core::backend::RemoteSpec;
use kvx_core::backend::sync::Mutex;
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{DeviceAccess, Error, ErrorKind, Memory, MemoryKind, RegionId, Result};

use crate::config::MAX_RAILS;
use crate::error::{self, NAME};
use crate::ffi::bindings_1_17::*;
use crate::ffi::{self, Endpoint, MemoryDescription, Version};
use crate::keys;
use crate::providers::is_shared_memory;
use crate::topology::{self, BusPlace, Topology};

/// The first interface that can register a dma-buf file of device memory.
const WITH_FILES: Version = Version::of(1, 20);
/// Returns libfabric's number of a kind of device.
fn interface(kind: MemoryKind) -> Option<fi_hmem_iface> {
    match kind {
        MemoryKind::Host | MemoryKind::Pinned => None,
        MemoryKind::Cuda => Some(FI_HMEM_CUDA),
        MemoryKind::Rocm => Some(FI_HMEM_ROCR),
    }
}

/// A local region.
pub(crate) struct Local {
    /// The local rails on which the region is registered, with the descriptor that operations take.
    rails: Box<[(usize, Descriptor)]>,
    registrations: Arc<Registration<ffi::Registration>>,
}

/// Valid until the region is unmapped; operations on it have ended by then.
#[derive(Clone, Copy)]
struct Descriptor(*mut c_void);

// SAFETY: a handle that is only passed to libfabric.
unsafe impl Send for Descriptor {}
// SAFETY: a handle that is only passed to libfabric.
unsafe impl Sync for Descriptor {}

impl Local {
    /// Returns the rails on which the region is registered; at least one.
    #[inline]
    pub(crate) fn rails(&self) -> impl ExactSizeIterator<Item = usize> + Clone {
        self.rails.iter().map(|(rail, _)| *rail)
    }

    /// Returns a rail by its index in [`rails`](Local::rails), and the descriptor for operations.
    #[inline]
    pub(crate) fn rail(&self, at: usize) -> (usize, *mut c_void) {
        let (rail, descriptor) = self.rails[at];
        (rail, descriptor.0)
    }

    /// Ends the registrations. The machine ensures that operations on them have ended. Errors: the
    /// provider keeps a registration, and peers may still access the memory.
    pub(crate) fn unmap(&self) -> Result<()> {
        self.registrations.end()
    }
}

impl RegistrationHandle for ffi::Registration {
    fn close(self) -> Result<()> {
        ffi::Registration::close(self)
            .map_err(|errno| error::native("the provider could not end a registration", errno))
    }
}

/// A rail for the purpose of registration.
pub(crate) struct RailPlace {
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) place: Option<BusPlace>,
}

/// The rails and all registrations. No registration outlives its memory or the agent.
pub(crate) struct MemoryRegistrar {
    /// `None` after `close`.
    rails: Mutex<Option<Arc<OpenRails>>>,
    registrations: Registrations<ffi::Registration>,
}

struct OpenRails {
    rails: Vec<RailPlace>,
    topology: Topology,
    /// The maximum number of rails per region.
    most: usize,
    /// True if the agent has warned that device memory is registered by its address.
    has_warned: AtomicBool,
}

impl MemoryRegistrar {
    pub(crate) fn new(rails: Vec<RailPlace>, topology: Topology, most: usize) -> Self {
        let has_warned = AtomicBool::new(false);
        let rails = Arc::new(OpenRails { rails, topology, most, has_warned });
        MemoryRegistrar { rails: Mutex::new(Some(rails)), registrations: Registrations::default() }
    }

    /// Ends all registrations, and releases the endpoints, when no operation is in flight.
    pub(crate) fn close(&self) {
        drop(self.rails.lock().take());
        self.registrations.close();
    }
}

impl OpenRails {
    /// Warns, once for an agent, that device memory is registered by its address, for which the
    /// provider must find it itself.
    fn warn_of_plain_registration(&self, kind: MemoryKind, info: &ffi::Info, why: &Error) {
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            let provider = info.provider();
            tracing::warn!(backend = NAME, "{}", plain_registration(kind, &provider, why));
        }
    }

    /// Registers memory on a rail.
    fn register(&self, rail: usize, memory: &Memory) -> Result<ffi::Registration> {
        let domain = self.rails[rail].endpoint.domain();
        let (address, len, read_only) = (memory.address(), memory.len(), memory.is_read_only());
        let mut described = MemoryDescription { address, len, read_only, device: None, file: None };
        if let (Some(interface), Some(access)) = (interface(memory.kind()), memory.device_access())
        {
            if !domain.info().has_devices() {
                let (provider, kind) = (domain.info().provider(), memory.kind());
                let why = format!(
                    "{provider} does not reach {kind} memory here (no FI_HMEM): name another \"libfabric.provider\", or register host memory"
                );
                return Err(ErrorKind::Unsupported.because(why).with_backend(NAME));
            }
            described.device = Some((interface, device_number(memory.kind(), access.ordinal())?));
            // SAFETY: core keeps the memory until the region is released, after `unmap`.
            match unsafe { register_file(domain, described, &**access) } {
                Ok(registration) => return Ok(registration),
                Err(why) => self.warn_of_plain_registration(memory.kind(), domain.info(), &why),
            }
        }
        // SAFETY: core keeps the memory until the region is released, after `unmap`.
        unsafe { keys::register(domain, described) }
    }
}

/// Returns the driver's number of a device as libfabric takes it. Errors: `Unsupported` for a
/// number that no driver assigns.
fn device_number(kind: MemoryKind, ordinal: u32) -> Result<c_int> {
    c_int::try_from(ordinal).map_err(|_| {
        let why = format!(
            "the driver's number of this {kind} device is unknown ({ordinal}): register memory \
             whose device reports it, or host memory"
        );
        ErrorKind::Unsupported.because(why).with_backend(NAME)
    })
}

/// Registers device memory as a part of a dma-buf. Errors: `Unsupported` if the library or the
/// device's driver has none, libfabric's if the provider does not accept it.
///
/// # Safety
/// As for [`keys::register`].
unsafe fn register_file(
    domain: &Arc<ffi::Domain>,
    described: MemoryDescription<'_>,
    access: &dyn DeviceAccess,
) -> Result<ffi::Registration> {
    let interface = domain.info().interface();
    if interface < WITH_FILES {
        let why =
            format!("libfabric {interface} registers no dma-buf: install {WITH_FILES} or newer");
        return Err(ErrorKind::Unsupported.because(why));
    }
    let exported = access.dma_buf(described.address, described.len)?;
    let file = Some((exported.file.as_fd(), exported.offset));
    // SAFETY: guaranteed by the caller.
    unsafe { keys::register(domain, MemoryDescription { file, ..described }) }
}

/// Returns the warning about device memory that is registered by its address.
fn plain_registration(kind: MemoryKind, provider: &str, why: &Error) -> String {
    let module = match kind {
        MemoryKind::Cuda => "the kernel module nvidia-peermem",
        _ => "a kernel driver that gives cards access to its memory",
    };
    format!(
        "{provider} registers {kind} memory by its address, which needs {module} and a provider \
         built for {kind}, because it was not registered as a dma-buf: {why}"
    )
}

// SAFETY: `Local` keeps the registrations until the region is revoked or the agent ends; core keeps
// the memory until then.
unsafe impl Registrar<Local> for MemoryRegistrar {
    fn register(&self, _: RegionId, memory: &Arc<Memory>) -> Result<(Local, Vec<u8>)> {
        let open = self.rails.lock().clone().ok_or_else(closed)?;
        let places: Vec<Option<&BusPlace>> =
            open.rails.iter().map(|rail| rail.place.as_ref()).collect();
        // A single rail is always the nearest.
        let place = if places.len() > 1 { open.topology.of_memory(memory) } else { None };
        let near = topology::nearest(place.as_ref(), &places, open.most);
        let (mut rails, mut keys, mut registrations) = (Vec::new(), Vec::new(), Vec::new());
        for rail in near {
            let registration = open.register(rail, memory)?;
            let endpoint = &open.rails[rail].endpoint;
            let info = endpoint.domain().info();
            endpoint.enable(&registration).map_err(|errno| {
                error::native("the provider could not enable this memory", errno)
            })?;
            // Over shared memory kvx copies by address, whatever the provider requires.
            let by_address = info.wants(FI_MR_VIRT_ADDR) || is_shared_memory(&info.provider());
            let base = if by_address { memory.address() } else { 0 };
            keys.push(Key { rail, base, key: registration.key() });
            rails.push((rail, Descriptor(registration.descriptor())));
            registrations.push(registration);
        }
        let registrations = self.registrations.add(registrations);
        Ok((Local { rails: rails.into(), registrations }, encode(&keys)))
    }
}

/// The access to a region over one of its owner's rails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) rail: usize,
    /// The provider's number of its first byte: its address, or 0.
    pub(crate) base: u64,
    pub(crate) key: u64,
}

fn encode(keys: &[Key]) -> Vec<u8> {
    let mut out = vec![keys.len() as u8];
    for Key { rail, base, key } in keys {
        out.put_u8(*rail as u8);
        out.put_u64(*base);
        out.put_u64(*key);
    }
    checksum::append(out)
}

/// A peer's region.
pub(crate) struct Remote(Box<[Key]>);

impl Remote {
    /// Decodes the export of a region of an agent with `rails` rails. Errors: `Malformed`.
    pub(crate) fn decode(region: &RemoteSpec<'_>, rails: usize) -> Result<Remote> {
        let mut reader =
            Reader::new("LIBFABRIC keys", checksum::strip("LIBFABRIC keys", region.export)?);
        let count = usize::from(reader.u8()?);
        if !(1..=MAX_RAILS).contains(&count) {
            return Err(reader.malformed("its number of keys is 0 or too large"));
        }
        let mut keys = Vec::with_capacity(count);
        for _ in 0..count {
            let key =
                Key { rail: usize::from(reader.u8()?), base: reader.u64()?, key: reader.u64()? };
            if key.rail >= rails || key.base.checked_add(region.len).is_none() {
                return Err(reader.malformed("its address range is invalid"));
            }
            keys.push(key);
        }
        reader.end()?;
        Ok(Remote(keys.into()))
    }

    /// Returns the owner's rails over which the region is reached; at least one.
    #[inline]
    pub(crate) fn rails(&self) -> impl ExactSizeIterator<Item = usize> + Clone {
        self.0.iter().map(|key| key.rail)
    }

    /// Returns a key by its index in [`rails`](Remote::rails).
    #[inline]
    pub(crate) fn key(&self, at: usize) -> Key {
        self.0[at]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvx_core::backend::RegionKey;

    fn decode(export: &[u8], len: u64) -> Result<Remote> {
        let key = RegionKey([0; 16]);
        Remote::decode(&RemoteSpec { id: RegionId(1), key, len, kind: MemoryKind::Host, export }, 2)
    }

    #[test]
    fn a_device_of_unknown_number_is_an_error_and_not_the_first_device() {
        assert_eq!(device_number(MemoryKind::Cuda, 0).unwrap(), 0);
        assert_eq!(device_number(MemoryKind::Cuda, 7).unwrap(), 7);
        // Drivers report -1 or -2 for memory of no device.
        for unknown in [u32::MAX, u32::MAX - 1] {
            let error = device_number(MemoryKind::Cuda, unknown).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.sentence().contains("number"), "{error}");
        }
    }

    #[test]
    fn a_registration_by_address_says_what_it_needs_and_why_it_is_made() {
        let why = ErrorKind::Unsupported.because("libfabric 1.17 registers no dma-buf");
        let told = plain_registration(MemoryKind::Cuda, "efa", &why);
        for part in ["efa", "nvidia-peermem", "1.17 registers no dma-buf"] {
            assert!(told.contains(part), "{told}");
        }
    }

    #[test]
    fn keys_are_encoded_unchanged_and_invalid_ones_are_rejected() {
        let keys = [Key { rail: 0, base: 0, key: 7 }, Key { rail: 1, base: 4096, key: u64::MAX }];
        let remote = decode(&encode(&keys), 1 << 40).unwrap();
        assert_eq!((remote.key(0), remote.key(1)), (keys[0], keys[1]));
        assert!(remote.rails().eq([0, 1]));
        assert!(decode(&encode(&[]), 1).is_err());
        assert!(
            decode(&encode(&[Key { rail: 2, ..keys[0] }]), 1).is_err(),
            "the peer has two rails"
        );
        assert!(decode(&encode(&[Key { base: u64::MAX, ..keys[0] }]), 1).is_err());
        assert!(decode(&encode(&keys)[1..], 1).is_err());
    }
}
