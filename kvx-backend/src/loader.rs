//! Opens native libraries at run time: a missing one is a reason in a list, never a crash.
//!
//! The host process belongs to the program, not to the libraries that kvx needs. They are never
//! closed (their threads and exit handlers would run into unmapped code), the environment is not
//! changed for them, and the signal handlers that some install while they are loaded or initialised
//! are put back: open a library and initialise it in one [`with_signals_kept`].
//!
//! ```
//! use kvx_backend::loader::{self, Search};
//!
//! let search = Search::new("KVX_EXAMPLE_LIB", &["libkvx-example.so.1"], "install kvx-example");
//! let opened = loader::with_signals_kept(|| {
//!     let library = search.open()?;
//!     // SAFETY: the library's header declares `int example_init(void)`.
//!     let init: unsafe extern "C" fn() -> i32 = unsafe { library.symbol(c"example_init") }?;
//!     // SAFETY: as the header says, it may be called once and needs nothing.
//!     Ok::<_, kvx_core::backend::Unavailable>((unsafe { init() }, library))
//! });
//! let why = opened.err().expect("there is no such library").to_string();
//! assert!(why.starts_with("libkvx-example.so.1 not found (KVX_EXAMPLE_LIB unset; tried"), "{why}");
//! assert!(why.ends_with("install kvx-example"));
//! ```

use std::borrow::Cow;
use std::cell::Cell;
use std::ffi::{CStr, OsStr, OsString, c_void};
use std::fmt;
#[cfg(target_env = "gnu")]
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use libloading::os::unix as native;

use kvx_core::backend::sync::Mutex;
use kvx_core::backend::{Unavailable, fork};

/// Looks for a library in this order: the file that the variable names, and nothing else if it is
/// set; the names, which the dynamic linker finds; the further files.
#[derive(Clone, Debug)]
#[must_use = "call open"]
pub struct Search {
    variable: &'static str,
    names: &'static [&'static str],
    files: Vec<PathBuf>,
    flags: i32,
    cure: Cow<'static, str>,
}

impl Search {
    /// Looks at `variable`, then for `names`, the first of which messages call the library by;
    /// `cure` says how to get it. The library's symbols stay out of the way of others
    /// (`RTLD_LOCAL`).
    pub fn new(
        variable: &'static str,
        names: &'static [&'static str],
        cure: impl Into<Cow<'static, str>>,
    ) -> Self {
        Search {
            variable,
            names,
            files: Vec::new(),
            flags: native::RTLD_NOW | native::RTLD_LOCAL,
            cure: cure.into(),
        }
    }

    /// Looks at these files after the names.
    pub fn files(mut self, files: impl IntoIterator<Item = PathBuf>) -> Self {
        self.files.extend(files);
        self
    }

    /// Lets libraries that are opened later see its symbols (`RTLD_GLOBAL`): for those that open
    /// plugins which count on it.
    pub fn global(mut self) -> Self {
        self.flags = native::RTLD_NOW | native::RTLD_GLOBAL;
        self
    }

    /// Opens the first that loads, for the life of the process. Signal handlers that it installs
    /// meanwhile are put back.
    ///
    /// # Errors
    /// Everything that was tried, with the dynamic linker's reason for each, and the cure.
    pub fn open(&self) -> Result<NativeLibrary, Unavailable> {
        // An empty value counts as unset: that is how a wrapper script clears it.
        self.open_at(std::env::var_os(self.variable).filter(|value| !value.is_empty()))
    }

    fn open_at(&self, value: Option<OsString>) -> Result<NativeLibrary, Unavailable> {
        if let Err(forked) = fork::check() {
            return Err(Unavailable::because(
                "no library can be opened in this process",
                forked.sentence().to_owned(),
            ));
        }
        let candidates: Vec<&OsStr> = match &value {
            Some(file) => vec![file],
            None => {
                let files = self.files.iter().map(|file| file.as_os_str());
                self.names.iter().map(OsStr::new).chain(files).collect()
            }
        };
        let origin = Origin {
            variable: self.variable,
            value: value.as_ref().map(|v| v.to_string_lossy().into()),
        };
        let (mut tried, mut broken) = (Vec::new(), None);
        for candidate in &candidates {
            match open_for_good(candidate, self.flags) {
                Ok(handle) => {
                    crate::reactor::halt_before_destructors();
                    let path = loaded_path(handle).unwrap_or_else(|| candidate.into());
                    tracing::debug!(path = %path.display(), variable = self.variable, "opened a native library");
                    return Ok(NativeLibrary(Arc::new(OpenLibrary {
                        handle,
                        path,
                        origin,
                        cure: self.cure.clone(),
                    })));
                }
                Err(error) => {
                    let (shown, reason) = (candidate.to_string_lossy(), error);
                    // The linker says the same of a file that is not there and of one that needs
                    // such a file: it begins with the name of the one that is missing.
                    let absent = reason.starts_with(&*shown) && reason.contains("No such file");
                    if !absent && broken.is_none() {
                        broken = Some(shown.clone().into_owned());
                    }
                    tried.push(if reason.starts_with(&*shown) {
                        reason
                    } else {
                        format!("{shown}: {reason}")
                    });
                }
            }
        }
        let missing = match (broken, candidates.first()) {
            (Some(broken), _) => format!("{broken} does not load"),
            (None, Some(first)) => format!("{} not found", first.to_string_lossy()),
            (None, None) => {
                format!("no library is known to look for and {} is unset", self.variable)
            }
        };
        let Origin { variable, value } = origin;
        Err(Unavailable {
            missing,
            variable: Some(variable),
            value,
            tried,
            cure: self.cure.clone().into_owned(),
        })
    }
}

/// Opens a library for the life of the process. Returns its handle, or the dynamic linker's reason.
fn open_for_good(file: &OsStr, flags: i32) -> Result<*mut c_void, String> {
    // SAFETY: the library's initialisers run. That they may is what naming a library means; what
    // they do to signal handlers is undone.
    let opened = with_signals_kept(|| unsafe { native::Library::open(Some(file), flags) });
    opened.map(native::Library::into_raw).map_err(|error| match error {
        libloading::Error::DlOpen { source } => source.to_string(),
        other => other.to_string(),
    })
}

/// Loads a library for the life of the process, for others that look for it: by a name that the
/// dynamic linker finds, or by its file. Signal handlers that it installs meanwhile are put back.
///
/// # Errors
/// The dynamic linker's reason.
pub fn preload(library: impl AsRef<OsStr>) -> Result<(), String> {
    open_for_good(library.as_ref(), native::RTLD_NOW | native::RTLD_LOCAL).map(drop)
}

/// A native library that is open for the life of the process. Cheap to clone.
#[derive(Clone)]
pub struct NativeLibrary(Arc<OpenLibrary>);

struct OpenLibrary {
    /// The dynamic linker's handle, never closed.
    handle: *mut c_void,
    path: PathBuf,
    origin: Origin,
    cure: Cow<'static, str>,
}

// SAFETY: the handle is a token for the dynamic linker, which may be asked from any thread; all
// else is plain data.
unsafe impl Send for OpenLibrary {}
// SAFETY: as above.
unsafe impl Sync for OpenLibrary {}

/// The variable that was looked at, and its value.
struct Origin {
    variable: &'static str,
    value: Option<String>,
}

/// What a process knows of a library that it opens once: the first that was asked for is the only
/// one.
pub struct OpenOnce<T>(OnceLock<T>);

impl<T> OpenOnce<T> {
    /// Not opened yet.
    #[expect(clippy::new_without_default, reason = "it is made for statics, which need a constant")]
    pub const fn new() -> Self {
        OpenOnce(OnceLock::new())
    }

    /// The library, if it has been opened.
    pub fn opened(&self) -> Option<&T> {
        self.0.get()
    }

    /// The library, which `load` opens unless it is open already.
    ///
    /// # Errors
    /// Those of `load`, which is tried again at the next call.
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
    /// Returns the library as its backend knows it.
    pub fn new(native: NativeLibrary, functions: F, version: V) -> Self {
        BoundLibrary { native, functions, version }
    }

    /// Returns the library itself, for symbols that only some versions have.
    pub fn native(&self) -> &NativeLibrary {
        &self.native
    }

    /// Returns its functions.
    pub fn functions(&self) -> &F {
        &self.functions
    }

    /// Returns its version.
    pub fn version(&self) -> V {
        self.version
    }

    /// Returns the file that was loaded.
    pub fn path(&self) -> &Path {
        self.native.path()
    }
}

/// The library of a process: the first that was opened is the only one.
pub struct ProcessLibrary<F, V> {
    opened: OpenOnce<BoundLibrary<F, V>>,
    load: fn() -> Result<BoundLibrary<F, V>, Unavailable>,
}

impl<F, V: Copy> ProcessLibrary<F, V> {
    /// Returns one that `load` will open.
    pub const fn new(load: fn() -> Result<BoundLibrary<F, V>, Unavailable>) -> Self {
        ProcessLibrary { opened: OpenOnce::new(), load }
    }

    /// Returns the library, opened if it was not yet.
    ///
    /// # Errors
    /// What was tried and the cure; tried again at the next call.
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
    /// It has not been opened, so that there can be no handle.
    pub fn functions(&self) -> &F {
        self.opened().expect("a handle exists, so its library is open").functions()
    }
}

impl NativeLibrary {
    /// The file that was really loaded. It may be another than the first of its name: the process
    /// may have loaded it before.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The symbol `name`.
    ///
    /// # Safety
    /// `T` is the type that the library gives the symbol: a pointer, or a function pointer with its
    /// signature.
    ///
    /// # Errors
    /// Names the symbol and the file.
    pub unsafe fn symbol<T: Copy>(&self, name: &CStr) -> Result<T, Unavailable> {
        // SAFETY: the caller's promise.
        unsafe { self.optional_symbol(name) }.ok_or_else(|| self.lacks(name, ""))
    }

    /// The address of the symbol `name`, for tables of functions that are filled by name.
    ///
    /// # Errors
    /// Names the symbol and the file.
    pub fn address(&self, name: &CStr) -> Result<NonNull<c_void>, Unavailable> {
        // SAFETY: whatever a symbol is, it is an address, and null ones are not told.
        unsafe { self.symbol(name) }
    }

    /// As [`address`](NativeLibrary::address), of the symbol as of `version`.
    ///
    /// # Errors
    /// Names the symbol, the version and the file.
    pub fn versioned_address(
        &self,
        name: &CStr,
        version: &CStr,
    ) -> Result<NonNull<c_void>, Unavailable> {
        // SAFETY: as above.
        unsafe { self.versioned_symbol(name, version) }
    }

    /// The symbol `name`, for what only some versions of a library have.
    ///
    /// # Safety
    /// As [`symbol`](NativeLibrary::symbol).
    pub unsafe fn optional_symbol<T: Copy>(&self, name: &CStr) -> Option<T> {
        // SAFETY: the handle is open for ever, and the name ends in NUL.
        let address = unsafe { libc::dlsym(self.0.handle, name.as_ptr()) };
        // SAFETY: the caller's promise.
        unsafe { typed(address) }
    }

    /// The symbol `name` as of `version` (`FABRIC_1.3`): what a program gets that was linked
    /// against that version, also when a newer library has a newer default.
    ///
    /// # Safety
    /// As [`symbol`](NativeLibrary::symbol), for the symbol as of that version.
    ///
    /// # Errors
    /// Names the symbol, the version and the file.
    pub unsafe fn versioned_symbol<T: Copy>(
        &self,
        name: &CStr,
        version: &CStr,
    ) -> Result<T, Unavailable> {
        // SAFETY: the caller's promise.
        unsafe { self.optional_versioned_symbol(name, version) }
            .ok_or_else(|| self.lacks(name, &format!(" of version {}", version.to_string_lossy())))
    }

    /// As [`versioned_symbol`](NativeLibrary::versioned_symbol), for what only some libraries have.
    ///
    /// # Safety
    /// As [`versioned_symbol`](NativeLibrary::versioned_symbol).
    pub unsafe fn optional_versioned_symbol<T: Copy>(
        &self,
        name: &CStr,
        version: &CStr,
    ) -> Option<T> {
        #[cfg(target_env = "gnu")]
        {
            // SAFETY: the handle is open for ever, and both names end in NUL.
            let address = unsafe { libc::dlvsym(self.0.handle, name.as_ptr(), version.as_ptr()) };
            // SAFETY: the caller's promise.
            unsafe { typed(address) }
        }
        #[cfg(not(target_env = "gnu"))]
        {
            // This C library ignores versions, and so does the linker that runs the program.
            let _ = version;
            // SAFETY: the caller's promise.
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
            cure: format!("it is another library than kvx expects, or too old: {cure}"),
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
    const { assert!(size_of::<T>() == size_of::<*mut c_void>(), "a symbol is an address") };
    if address.is_null() {
        return None; // a symbol may be defined as null; nothing that kvx calls is
    }
    // SAFETY: of one size, and the caller says that this address is a `T`.
    Some(unsafe { std::mem::transmute_copy(&address) })
}

#[cfg(target_env = "gnu")]
fn loaded_path(handle: *mut c_void) -> Option<PathBuf> {
    /// The beginning of the C library's `struct link_map`, which debuggers hold it to.
    #[repr(C)]
    struct LinkMap {
        _base: usize,
        name: *const libc::c_char,
    }
    let mut map: *const LinkMap = std::ptr::null();
    // SAFETY: the handle is open, and RTLD_DI_LINKMAP stores one pointer.
    let rc = unsafe { libc::dlinfo(handle, libc::RTLD_DI_LINKMAP, (&raw mut map).cast()) };
    if rc != 0 || map.is_null() {
        return None;
    }
    // SAFETY: the entry of a library that is never closed stays, and its name is a C string.
    let name = unsafe { CStr::from_ptr((*map).name) };
    std::path::absolute(OsStr::from_bytes(name.to_bytes())).ok()
}

/// Other C libraries are not asked: what was opened is the best that is known.
#[cfg(not(target_env = "gnu"))]
fn loaded_path(_: *mut c_void) -> Option<PathBuf> {
    None
}

/// One at a time: libraries race with each other in what they do to a process while they start.
static LOADING: Mutex<()> = Mutex::new(());

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `load`, which opens and initialises a library, and puts back every signal handler that it
/// changed. Whoever else opens a library by this module waits meanwhile; nested calls do not.
///
/// All 64 signals are compared; what was changed is told by `tracing` at debug level. Handlers that
/// other threads of the program install during the call are put back too: install them before, or
/// after.
///
/// The two signals that the C library keeps to itself (32 and 33) are left alone if it had no
/// handler there before: it installs one on first need, for good, and would end the process
/// without.
pub fn with_signals_kept<T>(load: impl FnOnce() -> T) -> T {
    if INSIDE.get() {
        return load();
    }
    let _one = LOADING.lock();
    let _kept = SavedHandlers::save(); // dropped before the lock, also when `load` panics
    load()
}

const SIGNALS: std::ops::RangeInclusive<i32> = 1..=64;

/// The kernel's `struct sigaction`, whose layout differs from machine to machine; it is only
/// carried and compared.
type Disposition = [u64; 8];

/// The dispositions of all signals at one time; put back when dropped.
struct SavedHandlers([Disposition; 64]);

impl SavedHandlers {
    fn save() -> Self {
        INSIDE.set(true);
        let mut kept = SavedHandlers([[0; 8]; 64]);
        for (signal, disposition) in SIGNALS.zip(&mut kept.0) {
            *disposition = disposition_of(signal);
        }
        kept
    }
}

impl Drop for SavedHandlers {
    fn drop(&mut self) {
        let mut changed = Vec::new();
        for (signal, before) in SIGNALS.zip(&self.0) {
            if disposition_of(signal) == *before {
                continue;
            }
            changed.push(signal);
            let of_the_c_library = matches!(signal, 32 | 33) && before[0] == 0;
            if !of_the_c_library {
                dispose(signal, before);
            }
        }
        INSIDE.set(false);
        if !changed.is_empty() {
            tracing::debug!(signals = ?changed, "a native library changed what these signals do: put back");
        }
    }
}

/// The size of the kernel's signal set.
const SET: usize = 8;

/// By the system call: the C library's function hides the signals it keeps to itself, and their
/// handlers.
fn disposition_of(signal: i32) -> Disposition {
    let mut disposition = [0; 8];
    let none = std::ptr::null::<Disposition>();
    // SAFETY: asks only; the kernel's structure is smaller than the 64 bytes it may fill. A refusal
    // leaves zeros.
    unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, none, disposition.as_mut_ptr(), SET) };
    disposition
}

fn dispose(signal: i32, disposition: &Disposition) {
    let none = std::ptr::null_mut::<Disposition>();
    // SAFETY: `disposition` is what the kernel said of this signal before, so its handler is one
    // that was installed then; a library that came since is not asked to run anything.
    let rc =
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, disposition.as_ptr(), none, SET) };
    if rc != 0 {
        let error = std::io::Error::last_os_error();
        tracing::warn!(signal, %error, "the handler of a signal could not be put back");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEARCH: Search = Search {
        variable: "KVX_NOWHERE_LIB",
        names: &["libkvx-nowhere.so.2", "libkvx-nowhere.so.1"],
        files: Vec::new(),
        flags: native::RTLD_NOW,
        cure: Cow::Borrowed("apt install nowhere"),
    };

    #[test]
    fn everything_that_was_tried_is_told() {
        let why = SEARCH.files(["/nowhere/a.so".into()]).open_at(None).unwrap_err();
        assert_eq!(why.missing, "libkvx-nowhere.so.2 not found");
        assert_eq!((why.variable, &why.value), (Some("KVX_NOWHERE_LIB"), &None));
        assert_eq!(why.tried.len(), 3);
        for (tried, name) in
            why.tried.iter().zip(["libkvx-nowhere.so.2", "libkvx-nowhere.so.1", "/nowhere/a.so"])
        {
            assert!(
                tried.starts_with(&format!("{name}: ")) && tried.contains("No such file"),
                "{tried}"
            );
        }
        assert_eq!(why.cure, "apt install nowhere");
    }

    #[test]
    fn a_variable_that_is_set_ends_the_search() {
        let why = SEARCH
            .files(["/nowhere/a.so".into()])
            .open_at(Some("/elsewhere/b.so".into()))
            .unwrap_err();
        assert_eq!(why.missing, "/elsewhere/b.so not found");
        assert_eq!(why.value.as_deref(), Some("/elsewhere/b.so"));
        assert_eq!(why.tried.len(), 1);
    }

    #[test]
    fn a_search_for_nothing_names_its_variable() {
        let why = Search::new("KVX_NOWHERE_LIB", &[], "set it").open_at(None).unwrap_err();
        assert!(why.missing.contains("KVX_NOWHERE_LIB is unset"), "{why}");
    }

    #[test]
    fn a_panic_while_loading_leaves_the_loader_usable() {
        let outcome = std::panic::catch_unwind(|| with_signals_kept(|| panic!("on purpose")));
        assert!(outcome.is_err());
        assert_eq!(with_signals_kept(|| with_signals_kept(|| 7)), 7);
    }

    #[test]
    fn a_library_is_opened_once_and_tried_again_until_then() {
        let once = OpenOnce::new();
        assert!(once.open(|| Err(Unavailable::because("not there", "install it"))).is_err());
        assert_eq!((once.opened(), once.open(|| Ok(1))), (None, Ok(&1)));
        assert_eq!((once.open(|| Ok(2)), once.opened()), (Ok(&1), Some(&1)));
    }
}
