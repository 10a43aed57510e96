//! Types for the arguments of C callers, so that only this module accesses their pointers.

use std::ffi::{CStr, c_char};

use crate::code::{Answer, Code};
use crate::settings;

/// A place for an output value. Only callers through the C interface create one. Their contract: it
/// is null, or has space for a value.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes the value. Fails with `INVALID_VALUE` for a null pointer.
    pub(crate) fn set(self, value: T) -> Answer {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the pointer is not null, so by the contract of every function with an `Out` it
        // has space for a value.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Replaces the value and returns the old one. Fails like [`set`](Out::set).
    pub(crate) fn taken(self, value: T) -> Answer<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the pointer is not null, and the functions that call this require callers to pass
        // a value.
        Ok(unsafe { std::ptr::replace(self.0, value) })
    }

    /// Writes the value, unless the pointer is null.
    pub(crate) fn set_if_wanted(self, value: T) {
        _ = self.set(value);
    }
}

impl Out<u8> {
    /// Writes a text with a terminating zero, shortened to `room`.
    pub(crate) fn text(self, text: &str, room: i32) -> Answer {
        let room = usize::try_from(room).map_err(|_| Code::INVALID_VALUE)?;
        let len = text.len().min(room.checked_sub(1).ok_or(Code::INVALID_VALUE)?);
        self.bytes(&[&text.as_bytes()[..len], &[0]].concat())
    }

    /// Writes bytes; the caller knows their number.
    pub(crate) fn bytes(self, bytes: &[u8]) -> Answer {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the pointer is not null, so by the contract it has space for the bytes that the
        // calling function documents.
        unsafe { self.0.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }
}

/// Input values of a caller: null, or as many values as another argument says.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Returns the first value. Fails with `INVALID_VALUE` for a null pointer.
    pub(crate) fn get(&self) -> Answer<T> {
        self.at(0)
    }

    /// Returns one of several values. The caller ensures that there are more than `at`.
    pub(crate) fn at(&self, at: usize) -> Answer<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the pointer is not null. By the contract of every function with an `In` there are
        // as many values as another argument says, and `at` is less than that.
        Ok(unsafe { self.0.add(at).read_unaligned() })
    }
}

impl<T> In<T> {
    /// Returns the pointer as a number, for arguments that may be either.
    pub(crate) fn address(&self) -> usize {
        self.0.addr()
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

impl In<u8> {
    /// Returns the bytes as a C string. Fails with `INVALID_VALUE` for a null pointer.
    pub(crate) fn text(self) -> Answer<String> {
        Text(self.0.cast()).get()
    }
}

/// A C string of a caller.
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn get(&self) -> Answer<String> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: the pointer is not null, so by the contract it is a C string.
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }
}

/// Runs an exported function: counts the call, fails it if a test requests that, and catches
/// panics.
pub(crate) fn answer(function: &'static str, work: impl FnOnce() -> Answer) -> i32 {
    if let Some(Code(wanted)) = settings::called(function) {
        return wanted;
    }
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    match result.unwrap_or(Err(Code::UNKNOWN)) {
        Ok(()) => 0,
        Err(Code(code)) => code,
    }
}
