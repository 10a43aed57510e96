//! The integration tests of the connector: connectors in one process, and ranks in processes of
//! their own.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod fuzz;
mod ranks;
mod runtime;

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: kvx_testkit::CountingAllocator = kvx_testkit::CountingAllocator;

fn main() -> ExitCode {
    if ranks::served_as_rank() {
        return ExitCode::SUCCESS;
    }
    let secret = ranks::secret_of_this_host();
    // Most of the time tests wait for processes. Their deadlines allow for four at a time.
    let result = kvx_testkit::harness_main_with(ranks::trials(), 4);
    secret.into_iter().for_each(|file| std::fs::remove_file(file).unwrap());
    result
}
