//! The results of `fi_getinfo`: a list of `fi_info`, each a provider on a domain with its
//! attributes.

use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::ptr::{self, NonNull};

use kvx_backend::loader;

use super::bindings_1_17::*;
use super::errno::Errno;
use super::library::{LIBRARY, Library, Version, interface_of};

/// The capabilities that kvx requires of every provider.
const CAPS: u64 = (FI_MSG | FI_RMA) as u64;
/// The modes that kvx supports if a provider requires them: memory for each operation.
const MODE: u64 = FI_CONTEXT | FI_CONTEXT2;
/// The registration modes that kvx supports if a provider requires them. Not `FI_MR_RAW` (keys
/// longer than 8 bytes) and not `FI_MR_MMU_NOTIFY` (memory whose pages may be unmapped).
const MR_MODE: u32 = FI_MR_LOCAL
    | FI_MR_VIRT_ADDR
    | FI_MR_ALLOCATED
    | FI_MR_PROV_KEY
    | FI_MR_ENDPOINT
    | FI_MR_RMA_EVENT
    | FI_MR_COLLECTIVE;

/// Requirements besides those for all providers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ProviderQuery<'a> {
    /// The provider; all providers if `None`.
    pub(crate) provider: Option<&'a str>,
    /// Requires access to device memory.
    pub(crate) devices: bool,
    /// Requires `FI_DELIVERY_COMPLETE`: the bytes of a completed write are visible at the target.
    /// `ofi_rxm` accepts it for every provider below it, also if that does not keep it.
    pub(crate) delivery: bool,
}

/// A list that libfabric allocated.
pub(crate) struct Infos(*mut fi_info);

// SAFETY: the list is plain memory that nobody changes.
unsafe impl Send for Infos {}
// SAFETY: the list is plain memory that nobody changes.
unsafe impl Sync for Infos {}

impl Infos {
    /// Returns the matching entries, which may be none.
    ///
    /// # Errors
    /// libfabric's.
    pub(crate) fn find(
        library: &'static Library,
        asked: ProviderQuery<'_>,
    ) -> Result<Infos, Errno> {
        // SAFETY: a null argument creates a new `fi_info` with all of its parts.
        let hints = NonNull::new(unsafe { (library.functions().fi_dupinfo)(ptr::null()) });
        let hints = Infos(hints.ok_or(Errno(libc::ENOMEM))?.as_ptr());
        // SAFETY: a new `fi_info` has all parts that are written here; libfabric frees the strings.
        unsafe {
            let info = &mut *hints.0;
            info.caps = CAPS | if asked.devices { FI_HMEM } else { 0 };
            info.mode = MODE;
            (*info.ep_attr).type_ = FI_EP_RDM;
            // Any thread may register memory; apart from that, one thread at a time makes progress.
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
        // Providers initialise here, which may change signal handlers as any library may.
        // SAFETY: the hints are complete; the answer is a separate list.
        let answer = loader::with_signals_kept(|| unsafe {
            let getinfo = library.functions().fi_getinfo;
            let interface = interface_of(library.version()).packed();
            getinfo(interface, ptr::null(), ptr::null(), 0, hints.0, &mut found)
        });
        match Errno::check(answer) {
            Ok(_) => Ok(Infos(found)),
            Err(Errno(libc::ENODATA)) => Ok(Infos(ptr::null_mut())),
            Err(errno) => Err(errno),
        }
    }

    /// Links entries to a list, in this order, with only the names of a provider, domain and card.
    /// It is never freed.
    #[cfg(test)]
    pub(crate) fn of_names(
        entries: &[(&'static CStr, &'static CStr, Option<&'static CStr>)],
    ) -> std::mem::ManuallyDrop<Infos> {
        let named = |name: &CStr| name.as_ptr().cast_mut();
        let mut next = ptr::null_mut();
        for (provider, domain, card) in entries.iter().rev() {
            let device_attr = |name| fi_device_attr { name: named(name), ..Default::default() };
            let nic = |name| fid_nic {
                device_attr: Box::leak(Box::new(device_attr(name))),
                ..Default::default()
            };
            next = Box::leak(Box::new(fi_info {
                next,
                fabric_attr: Box::leak(Box::new(fi_fabric_attr {
                    prov_name: named(provider),
                    ..Default::default()
                })),
                domain_attr: Box::leak(Box::new(fi_domain_attr {
                    name: named(domain),
                    ..Default::default()
                })),
                nic: card.map_or(ptr::null_mut(), |name| Box::leak(Box::new(nic(name)))),
                ..Default::default()
            }));
        }
        std::mem::ManuallyDrop::new(Infos(next))
    }

    /// Iterates over the entries, in libfabric's order of preference.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Info> {
        let mut next = self.0.cast_const();
        std::iter::from_fn(move || {
            // SAFETY: the list lives as long as `self`, and `Info` has the layout of its entries.
            let info = unsafe { next.cast::<Info>().as_ref() }?;
            next = info.0.next;
            Some(info)
        })
    }
}

impl Drop for Infos {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: this is the only owner, and nobody uses the list afterwards.
            unsafe { (LIBRARY.functions().fi_freeinfo)(self.0) };
        }
    }
}

/// Returns a copy that libfabric frees.
fn copied(text: &str) -> Result<*mut c_char, Errno> {
    let text = CString::new(text).map_err(|_| Errno(libc::EINVAL))?;
    // SAFETY: it is a C string.
    NonNull::new(unsafe { libc::strdup(text.as_ptr()) })
        .map(NonNull::as_ptr)
        .ok_or(Errno(libc::ENOMEM))
}

/// The address of a card on this machine's PCI buses.
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

/// A provider on a domain.
#[repr(transparent)]
pub(crate) struct Info(fi_info);

impl Info {
    pub(crate) fn raw(&self) -> *mut fi_info {
        (&raw const self.0).cast_mut()
    }

    /// Returns a separate copy.
    pub(crate) fn copy(&self) -> Result<Infos, Errno> {
        // SAFETY: it is complete, and the copy is a list with one entry.
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

    /// Returns the name of the provider, including the layers above the core provider:
    /// `tcp;ofi_rxm`.
    pub(crate) fn provider(&self) -> String {
        text(self.fabric().prov_name)
    }

    /// Returns the domain's name: that of a card or a network interface.
    pub(crate) fn domain(&self) -> String {
        text(self.attributes().name)
    }

    /// Returns the number and version of the wire protocol.
    pub(crate) fn protocol(&self) -> (u32, u32) {
        (self.endpoint().protocol, self.endpoint().protocol_version)
    }

    /// Returns the interface that the provider serves: the requested one.
    pub(crate) fn interface(&self) -> Version {
        Version::unpack(self.fabric().api_version)
    }

    /// Returns the provider's own version.
    pub(crate) fn provider_version(&self) -> Version {
        let packed = self.fabric().prov_version;
        Version::of(packed >> 16, packed & 0xffff)
    }

    /// Returns whether the provider requires a registration mode.
    pub(crate) fn wants(&self, rule: u32) -> bool {
        self.attributes().mr_mode.cast_unsigned() & rule != 0
    }

    /// Returns whether the provider can access device memory.
    pub(crate) fn has_devices(&self) -> bool {
        self.0.caps & FI_HMEM != 0
    }

    /// Returns whether the target must call the provider for peers to access its memory.
    pub(crate) fn is_progressed_by_hand(&self) -> bool {
        self.attributes().data_progress == FI_PROGRESS_MANUAL
    }

    /// Returns the number of bytes in a key.
    pub(crate) fn key_size(&self) -> usize {
        self.attributes().mr_key_size
    }

    /// Returns how many operations the endpoint takes: those that it initiates, and receives.
    pub(crate) fn depths(&self) -> (usize, usize) {
        // SAFETY: every entry of a list has all parts.
        (self.transmits().size, unsafe { &*self.0.rx_attr }.size)
    }

    /// Returns how many ranges an operation may have on each side.
    pub(crate) fn ranges(&self) -> usize {
        self.transmits().iov_limit.min(self.transmits().rma_iov_limit).max(1)
    }

    /// Returns the flags of operations that take flags.
    pub(crate) fn flags(&self) -> u64 {
        self.transmits().op_flags
    }

    /// Returns the maximum length of a message or piece.
    pub(crate) fn longest(&self) -> u64 {
        self.endpoint().max_msg_size as u64
    }

    /// Returns whether addresses are text rather than of a fixed length.
    pub(crate) fn has_text_addresses(&self) -> bool {
        self.0.addr_format == FI_ADDR_STR
    }

    /// Returns whether addresses are socket addresses.
    pub(crate) fn has_socket_addresses(&self) -> bool {
        let forms = [FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN6, FI_SOCKADDR_IB];
        forms.contains(&self.0.addr_format)
    }

    /// Returns the name of the card, which several domains may share. Providers without a card
    /// have one domain for each interface.
    pub(crate) fn card(&self) -> String {
        // SAFETY: both are null or valid.
        let device = unsafe { self.0.nic.as_ref().and_then(|nic| nic.device_attr.as_ref()) };
        let name = device.map(|device| text(device.name)).unwrap_or_default();
        if name.is_empty() { self.domain() } else { name }
    }

    /// Returns the PCI address of the card, if the provider reports it.
    pub(crate) fn pci(&self) -> Option<PciAddress> {
        // SAFETY: both are null or valid.
        let bus = unsafe { self.0.nic.as_ref()?.bus_attr.as_ref() }?;
        if bus.bus_type != FI_BUS_PCI {
            return None;
        }
        // SAFETY: the bus type tells which member of the union is valid.
        let fi_pci_attr { domain_id, bus_id, device_id, function_id } = unsafe { bus.attr.pci };
        Some(PciAddress {
            domain: domain_id,
            bus: bus_id,
            device: device_id,
            function: function_id,
        })
    }
}

/// Returns a text from libfabric; empty if it is null.
fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: texts of an `fi_info` end in NUL and live as long as it.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}
