//! Open libraries: their symbols, and the single library of a process.

use std::borrow::Cow;
use std::ffi::{CStr, OsStr, c_int, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use kvx_core::backend::Unavailable;

/// A native library that stays open for the life of the process. Cheap to clone.
#[derive(Clone)]
pub struct NativeLibrary(Arc<OpenLibrary>);

pub(super) struct OpenLibrary {
    /// The dynamic linker's handle, which is never closed.
    pub(super) handle: *mut c_void,
    pub(super) path: PathBuf,
    pub(super) origin: Origin,
    pub(super) cure: Cow<'static, str>,
}

// SAFETY: the handle belongs to the process, not to the thread that opened it; the other fields are
// `Send`.
unsafe impl Send for OpenLibrary {}
// SAFETY: the handle is only passed to `dlsym` and `dlvsym`, which threads may call concurrently;
// the other fields are `Sync`.
unsafe impl Sync for OpenLibrary {}

/// The variable that named the library, or could have named it.
pub(super) struct Origin {
    pub(super) variable: &'static str,
    pub(super) value: Option<String>,
}

/// A library that a process opens once; the first request decides which one.
pub struct OpenOnce<T>(OnceLock<T>);

impl<T> OpenOnce<T> {
    /// Returns a library that is not open yet.
    #[expect(clippy::new_without_default, reason = "it is made for statics, which need a constant")]
    pub const fn new() -> Self {
        OpenOnce(OnceLock::new())
    }

    /// Returns the library, if it has been opened.
    pub fn opened(&self) -> Option<&T> {
        self.0.get()
    }

    /// Returns the library, and opens it with `load` if necessary.
    ///
    /// # Errors
    ///
    /// Those of `load`, which the next call tries again.
    pub fn open(&self, load: impl FnOnce() -> Result<T, Unavailable>) -> Result<&T, Unavailable> {
        match self.0.get() {
            Some(library) => Ok(library),
            None => {
                let library = load()?;
                Ok(self.0.get_or_init(|| library))
            }
        }
    }
}

/// A native library with the functions that kvx calls, and its version.
#[derive(Debug)]
pub struct BoundLibrary<F, V> {
    native: NativeLibrary,
    functions: F,
    version: V,
}

impl<F, V: Copy> BoundLibrary<F, V> {
    /// Combines an open library with its functions and version.
    pub fn new(native: NativeLibrary, functions: F, version: V) -> Self {
        BoundLibrary { native, functions, version }
    }

    /// Returns the library itself, for symbols that only some versions have.
    pub fn native(&self) -> &NativeLibrary {
        &self.native
    }

    /// Returns the library's functions.
    pub fn functions(&self) -> &F {
        &self.functions
    }

    /// Returns the library's version.
    pub fn version(&self) -> V {
        self.version
    }

    /// Returns the file that was loaded.
    pub fn path(&self) -> &Path {
        self.native.path()
    }
}

/// A table of a library's functions, which `cargo xtask bindings` generates.
///
/// # Safety
/// Each field is a pointer to a function, listed with the name of that function.
pub unsafe trait FunctionTable: Copy {
    /// The names of the functions with the offsets of their fields, in the order of the fields.
    const FIELDS: &'static [(&'static CStr, usize)];

    /// Resolves all functions by `address`.
    ///
    /// # Safety
    /// `address` returns the address of the function of a name, which has the signature that the
    /// table gives it.
    ///
    /// # Errors
    /// The first error of `address`.
    unsafe fn find<E>(
        address: impl FnMut(&'static CStr) -> Result<NonNull<c_void>, E>,
    ) -> Result<Self, E> {
        const { assert!(is_complete::<Self>(Self::FIELDS)) };
        let names = Self::FIELDS.iter().map(|(name, _)| *name);
        let addresses = names.map(address).collect::<Result<Vec<_>, E>>()?;
        // SAFETY: the assertion above ensures that the table is as many pointers in this order, and
        // the caller that they point to functions of its signatures.
        Ok(unsafe { addresses.as_ptr().cast::<Self>().read() })
    }
}

/// Returns true if a table of pointers has exactly these fields, in this order.
const fn is_complete<T>(fields: &[(&CStr, usize)]) -> bool {
    let mut at = 0;
    while at < fields.len() {
        if fields[at].1 != at * size_of::<usize>() {
            return false;
        }
        at += 1;
    }
    size_of::<T>() == fields.len() * size_of::<usize>()
}

/// The library of a process: only the first one that was opened is used.
pub struct ProcessLibrary<F, V> {
    opened: OpenOnce<BoundLibrary<F, V>>,
    load: fn() -> Result<BoundLibrary<F, V>, Unavailable>,
}

impl<F, V: Copy> ProcessLibrary<F, V> {
    /// Returns a library that `load` will open.
    pub const fn new(load: fn() -> Result<BoundLibrary<F, V>, Unavailable>) -> Self {
        ProcessLibrary { opened: OpenOnce::new(), load }
    }

    /// Returns the library, and opens it if necessary.
    ///
    /// # Errors
    /// The places that were tried, and what to do. The next call tries again.
    pub fn open(&self) -> Result<&BoundLibrary<F, V>, Unavailable> {
        self.opened.open(self.load)
    }

    /// Returns the library, if it has been opened.
    pub fn opened(&self) -> Option<&BoundLibrary<F, V>> {
        self.opened.opened()
    }

    /// Returns the functions of the open library, for the holder of one of its handles.
    ///
    /// # Panics
    ///
    /// If the library has not been opened, in which case no handle can exist.
    pub fn functions(&self) -> &F {
        self.opened().expect("a handle exists, so its library is open").functions()
    }
}

impl NativeLibrary {
    pub(super) fn new(open: OpenLibrary) -> Self {
        NativeLibrary(Arc::new(open))
    }

    /// Returns the file that was loaded. It may differ from the first one with its name if the
    /// process had already loaded another.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Returns the symbol `name`.
    ///
    /// # Safety
    ///
    /// `T` must be the type that the library gives the symbol: a pointer, or a function pointer
    /// with its signature.
    ///
    /// # Errors
    ///
    /// Names the missing symbol and the file.
    pub unsafe fn symbol<T: Copy>(&self, name: &CStr) -> Result<T, Unavailable> {
        // SAFETY: the caller ensures that `T` is the symbol's type.
        unsafe { self.optional_symbol(name) }.ok_or_else(|| self.lacks(name, ""))
    }

    /// Returns the address of the symbol `name`, for tables of functions that are filled by name.
    ///
    /// # Errors
    ///
    /// Names the missing symbol and the file.
    pub fn address(&self, name: &CStr) -> Result<NonNull<c_void>, Unavailable> {
        // SAFETY: `T` is an address, which every symbol has; null addresses count as missing.
        unsafe { self.symbol(name) }
    }

    /// Like [`address`](NativeLibrary::address), for `version` of the symbol.
    ///
    /// # Errors
    ///
    /// Names the missing symbol, the version and the file.
    pub fn versioned_address(
        &self,
        name: &CStr,
        version: &CStr,
    ) -> Result<NonNull<c_void>, Unavailable> {
        // SAFETY: `T` is a non-null address, which every symbol has.
        unsafe { self.versioned_symbol(name, version) }
    }

    /// Returns the symbol `name`, which only some versions of a library have.
    ///
    /// # Safety
    ///
    /// As for [`symbol`](NativeLibrary::symbol).
    pub unsafe fn optional_symbol<T: Copy>(&self, name: &CStr) -> Option<T> {
        // SAFETY: the handle is never closed, and the name ends in NUL.
        let address = unsafe { libc::dlsym(self.0.handle, name.as_ptr()) };
        // SAFETY: the caller ensures that `T` is the symbol's type.
        unsafe { typed(address) }
    }

    /// Returns `version` of the symbol `name`, such as `FABRIC_1.3`: the one that a program linked
    /// against that version gets, even if a newer library has a newer default.
    ///
    /// # Safety
    ///
    /// As for [`symbol`](NativeLibrary::symbol), for that version of the symbol.
    ///
    /// # Errors
    ///
    /// Names the missing symbol, the version and the file.
    pub unsafe fn versioned_symbol<T: Copy>(
        &self,
        name: &CStr,
        version: &CStr,
    ) -> Result<T, Unavailable> {
        // SAFETY: the caller ensures that `T` is the type of that version of the symbol.
        unsafe { self.optional_versioned_symbol(name, version) }
            .ok_or_else(|| self.lacks(name, &format!(" of version {}", version.to_string_lossy())))
    }

    /// Like [`versioned_symbol`](NativeLibrary::versioned_symbol), for a symbol that only some
    /// libraries have.
    ///
    /// # Safety
    ///
    /// As for [`versioned_symbol`](NativeLibrary::versioned_symbol).
    pub unsafe fn optional_versioned_symbol<T: Copy>(
        &self,
        name: &CStr,
        version: &CStr,
    ) -> Option<T> {
        #[cfg(target_env = "gnu")]
        {
            // SAFETY: the handle is never closed, and both names end in NUL.
            let address = unsafe { libc::dlvsym(self.0.handle, name.as_ptr(), version.as_ptr()) };
            // SAFETY: the caller ensures that `T` is the type of that version of the symbol.
            unsafe { typed(address) }
        }
        #[cfg(not(target_env = "gnu"))]
        {
            // This C library ignores versions, as does the linker that runs the program.
            let _ = version;
            // SAFETY: the caller ensures that `T` is the symbol's type.
            unsafe { self.optional_symbol(name) }
        }
    }

    fn lacks(&self, name: &CStr, version: &str) -> Unavailable {
        let Origin { variable, value } = &self.0.origin;
        let (path, cure) = (self.0.path.display(), &self.0.cure);
        Unavailable {
            missing: format!("{path} has no symbol {}{version}", name.to_string_lossy()),
            variable: Some(variable),
            value: value.clone(),
            tried: Vec::new(),
            cure: format!("it is not the library that kvx expects, or it is too old: {cure}"),
        }
    }
}

impl fmt::Debug for NativeLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NativeLibrary({})", self.0.path.display())
    }
}

/// # Safety
/// `address` is null or points to a `T`.
unsafe fn typed<T: Copy>(address: *mut c_void) -> Option<T> {
    const { assert!(size_of::<T>() == size_of::<*mut c_void>(), "T must be address-sized") };
    if address.is_null() {
        return None; // a symbol may be null, but none that kvx calls is
    }
    // SAFETY: the sizes are equal, and the caller ensures that the address is a `T`.
    Some(unsafe { std::mem::transmute_copy(&address) })
}

/// Returns the files of the libraries that this process has loaded, as the dynamic linker names
/// them.
pub fn loaded_files() -> Vec<PathBuf> {
    unsafe extern "C" fn note(
        info: *mut libc::dl_phdr_info,
        _: usize,
        found: *mut c_void,
    ) -> c_int {
        // SAFETY: the linker passes an entry whose name is a C string, and the list that is passed
        // below.
        let (name, found) =
            unsafe { (CStr::from_ptr((*info).dlpi_name), &mut *found.cast::<Vec<PathBuf>>()) };
        // The program itself has an empty name.
        if !name.is_empty() {
            found.push(OsStr::from_bytes(name.to_bytes()).into());
        }
        0
    }
    let mut found: Vec<PathBuf> = Vec::new();
    // SAFETY: `note` interprets the pointer as the list of paths that it is, and the list outlives
    // the call.
    unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut found).cast()) };
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_all_fields_in_the_order_of_their_names() {
        let (first, second) = ((c"a", 0), (c"b", size_of::<usize>()));
        assert!(is_complete::<[usize; 2]>(&[first, second]));
        assert!(!is_complete::<[usize; 2]>(&[second, first]));
        assert!(!is_complete::<[usize; 2]>(&[first]));
        assert!(!is_complete::<[usize; 1]>(&[first, second]));
    }

    #[test]
    fn a_library_is_opened_once_and_failures_are_tried_again() {
        let once = OpenOnce::new();
        assert!(once.open(|| Err(Unavailable::because("not there", "install it"))).is_err());
        assert_eq!((once.opened(), once.open(|| Ok(1))), (None, Ok(&1)));
        assert_eq!((once.open(|| Ok(2)), once.opened()), (Ok(&1), Some(&1)));
    }
}
