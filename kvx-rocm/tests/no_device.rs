//! AMD's own library, on a machine without a device of AMD's.

use std::path::Path;

use kvx_testkit::skip;

/// Debian's package has all that HIP needs, so that its answer is about the device.
#[test]
fn the_library_without_a_device_says_what_is_missing() {
    let name = "the_library_without_a_device_says_what_is_missing";
    if Path::new("/dev/kfd").exists() {
        return skip(name, "this machine has /dev/kfd", "run it on a machine without AMD's GPUs");
    }
    let why = kvx_rocm::devices().expect_err("there is no device");
    if why.missing.contains("not found") {
        return skip(name, &why.missing, "apt-get install libamdhip64-5");
    }
    let told = why.to_string();
    assert!(told.contains("libamdhip64") && told.contains("finds no device: hipErrorNoDevice"), "{told}");
    assert!(told.contains("/dev/kfd is not there") && told.contains("amdgpu"), "{told}");
    // Asked again, it says the same.
    assert_eq!(kvx_rocm::devices().expect_err("there is no device"), why);
}
