//! Runs the example of two engines with its pools on a device: over the stand-in, a driver that
//! emulates devices in host memory.

use std::path::Path;
use std::process::Output;

use kvx_testkit::{Failure, skip, trial};
use libtest_mimic::Trial;

use crate::examples::{self, LIMIT};

const EXAMPLE: &str = "two_engines";

/// Runs the example with its pools on a device whose driver is this file.
fn on(device: &str, driver: &Path) -> Result<(Output, String), Failure> {
    let mut command = examples::command(EXAMPLE).map_err(|(reason, _)| Failure::new(reason))?;
    command.args(["--device", device]).env("KVX_CUDA_LIB", driver).env("KVX_HIP_LIB", driver);
    let output = kvx_testkit::output(&mut command, LIMIT);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Ok((output, said))
}

fn loads(device: &str) -> Result<(), Failure> {
    let (output, said) = on(device, &kvx_stand_in::library())?;
    let answers = String::from_utf8_lossy(&output.stdout);
    // The example has compared each answer with that of an engine that computes alone.
    if output.status.success() && answers.lines().count() == 3 {
        return Ok(());
    }
    Err(Failure::new(format!("{}: {answers}{said}", output.status)))
}

fn refused(device: &str, driver: &Path, words: &str) -> Result<(), Failure> {
    let (output, said) = on(device, driver)?;
    if !output.status.success() && said.contains(words) && output.stdout.is_empty() {
        return Ok(());
    }
    Err(Failure::new(format!("{}, without `{words}`: {said}", output.status)))
}

pub(crate) fn trials() -> impl Iterator<Item = Trial> {
    type Run = fn() -> Result<(), Failure>;
    let all: [(&str, Run); 4] = [
        // vLLM 21: two engines load between pools on devices, over the stand-in for NVIDIA's driver
        ("two_engines_load_from_pools_on_cuda_devices", || loads("cuda")),
        // vLLM 21: two engines load between pools on devices, over the stand-in for AMD's driver
        ("two_engines_load_from_pools_on_hip_devices", || loads("hip")),
        ("a_missing_driver_is_named_in_the_error", || {
            refused("cuda", Path::new("/none/libcuda.so.1"), "/none/libcuda.so.1")
        }),
        ("an_unknown_device_is_rejected", || {
            refused("tpu", Path::new("/none/libcuda.so.1"), "--device tpu")
        }),
    ];
    all.into_iter().map(|(name, run)| {
        trial(format!("engines_on_devices::{name}"), move || match examples::command(EXAMPLE) {
            Ok(_) => run(),
            Err((reason, cure)) => {
                skip(name, &reason, cure);
                Ok(())
            }
        })
    })
}
