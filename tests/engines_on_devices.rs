//! The example of two engines with its pools on a device: over the stand-in, a driver that is made of host memory.

#[path = "../examples/two_engines.rs"]
mod two_engines;

use std::error::Error;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use kvx_testkit::output;
use libtest_mimic::{Arguments, Failed, Trial};

/// How long the example may take.
const LIMIT: Duration = Duration::from_secs(60);

/// The example, with its pools on a device whose driver is this file.
fn on(device: &str, driver: &Path) -> Result<(Output, String), Failed> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--device", device]).env("KVX_CUDA_LIB", driver).env("KVX_HIP_LIB", driver);
    let output = output(&mut command, LIMIT);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Ok((output, said))
}

fn loads(device: &str) -> Result<(), Failed> {
    let (output, said) = on(device, &kvx_stand_in::library())?;
    let answers = String::from_utf8(output.stdout)?;
    // It has compared each answer with that of an engine of its own.
    if output.status.success() && answers.lines().count() == 3 {
        return Ok(());
    }
    Err(format!("{}: {answers}{said}", output.status).into())
}

fn refused(device: &str, driver: &Path, words: &str) -> Result<(), Failed> {
    let (output, said) = on(device, driver)?;
    if !output.status.success() && said.contains(words) && output.stdout.is_empty() {
        return Ok(());
    }
    Err(format!("{}, without `{words}`: {said}", output.status).into())
}

fn main() -> Result<(), Box<dyn Error>> {
    // The example, or one of its servers.
    if std::env::args().nth(1).is_some_and(|word| ["--device", "prefill", "decode"].contains(&&*word)) {
        return two_engines::main();
    }
    let none = Path::new("/none/libcuda.so.1");
    let trials = vec![
        Trial::test("two_engines_load_from_pools_on_cuda_devices", || loads("cuda")),
        Trial::test("two_engines_load_from_pools_on_hip_devices", || loads("hip")),
        Trial::test("a_missing_driver_is_said_in_words", || refused("cuda", none, "/none/libcuda.so.1")),
        Trial::test("a_device_of_another_name_is_refused", || refused("tpu", none, "--device tpu")),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit()
}
