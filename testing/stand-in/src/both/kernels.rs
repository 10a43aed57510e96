//! Loaded modules, and launches.

use std::ffi::{c_uint, c_void};

use super::both;
use crate::argument::{In, Out, Text};
use crate::code::Code;
use crate::handles::Handle;
use crate::launch::{self, FUNCTIONS, MODULES};
use crate::stream;

both! {
    cuModuleUnload, hipModuleUnload(module: Handle) |_| { MODULES.remove(module).map(|_| ()) }

    cuModuleGetFunction, hipModuleGetFunction(function: Out<Handle>, module: Handle, name: Text) |current| {
        current()?;
        let found = MODULES.get(module)?.function(&name.get()?)?;
        function.set(FUNCTIONS.add(found))
    }

    cuLaunchKernel, hipModuleLaunchKernel(
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
    ) |current| {
        let stream = stream::of(stream, current()?)?;
        let entry = FUNCTIONS.get(function)?.0;
        if !extra.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let parameters = launch::parameters_of(entry, &parameters)?;
        launch::launch(&stream, entry, [grid_x, grid_y, grid_z], [block_x, block_y, block_z], parameters)
    }
}
