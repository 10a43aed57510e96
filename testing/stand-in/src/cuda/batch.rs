//! Many copies in one call, in both versions of the driver's function.

use std::ffi::{c_int, c_uint};

use super::context::current;
use crate::argument::{In, Out, answer};
use crate::code::{Answer, Code};
use crate::copies::{self, End, Rows};
use crate::handles::Handle;
use crate::stream;

/// `CUmemcpyAttributes`.
#[derive(Clone, Copy)]
#[repr(C)]
struct CopyAttributes {
    order: c_uint,
    from: [c_int; 2],
    to: [c_int; 2],
    flags: c_uint,
}

struct Batch {
    to: In<u64>,
    from: In<u64>,
    len: In<usize>,
    count: usize,
    attributes: In<CopyAttributes>,
    places: In<usize>,
    attribute_count: usize,
    stream: Handle,
}

impl Batch {
    fn run(&self) -> Answer {
        // The driver rejects its default stream here.
        let several = self.count > 0 && (1..=self.count).contains(&self.attribute_count);
        if self.stream == 0 || !several || self.places.get()? != 0 {
            return Err(Code::INVALID_VALUE);
        }
        for at in 0..self.attribute_count {
            let known = (1..=3).contains(&self.attributes.at(at)?.order);
            if !known || (at > 0 && self.places.at(at)? <= self.places.at(at - 1)?) {
                return Err(Code::INVALID_VALUE);
            }
        }
        let stream = stream::of(self.stream, current()?)?;
        for at in 0..self.count {
            let (to, from) = (End::of(self.to.at(at)?), End::of(self.from.at(at)?));
            copies::copy(&stream, Rows::one(to, from, self.len.at(at)?))?;
        }
        Ok(())
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyBatchAsync(
    to: In<u64>,
    from: In<u64>,
    len: In<usize>,
    count: usize,
    attributes: In<CopyAttributes>,
    places: In<usize>,
    attribute_count: usize,
    failed: Out<usize>,
    stream: Handle,
) -> c_int {
    answer("cuMemcpyBatchAsync", || {
        let batch = Batch { to, from, len, count, attributes, places, attribute_count, stream };
        let done = batch.run();
        if done.is_err() {
            failed.set_if_wanted(usize::MAX);
        }
        done
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyBatchAsync_v2(
    to: In<u64>,
    from: In<u64>,
    len: In<usize>,
    count: usize,
    attributes: In<CopyAttributes>,
    places: In<usize>,
    attribute_count: usize,
    stream: Handle,
) -> c_int {
    answer("cuMemcpyBatchAsync_v2", || {
        Batch { to, from, len, count, attributes, places, attribute_count, stream }.run()
    })
}
