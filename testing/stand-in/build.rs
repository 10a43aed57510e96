//! Gives the library the soname of NVIDIA's driver. Once a test has opened it by its path, others
//! that open that name get it too.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}
