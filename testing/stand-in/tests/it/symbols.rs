//! Calls of a library that was opened.

use libloading::{Library, Symbol};

/// A library, and one that a name finds.
pub(crate) struct Opened(Library);

impl Opened {
    pub(crate) fn by_path() -> Self {
        // SAFETY: it runs nothing when it is opened.
        Opened(unsafe { Library::new(kvx_stand_in::library()) }.expect("the stand-in opens"))
    }

    pub(crate) fn by_name(name: &str) -> Option<Self> {
        // SAFETY: only asked for a library that is open already.
        unsafe { Library::new(name) }.ok().map(Opened)
    }

    /// The address of a function.
    pub(crate) fn address(&self, name: &str) -> Option<usize> {
        // SAFETY: nothing is called.
        let found: Symbol<'_, unsafe extern "C" fn()> =
            unsafe { self.0.get(name.as_bytes()) }.ok()?;
        Some(*found as usize)
    }

    /// # Safety
    /// `F` is the function's type.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the caller's promise.
        let found: Symbol<'_, F> =
            unsafe { self.0.get(name.as_bytes()) }.unwrap_or_else(|_| panic!("{name}"));
        *found
    }
}

/// Calls a function of a library with arguments of these types: `call!(library, cuInit(0: u32))`;
/// its number.
macro_rules! call {
    ($library:expr, $function:ident($($value:expr => $kind:ty),* $(,)?)) => {{
        // SAFETY: the types are those of the driver's documentation, and what the values point to
        // is a local of the test's that lives until the call is over, or a stream is waited for.
        unsafe {
            let function: unsafe extern "C" fn($($kind),*) -> i32 = $library.function(stringify!($function));
            function($($value),*)
        }
    }};
}
pub(crate) use call;
