//! The archive with a kit, for a machine without cargo and without a network.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::kit::{Kit, NIXL, UCX};
use crate::Result;
use crate::install::Environment;
use crate::process::{Deadline, must_succeed, output_of};

/// The script in the unpacked folder that runs everything.
pub(crate) const SCRIPT: &str = "run";

/// It uses a shell's own means only, because the machine may have no other programs.
const SCRIPT_TEXT: &str = "\
#!/bin/sh
# Tests kvx on this machine's NVIDIA GPU and prints a table of figures.
# KVX_CUDA_LIB names the driver if it is not libcuda.so.1.
exec \"${0%/*}/xtask\" gpu --from \"${0%/*}\" \"$@\"
";

/// The most bytes of an archive.
const MOST: u64 = 60 << 20;
/// The newest glibc whose symbols a program may need: Debian 12's.
const GLIBC: u32 = 36;
/// How long packing may take.
const LIMIT: Duration = Duration::from_secs(600);

/// The files of peers' wheels that are packed, with what they need of the same wheel. Of NIXL's plug-ins that is only
/// UCX's, and of UCX's modules none for network cards: a quarter of the wheel.
const PEERS: [(&str, &[&str]); 2] = [
    (
        UCX.0,
        &[
            UCX.1,
            "libucx/lib/ucx/libuct_cma.so.0",
            "libucx/lib/ucx/libuct_cuda.so.0",
            "libucx/lib/ucx/libucm_cuda.so.0",
        ],
    ),
    (
        NIXL.0,
        &[
            NIXL.1,
            ".nixl_cu12.mesonpy.libs/plugins/libplugin_UCX.so",
            "nixl_cu12.libs/ucx/libuct_cma.so.0.0.0",
            "nixl_cu12.libs/ucx/libuct_cuda.so.0.0.0",
            "nixl_cu12.libs/ucx/libucm_cuda.so.0.0.0",
        ],
    ),
];

/// Makes the archive of a kit; an error if it is too large, or a program needs too new a C library.
pub(crate) fn make(kit: &Kit) -> Result<PathBuf> {
    let deadline = Deadline::after(LIMIT);
    let folder = kit.peers.with_file_name("xtask").join("gpu");
    let packed = folder.join("kvx-gpu");
    if packed.exists() {
        fs::remove_dir_all(&packed)?;
    }
    fs::create_dir_all(&packed)?;
    for (name, file) in &kit.files {
        let copy = packed.join(name);
        fs::copy(file, &copy)?;
        let newest = glibc(&fs::read(&copy)?);
        if newest > GLIBC {
            return Err(format!("{name} needs glibc 2.{newest}, not 2.{GLIBC}: build on Debian 12").into());
        }
        let mut strip = Command::new("strip");
        strip.arg(copy);
        must_succeed(strip, deadline)?;
    }
    for (name, roots) in PEERS {
        if !pack_peer(name, roots, &kit.peers, &packed, deadline)? {
            println!("without {name}: cargo xtask test --install brings it");
        }
    }
    let script = packed.join(SCRIPT);
    fs::write(&script, SCRIPT_TEXT)?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    let archive = folder.join("kvx-gpu.tar.gz");
    let mut tar = Command::new("tar");
    tar.arg("-czf").arg(&archive).arg("-C").arg(packed).arg(".");
    must_succeed(tar, deadline)?;
    let size = fs::metadata(&archive)?.len();
    println!("{}: {} KiB of at most {} KiB", archive.display(), size >> 10, MOST >> 10);
    if size > MOST { Err("the archive is too large".into()) } else { Ok(archive) }
}

/// Unpacks an archive.
pub(crate) fn unpack(archive: &Path, folder: &Path) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.arg("-xzf").arg(archive).arg("-C").arg(folder);
    must_succeed(tar, Deadline::after(LIMIT))
}

/// Copies what is needed of a wheel to the same place of the environment; returns false if the wheel is not installed.
fn pack_peer(name: &str, roots: &[&str], peers: &Path, packed: &Path, deadline: Deadline) -> Result<bool> {
    let environment = Environment(peers.join(name).join("venv"));
    let (Some(packages), Some(_)) = (environment.find(""), environment.find(roots[0])) else {
        return Ok(false);
    };
    let mut files = BTreeSet::new();
    for root in roots {
        let mut ldd = Command::new("ldd");
        ldd.arg(packages.join(root));
        let output = output_of(ldd, deadline.left())?;
        // The linker writes paths as it found them, with dots in them.
        let needed = output.lines().filter_map(|line| line.split_once(" => ")?.1.split(" (").next());
        files.extend(needed.filter_map(|path| fs::canonicalize(path).ok()));
        files.insert(packages.join(root));
    }
    let (packages, peers) = (fs::canonicalize(packages)?, fs::canonicalize(peers)?);
    for file in files {
        let parent = fs::canonicalize(file.parent().ok_or("a file lies in a folder")?)?;
        let place = parent.join(file.file_name().ok_or("a file has a name")?);
        if !place.starts_with(&packages) {
            continue;
        }
        let copy = packed.join("peers").join(place.strip_prefix(&peers)?);
        fs::create_dir_all(copy.parent().ok_or("a file lies in a folder")?)?;
        // Not stripped: that damages what tools that make wheels have changed.
        fs::copy(file, copy)?;
    }
    Ok(true)
}

/// Returns the newest version of glibc 2 whose symbols a program needs.
fn glibc(program: &[u8]) -> u32 {
    const NAME: &[u8] = b"GLIBC_2.";
    let versions = program.windows(NAME.len() + 2).filter(|window| window.starts_with(NAME));
    let number = |window: &[u8]| {
        let digits = window[NAME.len()..].iter().take_while(|byte| byte.is_ascii_digit());
        digits.fold(0, |number, digit| number * 10 + u32::from(digit - b'0'))
    };
    versions.map(number).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::super::kit::XTASK;
    use super::*;

    #[test]
    fn the_newest_c_library_is_found() {
        assert_eq!(glibc(b"\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.9\0GLIBC_PRIVATE\0"), 34);
    }

    #[test]
    fn the_script_passes_its_arguments_to_xtask() {
        let folder = std::env::temp_dir().join(format!("kvx-xtask-gpu-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        for (name, text) in [(SCRIPT, SCRIPT_TEXT), (XTASK, "#!/bin/sh\necho \"$@\"\n")] {
            fs::write(folder.join(name), text).unwrap();
            fs::set_permissions(folder.join(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        let mut script = Command::new(folder.join(SCRIPT));
        script.args(["--quick", "a b"]).env("PATH", "");
        let output = output_of(script, LIMIT).unwrap();
        assert_eq!(output, format!("gpu --from {} --quick a b\n", folder.display()));
        fs::remove_dir_all(folder).unwrap();
    }
}
