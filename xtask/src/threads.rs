//! What threads do to each other: `cargo xtask loom`, every order of small models; `cargo xtask thread-sanitizer`, the
//! tests of core and native with every access watched.

use std::path::PathBuf;
use std::time::Duration;

use crate::Result;
use crate::harness::ran;
use crate::metadata::Metadata;
use crate::process::{self, Output};

/// What either may take, with its build.
const LIMIT: Duration = Duration::from_secs(45 * 60);
/// The models, by the name of their modules.
const MODELS: &str = "test --package kvx-core --package kvx-backend --lib -- models::";
/// What is watched: core's unit tests, SHM's but for three that count descriptors and have a process and two minutes to
/// themselves, and transfers between agents of one process.
const WATCHED: [&str; 3] = [
    "test --target x86_64-unknown-linux-gnu --package kvx-core --lib",
    "test --target x86_64-unknown-linux-gnu --package kvx-native --lib -- shm:: \
     --skip whatever_the_kernel_says --skip a_link_that_ends_at_any_packet --skip a_region_that_is_taken_back_in_mid",
    "test --target x86_64-unknown-linux-gnu --package kvx-native --test tcp_transfers --test tcp_sealed --test lists \
     --test shm_pair",
];
/// ThreadSanitizer without a standard library that is built for it: at least its generic code is compiled anew, and
/// core's locks are ones that are seen.
const WATCH: &str = "-Zsanitizer=thread -Zshare-generics=no --cfg kvx_tsan \
                     -Cunsafe-allow-abi-mismatch=sanitizer";
/// What it is not to report, and why.
const NOT_REPORTED: &str = "xtask/thread-sanitizer.txt";

/// Runs the models; false if one does not hold, or none was there.
pub(crate) fn loom() -> Result<bool> {
    let mut cargo = process::cargo(MODELS.split(' '));
    cargo.env("RUSTFLAGS", "--cfg kvx_loom").env("CARGO_TARGET_DIR", apart("loom")?);
    counted(process::run(cargo, LIMIT, Output::Shown)?)
}

/// Runs the tests under ThreadSanitizer; false if one fails or a race is reported.
pub(crate) fn sanitizer() -> Result<bool> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Err("ThreadSanitizer is run on x86-64 Linux alone, and this is another platform".into());
    }
    let suppressions = crate::root().join(NOT_REPORTED);
    let mut held = true;
    for part in WATCHED {
        let mut cargo = process::cargo(part.split(' '));
        cargo.env("TSAN_OPTIONS", format!("suppressions={}", suppressions.display()));
        // The compiler that builds kvx takes the sanitizer by that.
        cargo.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", WATCH).env("CARGO_TARGET_DIR", apart("tsan")?);
        held &= counted(process::run(cargo, LIMIT, Output::Shown)?)?;
    }
    Ok(held)
}

/// A folder of its own: with other flags everything is built anew.
fn apart(name: &str) -> Result<PathBuf> {
    Ok(Metadata::of_members()?.target_directory()?.join(name))
}

fn counted(finished: process::Finished) -> Result<bool> {
    println!("{}", finished.end);
    match ran(&finished.output) {
        (0, _) => Err("nothing was run: see what could not be built".into()),
        (count, _) => {
            println!("{count} passed");
            Ok(finished.succeeded())
        }
    }
}
