//! Functions that CUDA's driver and HIP have in common, except for their names.
#![allow(non_snake_case)]

mod kernels;
mod memory;
mod order;
mod virtual_memory;

/// Exports each function under its names in CUDA and in HIP. `|current|` is a function that returns
/// the calling thread's device in that vendor's driver. `|current, maker|` adds the vendor.
macro_rules! both {
    ($(
        $cuda:ident, $hip:ident ($($argument:ident: $type:ty),* $(,)?)
        |$current:pat_param $(, $maker:pat_param)?| $body:block
    )*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $cuda($($argument: $type),*) -> std::ffi::c_int {
            let $current = crate::cuda::current;
            $(let $maker = crate::devices::Maker::Cuda;)?
            crate::argument::answer(stringify!($cuda), || $body)
        }

        #[unsafe(no_mangle)]
        extern "C" fn $hip($($argument: $type),*) -> std::ffi::c_int {
            let $current = crate::hip::current;
            $(let $maker = crate::devices::Maker::Hip;)?
            crate::argument::answer(stringify!($hip), || $body)
        }
    )*};
}
use both;
