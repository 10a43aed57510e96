//! `cargo xtask kernels`: compiles kvx's kernels to the committed PTX, and once for AMD devices.

use std::path::{Path, PathBuf};

use crate::install::{self, Environment};
use crate::metadata::Metadata;
use crate::runtime_compiler::Compiler;
use crate::skips::{self, Skip};
use crate::{Result, root};

/// Below the root of the repository.
const SOURCE: &str = "kvx-gpu/src/kernels/kernels.cu";
const PTX: &str = "kvx-gpu/src/kernels/kernels.ptx";

/// The oldest devices that run the PTX; every newer one does too.
const ARCHITECTURE: &str = "--gpu-architecture=compute_70";

/// What the source must compile for: a data centre's device and one with waves of 32 threads.
const AMD_TARGETS: [&str; 2] = ["gfx90a", "gfx1030"];

/// The peer and the wheel of CUDA's compiler, and the library in it.
const NVRTC: (&str, &str) = ("nvrtc", "nvidia-cuda-nvrtc-cu12");
const NVRTC_LIBRARY: &str = "nvidia/cuda_nvrtc/lib/libnvrtc.so.12";
/// Debian's HIP, which contains hipRTC.
const HIP: [&str; 2] =
    ["/usr/lib/x86_64-linux-gnu/libamdhip64.so.5", "/usr/lib/aarch64-linux-gnu/libamdhip64.so.5"];

/// Writes the PTX again, or only compares, and compiles for AMD devices; returns false if the PTX differs.
pub(crate) fn run(check: bool) -> Result<bool> {
    let source = std::fs::read_to_string(root().join(SOURCE))?;
    let skip = |name: &str, reason: String| {
        let cure = "cargo xtask test --install on Debian 12".to_owned();
        skips::note(&Skip { name: name.to_owned(), reason, cure })
    };
    let mut held = true;
    match nvrtc(&Metadata::of_members()?.target_directory()?) {
        Some(library) => held = renewed(&library, &source, &root().join(PTX), check)?,
        None => skip("kernels for CUDA", format!("{} is not installed", NVRTC.1))?,
    }
    match HIP.iter().map(Path::new).find(|path| path.exists()) {
        Some(library) => for_amd(library, &source)?,
        None => skip("kernels for HIP", "libamdhip64.so.5 is not installed".to_owned())?,
    }
    Ok(held)
}

/// Returns the compiler that the PTX comes from, if its wheel is installed in the right version.
fn nvrtc(target: &Path) -> Option<PathBuf> {
    let (peer, wheel) = NVRTC;
    install::is_installed(peer, wheel, target)
        .then(|| Environment::of(target, peer).find(NVRTC_LIBRARY))
        .flatten()
}

/// Compiles for CUDA; returns false if the committed file differs and is only compared.
fn renewed(library: &Path, source: &str, file: &Path, check: bool) -> Result<bool> {
    let compiler = Compiler::open(library, "nvrtc")?;
    let ptx = cleaned(&compiler.compile(source, "kernels.cu", &[ARCHITECTURE], "PTX")?)?;
    if std::fs::read_to_string(file).is_ok_and(|committed| committed == ptx) {
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

/// Removes the constants of a header that the compiler always includes and no kernel uses.
fn cleaned(ptx: &[u8]) -> Result<String> {
    let text = std::str::from_utf8(ptx)?.trim_end_matches('\0');
    let ours = text.lines().filter(|line| !(line.starts_with(".global") && line.contains("2nv6target")));
    let mut cleaned = ours.collect::<Vec<_>>().join("\n").trim_end().to_owned();
    cleaned.push('\n');
    Ok(cleaned)
}

fn for_amd(library: &Path, source: &str) -> Result<()> {
    let compiler = Compiler::open(library, "hiprtc")?;
    for target in AMD_TARGETS {
        let code = compiler.compile(source, "kernels.cu", &[&format!("--offload-arch={target}")], "Code")?;
        // A driver finds each entry by its descriptor.
        for entry in entries(source) {
            let descriptor = format!("\0{entry}.kd\0");
            if !code.windows(descriptor.len()).any(|window| window == descriptor.as_bytes()) {
                return Err(format!("the code for {target} has no kernel {entry}").into());
            }
        }
        println!("kernels for {target}: {} bytes", code.len());
    }
    Ok(())
}

/// Returns the names of the kernels in a source.
fn entries(source: &str) -> impl Iterator<Item = &str> {
    let heads = source.split("extern \"C\" __global__").skip(1);
    heads.filter_map(|text| text.lines().nth(1)?.split_once('(').map(|(name, _)| name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn committed(file: &str) -> String {
        std::fs::read_to_string(root().join(file)).unwrap()
    }

    #[test]
    fn the_committed_ptx_has_the_entries_of_the_source() {
        let [source, ptx] = [SOURCE, PTX].map(committed);
        let names: Vec<_> = entries(&source).collect();
        assert_eq!(names, ["kvx_gather", "kvx_scatter", "kvx_hops", "kvx_permute"]);
        for name in names {
            assert!(ptx.contains(&format!(".visible .entry {name}(")), "{name}");
        }
        assert!(ptx.contains(".target sm_70\n"));
    }

    #[test]
    fn only_the_compilers_own_constants_are_left_out() {
        let ptx =
            b".version 8.0\n.global .align 8 .u64 _ZN41_INTERNALx2nv6target5sm_90E = 90;\n\n.entry a\n\0";
        assert_eq!(cleaned(ptx).unwrap(), ".version 8.0\n\n.entry a\n");
        assert_eq!(cleaned(committed(PTX).as_bytes()).unwrap(), committed(PTX));
    }
}
