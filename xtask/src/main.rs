//! `cargo xtask`: the developer commands of kvx.
//!
//! It depends on no kvx crate, so that it works even when they do not build.

mod api;
mod arguments;
mod bars;
mod bindings;
mod book;
mod features;
mod fuzz;
mod gpu;
mod harness;
mod install;
mod interop;
mod kernels;
mod limits;
mod metadata;
mod package;
mod peers;
mod process;
mod progress;
mod rdma;
mod release;
mod reliability;
mod router;
mod sbom;
mod skips;
mod spelling;
mod test;
mod threads;
mod wheel;

use std::process::ExitCode;

use arguments::{Arguments, Request};
use clap::Parser as _;

/// The result of a command; an error means that it could not do its work. Failures that a command
/// looks for are values instead.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let request = Arguments::parse().request;
    process::catch_interrupts();
    let held = match request {
        Request::Test(options) => test::run(&options),
        Request::Features => features::check(true, test::steps::LIMIT).map(all_held),
        Request::Package => package::run(),
        Request::Interop(options) => interop::run(&options),
        Request::Api(options) => api::run(options.check),
        Request::Bindings(options) => bindings::run(options.check),
        Request::Book => book::run(),
        Request::Kernels(options) => kernels::run(options.check),
        Request::Peers { names } => peers::command(&names),
        Request::Gpu(options) => gpu::run(&options),
        Request::Rdma(options) => rdma::run(&options),
        Request::Soak(options) => reliability::soak(&options),
        Request::Faults(options) => reliability::faults(&options),
        Request::Fuzz(options) => fuzz::run(&options),
        Request::Limits(options) => limits::run(&options),
        Request::Loom => threads::loom(),
        Request::ThreadSanitizer => threads::sanitizer(),
        Request::Wheel { check } => wheel::command(check),
        Request::Router { program } => router::command(program.as_deref()),
        Request::Reproduce { only } => release::reproduce(only.as_deref()),
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

/// Prints failures and returns whether there are none.
pub(crate) fn all_held(failures: Vec<String>) -> bool {
    failures.iter().for_each(|failure| println!("failed: {failure}"));
    failures.is_empty()
}

/// Returns the root of the repository that xtask was built in.
pub(crate) fn root() -> &'static std::path::Path {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is in a repository")
}

/// Returns the sorted names of the folders in a folder of the repository that pass the test.
pub(crate) fn subfolders(of: &str, passes: impl Fn(&std::path::Path) -> bool) -> Vec<String> {
    let entries = std::fs::read_dir(root().join(of)).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.path().is_dir() && passes(&entry.path()));
    let mut names: Vec<_> =
        folders.filter_map(|folder| folder.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Returns a parser of names that are found at run time.
pub(crate) fn one_of(
    names: Vec<String>,
) -> impl Fn(&str) -> std::result::Result<String, String> + Clone + Send + Sync {
    move |name| match names.iter().any(|known| known == name) {
        true => Ok(name.to_owned()),
        false => Err(format!("known names: {}", names.join(", "))),
    }
}
