//! An endpoint: a connection of one worker to another, and the operations on it.

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use kvx_core::Op;

use super::bindings_1_13::*;
use super::print::printed;
use super::request::{CompletionHandler, PostOutcome, with_callback};
use super::status::Status;

/// An endpoint. Not closed when dropped: [`close`](Endpoint::close) is an operation that takes
/// time.
///
/// All calls come from the one thread that uses its worker, while the worker is alive; none follows
/// `close`. The transport's machine upholds this.
pub(crate) struct Endpoint {
    raw: NonNull<ucp_ep>,
    functions: &'static Functions,
}

// SAFETY: used as its worker is, by one thread at a time.
unsafe impl Send for Endpoint {}

impl Endpoint {
    pub(super) fn new(raw: NonNull<ucp_ep>, functions: &'static Functions) -> Self {
        Endpoint { raw, functions }
    }

    pub(crate) fn raw(&self) -> ucp_ep_h {
        self.raw.as_ptr()
    }

    /// Reads the memory at `remote` into `local`, or writes it the other way. The end of a write
    /// says that `local` is free; that the bytes have arrived is said by the end of a
    /// [`flush`](Endpoint::flush) that is posted later.
    ///
    /// # Safety
    /// The worker is alive, this is the one thread that uses it, and the endpoint is not closed.
    /// `local` is so many bytes, within `memory` if that is given, which nobody touches until the
    /// end of a read, and nobody writes to until the end of a write; `target` is alive until the
    /// end.
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
        // SAFETY: the caller's promise.
        PostOutcome::read(unsafe {
            match op {
                Op::Read => get(self.raw(), local, length, remote, key, &param),
                Op::Write => put(self.raw(), local, length, remote, key, &param),
            }
        })
    }

    /// Ends when everything that was posted before it has arrived.
    ///
    /// # Safety
    /// As [`transfer`](Endpoint::transfer), but for the memory.
    pub(crate) unsafe fn flush<T: CompletionHandler>(&self, target: NonNull<T>) -> PostOutcome {
        // SAFETY: the caller's promise.
        PostOutcome::read(unsafe {
            (self.functions.ucp_ep_flush_nbx)(self.raw(), &with_callback(target))
        })
    }

    /// Sends an active message, eagerly.
    ///
    /// # Safety
    /// As [`transfer`](Endpoint::transfer); header and data stay as they are until the end.
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
        // SAFETY: the caller's promise.
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
    /// The worker is alive, this is the one thread that uses it, and the endpoint is not closed.
    ///
    /// # Errors
    /// UCX's status: `UCS_ERR_UNREACHABLE` when no lane of the endpoint reaches that memory.
    pub(crate) unsafe fn unpack(&self, key: &[u8]) -> Result<RemoteKey, Status> {
        let mut raw = ptr::null_mut();
        // SAFETY: the caller's promise.
        let status = unsafe {
            (self.functions.ucp_ep_rkey_unpack)(self.raw(), key.as_ptr().cast(), &mut raw)
        };
        Status::check(status)?;
        let raw = NonNull::new(raw).ok_or(Status(UCS_ERR_NO_MEMORY))?;
        Ok(RemoteKey { raw, functions: self.functions })
    }

    /// Closes the endpoint at once: operations in flight end with an error, by their callbacks,
    /// during progress.
    ///
    /// # Safety
    /// As [`transfer`](Endpoint::transfer), but for the memory; no key that was unpacked for it is
    /// used any more. Keys may be dropped later: that touches no endpoint.
    pub(crate) unsafe fn close<T: CompletionHandler>(self, target: NonNull<T>) -> PostOutcome {
        let mut param = with_callback(target);
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
        param.flags = UCP_EP_CLOSE_FLAG_FORCE;
        // SAFETY: the caller's promise.
        PostOutcome::read(unsafe { (self.functions.ucp_ep_close_nbx)(self.raw(), &param) })
    }

    /// UCX's description of the endpoint: its lanes and, from 1.14 or so, its protocols.
    ///
    /// # Safety
    /// As [`unpack`](Endpoint::unpack).
    pub(crate) unsafe fn printed(&self) -> String {
        // SAFETY: the caller's promise; the stream is open during the call.
        printed(|stream| unsafe { (self.functions.ucp_ep_print_info)(self.raw(), stream) })
    }
}

/// Operations on registered memory, posted by the hundred.
fn with_memory(mut param: ucp_request_param_t, memory: Option<ucp_mem_h>) -> ucp_request_param_t {
    param.op_attr_mask |= UCP_OP_ATTR_FLAG_MULTI_SEND;
    if let Some(memory) = memory {
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
        param.memh = memory;
    }
    param
}

/// A peer's key, unpacked. Dropped by the thread that uses the worker, while that is alive; its
/// endpoint may be closed by then.
pub(crate) struct RemoteKey {
    raw: NonNull<ucp_rkey>,
    functions: &'static Functions,
}

// SAFETY: used as its worker is, by one thread at a time.
unsafe impl Send for RemoteKey {}

impl RemoteKey {
    pub(crate) fn raw(&self) -> ucp_rkey_h {
        self.raw.as_ptr()
    }
}

impl Drop for RemoteKey {
    fn drop(&mut self) {
        // SAFETY: it is alive; the operations that used it have ended, which the transport upholds.
        unsafe { (self.functions.ucp_rkey_destroy)(self.raw()) };
    }
}
