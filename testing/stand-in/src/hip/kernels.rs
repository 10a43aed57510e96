//! Loads modules.

use std::ffi::c_int;

use super::device::current;
use crate::argument::{Out, Text, answer};
use crate::handles::Handle;
use crate::launch::{MODULES, Module};

#[unsafe(no_mangle)]
extern "C" fn hipModuleLoadData(module: Out<Handle>, image: Text) -> c_int {
    answer("hipModuleLoadData", || {
        current()?;
        module.set(MODULES.add(Module::from_code(&image.get()?)?))
    })
}
