//! An endpoint: a connection from one worker to another, and the operations on it.

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use kvx_core::Op;

use super::bindings_1_13::*;
use super::print::printed;
use super::request::{CompletionHandler, PostOutcome, with_callback};
use super::status::Status;

/// An endpoint. Dropping it does not close it: [`close`](Endpoint::close) is an asynchronous
/// operation.
///
/// Only the thread that uses the worker calls it, while the worker is alive and not after `close`.
/// The transport's machine upholds this.
pub(crate) struct Endpoint {
    raw: NonNull<ucp_ep>,
    functions: &'static Functions,
}

// SAFETY: only one thread at a time uses it, like its worker.
unsafe impl Send for Endpoint {}

impl Endpoint {
    pub(super) fn new(raw: NonNull<ucp_ep>, functions: &'static Functions) -> Self {
        Endpoint { raw, functions }
    }

    pub(crate) fn raw(&self) -> ucp_ep_h {
        self.raw.as_ptr()
    }

    pub(super) fn functions(&self) -> &'static Functions {
        self.functions
    }

    /// Reads the memory at `remote` into `local`, or writes it the other way. A completed write
    /// means only that `local` may be reused. The bytes have arrived when a
    /// [`flush`](Endpoint::flush) that was posted later completes.
    ///
    /// # Safety
    /// The worker is alive, no other thread uses it, and the endpoint is not closed. `local` has
    /// that many bytes, within `memory` if given. Until the operation ends, nobody accesses them
    /// (read) or writes to them (write), and `target` is alive.
    pub(crate) unsafe fn transfer<T: CompletionHandler>(
        &self,
        op: Op,
        (local, length): (*mut u8, usize),
        memory: Option<ucp_mem_h>,
        (remote, key): (u64, &RemoteKey),
        target: NonNull<T>,
    ) -> PostOutcome {
        let param = with_memory(with_callback(target), memory);
        let (local, key) = (local.cast::<c_void>(), key.raw());
        let Functions { ucp_get_nbx: get, ucp_put_nbx: put, .. } = self.functions;
        // SAFETY: guaranteed by the caller.
        PostOutcome::read(unsafe {
            match op {
                Op::Read => get(self.raw(), local, length, remote, key, &param),
                Op::Write => put(self.raw(), local, length, remote, key, &param),
            }
        })
    }

    /// Completes when everything that was posted before has arrived.
    ///
    /// # Safety
    /// As for [`transfer`](Endpoint::transfer), except for the memory.
    pub(crate) unsafe fn flush<T: CompletionHandler>(&self, target: NonNull<T>) -> PostOutcome {
        // SAFETY: guaranteed by the caller.
        PostOutcome::read(unsafe {
            (self.functions.ucp_ep_flush_nbx)(self.raw(), &with_callback(target))
        })
    }

    /// Sends an active message, eagerly.
    ///
    /// # Safety
    /// As for [`transfer`](Endpoint::transfer); header and data do not change until the operation
    /// ends.
    pub(crate) unsafe fn send<T: CompletionHandler>(
        &self,
        id: u32,
        header: &[u8],
        data: &[u8],
        target: NonNull<T>,
    ) -> PostOutcome {
        let mut param = with_callback(target);
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
        param.flags = UCP_AM_SEND_FLAG_EAGER;
        // SAFETY: guaranteed by the caller.
        PostOutcome::read(unsafe {
            (self.functions.ucp_am_send_nbx)(
                self.raw(),
                id,
                header.as_ptr().cast(),
                header.len(),
                data.as_ptr().cast(),
                data.len(),
                &param,
            )
        })
    }

    /// Unpacks a peer's key for this endpoint.
    ///
    /// # Safety
    /// The worker is alive, no other thread uses it, and the endpoint is not closed.
    ///
    /// # Errors
    /// UCX's status: `UCS_ERR_UNREACHABLE` if no lane of the endpoint reaches that memory.
    pub(crate) unsafe fn unpack(&self, key: &[u8]) -> Result<RemoteKey, Status> {
        let mut raw = ptr::null_mut();
        // SAFETY: guaranteed by the caller.
        let status = unsafe {
            (self.functions.ucp_ep_rkey_unpack)(self.raw(), key.as_ptr().cast(), &mut raw)
        };
        Status::check(status)?;
        let raw = NonNull::new(raw).ok_or(Status(UCS_ERR_NO_MEMORY))?;
        Ok(RemoteKey { raw, functions: self.functions })
    }

    /// Closes the endpoint immediately. Operations in flight fail, and their callbacks run during
    /// progress.
    ///
    /// # Safety
    /// As for [`transfer`](Endpoint::transfer), except for the memory. Nobody uses a key that was
    /// unpacked for the endpoint afterwards. Keys may be dropped later: that does not access the
    /// endpoint.
    pub(crate) unsafe fn close<T: CompletionHandler>(self, target: NonNull<T>) -> PostOutcome {
        let mut param = with_callback(target);
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
        param.flags = UCP_EP_CLOSE_FLAG_FORCE;
        // SAFETY: guaranteed by the caller.
        PostOutcome::read(unsafe { (self.functions.ucp_ep_close_nbx)(self.raw(), &param) })
    }

    /// Returns UCX's description of the endpoint: its lanes and, since about 1.14, its protocols.
    ///
    /// # Safety
    /// As for [`unpack`](Endpoint::unpack).
    pub(crate) unsafe fn printed(&self) -> String {
        // SAFETY: guaranteed by the caller; the stream is open during the call.
        printed(|stream| unsafe { (self.functions.ucp_ep_print_info)(self.raw(), stream) })
    }
}

/// Sets the memory of an operation that is posted many times.
fn with_memory(mut param: ucp_request_param_t, memory: Option<ucp_mem_h>) -> ucp_request_param_t {
    param.op_attr_mask |= UCP_OP_ATTR_FLAG_MULTI_SEND;
    if let Some(memory) = memory {
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
        param.memh = memory;
    }
    param
}

/// A peer's unpacked key. The thread that uses the worker drops it while the worker is alive; the
/// endpoint may already be closed.
pub(crate) struct RemoteKey {
    raw: NonNull<ucp_rkey>,
    functions: &'static Functions,
}

// SAFETY: only one thread at a time uses it, like its worker.
unsafe impl Send for RemoteKey {}

impl RemoteKey {
    pub(crate) fn raw(&self) -> ucp_rkey_h {
        self.raw.as_ptr()
    }
}

impl Drop for RemoteKey {
    fn drop(&mut self) {
        // SAFETY: it is alive; the transport keeps it until the operations that use it have ended.
        unsafe { (self.functions.ucp_rkey_destroy)(self.raw()) };
    }
}
