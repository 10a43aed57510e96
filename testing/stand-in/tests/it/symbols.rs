//! Calls functions of an opened library.

use libloading::{Library, Symbol};

/// The stand-in, or a library with a given name.
pub(crate) struct Opened(Library);

impl Opened {
    pub(crate) fn by_path() -> Self {
        // SAFETY: the library has no initialisers.
        Opened(unsafe { Library::new(kvx_stand_in::library()) }.expect("the stand-in opens"))
    }

    pub(crate) fn by_name(name: &str) -> Option<Self> {
        // SAFETY: tests only open a name whose library is already open.
        unsafe { Library::new(name) }.ok().map(Opened)
    }

    /// Returns the address of a function.
    pub(crate) fn address(&self, name: &str) -> Option<usize> {
        // SAFETY: the function is not called.
        let found: Symbol<'_, unsafe extern "C" fn()> =
            unsafe { self.0.get(name.as_bytes()) }.ok()?;
        Some(*found as usize)
    }

    /// # Safety
    /// `F` must be the function's type.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the caller ensures that `F` is the function's type.
        let found: Symbol<'_, F> =
            unsafe { self.0.get(name.as_bytes()) }.unwrap_or_else(|_| panic!("{name}"));
        *found
    }
}

/// Calls a function of a library with arguments of these types, such as `call!(library, cuInit(0:
/// u32))`, and returns its number.
macro_rules! call {
    ($library:expr, $function:ident($($value:expr => $kind:ty),* $(,)?)) => {{
        // SAFETY: the types are those of the driver's documentation. Pointers point to locals of
        // the test, which live until the call ends or the test has waited for the stream.
        unsafe {
            let function: unsafe extern "C" fn($($kind),*) -> i32 = $library.function(stringify!($function));
            function($($value),*)
        }
    }};
}
pub(crate) use call;
