//! The Mooncake library that this process has loaded.

use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};

use kvx_backend::loader::{self, FunctionTable as _, OpenOnce, Search};
use kvx_core::backend::Unavailable;
use kvx_core::backend::sync::Mutex;

use super::{adapter_bindings, bindings, self_test, sockets};

/// The environment variable that names the library.
const VARIABLE: &str = "KVX_MOONCAKE_LIB";
const NAMES: &[&str] = &["libtransfer_engine.so"];
const CURE: &str = "install Mooncake's libtransfer_engine.so, or the wheel mooncake-transfer-engine-non-cuda, and run \
                    `kvx mooncake-adapter FOLDER`, which says what to set";
/// If a wheel's engine needs these libraries, it is the wheel for CUDA.
const OF_CUDA: [&str; 2] = ["libcudart", "libcuda."];
const CURE_OF_CUDA: &str = "this is Mooncake's wheel for CUDA: install NVIDIA's driver and CUDA's runtime (pip install \
                            nvidia-cuda-runtime-cu12, its lib folder in LD_LIBRARY_PATH), or the wheel \
                            mooncake-transfer-engine-non-cuda in its place";
const CURE_OF_A_WHEEL: &str = "apt install libpython3.11 libibverbs1 libnuma1 libcurl4";
const INHERITED: &str = "start them before agents, or with all other files closed";
/// Severities of lines in the engine's log.
const ERRORS: c_int = 2;
const FATAL: c_int = 3;
/// The wheel versions that the adapter's layouts were tested with.
const KNOWN_WHEELS: &[&str] = &["0.3.13.post1"];

/// What a program requires of the library.
#[derive(Clone, Debug, Default)]
pub(crate) struct LoadOptions {
    /// Further files to try.
    pub(crate) files: Vec<PathBuf>,
    /// True to accept a wheel that this release was not tested with.
    pub(crate) any_version: bool,
    /// True to load the engine's etcd client.
    pub(crate) etcd: bool,
}

/// A loaded library, for the life of the process: only the first one that was requested is used.
pub(crate) struct Library {
    functions: bindings::Functions,
    adapter: Option<adapter_bindings::Functions>,
    path: PathBuf,
    version: String,
    etcd: bool,
}

static OPENED: OpenOnce<Library> = OpenOnce::new();
/// Held while a library is loaded. Lists the libraries that failed their self-test, with the
/// reason. Their state is unknown and their two engines stay forever, so they are not tried again.
static OPENING: Mutex<Vec<(PathBuf, Unavailable)>> = Mutex::new(Vec::new());

impl Library {
    /// Loads and tests the library, once per process. Undoes the engine's changes to signal
    /// handlers, names its threads, and rejects an engine that behaves unexpectedly.
    ///
    /// # Errors
    /// The candidates that were tried, and the remedy; the next call tries again. Or the reason why
    /// the engine failed its self-test.
    pub(crate) fn open(wanted: &LoadOptions) -> Result<&'static Library, Unavailable> {
        let refused = &mut *OPENING.lock();
        if let Some(library) = OPENED.opened() {
            library.has_etcd(wanted.etcd)?;
            return Ok(library);
        }
        let load = || {
            loader::with_signals_kept(|| {
                let before = sockets::files();
                let library = Library::load(wanted)?;
                if let Some((_, why)) = refused.iter().find(|(path, _)| *path == library.path) {
                    return Err(why.clone());
                }
                if sockets::keep_from_children(&before) == 0 {
                    tracing::warn!(
                        "children of this process inherit the sockets of Mooncake's engine: {INHERITED}"
                    );
                }
                library.run_self_test().inspect_err(|why| {
                    refused.push((library.path.clone(), why.clone()));
                })?;
                Ok(library)
            })
        };
        OPENED.open(|| on_named_thread(load))
    }

    fn load(wanted: &LoadOptions) -> Result<Library, Unavailable> {
        let library = Search::new(VARIABLE, NAMES, CURE)
            .files(wanted.files.iter().cloned())
            .open()
            .map_err(explained)?;
        let path = library.path().to_owned();
        let find = |name: &'static CStr| library.address(name);
        // SAFETY: these names are Mooncake's C interface, or the adapter's; the bindings were
        // generated from their headers.
        let functions = unsafe { bindings::Functions::find(find) }?;
        // SAFETY: these names are Mooncake's C interface, or the adapter's; the bindings were
        // generated from their headers, and no other library has such names.
        let adapter = unsafe { adapter_bindings::Functions::find(find) }.ok();
        let mut version = "of unknown version".to_owned();
        if let Some(adapter) = &adapter {
            // SAFETY: the text stays valid until this thread's next call.
            let wheel = unsafe { text((adapter.kvx_mooncake_version)()) }.unwrap_or_default();
            if !wanted.any_version && !KNOWN_WHEELS.contains(&wheel.as_str()) {
                return Err(unknown_wheel(&wheel));
            }
            // SAFETY: it may be called at any time; the caller restores signal handlers that it
            // changes.
            let why = unsafe { text((adapter.kvx_mooncake_load)(wanted.etcd.into())) };
            if let Some(why) = why {
                return Err(not_loaded(&path, &why));
            }
            version = format!("wheel {wheel}");
        }
        // A libtransfer_engine.so has the clients that it was built with, and reports itself if
        // etcd is not among them.
        let etcd = adapter.is_none() || wanted.etcd;
        Ok(Library { functions, adapter, path, version, etcd })
    }

    fn run_self_test(&self) -> Result<(), Unavailable> {
        // The self-test makes deliberate mistakes, which the engine would log as errors. Later
        // errors concern the user.
        self.log_from(FATAL);
        let tried = self_test::run(self, self_test::PATIENCE);
        self.log_from(ERRORS);
        tried.map_err(|why| {
            let path = self.path.display();
            let missing = format!(
                "the engine of {path} failed its self-test: {why}; MC_LOG_LEVEL=INFO shows its log"
            );
            Unavailable::because(missing, CURE)
        })
    }

    /// Sets the minimum severity of the engine's log, unless the environment sets it.
    fn log_from(&self, severity: c_int) {
        if let Some(adapter) = &self.adapter {
            // SAFETY: it may be called at any time.
            unsafe { (adapter.kvx_mooncake_log_from)(severity) };
        }
    }

    fn has_etcd(&self, wanted: bool) -> Result<(), Unavailable> {
        if !wanted || self.etcd {
            return Ok(());
        }
        Err(Unavailable::because(
            "the engine was loaded without its etcd client, for an earlier agent of this process",
            "build the agent whose metadata is in etcd first",
        ))
    }

    /// Returns a library with other functions.
    #[cfg(test)]
    pub(super) fn with(
        &self,
        functions: bindings::Functions,
        adapter: Option<adapter_bindings::Functions>,
    ) -> Library {
        let (path, version) = (self.path.clone(), self.version.clone());
        Library { functions, adapter, path, version, etcd: self.etcd }
    }

    pub(super) fn functions(&self) -> &bindings::Functions {
        &self.functions
    }

    pub(super) fn adapter(&self) -> Option<&adapter_bindings::Functions> {
        self.adapter.as_ref()
    }

    /// Returns the library's file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the library's version, as far as it is known.
    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    /// Returns the error text of this thread's last call, if the engine has one.
    pub(super) fn last_error(&self) -> Option<String> {
        // SAFETY: the text stays valid until this thread's next call.
        unsafe { text((self.adapter?.kvx_mooncake_error)()) }.filter(|text| !text.is_empty())
    }

    /// Returns the last errors that the engine logged.
    pub(crate) fn log(&self) -> Option<String> {
        // SAFETY: the text stays valid until this thread's next call.
        unsafe { text((self.adapter?.kvx_mooncake_log)()) }.filter(|text| !text.is_empty())
    }
}

/// Explains the error if the user named the wheel's own file.
fn explained(mut why: Unavailable) -> Unavailable {
    let named = why
        .value
        .as_deref()
        .map(Path::new)
        .and_then(Path::file_name)
        .and_then(|name| name.to_str());
    if named.is_some_and(|name| name.starts_with("engine") && name.ends_with(".so")) {
        why.missing =
            format!("{VARIABLE} names a wheel's engine, which has no C interface: {}", why.missing);
        why.cure =
            "run `kvx mooncake-adapter FOLDER --engine` with this file, and set the variables \
                    that it prints"
                .to_owned();
    }
    why
}

/// Returns the error of a wheel's engine that cannot be loaded.
fn not_loaded(adapter: &Path, why: &str) -> Unavailable {
    let is_for_cuda = OF_CUDA.iter().any(|library| why.contains(library));
    Unavailable::because(
        format!("{} cannot load the wheel's engine: {why}", adapter.display()),
        if is_for_cuda { CURE_OF_CUDA } else { CURE_OF_A_WHEEL },
    )
}

fn unknown_wheel(version: &str) -> Unavailable {
    let known = KNOWN_WHEELS.join(", ");
    let missing = match version {
        "" => {
            "the wheel's version is unknown: KVX_MOONCAKE_ENGINE does not name a mooncake/engine.so"
                .to_owned()
        }
        version => {
            format!("the wheel has version {version}, but the adapter was tested with {known}")
        }
    };
    Unavailable::because(
        missing,
        format!("install version {known}, or accept this one with the option mooncake.any_version"),
    )
}

/// Runs `run` on a thread whose name and signal mask the engine's threads inherit. The engine
/// writes to sockets that a peer may close; that must not end a program that does not ignore
/// SIGPIPE.
pub(super) fn on_named_thread<T: Send>(
    run: impl FnOnce() -> Result<T, Unavailable> + Send,
) -> Result<T, Unavailable> {
    std::thread::scope(|scope| {
        let thread =
            std::thread::Builder::new().name("kvx-mooncake".into()).spawn_scoped(scope, || {
                block_sigpipe();
                run()
            });
        match thread.map(std::thread::ScopedJoinHandle::join) {
            Ok(Ok(result)) => result,
            Ok(Err(panic)) => std::panic::resume_unwind(panic),
            Err(error) => Err(Unavailable::because(
                format!("could not start the thread that starts the engine: {error}"),
                "raise the limit of threads",
            )),
        }
    })
}

/// Blocks SIGPIPE for this thread and threads that it starts.
pub(crate) fn block_sigpipe() {
    // SAFETY: initialises a set on the stack, adds one signal and passes it; the old mask is not
    // requested.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGPIPE);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
    }
}

/// # Safety
/// Null, or a C string that stays valid during the call.
unsafe fn text(text: *const c_char) -> Option<String> {
    // SAFETY: guaranteed by the caller.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheels_own_file_is_explained() {
        let mut why = Unavailable::because("engine.so does not load", CURE);
        why.value = Some("/venv/mooncake/engine.cpython-311.so".into());
        let why = explained(why).to_string();
        assert!(why.contains("wheel's engine") && why.contains("--engine"), "{why}");
        let other = explained(Unavailable::because("x", CURE));
        assert_eq!(other.cure, CURE);
    }

    #[test]
    fn a_wheel_for_cuda_is_distinguished_from_one_that_lacks_another_library() {
        let cure = |missing: &str| {
            let why =
                format!("{missing}: cannot open shared object file: No such file or directory");
            not_loaded(Path::new("/adapter.so"), &why).cure
        };
        assert!(
            ["libcudart.so.12", "libcuda.so.1"]
                .iter()
                .all(|missing| cure(missing).contains("for CUDA"))
        );
        assert!(cure("libibverbs.so.1").starts_with("apt install"));
    }

    #[test]
    fn an_unknown_wheel_is_reported_with_the_known_versions() {
        let why = unknown_wheel("9.9").to_string();
        assert!(
            why.contains("9.9") && why.contains(KNOWN_WHEELS[0]) && why.contains("any_version"),
            "{why}"
        );
        assert!(unknown_wheel("").to_string().contains("KVX_MOONCAKE_ENGINE"));
    }
}
