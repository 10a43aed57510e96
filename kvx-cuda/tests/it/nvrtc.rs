//! Tests kernels if the driver rejects kvx's PTX: NVIDIA's own compiler, which needs no device,
//! compiles the source to a binary.

use std::path::PathBuf;

use kvx_testkit::{Child, skip};

use crate::devices::{Bench, LONG, ROLE};

pub(crate) const NAME: &str = "kernels_are_compiled_where_the_driver_takes_no_ptx";

/// Runs in its own process, because a device loads its kernels once.
pub(crate) fn compiles_the_kernels(_: &Bench<'_>) {
    let Some(library) = library() else {
        let wheel = "the wheel nvidia-cuda-nvrtc-cu12 is not installed";
        return skip(NAME, wheel, "cargo xtask test --install");
    };
    let role = format!("compiled {}", library.display());
    let child = Child::start_self(ROLE, &role).expect("a process starts");
    assert_eq!(child.hear(LONG).expect("it reports the result"), "compiled");
}

/// Returns the wheel's library, below cargo's target folder.
fn library() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let mut environments = program.ancestors().map(|target| target.join("peers/nvrtc/venv/lib"));
    environments.find_map(|environment| {
        let pythons = std::fs::read_dir(environment).ok()?.flatten();
        let file = "site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12";
        pythons.map(|python| python.path().join(file)).find(|file| file.exists())
    })
}
