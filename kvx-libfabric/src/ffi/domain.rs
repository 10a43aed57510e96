//! A domain: one card or network interface, with the memory that is registered on it.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use kvx_backend::loader;

use super::bindings_1_17::*;
use super::errno::Errno;
use super::info::{Info, Infos};
use super::library::Library;

/// Reads a function from an object's table. Where a provider lacks a function, libfabric sets one
/// that returns an error.
macro_rules! function {
    ($object:expr, $table:ident, $name:ident) => {
        (*(*$object).$table).$name.expect("libfabric sets all functions of its first release")
    };
}
pub(super) use function;

/// Closes an object. Errors: another object still uses it.
///
/// # Safety
/// libfabric created the object, and nobody uses it afterwards.
pub(super) unsafe fn try_close(object: *mut fid) -> Result<(), Errno> {
    // SAFETY: every object begins with its `fid`.
    Errno::check(unsafe { function!(object, ops, close)(object) }).map(|_| ())
}

/// Closes an object, and logs the error.
///
/// # Safety
/// libfabric created the object, and nobody uses it afterwards.
pub(super) unsafe fn close(object: *mut fid, what: &'static str) {
    // SAFETY: guaranteed by the caller.
    if let Err(errno) = unsafe { try_close(object) } {
        tracing::warn!(what, ?errno, "libfabric did not close an object");
    }
}

/// An open domain. It was opened with `FI_THREAD_COMPLETION`: any thread may register memory, but
/// only one thread at a time may use an endpoint and the objects bound to it.
pub(crate) struct Domain {
    raw: NonNull<fid_domain>,
    fabric: NonNull<fid_fabric>,
    info: Infos,
}

// SAFETY: libfabric serialises concurrent uses of a domain and its registrations; see above.
unsafe impl Send for Domain {}
// SAFETY: libfabric serialises concurrent uses of a domain and its registrations; see above.
unsafe impl Sync for Domain {}

impl Domain {
    /// Opens a domain. Errors: libfabric's.
    pub(crate) fn open(library: &'static Library, info: &Info) -> Result<Arc<Domain>, Errno> {
        let info = info.copy()?;
        let first = info.iter().next().ok_or(Errno(libc::ENOMEM))?;
        // Providers initialise here, which may change signal handlers as any library may.
        let (fabric, raw) = loader::with_signals_kept(|| {
            let mut fabric = ptr::null_mut();
            // SAFETY: libfabric created the attributes, in the list that the domain keeps.
            let answer = unsafe {
                (library.functions().fi_fabric)(
                    first.fabric_attributes(),
                    &mut fabric,
                    ptr::null_mut(),
                )
            };
            Errno::check(answer)?;
            let fabric = NonNull::new(fabric).ok_or(Errno(libc::ENOMEM))?;
            let mut raw = ptr::null_mut();
            // SAFETY: the fabric is open, and the info belongs to it.
            let answer = unsafe {
                function!(fabric.as_ptr(), ops, domain)(
                    fabric.as_ptr(),
                    first.raw(),
                    &mut raw,
                    ptr::null_mut(),
                )
            };
            match (Errno::check(answer), NonNull::new(raw)) {
                (Ok(_), Some(raw)) => Ok((fabric, raw)),
                (answer, _) => {
                    // SAFETY: no object was opened in it.
                    unsafe { close(&raw mut (*fabric.as_ptr()).fid, "fabric") };
                    Err(answer.err().unwrap_or(Errno(libc::ENOMEM)))
                }
            }
        })?;
        Ok(Arc::new(Domain { raw, fabric, info }))
    }

    pub(crate) fn raw(&self) -> *mut fid_domain {
        self.raw.as_ptr()
    }

    pub(super) fn fabric(&self) -> *mut fid_fabric {
        self.fabric.as_ptr()
    }

    /// Returns the domain's `fi_info`.
    pub(crate) fn info(&self) -> &Info {
        self.info.iter().next().expect("a domain is opened with its info")
    }

    /// Registers memory. `key` is used if the provider lets the application choose keys. Peers can
    /// access the memory immediately or, if the provider requires [`Registration::enable`], after
    /// that.
    ///
    /// # Safety
    /// The memory stays valid until the [`Registration`] is dropped.
    ///
    /// # Errors
    /// libfabric's; `FI_ENOKEY` if the key is in use.
    pub(crate) unsafe fn register(
        self: &Arc<Self>,
        memory: MemoryDescription<'_>,
        key: u64,
    ) -> Result<Registration, Errno> {
        let range = libc::iovec { iov_base: memory.address as *mut _, iov_len: memory.len };
        let file;
        let mut attributes = Attributes::default();
        let asked = &mut attributes.known;
        asked.mr_iov = &range;
        asked.iov_count = 1;
        let written = if memory.read_only { 0 } else { FI_RECV | FI_READ | FI_REMOTE_WRITE };
        asked.access = u64::from(FI_SEND | FI_WRITE | FI_REMOTE_READ | written);
        asked.requested_key = key;
        let mut flags = 0;
        if let Some((interface, ordinal)) = memory.device {
            asked.iface = interface;
            asked.device.cuda = ordinal; // every interface has its device number at this offset
        }
        if let Some((descriptor, offset)) = memory.file {
            file = FabricDmaBuf::new(descriptor, offset, &memory);
            asked.mr_iov = (&raw const file).cast();
            flags |= FI_MR_DMABUF;
        }
        let mut raw = ptr::null_mut();
        // SAFETY: the domain is open; the attributes and what they point to outlive the call; the
        // caller guarantees that the memory does too.
        let answer = unsafe {
            let domain = self.raw.as_ptr();
            function!(domain, mr, regattr)(
                &raw mut (*domain).fid,
                &raw const *asked,
                flags,
                &mut raw,
            )
        };
        Errno::check(answer)?;
        let raw = NonNull::new(raw).ok_or(Errno(libc::ENOMEM))?;
        Ok(Registration { raw, is_closed: false, _domain: Arc::clone(self) })
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: endpoints and registrations hold a reference to the domain, so none is left.
        unsafe {
            close(&raw mut (*self.raw.as_ptr()).fid, "domain");
            close(&raw mut (*self.fabric.as_ptr()).fid, "fabric");
        }
    }
}

/// Registers a range of a dma-buf file instead of addresses: libfabric 1.20 and later.
const FI_MR_DMABUF: u64 = 1 << 40;

/// The dma-buf that the attributes of a registration point to with that flag.
#[repr(C)]
struct FabricDmaBuf {
    fd: c_int,
    offset: u64,
    len: usize,
    /// The address at which the file begins. Peers name bytes by this address plus the offset.
    base: *mut libc::c_void,
}

impl FabricDmaBuf {
    /// Describes memory that begins at this offset of a file.
    fn new(file: BorrowedFd<'_>, offset: u64, memory: &MemoryDescription<'_>) -> Self {
        let base = memory.address.wrapping_sub(offset) as *mut _;
        FabricDmaBuf { fd: file.as_raw_fd(), offset, len: memory.len, base }
    }
}

/// The attributes of a registration, followed by zeros for the fields that versions after 1.17
/// have.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    known: fi_mr_attr,
    later: [u64; 8],
}

/// The parameters of a registration.
#[derive(Clone, Copy)]
pub(crate) struct MemoryDescription<'a> {
    pub(crate) address: u64,
    pub(crate) len: usize,
    /// True if nobody writes to the memory.
    pub(crate) read_only: bool,
    /// libfabric's number of the kind of device, and the driver's number of the device.
    pub(crate) device: Option<(fi_hmem_iface, c_int)>,
    /// The dma-buf file from the device's driver, and the offset of the memory in it.
    pub(crate) file: Option<(BorrowedFd<'a>, u64)>,
}

/// A registration of memory.
pub(crate) struct Registration {
    raw: NonNull<fid_mr>,
    is_closed: bool,
    _domain: Arc<Domain>,
}

// SAFETY: libfabric serialises concurrent uses of a registration, like those of its domain, which
// outlives it.
unsafe impl Send for Registration {}
// SAFETY: libfabric serialises concurrent uses of a registration, like those of its domain, which
// outlives it.
unsafe impl Sync for Registration {}

impl Registration {
    /// Returns the descriptor for local operations on this memory.
    pub(crate) fn descriptor(&self) -> *mut libc::c_void {
        // SAFETY: it is open.
        unsafe { (*self.raw.as_ptr()).mem_desc }
    }

    /// Returns the key for peers' operations.
    pub(crate) fn key(&self) -> u64 {
        // SAFETY: it is open.
        unsafe { (*self.raw.as_ptr()).key }
    }

    pub(super) fn fid(&self) -> *mut fid {
        // SAFETY: it is open, and begins with its `fid`.
        unsafe { &raw mut (*self.raw.as_ptr()).fid }
    }

    /// Ends the registration, after all operations on the memory. Errors: libfabric's; the memory
    /// stays registered.
    pub(crate) fn close(mut self) -> Result<(), Errno> {
        self.is_closed = true;
        // SAFETY: it is open, and not used afterwards: `Drop` does not close it again.
        unsafe { try_close(self.fid()) }
    }

    /// Enables access through an endpoint, as `FI_MR_ENDPOINT` requires.
    ///
    /// # Safety
    /// `endpoint` is open.
    ///
    /// # Errors
    /// libfabric's.
    pub(super) unsafe fn enable(&self, endpoint: *mut fid) -> Result<(), Errno> {
        let own = self.fid();
        // SAFETY: both are open.
        unsafe {
            Errno::check(function!(own, ops, bind)(own, endpoint, 0))?;
            Errno::check(function!(own, ops, control)(
                own,
                FI_ENABLE.cast_signed(),
                ptr::null_mut(),
            ))?;
        }
        Ok(())
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if !self.is_closed {
            // SAFETY: the transport keeps it until the operations on it have ended.
            unsafe { close(self.fid(), "registration") };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn peers_reach_memory_inside_a_dma_buf_at_its_own_address() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let (address, len) = (0x7000_1000, 64);
        let memory = MemoryDescription { address, len, read_only: false, device: None, file: None };
        for offset in [0, 0x1000, 0x2_0000] {
            let FabricDmaBuf { base, len: length, offset: from, .. } =
                FabricDmaBuf::new(file.as_fd(), offset, &memory);
            assert_eq!((base.addr() as u64 + from, from, length), (address, offset, len));
        }
    }
}
