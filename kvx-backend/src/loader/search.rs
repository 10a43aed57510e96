//! The search for a library: where it is looked for, and what a failed search reports.

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
                    return Ok(NativeLibrary::new(OpenLibrary {
                        handle,
                        path,
                        origin,
                        cure: self.cure.clone(),
                    }));
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
}
