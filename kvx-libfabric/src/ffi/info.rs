//! libfabric's offers: a list of `fi_info`, each a provider on a domain with all of its attributes.

use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::ptr::{self, NonNull};

use kvx_backend::loader;

use super::bindings_1_17::*;
use super::errno::Errno;
use super::library::{INTERFACE, LIBRARY, Library, Version};

/// The capabilities that an endpoint of ours needs of whatever provider.
const CAPS: u64 = (FI_MSG | FI_RMA) as u64;
/// The modes that kvx can serve if a provider wants them: memory for each operation.
const MODE: u64 = FI_CONTEXT | FI_CONTEXT2;
/// The rules of registration that are kept, if a provider has them. Not `FI_MR_RAW` (keys longer
/// than 8 bytes) and not `FI_MR_MMU_NOTIFY` (whose pages come and go).
const MR_MODE: u32 = FI_MR_LOCAL
    | FI_MR_VIRT_ADDR
    | FI_MR_ALLOCATED
    | FI_MR_PROV_KEY
    | FI_MR_ENDPOINT
    | FI_MR_RMA_EVENT
    | FI_MR_COLLECTIVE;

/// What is asked of providers beside what all of them must have.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ProviderQuery<'a> {
    /// One provider; all of them if none is named.
    pub(crate) provider: Option<&'a str>,
    /// That it reaches device memory.
    pub(crate) devices: bool,
    /// That the end of a write says that the bytes are visible at the target.
    pub(crate) delivery: bool,
}

/// A list, which libfabric allocated.
pub(crate) struct Infos(*mut fi_info);

// SAFETY: the list is plain memory that nobody changes.
unsafe impl Send for Infos {}
// SAFETY: the list is plain memory that nobody changes.
unsafe impl Sync for Infos {}

impl Infos {
    /// The offers that fit. Empty when there is none.
    ///
    /// # Errors
    /// libfabric's.
    pub(crate) fn find(
        library: &'static Library,
        asked: ProviderQuery<'_>,
    ) -> Result<Infos, Errno> {
        // SAFETY: "none" makes a new one with all of its parts.
        let hints = NonNull::new(unsafe { (library.functions().fi_dupinfo)(ptr::null()) });
        let hints = Infos(hints.ok_or(Errno(libc::ENOMEM))?.as_ptr());
        // SAFETY: a new `fi_info` has all parts that are written here; the strings are libfabric's
        // to free.
        unsafe {
            let info = &mut *hints.0;
            info.caps = CAPS | if asked.devices { FI_HMEM } else { 0 };
            info.mode = MODE;
            (*info.ep_attr).type_ = FI_EP_RDM;
            // The program's threads register memory; of all else, one thread at a time makes
            // progress.
            (*info.domain_attr).threading = FI_THREAD_COMPLETION;
            (*info.domain_attr).resource_mgmt = FI_RM_ENABLED;
            let devices = if asked.devices { FI_MR_HMEM } else { 0 };
            (*info.domain_attr).mr_mode = (MR_MODE | devices).cast_signed();
            (*info.tx_attr).op_flags =
                if asked.delivery { u64::from(FI_DELIVERY_COMPLETE) } else { 0 };
            if let Some(provider) = asked.provider {
                (*info.fabric_attr).prov_name = copied(provider)?;
            }
        }
        let mut found = ptr::null_mut();
        // Providers are opened here, which may do to signal handlers what a library may.
        // SAFETY: the hints are whole; the answer is a list of its own.
        let answer = loader::with_signals_kept(|| unsafe {
            let getinfo = library.functions().fi_getinfo;
            getinfo(INTERFACE.packed(), ptr::null(), ptr::null(), 0, hints.0, &mut found)
        });
        match Errno::check(answer) {
            Ok(_) => Ok(Infos(found)),
            Err(Errno(libc::ENODATA)) => Ok(Infos(ptr::null_mut())),
            Err(errno) => Err(errno),
        }
    }

    /// Each of them, in libfabric's order of preference.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Info> {
        let mut next = self.0.cast_const();
        std::iter::from_fn(move || {
            // SAFETY: the list is alive as long as `self`, and `Info` is a name for its entries.
            let info = unsafe { next.cast::<Info>().as_ref() }?;
            next = info.0.next;
            Some(info)
        })
    }
}

impl Drop for Infos {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: it is ours, and nobody uses it any more.
            unsafe { (LIBRARY.functions().fi_freeinfo)(self.0) };
        }
    }
}

/// A copy that libfabric frees.
fn copied(text: &str) -> Result<*mut c_char, Errno> {
    let text = CString::new(text).map_err(|_| Errno(libc::EINVAL))?;
    // SAFETY: it is a C string.
    NonNull::new(unsafe { libc::strdup(text.as_ptr()) })
        .map(NonNull::as_ptr)
        .ok_or(Errno(libc::ENOMEM))
}

/// Where a card sits on the PCI buses of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PciAddress {
    pub(crate) domain: u16,
    pub(crate) bus: u8,
    pub(crate) device: u8,
    pub(crate) function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

/// One provider on one domain.
#[repr(transparent)]
pub(crate) struct Info(fi_info);

impl Info {
    pub(super) fn raw(&self) -> *mut fi_info {
        (&raw const self.0).cast_mut()
    }

    /// A copy of its own.
    pub(crate) fn copy(&self) -> Result<Infos, Errno> {
        // SAFETY: it is whole, and the copy is a list of one.
        let copy = unsafe { (LIBRARY.functions().fi_dupinfo)(self.raw()) };
        if copy.is_null() { Err(Errno(libc::ENOMEM)) } else { Ok(Infos(copy)) }
    }

    fn fabric(&self) -> &fi_fabric_attr {
        // SAFETY: every entry of a list has all parts.
        unsafe { &*self.0.fabric_attr }
    }

    fn attributes(&self) -> &fi_domain_attr {
        // SAFETY: every entry of a list has all parts.
        unsafe { &*self.0.domain_attr }
    }

    fn transmits(&self) -> &fi_tx_attr {
        // SAFETY: every entry of a list has all parts.
        unsafe { &*self.0.tx_attr }
    }

    fn endpoint(&self) -> &fi_ep_attr {
        // SAFETY: every entry of a list has all parts.
        unsafe { &*self.0.ep_attr }
    }

    pub(super) fn fabric_attributes(&self) -> *mut fi_fabric_attr {
        self.0.fabric_attr
    }

    /// The provider's name, with those that it runs on: `tcp;ofi_rxm`.
    pub(crate) fn provider(&self) -> String {
        text(self.fabric().prov_name)
    }

    /// The domain's name: that of a card, or of a network interface.
    pub(crate) fn domain(&self) -> String {
        text(self.attributes().name)
    }

    /// The number of the protocol on the wire, and its version.
    pub(crate) fn protocol(&self) -> (u32, u32) {
        (self.endpoint().protocol, self.endpoint().protocol_version)
    }

    /// The provider's own version.
    pub(crate) fn provider_version(&self) -> Version {
        let packed = self.fabric().prov_version;
        Version::of(packed >> 16, packed & 0xffff)
    }

    /// Returns whether a rule of registration applies.
    pub(crate) fn wants(&self, rule: u32) -> bool {
        self.attributes().mr_mode.cast_unsigned() & rule != 0
    }

    /// Returns whether it reaches device memory.
    pub(crate) fn has_devices(&self) -> bool {
        self.0.caps & FI_HMEM != 0
    }

    /// Returns whether somebody must call the provider at the target for its memory to be read and
    /// written.
    pub(crate) fn is_progressed_by_hand(&self) -> bool {
        self.attributes().data_progress == FI_PROGRESS_MANUAL
    }

    /// Returns how many bytes of a key are used.
    pub(crate) fn key_size(&self) -> usize {
        self.attributes().mr_key_size
    }

    /// Returns how many operations it takes at a time.
    pub(crate) fn depth(&self) -> usize {
        self.transmits().size
    }

    /// Returns how many ranges an operation on remote memory may have, on both sides.
    pub(crate) fn ranges(&self) -> usize {
        self.transmits().iov_limit.min(self.transmits().rma_iov_limit).max(1)
    }

    /// The flags of operations that are posted with flags.
    pub(crate) fn flags(&self) -> u64 {
        self.transmits().op_flags
    }

    /// The longest message or piece.
    pub(crate) fn longest(&self) -> u64 {
        self.endpoint().max_msg_size as u64
    }

    /// Returns whether its addresses are texts rather than of a fixed length.
    pub(crate) fn has_text_addresses(&self) -> bool {
        self.0.addr_format == FI_ADDR_STR
    }

    /// Returns where its card sits, if the provider says so.
    pub(crate) fn pci(&self) -> Option<PciAddress> {
        // SAFETY: both are null or whole.
        let bus = unsafe { self.0.nic.as_ref()?.bus_attr.as_ref() }?;
        if bus.bus_type != FI_BUS_PCI {
            return None;
        }
        // SAFETY: the kind of bus says which part it is.
        let fi_pci_attr { domain_id, bus_id, device_id, function_id } = unsafe { bus.attr.pci };
        Some(PciAddress {
            domain: domain_id,
            bus: bus_id,
            device: device_id,
            function: function_id,
        })
    }
}

/// A text of libfabric's; empty if there is none.
fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: texts of an `fi_info` end in NUL and live as long as it.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}
