//! libfabric's error numbers: the system's, and some of its own.

use std::ffi::{CStr, c_int};
use std::fmt;

use super::library::LIBRARY;

/// The positive error number of a failed call.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Errno(pub(crate) c_int);

impl Errno {
    /// Returns the answer of a call, or an error if it is negative.
    pub(super) fn check(answer: c_int) -> Result<c_int, Errno> {
        if answer < 0 { Err(Errno(answer.saturating_neg())) } else { Ok(answer) }
    }

    /// Returns the count that a call answered, or an error if it is negative.
    pub(super) fn check_count(answer: isize) -> Result<usize, Errno> {
        usize::try_from(answer).map_err(|_| Errno(c_int::try_from(-answer).unwrap_or(c_int::MAX)))
    }

    /// Returns libfabric's text for the number.
    pub(crate) fn text(self) -> String {
        let Some(library) = LIBRARY.opened() else { return format!("libfabric error {}", self.0) };
        // SAFETY: any number is allowed; the result is a string constant, or a buffer of the
        // calling thread.
        let text = unsafe { (library.functions().fi_strerror)(self.0) };
        if text.is_null() {
            return format!("libfabric error {}", self.0);
        }
        // SAFETY: it is a C string, see above.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.0, self.text())
    }
}
