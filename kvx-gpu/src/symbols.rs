//! Tables of a library's functions.

/// Declares a table of a library's functions, which `find` looks up in a
/// [`NativeLibrary`](kvx_backend::loader::NativeLibrary):
/// those that are required by name, and those that are optional as `Option`s.
///
/// ```
/// kvx_gpu::symbols! {
///     /// What this program calls.
///     struct Functions {
///         getpid: fn() -> i32,
///     }
///     optional {
///         no_such_function: fn(u64) -> i32,
///     }
/// }
/// ```
#[doc(hidden)]
#[macro_export]
macro_rules! __gpu_symbols {
    (
        $(#[$about:meta])*
        $visible:vis struct $Table:ident { $($name:ident: fn($($argument:ty),* $(,)?) -> $result:ty,)* }
        optional { $($extra:ident: fn($($given:ty),* $(,)?) -> $outcome:ty,)* }
    ) => {
        $(#[$about])*
        #[allow(non_snake_case, dead_code)]
        #[derive(Clone, Copy)]
        $visible struct $Table {
            $($visible $name: unsafe extern "C" fn($($argument),*) -> $result,)*
            $($visible $extra: Option<unsafe extern "C" fn($($given),*) -> $outcome>,)*
        }

        impl $Table {
            /// Looks all of them up.
            ///
            /// # Safety
            /// The library's functions of these names have these signatures.
            #[allow(dead_code)]
            $visible unsafe fn find(
                library: &$crate::NativeLibrary,
            ) -> ::std::result::Result<Self, $crate::Unavailable> {
                // SAFETY: the caller's promise.
                unsafe {
                    Ok($Table {
                        $($name: library.symbol($crate::__gpu_symbols!(@name $name))?,)*
                        $($extra: library.optional_symbol($crate::__gpu_symbols!(@name $extra)),)*
                    })
                }
            }
        }
    };
    (@name $name:ident) => {
        const {
            match ::std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("an identifier has no NUL"),
            }
        }
    };
}

pub use __gpu_symbols as symbols;
