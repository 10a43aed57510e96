//! Tests of the loader, with native libraries that they build.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kvx_backend::loader::{self, NativeLibrary, Search};
use kvx_core::backend::Unavailable;

/// The time after which the compiler is killed.
const LIMIT: Duration = Duration::from_secs(60);

/// Serialises the tests: signal handlers belong to the process, and the tests are threads of one.
static PROCESS: Mutex<()> = Mutex::new(());

/// A library that installs handlers when it is loaded and more when it is initialised, as
/// Mooncake's engine and UCX do.
const NOISY: &str = r#"
typedef void (*handler)(int);
handler signal(int number, handler what);
static void ours(int number) { (void)number; }
__attribute__((constructor)) static void at_load(void) {
    signal(7, ours);               /* SIGBUS */
    signal(11, ours);              /* SIGSEGV */
    signal(13, (handler)1);        /* SIGPIPE, ignored */
    signal(23, ours);              /* SIGURG */
    signal(34, ours);              /* the first real-time signal that a program may use */
    signal(64, ours);              /* the last */
}
int noisy_init(int first) {
    signal(first, ours);
    signal(7, (handler)0);
    signal(11, (handler)0);
    signal(13, ours);
    signal(23, (handler)1);
    return first;
}
int noisy_old(void) { return 1; }
int noisy_new(void) { return 2; }
__asm__(".symver noisy_old,noisy_answer@NOISY_1.0");
__asm__(".symver noisy_new,noisy_answer@@NOISY_2.0");
"#;

const VERSIONS: &str =
    "NOISY_1.0 { global: noisy_init; local: noisy_old; noisy_new; };\nNOISY_2.0 { } NOISY_1.0;\n";

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
}

fn build(name: &str, source: &str, extra: &[&str]) -> PathBuf {
    let folder = folder();
    let (file, library) =
        (folder.join(format!("{name}.c")), folder.join(format!("lib{name}.so.1")));
    std::fs::write(&file, source).unwrap();
    let soname = format!("-Wl,-soname,lib{name}.so.1");
    let mut compile = Command::new("cc"); // available, because Rust needs it to link
    compile.args(["-shared", "-fPIC", &soname, "-o"]).args([&library, &file]).args(extra);
    let built = kvx_testkit::output(compile.current_dir(&folder), LIMIT);
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    library
}

fn noisy(name: &str) -> PathBuf {
    std::fs::write(folder().join(format!("{name}.map")), VERSIONS).unwrap();
    build(name, NOISY, &[&format!("-Wl,--version-script={name}.map")])
}

/// Returns a search that finds the library only at its file.
fn at(file: &Path) -> Search {
    Search::new("KVX_TEST_LOADER_LIB", &[], "build it").files([file.into()])
}

/// Returns all 64 dispositions, as the kernel reports them.
fn dispositions() -> Vec<[u64; 8]> {
    let of = |signal: i32| {
        let mut disposition = [0u64; 8];
        let none = std::ptr::null::<u8>();
        // SAFETY: this only queries, and the kernel's structure fits.
        unsafe {
            libc::syscall(libc::SYS_rt_sigaction, signal, none, disposition.as_mut_ptr(), 8usize)
        };
        disposition
    };
    (1..=64).map(of).collect()
}

fn initialise(library: &NativeLibrary, first: i32) -> Result<i32, Unavailable> {
    // SAFETY: the source above declares this signature.
    let init: unsafe extern "C" fn(i32) -> i32 = unsafe { library.symbol(c"noisy_init") }?;
    // SAFETY: the function only calls signal().
    Ok(unsafe { init(first) })
}

#[test]
fn all_64_signal_handlers_are_restored_after_loading_and_initialising() {
    let _process = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let file = noisy("noisy-signals");
    let before = dispositions();
    assert_eq!(before.len(), 64);
    assert_ne!(before[10][0], 0, "Rust has a handler for SIGSEGV, which must be restored");
    let (inside, library) = loader::with_signals_kept(|| {
        let library = at(&file).open().unwrap();
        assert_eq!(initialise(&library, 12).unwrap(), 12);
        (dispositions(), library)
    });
    let changed: Vec<_> =
        (1..=64).filter(|signal| inside[signal - 1] != before[signal - 1]).collect();
    assert_eq!(changed, [7, 11, 12, 13, 23, 34, 64], "the library changes these handlers");
    assert_eq!(dispositions(), before);
    assert_eq!(library.path(), file);

    // Opening alone also restores handlers.
    at(&noisy("noisy-alone")).open().unwrap();
    assert_eq!(dispositions(), before);
}

#[test]
fn two_threads_load_one_after_the_other() {
    let _process = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let files = [noisy("noisy-left"), noisy("noisy-right")];
    let before = dispositions();
    let inside = AtomicU32::new(0);
    let both = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        for (file, first) in files.iter().zip([10, 12]) {
            let (inside, both) = (&inside, &both);
            scope.spawn(move || {
                both.wait();
                for _ in 0..50 {
                    loader::with_signals_kept(|| {
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        let library = at(file).open().unwrap();
                        initialise(&library, first).unwrap();
                        std::thread::yield_now();
                        assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1);
                    });
                }
            });
        }
    });
    assert_eq!(dispositions(), before);
}

#[test]
fn symbols_have_versions_and_may_be_missing() {
    let _process = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    type Answer = unsafe extern "C" fn() -> i32;
    let file = noisy("noisy-symbols");
    let library = at(&file).open().unwrap();
    // SAFETY: the source above declares these signatures.
    unsafe {
        let newest: Answer = library.symbol(c"noisy_answer").unwrap();
        let old: Answer = library.versioned_symbol(c"noisy_answer", c"NOISY_1.0").unwrap();
        let new: Answer = library.versioned_symbol(c"noisy_answer", c"NOISY_2.0").unwrap();
        assert_eq!((newest(), old(), new()), (2, 1, 2));
        assert!(library.optional_symbol::<Answer>(c"noisy_extra").is_none());
        assert!(
            library.optional_versioned_symbol::<Answer>(c"noisy_answer", c"NOISY_3.0").is_none()
        );
        let why = library.symbol::<Answer>(c"noisy_extra").unwrap_err();
        assert_eq!(why.missing, format!("{} has no symbol noisy_extra", file.display()));
        assert!(why.cure.ends_with("build it"), "{why}");
        let why = library.versioned_symbol::<Answer>(c"noisy_answer", c"NOISY_3.0").unwrap_err();
        assert!(why.missing.ends_with("has no symbol noisy_answer of version NOISY_3.0"), "{why}");
    }
}

#[test]
fn an_existing_library_that_does_not_load_reports_why() {
    let _process = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let text = folder().join("libtext.so.1");
    std::fs::write(
        &text,
        "not a library at all, but long enough for the dynamic linker to look at it closely\n",
    )
    .unwrap();
    let why = at(&text).open().unwrap_err();
    assert_eq!(why.missing, format!("{} does not load", text.display()));
    assert!(why.tried[0].contains("invalid ELF header"), "{why}");

    // Here the library's dependency is missing.
    let needed = build("needed", "int needed(void) { return 1; }", &[]);
    let needs = build(
        "needs",
        "int needed(void); int needs(void) { return needed(); }",
        &[needed.to_str().unwrap()],
    );
    std::fs::remove_file(&needed).unwrap();
    let why = at(&needs).open().unwrap_err();
    assert_eq!(why.missing, format!("{} does not load", needs.display()));
    assert!(why.tried[0].contains("libneeded.so.1"), "{why}");
}

#[test]
fn symbols_stay_local_unless_the_search_makes_them_global() {
    let _process = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let everywhere = |name: &std::ffi::CStr| {
        // SAFETY: this only looks up a name among the globally loaded symbols.
        unsafe { !libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()).is_null() }
    };
    let local = build("local", "int kvx_local_symbol(void) { return 1; }", &[]);
    at(&local).open().unwrap();
    assert!(!everywhere(c"kvx_local_symbol"));
    let global = build("global", "int kvx_global_symbol(void) { return 1; }", &[]);
    at(&global).global().open().unwrap();
    assert!(everywhere(c"kvx_global_symbol"));
}
