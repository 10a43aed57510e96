//! The archive with a kit that is carried to a machine without cargo and without a network.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::kit::{Kit, RIXL, UCX};
use crate::Result;
use crate::install::site_packages;
use crate::process::{self, Output};

/// What runs everything, in the unpacked folder.
pub(crate) const SCRIPT: &str = "run";

/// By a shell's own means: there may be nothing else.
const SCRIPT_TEXT: &str = "\
#!/bin/sh
# Shows kvx on this machine's NVIDIA GPU: tests and a table of figures. KVX_CUDA_LIB names the driver if it is not libcuda.so.1.
exec \"${0%/*}/xtask\" gpu --from \"${0%/*}\" \"$@\"
";

/// The most that is carried.
const MOST: u64 = 60 << 20;
/// The newest symbols of the C library that a program may ask for: Debian 12's.
const GLIBC: u32 = 36;
/// How long one tool may take.
const LIMIT: Duration = Duration::from_secs(300);

/// What of a peer's wheel goes along, below its `site-packages`: these files, and what they need of the same wheel.
struct PackedPeer {
    name: &'static str,
    roots: &'static [&'static str],
}

const PEERS: &[PackedPeer] = &[
    PackedPeer {
        name: UCX.0,
        roots: &[
            UCX.1,
            "libucx/lib/ucx/libuct_cma.so.0",
            "libucx/lib/ucx/libuct_cuda.so.0",
            "libucx/lib/ucx/libucm_cuda.so.0",
        ],
    },
    // Of NIXL's plugins only UCX's, and of UCX's modules none for cards: without them it is a quarter of the wheel.
    PackedPeer {
        name: RIXL.0,
        roots: &[
            RIXL.1,
            ".nixl_cu12.mesonpy.libs/plugins/libplugin_UCX.so",
            "nixl_cu12.libs/ucx/libuct_cma.so.0.0.0",
            "nixl_cu12.libs/ucx/libuct_cuda.so.0.0.0",
            "nixl_cu12.libs/ucx/libucm_cuda.so.0.0.0",
        ],
    },
];

/// Makes the archive of a kit. Errors: it is too large, or a program asks for too new a C library.
pub(crate) fn make(kit: &Kit) -> Result<PathBuf> {
    let target = kit.peers.parent().ok_or("the wheels lie in no folder")?;
    let folder = target.join("xtask").join("gpu");
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
            return Err(format!(
                "{name} asks for glibc 2.{newest}, newer than 2.{GLIBC}: build on Debian 12"
            )
            .into());
        }
        must("strip", [copy.as_os_str()])?;
    }
    for peer in PEERS {
        if !pack_peer(peer, &kit.peers, &packed)? {
            println!("without {}: cargo xtask test --install brings it", peer.name);
        }
    }
    let script = packed.join(SCRIPT);
    fs::write(&script, SCRIPT_TEXT)?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    let archive = folder.join("kvx-gpu.tar.gz");
    let (into, from) = (archive.as_os_str(), packed.as_os_str());
    must("tar", ["-czf".as_ref(), into, "-C".as_ref(), from, ".".as_ref()])?;
    let size = fs::metadata(&archive)?.len();
    println!(
        "{}: {:.1} MiB of at most {} MiB",
        archive.display(),
        size as f64 / f64::from(1 << 20),
        MOST >> 20
    );
    if size > MOST { Err("too large to be carried".into()) } else { Ok(archive) }
}

/// Unpacks an archive.
pub(crate) fn unpack(archive: &Path, folder: &Path) -> Result<()> {
    must("tar", ["-xzf".as_ref(), archive.as_os_str(), "-C".as_ref(), folder.as_os_str()])
}

/// Copies what is needed of a wheel, where it lies in the environment; false if the wheel is not there.
fn pack_peer(peer: &PackedPeer, peers: &Path, packed: &Path) -> Result<bool> {
    let environment = peers.join(peer.name).join("venv");
    let Some(packages) = site_packages(&environment).find(|folder| folder.join(peer.roots[0]).is_file())
    else {
        return Ok(false);
    };
    let mut files: BTreeSet<PathBuf> = peer.roots.iter().map(|root| packages.join(root)).collect();
    for root in &files.clone() {
        files.extend(needed(root, &packages)?);
    }
    for file in files {
        let copy = packed.join("peers").join(file.strip_prefix(peers)?);
        fs::create_dir_all(copy.parent().ok_or("a file lies in a folder")?)?;
        // As it is: tools that strip damage what tools that make wheels have changed.
        fs::copy(file, copy)?;
    }
    Ok(true)
}

/// The libraries below `folder` that the dynamic linker would open for a library.
fn needed(library: &Path, folder: &Path) -> Result<Vec<PathBuf>> {
    let mut ldd = Command::new("ldd");
    ldd.arg(library);
    let told = process::run(ldd, LIMIT, Output::Kept)?;
    if !told.succeeded() {
        return Err(format!("ldd {}: {}", library.display(), told.end).into());
    }
    let paths = told.output.lines().filter_map(|line| line.split_once(" => ")?.1.split(" (").next());
    // The linker writes paths as it found them, with dots in them.
    let real = paths.filter_map(|path| fs::canonicalize(path).ok());
    let folder = fs::canonicalize(folder)?;
    Ok(real.filter(|path| path.starts_with(&folder)).collect())
}

fn must<'a>(program: &str, arguments: impl IntoIterator<Item = &'a std::ffi::OsStr>) -> Result<()> {
    let mut command = Command::new(program);
    command.args(arguments);
    let shown = format!("{command:?}");
    let finished = process::run(command, LIMIT, Output::Shown)?;
    if finished.succeeded() { Ok(()) } else { Err(format!("{shown}: {}", finished.end).into()) }
}

/// The newest version of glibc 2 that a program asks for symbols of.
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
        assert_eq!(glibc(b"nothing"), 0);
    }

    #[test]
    fn the_script_passes_its_arguments_on() {
        let folder = std::env::temp_dir().join(format!("kvx-xtask-gpu-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        for (name, text) in [(SCRIPT, SCRIPT_TEXT), (XTASK, "#!/bin/sh\necho \"$@\"\n")] {
            fs::write(folder.join(name), text).unwrap();
            fs::set_permissions(folder.join(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        let mut script = Command::new(folder.join(SCRIPT));
        script.args(["--quick", "a b"]).env("PATH", "");
        let finished = process::run(script, LIMIT, Output::Kept).unwrap();
        assert_eq!(finished.output, format!("gpu --from {} --quick a b\n", folder.display()));
        fs::remove_dir_all(folder).unwrap();
    }
}
