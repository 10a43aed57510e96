//! `cargo xtask`: the one entry point for everything that a developer of kvx runs.
//!
//! It depends on no kvx crate, so that it builds and speaks even when they do not.

mod arguments;
mod bars;
mod bindings;
#[cfg(test)]
mod circles;
#[cfg(test)]
mod core_size;
mod faults;
mod features;
mod fuzz;
mod gpu;
mod harness;
mod install;
mod interop;
mod kernels;
mod limits;
mod metadata;
mod names;
mod package;
mod peers;
mod process;
mod runtime_compiler;
mod semver;
mod skips;
mod soak;
mod test;
mod threads;
mod wheel;
mod width;

use std::process::ExitCode;

use arguments::Request;

/// What a command says when it could not do its work; the failures that it is there to find are not such.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let request = match arguments::parse(std::env::args().skip(1)) {
        Ok(request) => request,
        Err(complaint) => {
            eprintln!("{complaint}\n\n{}", arguments::usage());
            return ExitCode::from(2);
        }
    };
    process::catch_interrupts();
    let held = match request {
        Request::Help => {
            println!("{}", arguments::usage());
            Ok(true)
        }
        Request::Test(options) => test::run(&options),
        Request::Features => features::command(),
        Request::Package { names } => package::command(names),
        Request::Semver(revision) => semver::run(&revision),
        Request::Interop(chosen) => interop::run(&chosen),
        Request::Bindings { check } => bindings::run(check),
        Request::Kernels { check } => kernels::run(check),
        Request::Peers(names) => peers::command(&names),
        Request::Gpu(options) => gpu::run(&options),
        Request::Soak(options) => soak::run(&options),
        Request::Faults { connector, only } => faults::run(connector, only.as_deref()),
        Request::Fuzz(options) => fuzz::run(&options),
        Request::Limits(options) => limits::run(&options),
        Request::Loom => threads::loom(),
        Request::ThreadSanitizer => threads::sanitizer(),
        Request::Wheel { check } => wheel::command(check),
    };
    match held {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The repository, as it was when xtask was built.
pub(crate) fn root() -> &'static std::path::Path {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in a repository")
}
