//! Captures UCX's descriptions of its objects.

use std::ffi::c_char;

use libc::FILE;

/// Returns the text that `print` writes to the stream, or an empty text if there is no memory for
/// it.
pub(super) fn printed(print: impl FnOnce(*mut FILE)) -> String {
    let (mut text, mut length): (*mut c_char, usize) = (std::ptr::null_mut(), 0);
    // SAFETY: closing the stream below writes both variables, which outlive it.
    let stream = unsafe { libc::open_memstream(&raw mut text, &raw mut length) };
    if stream.is_null() {
        return String::new();
    }
    print(stream);
    // SAFETY: the stream is open and not used afterwards.
    unsafe { libc::fclose(stream) };
    if text.is_null() {
        return String::new();
    }
    // SAFETY: closing has stored the buffer and its length.
    let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) };
    let printed = String::from_utf8_lossy(bytes).into_owned();
    // SAFETY: `open_memstream` leaves the buffer to its caller, which does not use it afterwards.
    unsafe { libc::free(text.cast()) };
    printed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_text_is_captured() {
        let text = printed(|stream| {
            for _ in 0..3000 {
                // SAFETY: the stream is open, and the format takes no arguments.
                unsafe { libc::fputs(c"line\n".as_ptr(), stream) };
            }
        });
        assert_eq!(text, "line\n".repeat(3000));
        assert_eq!(printed(|_| ()), "");
    }
}
