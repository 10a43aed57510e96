//! `cargo xtask loom` runs small models with every order of their threads. `cargo xtask
//! thread-sanitizer` runs tests of core and native with every memory access checked.

use std::time::Duration;

use crate::Result;
use crate::harness::passed_and_skipped;
use crate::metadata::Metadata;
use crate::process::{self, Output};

/// The limit of one call of cargo, with its build.
const LIMIT: Duration = Duration::from_secs(45 * 60);
/// The arguments that select Loom's models, by the name of their modules. Loom itself is optimised,
/// because it takes most of the time.
const MODELS: &str = "test --config profile.dev.package.loom.opt-level=3 \
                      --config profile.dev.package.generator.opt-level=3 \
                      --package kvx-core --package kvx-backend --lib -- models::";
/// The tests that ThreadSanitizer watches: core's unit tests; SHM's, except three that count
/// descriptors and need a process and two minutes to themselves; and transfers between agents of
/// one process.
const WATCHED: [&str; 6] = [
    "test --target x86_64-unknown-linux-gnu --package kvx-core --lib",
    "test --target x86_64-unknown-linux-gnu --package kvx-native --lib -- shm:: \
     --skip whatever_the_kernel_says --skip a_link_that_ends_at_any_packet --skip a_region_that_is_taken_back_in_mid",
    "test --target x86_64-unknown-linux-gnu --package kvx-native --test it -- tcp_transfers::",
    "test --target x86_64-unknown-linux-gnu --package kvx-native --test it -- tcp_sealed::",
    "test --target x86_64-unknown-linux-gnu --package kvx-native --test it -- lists::",
    "test --target x86_64-unknown-linux-gnu --package kvx-native --test it -- shm_pair::",
];
/// Flags for ThreadSanitizer without a standard library that is built for it. At least its generic
/// code is compiled again, and core uses locks that ThreadSanitizer recognises.
const WATCH: &str = "-Zsanitizer=thread -Zshare-generics=no --cfg kvx_tsan \
                     -Cunsafe-allow-abi-mismatch=sanitizer";
/// Reports that are suppressed, with the reasons.
const SUPPRESSIONS: &str = "xtask/thread-sanitizer.txt";

/// Runs the models; returns false if one fails.
pub(crate) fn loom() -> Result<bool> {
    run(MODELS, "loom", &[("RUSTFLAGS", "--cfg kvx_loom")])
}

/// Runs the tests under ThreadSanitizer; returns false if one fails or a race is reported.
pub(crate) fn sanitizer() -> Result<bool> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Err(
            "ThreadSanitizer runs on x86-64 Linux only, and this is another platform".into()
        );
    }
    let options = format!("suppressions={}", crate::root().join(SUPPRESSIONS).display());
    // RUSTC_BOOTSTRAP makes the stable compiler accept the sanitizer's flags.
    let variables =
        [("TSAN_OPTIONS", options.as_str()), ("RUSTC_BOOTSTRAP", "1"), ("RUSTFLAGS", WATCH)];
    let mut held = true;
    for part in WATCHED {
        held &= run(part, "tsan", &variables)?;
    }
    Ok(held)
}

/// Runs cargo with a separate target directory, because other flags build everything again.
fn run(line: &str, folder: &str, variables: &[(&str, &str)]) -> Result<bool> {
    let mut cargo = process::cargo(line.split(' '));
    cargo.envs(variables.iter().copied());
    cargo.env("CARGO_TARGET_DIR", Metadata::of_members()?.target_directory.join(folder));
    let finished = process::run(cargo, LIMIT, Output::Shown)?;
    let (passed, _) = passed_and_skipped(&finished.output);
    println!("{}\n{passed} passed", finished.end);
    if passed == 0 {
        return Err("no test ran; see above for the build's errors".into());
    }
    Ok(finished.succeeded())
}
