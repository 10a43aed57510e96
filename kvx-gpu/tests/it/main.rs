//! The integration tests of what NVIDIA's and AMD's devices have in common.

mod kernels;

use std::process::ExitCode;

fn main() -> ExitCode {
    kvx_testkit::harness_main([])
}
