//! The scatter-gather datatype: many pieces in one put. Only tests use it. The transport posts
//! pieces one by one, which is as fast over cma and tcp and works with every version.

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use super::bindings_1_13::*;
use super::bindings_1_22 as sgl;
use super::library::{LIBRARY, Library};
use super::request::{CompletionHandler, PostOutcome, with_callback};
use super::{Endpoint, RemoteKey, Version};

/// Returns whether every lane takes puts of lists. 1.22 takes them only on cards whose driver has a
/// plug-in for them; an endpoint that refuses one is unusable afterwards.
pub(super) fn is_supported_by(library: &Library) -> bool {
    library.version() >= Version::new(1, 23, 0)
}

/// The pieces of one put: position `i` of each list describes piece `i`.
#[derive(Default)]
pub(super) struct Sgl {
    buffers: Vec<*mut c_void>,
    lengths: Vec<usize>,
    memories: Vec<ucp_mem_h>,
    remotes: Vec<u64>,
    keys: Vec<ucp_rkey_h>,
}

impl Sgl {
    pub(super) fn push(
        &mut self,
        local: *const u8,
        length: usize,
        memory: ucp_mem_h,
        remote: u64,
        key: &RemoteKey,
    ) {
        self.buffers.push(local.cast_mut().cast());
        self.lengths.push(length);
        self.memories.push(memory);
        self.remotes.push(remote);
        self.keys.push(key.raw());
    }

    /// Writes all pieces as one operation. Its completion means the same as that of
    /// [`Endpoint::put`].
    ///
    /// # Safety
    /// As for [`Endpoint::put`], for every piece. The list is neither changed nor dropped until the
    /// operation ends. The library [supports lists](is_supported_by).
    pub(super) unsafe fn put<T: CompletionHandler>(
        &self,
        endpoint: &Endpoint,
        target: NonNull<T>,
    ) -> PostOutcome {
        let count = self.lengths.len();
        let local = sgl::ucp_dt_local_sgl_t {
            field_mask: u64::from(
                sgl::UCP_DT_LOCAL_SGL_FIELD_BUFFERS
                    | sgl::UCP_DT_LOCAL_SGL_FIELD_LENGTHS
                    | sgl::UCP_DT_LOCAL_SGL_FIELD_MEMHS,
            ),
            buffers: self.buffers.as_ptr(),
            lengths: self.lengths.as_ptr(),
            memhs: self.memories.as_ptr(),
            ..sgl::ucp_dt_local_sgl_t::default()
        };
        let remote = sgl::ucp_dt_remote_sgl_t {
            field_mask: u64::from(
                sgl::UCP_DT_REMOTE_SGL_FIELD_REMOTE_ADDRS
                    | sgl::UCP_DT_REMOTE_SGL_FIELD_LENGTHS
                    | sgl::UCP_DT_REMOTE_SGL_FIELD_RKEYS,
            ),
            remote_addrs: self.remotes.as_ptr(),
            lengths: self.lengths.as_ptr(),
            rkeys: self.keys.as_ptr(),
        };
        let base = with_callback(target);
        let datatype = ucp_datatype_t::from(sgl::UCP_DATATYPE_SGL);
        let param = sgl::ucp_request_param_t {
            op_attr_mask: base.op_attr_mask
                | UCP_OP_ATTR_FIELD_DATATYPE
                | sgl::UCP_OP_ATTR_FIELD_REMOTE_DATATYPE
                | sgl::UCP_OP_ATTR_FIELD_REMOTE
                | sgl::UCP_OP_ATTR_FIELD_REMOTE_COUNT,
            cb: base.cb,
            user_data: base.user_data,
            datatype,
            remote_datatype: datatype,
            remote: (&raw const remote).cast(),
            remote_count: count,
            ..sgl::ucp_request_param_t::default()
        };
        let put = LIBRARY.functions().ucp_put_nbx;
        let (list, param) = ((&raw const local).cast(), (&raw const param).cast());
        // SAFETY: guaranteed by the caller. The call copies both descriptors; the list owns the
        // arrays. The parameters begin with those of 1.13; a library that has the datatype also
        // reads the fields after them. With a remote list, the call's own address and key are
        // unused.
        PostOutcome::read(unsafe { put(endpoint.raw(), list, count, 0, ptr::null_mut(), param) })
    }
}
