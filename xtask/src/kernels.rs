//! `cargo xtask kernels`: the committed PTX of kvx's kernels, and whether their source is one for AMD devices too.

use std::path::{Path, PathBuf};

use crate::install::site_packages;
use crate::metadata::Metadata;
use crate::runtime_compiler::Compiler;
use crate::skips::{self, Skip};
use crate::{Result, install};

/// Below the root of the repository.
const SOURCE: &str = "kvx-gpu/src/kernels/kernels.cu";
const PTX: &str = "kvx-gpu/src/kernels/kernels.ptx";

/// The oldest devices that run the PTX; every newer one does too.
const ARCHITECTURE: &str = "--gpu-architecture=compute_70";

/// What the source must compile for: a data centre's device and one with waves of 32 threads.
const AMD_TARGETS: &[&str] = &["gfx90a", "gfx1030"];

/// Where Debian's HIP lies, which has hipRTC in it.
const HIP: &[&str] =
    &["/usr/lib/x86_64-linux-gnu/libamdhip64.so.5", "/usr/lib/aarch64-linux-gnu/libamdhip64.so.5"];

/// What makes both run.
const CURE: &str = "cargo xtask test --install on Debian 12";

/// Writes the PTX again, or only compares, and compiles for AMD devices; false if something differs.
pub(crate) fn run(check: bool) -> Result<bool> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no repository")?;
    let target = Metadata::of_members()?.target_directory()?;
    let source = std::fs::read_to_string(root.join(SOURCE))?;
    let held = match nvrtc(&target) {
        Some(library) => renewed(&library, &source, &root.join(PTX), check)?,
        None => {
            let reason = format!("no {} {} is installed", install::NVRTC.name, install::NVRTC.version);
            skips::note(&Skip { name: "kernels for CUDA".to_owned(), reason, cure: CURE.to_owned() })?;
            true
        }
    };
    match HIP.iter().map(Path::new).find(|path| path.exists()) {
        Some(library) => for_amd(library, &source)?,
        None => {
            let reason = "no libamdhip64.so.5 is installed".to_owned();
            skips::note(&Skip { name: "kernels for HIP".to_owned(), reason, cure: CURE.to_owned() })?;
        }
    }
    Ok(held)
}

/// The compiler of the wheel that the PTX comes from, if it is installed.
fn nvrtc(target: &Path) -> Option<PathBuf> {
    let wheel = &install::NVRTC;
    let environment = target.join("peers").join(wheel.peer).join("venv");
    let is_there = install::is_installed(wheel, &environment);
    let library = "nvidia/cuda_nvrtc/lib/libnvrtc.so.12";
    is_there
        .then(|| site_packages(&environment).map(|folder| folder.join(library)).find(|path| path.exists()))?
}

/// Compiles for CUDA; false if the committed file differs and is only to be compared.
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

/// Without the constants of a header that the compiler always includes, which no kernel uses.
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
        // Each entry has a descriptor, by which a driver finds it.
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

/// The names of the kernels in a source.
fn entries(source: &str) -> impl Iterator<Item = &str> {
    let heads = source.split("extern \"C\" __global__").skip(1);
    heads.filter_map(|text| text.lines().nth(1)?.split_once('(').map(|(name, _)| name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn committed(file: &str) -> String {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        std::fs::read_to_string(root.join(file)).unwrap()
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
