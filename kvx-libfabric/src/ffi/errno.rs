//! libfabric's error numbers: those of the system, and some of its own.

use std::ffi::{CStr, c_int};
use std::fmt;

use super::library::LIBRARY;

/// Why a call failed: a positive number.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Errno(pub(crate) c_int);

impl Errno {
    /// `Ok` for anything but a negative answer.
    pub(super) fn check(answer: c_int) -> Result<c_int, Errno> {
        if answer < 0 { Err(Errno(answer.saturating_neg())) } else { Ok(answer) }
    }

    /// Does the same for calls that answer with a count.
    pub(super) fn check_count(answer: isize) -> Result<usize, Errno> {
        usize::try_from(answer).map_err(|_| Errno(c_int::try_from(-answer).unwrap_or(c_int::MAX)))
    }

    /// libfabric's own words.
    pub(crate) fn text(self) -> String {
        let Some(library) = LIBRARY.opened() else { return format!("libfabric error {}", self.0) };
        // SAFETY: any number may be asked; the answer is a string constant, or a buffer of the
        // calling thread.
        let text = unsafe { (library.functions().fi_strerror)(self.0) };
        if text.is_null() {
            return format!("libfabric error {}", self.0);
        }
        // SAFETY: it is a C string, as above.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.0, self.text())
    }
}
