//! Loads modules.

use std::ffi::c_int;

use super::context::current;
use crate::argument::{In, Out, answer};
use crate::handles::Handle;
use crate::launch::{MODULES, Module};

#[unsafe(no_mangle)]
extern "C" fn cuModuleLoadData(module: Out<Handle>, image: In<u8>) -> c_int {
    answer("cuModuleLoadData", || {
        current()?;
        module.set(MODULES.add(Module::from_image(image)?))
    })
}
