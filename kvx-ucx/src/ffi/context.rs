//! A context: configuration, transports and registered memory.

use std::ffi::{CString, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use kvx_backend::loader;
use kvx_backend::version::Version;

use super::bindings_1_13::*;
use super::library::Library;
use super::print::printed;
use super::status::Status;
use crate::config::Setting;

/// Settings that every version knows.
const KNOWN: &[&str] = &["TLS", "NET_DEVICES"];

/// UCX with one configuration. Workers and threads share it: UCX locks it.
pub(crate) struct UcxContext {
    raw: NonNull<ucp_context>,
    library: &'static Library,
    /// True if the user chose settings whose names UCX may not know.
    takes_any_name: bool,
}

// SAFETY: it was created with `mt_workers_shared`, so UCX serialises the calls of several threads.
unsafe impl Send for UcxContext {}
// SAFETY: it was created with `mt_workers_shared`, so UCX serialises the calls of several threads.
unsafe impl Sync for UcxContext {}

impl UcxContext {
    /// Creates a context for one-sided operations and active messages, with wake-up descriptors.
    /// `settings` override the environment.
    ///
    /// # Errors
    /// UCX's status, and the setting that it rejected, if that was the reason.
    pub(crate) fn new(
        library: &'static Library,
        settings: &[Setting],
    ) -> Result<Arc<UcxContext>, (Status, Option<String>)> {
        let functions = library.functions();
        // UCX loads modules here, which may change signal handlers as the library itself may.
        loader::with_signals_kept(|| {
            let config = UcpConfig::read(library).map_err(|status| (status, None))?;
            for setting in settings {
                let Setting { name, value, required } = setting;
                match config.set(name, value) {
                    Ok(()) => {}
                    Err(status) if *required => {
                        return Err((status, Some(format!("UCX_{name}={value}"))));
                    }
                    Err(status) => {
                        tracing::debug!(
                            name,
                            value,
                            ?status,
                            "UCX rejects one of kvx's default settings"
                        )
                    }
                }
            }
            let params = ucp_params_t {
                field_mask: u64::from(
                    UCP_PARAM_FIELD_FEATURES
                        | UCP_PARAM_FIELD_MT_WORKERS_SHARED
                        | UCP_PARAM_FIELD_NAME,
                ),
                features: u64::from(UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP),
                mt_workers_shared: 1,
                name: c"kvx".as_ptr(),
                ..ucp_params_t::default()
            };
            let mut raw = ptr::null_mut();
            // SAFETY: the structures are those of 1.13, the version that the call passes; the
            // fields that the mask names are set; the configuration is alive.
            let status = unsafe {
                (functions.ucp_init_version)(1, 13, &params, config.raw.as_ptr(), &mut raw)
            };
            Status::check(status).map_err(|status| (status, None))?;
            let raw = NonNull::new(raw).ok_or((Status(UCS_ERR_NO_MEMORY), None))?;
            let may_be_unknown =
                |setting: &Setting| setting.required && !KNOWN.contains(&&*setting.name);
            Ok(Arc::new(UcxContext {
                raw,
                library,
                takes_any_name: settings.iter().any(may_be_unknown),
            }))
        })
    }

    pub(super) fn raw(&self) -> ucp_context_h {
        self.raw.as_ptr()
    }

    pub(crate) fn library(&self) -> &'static Library {
        self.library
    }

    /// Returns whether the user chose settings whose names UCX may not know. UCX's warnings then
    /// concern the user.
    pub(super) fn takes_any_name(&self) -> bool {
        self.takes_any_name
    }

    /// Returns the kinds of memory that the context can move, a bit for each of UCX's constants.
    pub(crate) fn memory_types(&self) -> u64 {
        let mut attributes = ucp_context_attr_t {
            field_mask: u64::from(UCP_ATTR_FIELD_MEMORY_TYPES),
            ..ucp_context_attr_t::default()
        };
        // SAFETY: the context is alive; what the mask names is written.
        let status =
            unsafe { (self.library.functions().ucp_context_query)(self.raw(), &mut attributes) };
        Status::check(status).map_or(1 << UCS_MEMORY_TYPE_HOST, |()| attributes.memory_types)
    }

    /// Returns UCX's description of its devices and transports.
    pub(crate) fn printed(&self) -> String {
        // SAFETY: the context is alive, and the stream is open during the call.
        printed(|stream| unsafe {
            (self.library.functions().ucp_context_print_info)(self.raw(), stream)
        })
    }

    /// Registers memory.
    ///
    /// # Safety
    /// The memory stays allocated until the [`MappedMemory`] is dropped.
    ///
    /// # Errors
    /// UCX's status.
    pub(crate) unsafe fn map(self: &Arc<Self>, memory: &MapParams) -> Result<MappedMemory, Status> {
        let MapParams(params) = memory;
        let mut raw = ptr::null_mut();
        // SAFETY: the context is alive; the caller guarantees that the memory is too.
        let status =
            unsafe { (self.library.functions().ucp_mem_map)(self.raw(), params, &mut raw) };
        Status::check(status)?;
        let raw = NonNull::new(raw).ok_or(Status(UCS_ERR_NO_MEMORY))?;
        Ok(MappedMemory { raw, is_unmapped: false, context: Arc::clone(self) })
    }
}

impl Drop for UcxContext {
    fn drop(&mut self) {
        // SAFETY: workers and mapped memory hold a reference to the context, so none is left.
        unsafe { (self.library.functions().ucp_cleanup)(self.raw()) };
    }
}

/// The first version in which the names of transport settings have the transport's prefix.
const PREFIXED: Version = Version::new(1, 17, 0);

/// A configuration: the environment's, then the explicit settings. Some settings, such as the log
/// level, apply to the whole process immediately.
pub(super) struct UcpConfig {
    raw: NonNull<ucp_config_t>,
    library: &'static Library,
}

impl UcpConfig {
    pub(super) fn read(library: &'static Library) -> Result<UcpConfig, Status> {
        let mut raw = ptr::null_mut();
        // SAFETY: with a null prefix and file name, UCX reads the environment.
        Status::check(unsafe {
            (library.functions().ucp_config_read)(ptr::null(), ptr::null(), &mut raw)
        })?;
        let raw = NonNull::new(raw).ok_or(Status(UCS_ERR_NO_MEMORY))?;
        Ok(UcpConfig { raw, library })
    }

    pub(super) fn set(&self, name: &str, value: &str) -> Result<(), Status> {
        // Older versions know a transport's settings without the prefix.
        let name = match name {
            "TCP_TX_SEG_SIZE" | "TCP_RX_SEG_SIZE" if self.library.version() < PREFIXED => {
                &name["TCP_".len()..]
            }
            name => name,
        };
        let invalid = |_| Status(UCS_ERR_INVALID_PARAM);
        let (name, value) =
            (CString::new(name).map_err(invalid)?, CString::new(value).map_err(invalid)?);
        // SAFETY: the configuration is alive; both texts are copied.
        let status = unsafe {
            (self.library.functions().ucp_config_modify)(
                self.raw.as_ptr(),
                name.as_ptr(),
                value.as_ptr(),
            )
        };
        Status::check(status)
    }
}

impl Drop for UcpConfig {
    fn drop(&mut self) {
        // SAFETY: it is alive and not used afterwards.
        unsafe { (self.library.functions().ucp_config_release)(self.raw.as_ptr()) };
    }
}

/// UCX's parameters of a registration.
pub(crate) struct MapParams(pub(crate) ucp_mem_map_params_t);

impl MapParams {
    /// Describes `length` bytes at `address`. Without `memory_type` UCX detects the kind of memory.
    /// UCX's constant for "unknown" differs between versions, so kvx never passes it.
    pub(crate) fn new(
        address: *mut u8,
        length: usize,
        memory_type: Option<ucs_memory_type_t>,
    ) -> MapParams {
        let mut params = ucp_mem_map_params_t {
            field_mask: u64::from(UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH),
            address: address.cast(),
            length,
            ..ucp_mem_map_params_t::default()
        };
        if let Some(memory_type) = memory_type {
            params.field_mask |= u64::from(UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE);
            params.memory_type = memory_type;
        }
        MapParams(params)
    }
}

/// A registration of memory.
pub(crate) struct MappedMemory {
    raw: NonNull<ucp_mem>,
    is_unmapped: bool,
    context: Arc<UcxContext>,
}

// SAFETY: it belongs to the context, which UCX locks.
unsafe impl Send for MappedMemory {}
// SAFETY: it belongs to the context, which UCX locks; it is only read.
unsafe impl Sync for MappedMemory {}

impl MappedMemory {
    /// Returns the handle that operations on this memory take.
    pub(crate) fn raw(&self) -> ucp_mem_h {
        self.raw.as_ptr()
    }

    /// Returns the key with which peers access the memory.
    ///
    /// # Errors
    /// UCX's status.
    pub(crate) fn key(&self) -> Result<PackedKey, Status> {
        let functions = self.context.library.functions();
        let (mut buffer, mut length) = (ptr::null_mut::<c_void>(), 0);
        // SAFETY: the context and the registration are alive.
        let status = unsafe {
            (functions.ucp_rkey_pack)(self.context.raw(), self.raw(), &mut buffer, &mut length)
        };
        Status::check(status)?;
        // SAFETY: UCX has stored a buffer of that length.
        let key = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), length) }.to_vec();
        // SAFETY: the call above returned the buffer, and nobody uses it afterwards.
        unsafe { (functions.ucp_rkey_buffer_release)(buffer) };
        Ok(PackedKey(key))
    }

    /// Ends the registration.
    ///
    /// # Errors
    /// UCX's status: the memory stays registered.
    pub(crate) fn unmap(mut self) -> Result<(), Status> {
        self.end()
    }

    fn end(&mut self) -> Result<(), Status> {
        self.is_unmapped = true;
        let functions = self.context.library.functions();
        // SAFETY: it is alive, as both callers consume it; the transport keeps it until the
        // operations on it have ended.
        Status::check(unsafe { (functions.ucp_mem_unmap)(self.context.raw(), self.raw()) })
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        if !self.is_unmapped
            && let Err(status) = self.end()
        {
            tracing::warn!(?status, "UCX did not unmap memory");
        }
    }
}

/// A packed key, as it is sent to peers.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct PackedKey(pub(crate) Vec<u8>);
