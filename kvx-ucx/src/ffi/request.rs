//! Requests: the handles that UCX returns for operations in progress.

use std::ffi::c_void;
use std::ptr::NonNull;

use super::bindings_1_13::{
    UCP_OP_ATTR_FIELD_CALLBACK, UCP_OP_ATTR_FIELD_USER_DATA, ucp_request_param_t, ucs_status_ptr_t,
    ucs_status_t,
};
use super::library::LIBRARY;
use super::status::Status;

/// The outcome of posting an operation.
#[derive(Debug)]
#[must_use = "an operation that is pending completes later"]
pub(crate) enum PostOutcome {
    /// The operation has completed; no callback follows.
    Done,
    /// The operation was not started; no callback follows.
    Failed(Status),
    /// The operation is in progress. Its callback follows, and frees the request.
    Pending,
}

impl PostOutcome {
    /// Converts the return value of an `_nbx` call (`UCS_PTR_STATUS` and similar macros).
    pub(super) fn read(answer: ucs_status_ptr_t) -> PostOutcome {
        match (NonNull::new(answer), Status::of_pointer(answer as usize)) {
            (None, _) => PostOutcome::Done,
            (_, Some(status)) => PostOutcome::Failed(status),
            (Some(_), None) => PostOutcome::Pending,
        }
    }
}

/// Handles the completion of an operation whose user data points to it.
pub(crate) trait CompletionHandler {
    /// Called when the operation has ended, during a call into UCX (progress, or closing an
    /// endpoint). It may post operations, but must not destroy the worker and must not panic.
    ///
    /// # Safety
    /// `this` is the pointer that was passed to [`with_callback`], and is alive.
    unsafe fn on_completion(this: NonNull<Self>, outcome: Result<(), Status>);
}

/// Returns the parameters of a send-like operation (get, put, flush, close, active message) that
/// calls `target` when it ends. The poster keeps `target` alive until then.
pub(crate) fn with_callback<T: CompletionHandler>(target: NonNull<T>) -> ucp_request_param_t {
    let mut param = ucp_request_param_t {
        op_attr_mask: UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        user_data: target.as_ptr().cast(),
        ..ucp_request_param_t::default()
    };
    param.cb.send = Some(on_completion::<T>);
    param
}

/// Frees the request and notifies its target.
unsafe extern "C" fn on_completion<T: CompletionHandler>(
    request: *mut c_void,
    status: ucs_status_t,
    target: *mut c_void,
) {
    // SAFETY: UCX calls this once, at the end of the request, which nobody else frees.
    unsafe { (LIBRARY.functions().ucp_request_free)(request) };
    let Some(target) = NonNull::new(target.cast::<T>()) else {
        return debug_assert!(false, "UCX passes the user data that it was given");
    };
    // SAFETY: the poster keeps the target alive, see `with_callback`.
    unsafe { T::on_completion(target, Status::check(status)) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::bindings_1_13::{UCS_ERR_NO_MESSAGE, UCS_ERR_UNREACHABLE};

    #[test]
    fn pointers_are_done_an_error_or_a_request() {
        let read = |number: isize| {
            PostOutcome::read(std::ptr::without_provenance_mut(number.cast_unsigned()))
        };
        assert!(matches!(read(0), PostOutcome::Done));
        for status in [UCS_ERR_NO_MESSAGE, UCS_ERR_UNREACHABLE, -99, -100] {
            assert!(
                matches!(read(isize::from(status)), PostOutcome::Failed(Status(read)) if read == status),
                "{status}"
            );
        }
        assert!(matches!(read(-101), PostOutcome::Pending));
        assert!(matches!(read(4096), PostOutcome::Pending));
    }
}
