//! `cargo xtask interop transformers`: the example server's logits and tokens beside those of an independent reference.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::Result;
use crate::install::must_succeed;
use crate::metadata::Metadata;
use crate::process::{self, Output};

/// What is asked, and what it runs on.
const PACKAGES: [&str; 2] = ["torch==2.13.0", "transformers==5.19.0"];
/// Both together.
const LIMIT: Duration = Duration::from_secs(60 * 60);

/// Installs transformers and runs the test that compares logits with it; false if they differ.
pub(super) fn run(record: bool) -> Result<bool> {
    let until = Instant::now() + LIMIT;
    let environment = Metadata::of_members()?.target_directory()?.join("peers/transformers/venv");
    let python = environment.join("bin/python");
    if !python.exists() {
        let mut create = Command::new("python3");
        create.args(["-m", "venv"]).arg(&environment);
        must_succeed(create, until)?;
    }
    let mut pip = Command::new(&python);
    // With what they need: for torch that is libraries of CUDA, also where there is no GPU.
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(PACKAGES);
    must_succeed(pip, until)?;
    let mut test =
        process::cargo(["test", "-p", "kvx-paged-llama", "--test", "reference", "--", "--nocapture"]);
    test.env("KVX_TRANSFORMERS_PYTHON", python);
    if record {
        test.env("KVX_TRANSFORMERS_RECORD", "1");
    }
    let finished = process::run(test, until.saturating_duration_since(Instant::now()), Output::Shown)?;
    Ok(finished.succeeded())
}
