//! UCX's status codes, `ucs_status_t`.

use std::ffi::CStr;
use std::fmt;

use super::bindings_1_13::{UCS_ERR_LAST, UCS_OK, ucs_status_t};
use super::library::LIBRARY;

/// A status other than success.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Status(pub(crate) ucs_status_t);

impl Status {
    /// Returns `Ok` only for `UCS_OK`.
    pub(crate) fn check(status: ucs_status_t) -> Result<(), Status> {
        if status == UCS_OK { Ok(()) } else { Err(Status(status)) }
    }

    /// Returns UCX's text for the status.
    pub(crate) fn text(self) -> String {
        let Some(library) = LIBRARY.opened() else { return format!("UCX status {}", self.0) };
        // SAFETY: any value is allowed; the result is a string constant, or a buffer of the calling
        // thread.
        let text = unsafe { CStr::from_ptr((library.functions().ucs_status_string)(self.0)) };
        text.to_string_lossy().into_owned()
    }

    /// Returns the error that a pointer from UCX encodes, if it is not a request
    /// (`UCS_PTR_IS_ERR`).
    pub(super) fn of_pointer(address: usize) -> Option<Status> {
        // The last 100 addresses encode errors: small negative numbers.
        let number = address.cast_signed();
        (isize::from(UCS_ERR_LAST)..0).contains(&number).then_some(Status(number as ucs_status_t))
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.0, self.text())
    }
}
