//! A worker: makes progress, and owns endpoints and handlers of active messages.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use kvx_backend::version::Version;

use super::bindings_1_13::*;
use super::context::UcxContext;
use super::endpoint::Endpoint;
use super::log;
use super::print::printed;
use super::status::Status;

/// A worker in thread mode SERIALIZED: any thread may use it, one at a time. It is therefore not
/// `Sync`.
pub(crate) struct Worker {
    raw: NonNull<ucp_worker>,
    descriptor: RawFd,
    context: Arc<UcxContext>,
    one_at_a_time: PhantomData<std::cell::Cell<()>>,
}

// SAFETY: thread mode SERIALIZED allows one thread after another; `&mut` or a lock provides that,
// as the type is not `Sync`.
unsafe impl Send for Worker {}

/// The outcome of arming a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArmOutcome {
    /// The descriptor becomes readable when there is something to do.
    Sleep,
    /// There is something to do now: make progress, then arm again.
    Busy,
}

/// An active message, valid during the call that delivers it.
pub(crate) struct Message<'a> {
    pub(crate) header: &'a [u8],
    pub(crate) data: &'a [u8],
}

impl Worker {
    /// Creates a worker. Errors: UCX's status.
    pub(crate) fn new(context: &Arc<UcxContext>) -> Result<Worker, Status> {
        let functions = context.library().functions();
        let params = ucp_worker_params_t {
            field_mask: u64::from(UCP_WORKER_PARAM_FIELD_THREAD_MODE),
            thread_mode: UCS_THREAD_MODE_SERIALIZED,
            ..ucp_worker_params_t::default()
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the context is alive, and the field that the mask names is set.
        let mut create =
            || unsafe { (functions.ucp_worker_create)(context.raw(), &params, &mut raw) };
        // Older versions print warnings on standard output about kvx's settings for transports that
        // are not in use. They also warn of unknown names there, which newer versions reject.
        let is_old = context.library().version() < Version::new(1, 21, 0);
        let quiet = is_old && !context.takes_any_name();
        let status = if quiet { log::with_less_log(context.library(), create) } else { create() };
        Status::check(status)?;
        let raw = NonNull::new(raw).ok_or(Status(UCS_ERR_NO_MEMORY))?;
        let mut worker = Worker {
            raw,
            descriptor: -1,
            context: Arc::clone(context),
            one_at_a_time: PhantomData,
        };
        let mut descriptor: c_int = -1;
        // SAFETY: the worker is alive; its context has the wake-up feature.
        Status::check(unsafe { (functions.ucp_worker_get_efd)(worker.raw(), &mut descriptor) })?;
        worker.descriptor = descriptor;
        Ok(worker)
    }

    fn raw(&self) -> ucp_worker_h {
        self.raw.as_ptr()
    }

    fn functions(&self) -> &'static Functions {
        self.context.library().functions()
    }

    /// Returns the worker's address, for peers.
    ///
    /// # Errors
    /// UCX's status.
    pub(crate) fn address(&self) -> Result<Vec<u8>, Status> {
        let (mut address, mut length) = (ptr::null_mut(), 0);
        // SAFETY: the worker is alive.
        let status = unsafe {
            (self.functions().ucp_worker_get_address)(self.raw(), &mut address, &mut length)
        };
        Status::check(status)?;
        // SAFETY: UCX has stored an address of that length.
        let copy = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), length) }.to_vec();
        // SAFETY: it came from the call above and is not used any more.
        unsafe { (self.functions().ucp_worker_release_address)(self.raw(), address) };
        Ok(copy)
    }

    /// Makes one round of progress, in which callbacks run. Returns how much was done; 0 for
    /// nothing.
    pub(crate) fn progress(&self) -> u32 {
        // SAFETY: the worker is alive, and no other thread uses it.
        unsafe { (self.functions().ucp_worker_progress)(self.raw()) }
    }

    /// Arms the descriptor: it becomes readable at the next event. Errors: UCX's status.
    pub(crate) fn arm(&self) -> Result<ArmOutcome, Status> {
        // SAFETY: the worker is alive.
        match unsafe { (self.functions().ucp_worker_arm)(self.raw()) } {
            UCS_OK => Ok(ArmOutcome::Sleep),
            UCS_ERR_BUSY => Ok(ArmOutcome::Busy),
            status => Err(Status(status)),
        }
    }

    /// Returns the descriptor to sleep on after [`arm`](Worker::arm). It belongs to the worker.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: UCX keeps it open until the worker is destroyed, which the borrow prevents.
        unsafe { BorrowedFd::borrow_raw(self.descriptor) }
    }

    /// Returns UCX's description of the worker.
    pub(crate) fn printed(&self) -> String {
        // SAFETY: the worker is alive, and the stream is open during the call.
        printed(|stream| unsafe { (self.functions().ucp_worker_print_info)(self.raw(), stream) })
    }

    /// Returns UCX's description of the worker, with the protocols that UCX has chosen for gets and
    /// puts so far.
    ///
    /// UCX adds those only while its log level is `debug`.
    pub(crate) fn printed_with_protocols(&self) -> String {
        log::with_debug_log(self.context.library(), || self.printed())
    }

    /// Creates an endpoint to the worker at `address`, in error mode PEER: when the peer fails, the
    /// endpoint's operations end with an error, and progress calls `failed` once with `target`.
    ///
    /// # Safety
    /// `target` is alive until the endpoint is closed. The endpoint is closed, and the close
    /// operation has ended, before the worker is dropped.
    ///
    /// # Errors
    /// UCX's status: `UCS_ERR_UNREACHABLE` if no transport of both sides reports peer failures.
    pub(crate) unsafe fn connect(
        &self,
        address: &[u8],
        failed: unsafe extern "C" fn(target: *mut c_void, endpoint: ucp_ep_h, status: ucs_status_t),
        target: *mut c_void,
    ) -> Result<Endpoint, Status> {
        let params = ucp_ep_params_t {
            field_mask: u64::from(
                UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                    | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                    | UCP_EP_PARAM_FIELD_ERR_HANDLER,
            ),
            address: address.as_ptr().cast(),
            err_mode: UCP_ERR_HANDLING_MODE_PEER,
            err_handler: ucp_err_handler_t { cb: Some(failed), arg: target },
            ..unset_endpoint_params()
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the worker is alive, and the fields that the mask names are set.
        Status::check(unsafe { (self.functions().ucp_ep_create)(self.raw(), &params, &mut raw) })?;
        NonNull::new(raw)
            .map(|raw| Endpoint::new(raw, self.functions()))
            .ok_or(Status(UCS_ERR_NO_MEMORY))
    }

    /// Delivers active messages with this `id` whole to `target`, during progress.
    ///
    /// # Safety
    /// `target` is alive until the worker is dropped.
    ///
    /// # Errors
    /// UCX's status.
    pub(crate) unsafe fn deliver<T: MessageHandler>(
        &self,
        id: u32,
        target: NonNull<T>,
    ) -> Result<(), Status> {
        let param = ucp_am_handler_param_t {
            field_mask: u64::from(
                UCP_AM_HANDLER_PARAM_FIELD_ID
                    | UCP_AM_HANDLER_PARAM_FIELD_FLAGS
                    | UCP_AM_HANDLER_PARAM_FIELD_CB
                    | UCP_AM_HANDLER_PARAM_FIELD_ARG,
            ),
            id,
            flags: UCP_AM_FLAG_WHOLE_MSG,
            cb: Some(on_message::<T>),
            arg: target.as_ptr().cast(),
        };
        // SAFETY: the worker is alive, and the fields that the mask names are set.
        Status::check(unsafe {
            (self.functions().ucp_worker_set_am_recv_handler)(self.raw(), &param)
        })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SAFETY: nobody else has it. UCX destroys the endpoints that are still open with it.
        unsafe { (self.functions().ucp_worker_destroy)(self.raw()) };
    }
}

/// Receives active messages.
pub(crate) trait MessageHandler {
    /// Called for each active message that was sent eagerly; others are rejected. It may post
    /// operations, but must not destroy the worker and must not panic.
    ///
    /// # Safety
    /// `this` is the pointer that was passed to [`Worker::deliver`], and is alive.
    unsafe fn on_message(this: NonNull<Self>, message: Message<'_>);
}

unsafe extern "C" fn on_message<T: MessageHandler>(
    target: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: UCX passes a valid structure.
    if unsafe { (*param).recv_attr } & u64::from(UCP_AM_RECV_ATTR_FLAG_RNDV) != 0 {
        // kvx sends nothing by rendezvous, and no other sender may make the receiver fetch data.
        return UCS_ERR_UNSUPPORTED;
    }
    // SAFETY: UCX passes both with their lengths; they are valid during the call.
    let message =
        unsafe { Message { header: bytes(header, header_length), data: bytes(data, length) } };
    let Some(target) = NonNull::new(target.cast::<T>()) else {
        debug_assert!(false, "UCX passes the argument that it was given");
        return UCS_OK;
    };
    // SAFETY: the caller of `deliver` keeps it alive.
    unsafe { T::on_message(target, message) };
    UCS_OK
}

/// # Safety
/// Unless `address` is null, `length` bytes at it are valid for `'a`.
unsafe fn bytes<'a>(address: *const c_void, length: usize) -> &'a [u8] {
    if length == 0 {
        return &[];
    }
    // SAFETY: guaranteed by the caller.
    unsafe { std::slice::from_raw_parts(address.cast(), length) }
}

/// Returns parameters without any field set: `sockaddr` has pointers, so the type has no `Default`.
fn unset_endpoint_params() -> ucp_ep_params_t {
    // SAFETY: integers and pointers that UCX ignores unless the mask names them.
    unsafe { std::mem::zeroed() }
}
