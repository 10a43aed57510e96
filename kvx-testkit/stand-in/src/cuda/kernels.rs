//! Modules and launches.

use std::ffi::{c_int, c_uint, c_void};

use super::context::current;
use crate::argument::{In, Out, Text, answer};
use crate::code::Code;
use crate::handles::Handle;
use crate::launch::{self, FUNCTIONS, MODULES, Module};
use crate::stream;

#[unsafe(no_mangle)]
extern "C" fn cuModuleLoadData(module: Out<Handle>, image: Text) -> c_int {
    answer("cuModuleLoadData", || {
        current()?;
        module.set(MODULES.add(Module::from_ptx(&image.get()?)?))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: Handle) -> c_int {
    answer("cuModuleUnload", || MODULES.remove(module).map(|_| ()))
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleGetFunction(function: Out<Handle>, module: Handle, name: Text) -> c_int {
    answer("cuModuleGetFunction", || {
        current()?;
        let found = MODULES.get(module)?.function(&name.get()?)?;
        function.set(FUNCTIONS.add(found))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuLaunchKernel(
    function: Handle,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    _shared: c_uint,
    stream: Handle,
    parameters: In<In<u64>>,
    extra: In<*const c_void>,
) -> c_int {
    answer("cuLaunchKernel", || {
        let stream = stream::of(stream, current()?)?;
        let entry = FUNCTIONS.get(function)?.0;
        if !extra.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let parameters = launch::parameters_of(entry, &parameters)?;
        launch::launch(&stream, entry, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], parameters)
    })
}
