//! Gives the library the name by which programs ask for NVIDIA's driver: once a test has opened it
//! by its path, whoever else asks for that name gets it too.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}
