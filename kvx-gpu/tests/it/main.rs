//! The integration tests of the code that NVIDIA's and AMD's devices share.

mod kernels;

use std::process::ExitCode;

fn main() -> ExitCode {
    kvx_testkit::harness_main([])
}
