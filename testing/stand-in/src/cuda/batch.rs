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

/// Contiguous copies, `count` of each table.
#[derive(Clone, Copy)]
struct Copies {
    to: In<u64>,
    from: In<u64>,
    len: In<usize>,
    count: usize,
}

/// The attributes of copies, each with the first copy that it applies to.
#[derive(Clone, Copy)]
struct Attributes {
    each: In<CopyAttributes>,
    places: In<usize>,
    count: usize,
}

fn run(copies: Copies, attributes: Attributes, stream: Handle) -> Answer {
    // The driver rejects its default stream here.
    let several = copies.count > 0 && (1..=copies.count).contains(&attributes.count);
    if stream == 0 || !several || attributes.places.get()? != 0 {
        return Err(Code::INVALID_VALUE);
    }
    for at in 0..attributes.count {
        let known = (1..=3).contains(&attributes.each.at(at)?.order);
        if !known || (at > 0 && attributes.places.at(at)? <= attributes.places.at(at - 1)?) {
            return Err(Code::INVALID_VALUE);
        }
    }
    let stream = stream::of(stream, current()?)?;
    for at in 0..copies.count {
        let (to, from) = (End::of(copies.to.at(at)?), End::of(copies.from.at(at)?));
        copies::copy(&stream, Rows::one(to, from, copies.len.at(at)?))?;
    }
    Ok(())
}

/// Defines a version of the driver's function, which may have an argument for the copy that failed.
macro_rules! batch_function {
    ($name:ident $(, $failed:ident: $Failed:ty)?) => {
        #[unsafe(no_mangle)]
        extern "C" fn $name(
            to: In<u64>,
            from: In<u64>,
            len: In<usize>,
            copy_count: usize,
            attributes: In<CopyAttributes>,
            places: In<usize>,
            attribute_count: usize,
            $($failed: $Failed,)?
            stream: Handle,
        ) -> c_int {
            answer(stringify!($name), || {
                let copies = Copies { to, from, len, count: copy_count };
                let attributes = Attributes { each: attributes, places, count: attribute_count };
                let done = run(copies, attributes, stream);
                $(if done.is_err() {
                    $failed.set_if_wanted(usize::MAX);
                })?
                done
            })
        }
    };
}

batch_function!(cuMemcpyBatchAsync, failed: Out<usize>);
batch_function!(cuMemcpyBatchAsync_v2);
