//! Copies and fills.

use std::ffi::{c_int, c_uint};

use super::context::current;
use crate::argument::{In, answer};
use crate::code::{Answer, Code};
use crate::copies::{self, End, Rows};
use crate::handles::Handle;
use crate::mapping::is_of_device;
use crate::stream;

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, len: usize, stream: Handle) -> c_int {
    answer("cuMemcpyHtoDAsync_v2", || one(End::Device(to), End::of(from), len, stream))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, len: usize, stream: Handle) -> c_int {
    answer("cuMemcpyDtoHAsync_v2", || one(End::of(to), End::Device(from), len, stream))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: Handle) -> c_int {
    answer("cuMemcpyDtoDAsync_v2", || one(End::Device(to), End::Device(from), len, stream))
}

fn one(to: End, from: End, len: usize, stream: Handle) -> Answer {
    for (end, of_device) in
        [(to, matches!(to, End::Device(_))), (from, matches!(from, End::Device(_)))]
    {
        // A host address in place of a device's; the device could not access it.
        if let (End::Device(address), true) = (end, of_device)
            && !is_of_device(address)
        {
            return Err(Code::INVALID_VALUE);
        }
    }
    copies::copy(&stream::of(stream, current()?)?, Rows::one(to, from, len))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(address: u64, value: u8, len: usize, stream: Handle) -> c_int {
    answer("cuMemsetD8Async", || {
        copies::fill(&stream::of(stream, current()?)?, address, value, len)
    })
}

/// `CUDA_MEMCPY2D`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Copy2D {
    from: Side,
    to: Side,
    width: usize,
    height: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Side {
    x: usize,
    y: usize,
    memory_type: c_uint,
    host: u64,
    device: u64,
    array: usize,
    pitch: usize,
}

impl Side {
    fn end(&self) -> Answer<End> {
        let skipped = (self.y * self.pitch + self.x) as u64;
        match self.memory_type {
            1 => Ok(End::of(self.host + skipped)),
            2 if is_of_device(self.device) => Ok(End::Device(self.device + skipped)),
            4 => Ok(End::of(self.device + skipped)),
            _ => Err(Code::INVALID_VALUE),
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpy2DAsync_v2(copy: In<Copy2D>, stream: Handle) -> c_int {
    answer("cuMemcpy2DAsync_v2", || {
        let Copy2D { from, to, width, height } = copy.get()?;
        let (to_pitch, from_pitch) = (to.pitch, from.pitch);
        let rows = Rows { to: to.end()?, to_pitch, from: from.end()?, from_pitch, width, height };
        copies::copy(&stream::of(stream, current()?)?, rows)
    })
}
