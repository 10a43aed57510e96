//! The transports of an endpoint, which versions since 1.14 report as attributes.

use std::ffi::{CStr, c_char, c_uint};
use std::ptr;

use kvx_backend::version::Version;

use super::bindings_1_13::*;
use super::endpoint::Endpoint;
use super::status::Status;

/// The first version whose endpoints have this attribute.
const SINCE: Version = Version::new(1, 14, 0);
const UCP_EP_ATTR_FIELD_TRANSPORTS: u64 = 1 << 3;
/// The maximum number of lanes of an endpoint; UCX has at most 64.
const MAX_LANES: usize = 64;

/// The transport and the device of a lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LaneTransport {
    pub(crate) transport: String,
    pub(crate) device: String,
}

/// `ucp_transport_entry_t`. Both texts belong to the context.
#[repr(C)]
#[derive(Clone, Copy)]
struct Entry {
    transport: *const c_char,
    device: *const c_char,
}

/// `ucp_ep_attr_t` as of 1.14, followed by space for later fields.
#[repr(C)]
struct Attributes {
    known: ucp_ep_attr_t,
    entries: *mut Entry,
    count: c_uint,
    entry_size: usize,
    later: [u64; 8],
}

impl Endpoint {
    /// Returns the transport of each lane, in the order of the lanes; `None` if the library's
    /// version or the endpoint does not report them.
    ///
    /// # Safety
    /// As for [`unpack`](Endpoint::unpack).
    pub(crate) unsafe fn transports(&self, library: Version) -> Option<Vec<LaneTransport>> {
        if library < SINCE {
            return None;
        }
        let mut entries = [Entry { transport: ptr::null(), device: ptr::null() }; MAX_LANES];
        let mut attributes = Attributes {
            known: ucp_ep_attr_t {
                field_mask: UCP_EP_ATTR_FIELD_TRANSPORTS,
                ..ucp_ep_attr_t::default()
            },
            entries: entries.as_mut_ptr(),
            count: MAX_LANES as c_uint,
            entry_size: size_of::<Entry>(),
            later: [0; 8],
        };
        // SAFETY: guaranteed by the caller. UCX writes at most `count` entries of this size.
        let status =
            unsafe { (self.functions().ucp_ep_query)(self.raw(), (&raw mut attributes).cast()) };
        if let Err(status) = Status::check(status) {
            tracing::debug!(?status, "UCX does not report the transports of an endpoint");
            return None;
        }
        let found = (attributes.count as usize).min(MAX_LANES);
        // SAFETY: UCX has written that many entries. Their texts belong to the context, which lives
        // as long as the worker, and the worker is alive.
        let lane = |Entry { transport, device }: &Entry| unsafe {
            Some(LaneTransport { transport: text(*transport)?, device: text(*device)? })
        };
        entries[..found].iter().map(lane).collect()
    }
}

/// # Safety
/// The text is null or a C string.
unsafe fn text(text: *const c_char) -> Option<String> {
    // SAFETY: guaranteed by the caller.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}
