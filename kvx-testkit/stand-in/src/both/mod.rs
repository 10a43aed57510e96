//! Functions that are the same in CUDA's driver and in HIP but for their names.
#![allow(non_snake_case)]

mod kernels;
mod memory;
mod order;

/// Exports each function under its name in CUDA and under its name in HIP. `|current|` gives the device of the calling thread,
/// as that maker's driver knows it.
macro_rules! both {
    ($($cuda:ident, $hip:ident ($($argument:ident: $type:ty),* $(,)?) |$current:pat_param| $body:block)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $cuda($($argument: $type),*) -> std::ffi::c_int {
            let $current = crate::cuda::current;
            crate::argument::answer(stringify!($cuda), || $body)
        }

        #[unsafe(no_mangle)]
        extern "C" fn $hip($($argument: $type),*) -> std::ffi::c_int {
            let $current = crate::hip::current;
            crate::argument::answer(stringify!($hip), || $body)
        }
    )*};
}
use both;
