//! Runs each example to its end, as `cargo run --example` does, and checks its output.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use kvx_testkit::{Failure, output, skip, trial};
use libtest_mimic::Trial;

/// The time limit of an example.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// An example in `examples/`.
pub(crate) struct Example {
    pub(crate) name: &'static str,
    /// True if this build has the features that it needs.
    is_built: bool,
    /// Parts of its expected output.
    says: &'static [&'static str],
}

pub(crate) const ALL: &[Example] = &[
    Example {
        name: "two_processes",
        is_built: cfg!(all(feature = "shm", feature = "tcp")),
        says: &["131072 bytes over ", "decode-0 has request 7"],
    },
    Example {
        name: "adopted_memory",
        is_built: cfg!(all(feature = "shm", feature = "tcp")),
        says: &["16 blocks as 8 segments over "],
    },
    Example {
        name: "vllm_config",
        is_built: cfg!(feature = "tcp"),
        says: &["TCP", "did you mean UCX?"],
    },
    Example {
        name: "faults",
        is_built: cfg!(feature = "tcp"),
        says: &["stopped: ", "killed: ", "prefill-0", "wrong: ", "\"kw\""],
    },
    Example {
        name: "two_engines",
        is_built: cfg!(all(feature = "connector", feature = "shm", feature = "tcp")),
        says: &[
            "one: {",
            "\"cached\":0,\"computed\":0}",
            "two: {",
            "\"cached\":3,\"computed\":0}",
            "three: {",
        ],
    },
    Example {
        name: "dense_engine",
        is_built: cfg!(all(feature = "connector", feature = "shm", feature = "tcp")),
        says: &["tokens 0..37 have arrived", "the prefill's blocks are Fetched"],
    },
];

/// Returns the command of an example that cargo has built next to this program.
///
/// # Errors
/// Returns the reason and the remedy if the example is not built or older than its source.
pub(crate) fn command(name: &str) -> Result<Command, (String, &'static str)> {
    const CURE: &str = "cargo build --examples, or cargo test without --test";
    let program = std::env::current_exe().ok();
    let profile = program.as_deref().and_then(|program| program.parent()?.parent());
    let file = profile.map(|folder| folder.join("examples").join(name)).unwrap_or_default();
    let source =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples").join(format!("{name}.rs"));
    let changed = |file: &PathBuf| file.metadata().and_then(|about| about.modified()).ok();
    match changed(&file) {
        None => Err((format!("example {name} is not built"), CURE)),
        built if built < changed(&source) => {
            Err((format!("example {name} is older than its source"), CURE))
        }
        Some(_) => Ok(Command::new(file)),
    }
}

fn run(Example { name, says, .. }: &Example) -> Result<(), Failure> {
    let mut command = match command(name) {
        Ok(command) => command,
        Err((reason, cure)) => {
            skip(&format!("examples::{name}"), &reason, cure);
            return Ok(());
        }
    };
    let done = output(&mut command, LIMIT);
    let [printed, errors] =
        [&done.stdout, &done.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    if !done.status.success() {
        return Err(Failure::new(format!("{}\n{printed}{errors}", done.status)));
    }
    match says.iter().find(|words| !printed.contains(**words)) {
        None => Ok(()),
        Some(words) => Err(Failure::new(format!("the output lacks {words:?}:\n{printed}"))),
    }
}

pub(crate) fn trials() -> impl Iterator<Item = Trial> {
    let built = ALL.iter().filter(|example| example.is_built);
    built.map(|example| trial(format!("examples::{}", example.name), || run(example)))
}
