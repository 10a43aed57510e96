//! The arguments of C callers, as types: pointers that are looked at in one place only.

use std::ffi::{CStr, c_char};

use crate::code::{Answer, Code};
use crate::settings;

/// Where a caller wants a value. Only callers through the C interface make one, and its contract is
/// theirs: null, or room for a value.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Puts it there. Errors: `INVALID_VALUE` for a null pointer.
    pub(crate) fn set(self, value: T) -> Answer {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: it is not null, so by the contract of every function that takes one it has room
        // for a value.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// What was there, for which a value takes its place. Errors as [`set`](Out::set).
    pub(crate) fn taken(self, value: T) -> Answer<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: it is not null, and the functions that use this ask for a value there.
        Ok(unsafe { std::ptr::replace(self.0, value) })
    }

    /// Puts it there, unless the caller does not want it.
    pub(crate) fn set_if_wanted(self, value: T) {
        _ = self.set(value);
    }
}

impl Out<u8> {
    /// Puts a text with a zero at its end there, shortened to `room`.
    pub(crate) fn text(self, text: &str, room: i32) -> Answer {
        let room = usize::try_from(room).map_err(|_| Code::INVALID_VALUE)?;
        let len = text.len().min(room.checked_sub(1).ok_or(Code::INVALID_VALUE)?);
        self.bytes(&[&text.as_bytes()[..len], &[0]].concat())
    }

    /// Puts bytes there, for which the caller has been told the size.
    pub(crate) fn bytes(self, bytes: &[u8]) -> Answer {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: it is not null, so by the contract it has room for what the functions that use
        // this say they write.
        unsafe { self.0.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }
}

/// Values of a caller: null, or as many as another argument says.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// The first one. Errors: `INVALID_VALUE` for a null pointer.
    pub(crate) fn get(&self) -> Answer<T> {
        self.at(0)
    }

    /// One of several; the caller promised that there are as many.
    pub(crate) fn at(&self, at: usize) -> Answer<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: it is not null, and by the contract of the functions that take one there are as
        // many values as they are told by another argument, which the place is below.
        Ok(unsafe { self.0.add(at).read_unaligned() })
    }
}

impl<T> In<T> {
    /// The pointer as a number, for arguments that may be one.
    pub(crate) fn address(&self) -> usize {
        self.0.addr()
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

impl In<u8> {
    /// The same bytes as a C string. Errors: `INVALID_VALUE` for a null pointer.
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
        // SAFETY: it is not null, so by the contract it is a C string.
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }
}

/// Does the work of an exported function: counts the call, fails it if a test wants that, and lets
/// no panic out.
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
