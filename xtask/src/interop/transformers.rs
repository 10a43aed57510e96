//! `cargo xtask interop transformers`: compares the example server's logits and tokens with an
//! independent reference.

use std::time::Duration;

use crate::Result;
use crate::install::Environment;
use crate::metadata::Metadata;
use crate::process::{self, Deadline};

/// The packages of the reference, installed with their dependencies.
const PACKAGES: [&str; 2] = ["torch==2.13.0", "transformers==5.19.0"];
/// The limit of installation and test.
const LIMIT: Duration = Duration::from_secs(60 * 60);

/// Installs transformers and runs the test that compares with it; returns false if the logits
/// differ.
pub(super) fn run(record: bool) -> Result<bool> {
    let deadline = Deadline::after(LIMIT);
    let environment = Environment::of(&Metadata::of_members()?.target_directory, "transformers");
    let arguments = ["--quiet"].into_iter().chain(PACKAGES).map(str::to_owned);
    environment.install(arguments, deadline)?;
    let mut test = process::cargo([
        "test",
        "-p",
        "kvx-paged-llama",
        "--test",
        "it",
        "--",
        "reference::",
        "--nocapture",
    ]);
    test.env("KVX_TRANSFORMERS_PYTHON", environment.python());
    test.envs(record.then_some(("KVX_TRANSFORMERS_RECORD", "1")));
    process::shown_to_succeed(test, deadline.left())
}
