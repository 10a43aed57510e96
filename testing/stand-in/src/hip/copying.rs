//! Copies and fills.

use std::ffi::c_int;

use super::device::current;
use crate::argument::answer;
use crate::code::{Answer, Code};
use crate::copies::{self, End, Rows};
use crate::handles::Handle;
use crate::mapping::is_of_device;
use crate::stream;

/// Returns the ends of a copy of this kind. Fails with `INVALID_VALUE` if an address is not on the
/// side that the kind requires.
fn ends(to: u64, from: u64, kind: c_int) -> Answer<(End, End)> {
    let fits = match kind {
        1 => is_of_device(to) && !is_of_device(from),
        2 => !is_of_device(to) && is_of_device(from),
        3 => is_of_device(to) && is_of_device(from),
        4 => true,
        _ => false,
    };
    if fits { Ok((End::of(to), End::of(from))) } else { Err(Code::INVALID_VALUE) }
}

#[unsafe(no_mangle)]
extern "C" fn hipMemcpyAsync(to: u64, from: u64, len: usize, kind: c_int, stream: Handle) -> c_int {
    answer("hipMemcpyAsync", || {
        let (to, from) = ends(to, from, kind)?;
        copies::copy(&stream::of(stream, current()?)?, Rows::one(to, from, len))
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipMemcpy2DAsync(
    to: u64,
    to_pitch: usize,
    from: u64,
    from_pitch: usize,
    width: usize,
    height: usize,
    kind: c_int,
    stream: Handle,
) -> c_int {
    answer("hipMemcpy2DAsync", || {
        let (to, from) = ends(to, from, kind)?;
        let rows = Rows { to, to_pitch, from, from_pitch, width, height };
        copies::copy(&stream::of(stream, current()?)?, rows)
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipMemsetAsync(address: u64, value: c_int, len: usize, stream: Handle) -> c_int {
    answer("hipMemsetAsync", || {
        copies::fill(&stream::of(stream, current()?)?, address, value as u8, len)
    })
}
