//! The search for a library: its places, and the report of a failed search.

use std::borrow::Cow;
#[cfg(target_env = "gnu")]
use std::ffi::CStr;
use std::ffi::{OsStr, OsString, c_void};
#[cfg(target_env = "gnu")]
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use libloading::os::unix as native;

use kvx_core::backend::{Unavailable, fork};

use super::library::{NativeLibrary, OpenLibrary, Origin};
use super::signals::with_signals_kept;

/// A search for a library, in this order: the file that the variable names, and no other place if
/// the variable is set; the names, which the dynamic linker resolves; the additional files.
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
    /// Searches `variable`, then `names`, the first of which appears in messages. `cure` says how
    /// to install the library. The library's symbols stay invisible to other libraries
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

    /// Also searches these files, after the names.
    pub fn files(mut self, files: impl IntoIterator<Item = PathBuf>) -> Self {
        self.files.extend(files);
        self
    }

    /// Makes the library's symbols visible to libraries that are opened later (`RTLD_GLOBAL`), for
    /// libraries whose plugins rely on that.
    pub fn global(mut self) -> Self {
        self.flags = native::RTLD_NOW | native::RTLD_GLOBAL;
        self
    }

    /// Opens the first library that loads, for the life of the process. Restores signal handlers
    /// that the library changes meanwhile.
    ///
    /// # Errors
    ///
    /// Everything that was tried, with the dynamic linker's reason for each, and what to do.
    pub fn open(&self) -> Result<NativeLibrary, Unavailable> {
        // An empty value counts as unset, because wrapper scripts clear variables this way.
        self.open_at(std::env::var_os(self.variable).filter(|value| !value.is_empty()))
    }

    fn open_at(&self, value: Option<OsString>) -> Result<NativeLibrary, Unavailable> {
        if let Err(forked) = fork::check() {
            return Err(Unavailable::because(
                "this process cannot open native libraries",
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
                    tracing::debug!(
                        path = %path.display(),
                        variable = self.variable,
                        "opened a native library"
                    );
                    return Ok(NativeLibrary::new(OpenLibrary {
                        handle,
                        path,
                        origin,
                        cure: self.cure.clone(),
                    }));
                }
                Err(error) => {
                    let (shown, reason) = (candidate.to_string_lossy(), error);
                    // The linker's message is the same for a missing file and for a file whose
                    // dependency is missing, except that it begins with the name of the missing
                    // one.
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
                format!("no name of the library is known and {} is unset", self.variable)
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
    // SAFETY: the library's initialisers run. By naming the library the user permits that; changes
    // to signal handlers are undone.
    let opened = with_signals_kept(|| unsafe { native::Library::open(Some(file), flags) });
    opened.map(native::Library::into_raw).map_err(|error| match error {
        libloading::Error::DlOpen { source } => source.to_string(),
        other => other.to_string(),
    })
}

/// Loads a library for the life of the process, so that other libraries find it. The library is a
/// name that the dynamic linker resolves, or a file. Restores signal handlers that the library
/// changes meanwhile.
///
/// # Errors
/// The dynamic linker's reason.
pub fn preload(library: impl AsRef<OsStr>) -> Result<(), String> {
    open_for_good(library.as_ref(), native::RTLD_NOW | native::RTLD_LOCAL).map(drop)
}

#[cfg(target_env = "gnu")]
fn loaded_path(handle: *mut c_void) -> Option<PathBuf> {
    /// The beginning of the C library's `struct link_map`, which is stable because debuggers rely
    /// on it.
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
    // SAFETY: the library is never closed, so its entry stays valid, and its name is a C string.
    let name = unsafe { CStr::from_ptr((*map).name) };
    std::path::absolute(OsStr::from_bytes(name.to_bytes())).ok()
}

/// Returns `None`: kvx does not query other C libraries, and the caller uses the name that it
/// opened.
#[cfg(not(target_env = "gnu"))]
fn loaded_path(_: *mut c_void) -> Option<PathBuf> {
    None
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
    fn a_failed_search_reports_everything_that_was_tried() {
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
    fn a_search_without_names_reports_its_variable() {
        let why = Search::new("KVX_NOWHERE_LIB", &[], "set it").open_at(None).unwrap_err();
        assert!(why.missing.contains("KVX_NOWHERE_LIB is unset"), "{why}");
    }
}
