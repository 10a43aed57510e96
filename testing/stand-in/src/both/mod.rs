//! Functions that are the same in CUDA's driver and in HIP but for their names.
#![allow(non_snake_case)]

mod kernels;
mod memory;
mod order;
mod virtual_memory;

/// Exports each function under its name in CUDA and under its name in HIP. `|current|` gives the
/// device of the calling thread, as that maker's driver knows it; `|current, maker|` says whose
/// driver that is, too.
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
