//! The kernels' source, compiled for the host.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use kvx_gpu::kernels::{ENTRIES, Launch};
use libloading::{Library, Symbol};

/// The time after which the compiler is killed.
const LIMIT: Duration = Duration::from_secs(60);

type Run = unsafe extern "C" fn(kernel: u32, grid: *const u32, parameters: *const u64);

/// Returns the kernels on the host; `None` without a C++ compiler, which is reported as a skip of
/// `test`.
pub(crate) fn compiled(test: &str) -> Option<&'static OnHost> {
    static COMPILED: OnceLock<Option<OnHost>> = OnceLock::new();
    let compiled = COMPILED.get_or_init(compile).as_ref();
    if compiled.is_none() {
        kvx_testkit::skip(test, "no C++ compiler", "apt-get install g++");
    }
    compiled
}

pub(crate) struct OnHost(Library);

impl OnHost {
    /// Runs a launch to its end.
    ///
    /// # Safety
    /// Its parameters are addresses of this process, and the kernel's accesses through them are
    /// valid.
    pub(crate) unsafe fn run(&self, launch: &Launch) {
        let kernel =
            ENTRIES.iter().position(|entry| *entry == launch.entry).expect("a kernel of ours");
        // SAFETY: `on_host.cpp` defines it with this signature.
        let run: Symbol<'_, Run> =
            unsafe { self.0.get(b"kvx_launch_on_host") }.expect("it is there");
        // SAFETY: the caller guarantees the addresses; there are as many parameters as the kernel
        // takes, which `the_compiled_kernels_take_what_is_launched` compares.
        unsafe { run(kernel as u32, launch.grid.as_ptr(), launch.parameters.as_ptr()) };
    }
}

fn compile() -> Option<OnHost> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kernels-{}.so", std::process::id()));
    let mut compile = Command::new("c++");
    compile.args([
        "-std=c++17",
        "-O1",
        "-shared",
        "-fPIC",
        "-fno-strict-aliasing",
        "-Wno-unknown-pragmas",
    ]);
    // Abort the test at an access wider than its address is aligned to, which this processor would
    // allow.
    compile.args(["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]);
    compile.arg("-I").arg(root.join("src/kernels")).arg(root.join("tests/it/kernels/on_host.cpp"));
    let mut compiler = compile.arg("-o").arg(&library).spawn().ok()?;
    kvx_testkit::kill_after(&compiler, LIMIT);
    let status = compiler.wait().expect("it is our child");
    assert!(status.success(), "{compile:?}: {status}");
    // SAFETY: the library was just compiled, and runs no code when it is loaded.
    let opened = unsafe { Library::new(&library) }.expect("the compiled library");
    std::fs::remove_file(&library).expect("the compiled library");
    Some(OnHost(opened))
}
