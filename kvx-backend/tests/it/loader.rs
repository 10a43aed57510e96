//! The loader, with native libraries that the tests build for themselves.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kvx_backend::loader::{self, NativeLibrary, Search};
use kvx_core::backend::Unavailable;

/// The compiler is killed after it.
const LIMIT: Duration = Duration::from_secs(60);

/// Signal handlers belong to the process, and the tests are threads of one.
static PROCESS: Mutex<()> = Mutex::new(());

/// Installs handlers when it is loaded and more when it is initialised, as Mooncake's engine and
/// UCX do.
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
    let mut compile = Command::new("cc"); // Rust needs it to link, so it is here
    compile.args(["-shared", "-fPIC", &soname, "-o"]).args([&library, &file]).args(extra);
    let built = kvx_testkit::output(compile.current_dir(&folder), LIMIT);
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    library
}

fn noisy(name: &str) -> PathBuf {
    std::fs::write(folder().join(format!("{name}.map")), VERSIONS).unwrap();
    build(name, NOISY, &[&format!("-Wl,--version-script={name}.map")])
}

/// Found by no name: only at its file.
fn at(file: &Path) -> Search {
    Search::new("KVX_TEST_LOADER_LIB", &[], "build it").files([file.into()])
}

/// All 64 dispositions, as the kernel tells them.
fn dispositions() -> Vec<[u64; 8]> {
    let of = |signal: i32| {
        let mut disposition = [0u64; 8];
        let none = std::ptr::null::<u8>();
        // SAFETY: asks only, and the kernel's structure fits.
        unsafe {
            libc::syscall(libc::SYS_rt_sigaction, signal, none, disposition.as_mut_ptr(), 8usize)
        };
        disposition
    };
    (1..=64).map(of).collect()
}

fn initialise(library: &NativeLibrary, first: i32) -> Result<i32, Unavailable> {
    // SAFETY: as the source above declares it.
    let init: unsafe extern "C" fn(i32) -> i32 = unsafe { library.symbol(c"noisy_init") }?;
    // SAFETY: it only calls signal().
    Ok(unsafe { init(first) })
}

#[test]
fn all_64_signals_are_as_they_were_after_loading_and_initialising() {
    let _process = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let file = noisy("noisy-signals");
    let before = dispositions();
    assert_eq!(before.len(), 64);
    assert_ne!(before[10][0], 0, "Rust has a handler for SIGSEGV, which must come back");
    let (inside, library) = loader::with_signals_kept(|| {
        let library = at(&file).open().unwrap();
        assert_eq!(initialise(&library, 12).unwrap(), 12);
        (dispositions(), library)
    });
    let changed: Vec<_> =
        (1..=64).filter(|signal| inside[signal - 1] != before[signal - 1]).collect();
    assert_eq!(changed, [7, 11, 12, 13, 23, 34, 64], "the library is as noisy as it should be");
    assert_eq!(dispositions(), before);
    assert_eq!(library.path(), file);

    // Opening alone is covered as well.
    at(&noisy("noisy-alone")).open().unwrap();
    assert_eq!(dispositions(), before);
}

#[test]
fn two_threads_that_load_do_so_one_after_the_other() {
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
fn symbols_come_in_versions_and_may_be_missing() {
    let _process = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    type Answer = unsafe extern "C" fn() -> i32;
    let file = noisy("noisy-symbols");
    let library = at(&file).open().unwrap();
    // SAFETY: as the source above declares them.
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
fn a_library_that_is_there_but_does_not_load_says_why() {
    let _process = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let text = folder().join("libtext.so.1");
    std::fs::write(
        &text,
        "no library at all, but long enough for the dynamic linker to look at it closely\n",
    )
    .unwrap();
    let why = at(&text).open().unwrap_err();
    assert_eq!(why.missing, format!("{} does not load", text.display()));
    assert!(why.tried[0].contains("invalid ELF header"), "{why}");

    // Its own dependency is what is missing.
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
fn symbols_stay_local_unless_they_are_asked_to_be_global() {
    let _process = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let everywhere = |name: &std::ffi::CStr| {
        // SAFETY: looks a name up in what is loaded globally.
        unsafe { !libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()).is_null() }
    };
    let local = build("local", "int kvx_local_symbol(void) { return 1; }", &[]);
    at(&local).open().unwrap();
    assert!(!everywhere(c"kvx_local_symbol"));
    let global = build("global", "int kvx_global_symbol(void) { return 1; }", &[]);
    at(&global).global().open().unwrap();
    assert!(everywhere(c"kvx_global_symbol"));
}
