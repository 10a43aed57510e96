//! Tests AMD's own library on a machine without an AMD device.

use std::path::Path;

use kvx_testkit::{Check, is_own_process, run_in_own_process, skip, test};

use crate::{devices, stand_in};

const NAME: &str = "no_device::the_library_without_a_device_says_what_is_missing";
/// Set in the process that must not start itself again with the stand-in.
const AMDS_OWN: &str = "KVX_TEST_AMDS_OWN_LIBRARY";

/// Returns whether this is the process of the test below.
pub(crate) fn is_asked() -> bool {
    std::env::var_os(AMDS_OWN).is_some()
}

/// Runs in its own process, with AMD's library where the other tests have the stand-in.
#[test]
fn the_library_without_a_device_says_what_is_missing() -> Check {
    if !is_own_process() {
        return run_in_own_process(NAME, |command| {
            command.env(AMDS_OWN, "1");
            if devices::over_the_stand_in(&stand_in::MAKER) {
                stand_in::MAKER
                    .variables
                    .iter()
                    .for_each(|variable| _ = command.env_remove(variable));
            }
        });
    }
    says_what_is_missing();
    Ok(())
}

/// Debian's package contains everything that HIP needs, so its error is about the device.
fn says_what_is_missing() {
    if Path::new("/dev/kfd").exists() {
        return skip(NAME, "this machine has /dev/kfd", "run it on a machine without AMD's GPUs");
    }
    let why = kvx_rocm::devices().expect_err("there is no device");
    if why.missing.contains("not found") {
        return skip(NAME, &why.missing, "apt-get install libamdhip64-5");
    }
    let told = why.to_string();
    assert!(
        told.contains("libamdhip64") && told.contains("finds no device: hipErrorNoDevice"),
        "{told}"
    );
    assert!(told.contains("/dev/kfd is not there") && told.contains("amdgpu"), "{told}");
    // A second call returns the same error.
    assert_eq!(kvx_rocm::devices().expect_err("there is no device"), why);
}
