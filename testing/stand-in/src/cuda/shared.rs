//! Exports memory for the cards of other vendors.

use std::ffi::c_int;
use std::os::fd::RawFd;

use super::context::current;
use crate::argument::{Out, answer};
use crate::code::Code;
use crate::mapping::page;
use crate::memory::memory;

#[unsafe(no_mangle)]
extern "C" fn cuMemGetHandleForAddressRange(
    descriptor: Out<RawFd>,
    address: u64,
    len: usize,
    kind: c_int,
    _flags: u64,
) -> c_int {
    answer("cuMemGetHandleForAddressRange", || {
        current()?;
        let aligned = address.is_multiple_of(page() as u64) && len.is_multiple_of(page());
        if kind != 1 || !aligned {
            return Err(Code::INVALID_VALUE);
        }
        descriptor.set(memory().descriptor(address, len)?)
    })
}
