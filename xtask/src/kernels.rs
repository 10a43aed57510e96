//! `cargo xtask kernels`: compiles kvx's kernels to the committed PTX, and once for AMD devices.

use std::path::Path;
use std::process::Command;

use crate::install::{self, Environment};
use crate::metadata::Metadata;
use crate::process::{Deadline, must_succeed};
use crate::skips;
use crate::test::steps;
use crate::{Result, root};

/// Paths in the repository.
const SOURCE: &str = "kvx-gpu/src/kernels/kernels.cu";
const PTX: &str = "kvx-gpu/src/kernels/kernels.ptx";

/// The oldest devices that run the PTX; every newer one does too.
const ARCHITECTURE: &str = "--gpu-architecture=compute_70";

/// The AMD targets for which the source must compile: a data-centre device, and one with waves of
/// 32 threads.
const AMD_TARGETS: [&str; 2] = ["gfx90a", "gfx1030"];

/// The peer and the wheel of CUDA's compiler, and the library in it.
const NVRTC: (&str, &str) = ("nvrtc", "nvidia-cuda-nvrtc-cu12");
const NVRTC_LIBRARY: &str = "nvidia/cuda_nvrtc/lib/libnvrtc.so.12";
/// Debian's HIP, which contains hipRTC.
const HIP: [&str; 2] =
    ["/usr/lib/x86_64-linux-gnu/libamdhip64.so.5", "/usr/lib/aarch64-linux-gnu/libamdhip64.so.5"];

/// Writes the PTX again, or only compares, and compiles for AMD devices; returns false if the PTX
/// differs.
pub(crate) fn run(check: bool) -> Result<bool> {
    let target = Metadata::of_members()?.target_directory;
    let skip =
        |name, reason: &str| skips::note(name, reason, "cargo xtask test --install on Debian 12");
    let mut held = true;
    let (peer, wheel) = NVRTC;
    match Environment::of(&target, peer).find(NVRTC_LIBRARY) {
        Some(library) if install::is_installed(peer, wheel, &target) => {
            held = renew(&library, &target, check)?
        }
        _ => skip("kernels for CUDA", &format!("{wheel} is not installed"))?,
    }
    match HIP.iter().map(Path::new).find(|path| path.exists()) {
        Some(library) => compile_for_amd(library, &target)?,
        None => skip("kernels for HIP", "libamdhip64.so.5 is not installed")?,
    }
    Ok(held)
}

/// Compiles for CUDA; returns false if the committed file differs and is only compared.
fn renew(library: &Path, target: &Path, check: bool) -> Result<bool> {
    let text = String::from_utf8(compile(library, "nvrtc", "PTX", ARCHITECTURE, target)?)?;
    // Omits the constants of a header that the compiler always includes and no kernel uses.
    let lines = text.trim_end_matches('\0').lines();
    let ours = lines.filter(|line| !(line.starts_with(".global") && line.contains("2nv6target")));
    let ptx = ours.collect::<Vec<_>>().join("\n").trim_end().to_owned() + "\n";
    let file = root().join(PTX);
    if std::fs::read_to_string(&file).is_ok_and(|committed| committed == ptx) {
        println!("{PTX}: identical");
    } else if check {
        println!("{PTX}: differs: run `cargo xtask kernels` and commit it");
        return Ok(false);
    } else {
        std::fs::write(file, ptx)?;
        println!("{PTX}: written");
    }
    Ok(true)
}

fn compile_for_amd(library: &Path, target: &Path) -> Result<()> {
    let source = std::fs::read_to_string(root().join(SOURCE))?;
    for device in AMD_TARGETS {
        let code = compile(library, "hiprtc", "Code", &format!("--offload-arch={device}"), target)?;
        // A driver finds each entry by its descriptor.
        for entry in entries(&source) {
            let descriptor = format!("\0{entry}.kd\0");
            if !code.windows(descriptor.len()).any(|window| window == descriptor.as_bytes()) {
                return Err(format!("the code for {device} has no kernel {entry}").into());
            }
        }
        println!("kernels for {device}: {} bytes", code.len());
    }
    Ok(())
}

/// Compiles the source with a library whose functions begin with `prefix`.
fn compile(
    library: &Path,
    prefix: &str,
    kind: &str,
    option: &str,
    target: &Path,
) -> Result<Vec<u8>> {
    let output = target.join("kernels.out");
    let mut python = Command::new("python3");
    python.arg(root().join("xtask/src/kernels.py")).arg(library).args([prefix, kind]);
    python.arg(root().join(SOURCE)).arg(&output).arg(option);
    must_succeed(python, Deadline::after(steps::LIMIT))?;
    Ok(std::fs::read(output)?)
}

/// Returns the names of the kernels in a source.
fn entries(source: &str) -> impl Iterator<Item = &str> {
    let heads = source.split("extern \"C\" __global__").skip(1);
    heads.filter_map(|text| text.lines().nth(1)?.split_once('(').map(|(name, _)| name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_ptx_has_the_entries_of_the_source() {
        let [source, ptx] =
            [SOURCE, PTX].map(|file| std::fs::read_to_string(root().join(file)).unwrap());
        let names: Vec<_> = entries(&source).collect();
        assert_eq!(names, ["kvx_gather", "kvx_scatter", "kvx_hops", "kvx_permute"]);
        assert!(names.iter().all(|name| ptx.contains(&format!(".visible .entry {name}("))));
        assert!(ptx.contains(".target sm_70\n") && !ptx.contains("2nv6target"));
    }
}
