//! Catches the text that UCX prints about itself.

use std::ffi::c_char;

use libc::FILE;

/// The text that `print` writes to the stream; empty if there is no memory for one.
pub(super) fn printed(print: impl FnOnce(*mut FILE)) -> String {
    let (mut text, mut length): (*mut c_char, usize) = (std::ptr::null_mut(), 0);
    // SAFETY: both are written when the stream is closed, below, and outlive it.
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
    // SAFETY: the buffer is the caller's to free, and is not used any more.
    unsafe { libc::free(text.cast()) };
    printed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_comes_back() {
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
