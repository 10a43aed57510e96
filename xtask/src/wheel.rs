//! `cargo xtask wheel`: packs the NIXL backend KVX and the program `kvx` into a Python wheel.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::features::tree_crates;
use crate::install::{self, Environment};
use crate::metadata::Metadata;
use crate::process::{self, Deadline, Output, must_succeed, output_of};
use crate::{Result, peers, root};

/// The limit of the whole command.
const LIMIT: Duration = Duration::from_secs(30 * 60);
/// The wheel's tag: the oldest glibc that it runs on.
const TAG: &str = "manylinux_2_34_x86_64";
const NAME: &str = "kvx_nixl";
const PLUGIN: &str = "libplugin_KVX.so";
/// The most bytes of the plug-in, which is copied into environments of other people.
const MOST_BYTES: u64 = 4_000_000;
/// The libraries that the plug-in may need: those of glibc, and libgcc_s.
const MAY_NEED: [&str; 6] =
    ["ld-linux-x86-64.so.2", "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libgcc_s.so.1"];

/// Makes the wheel; with `check`, installs and uses it in a new environment together with NIXL.
pub(crate) fn command(check: bool) -> Result<bool> {
    let deadline = Deadline::after(LIMIT);
    let target = Metadata::of_members()?.target_directory()?;
    let wheel = make(&target, deadline)?;
    if check {
        used_in_a_new_environment(&wheel, &target, deadline)?;
    }
    println!("{}", wheel.display());
    Ok(true)
}

fn make(target: &Path, deadline: Deadline) -> Result<PathBuf> {
    let failures = install::peers(&["wheel"], target, deadline);
    if !failures.is_empty() {
        return Err(failures.join("; ").into());
    }
    let python = Environment::of(target, "wheel").python();
    // The program as `cargo run --release` builds it, so that it exists already. The library last and alone: built
    // with the program, it contains more than it needs.
    for what in [["--bin", "kvx"], ["-p", "kvx-nixl"]] {
        must_succeed(process::cargo(["build", "--release"].into_iter().chain(what)), deadline)?;
    }
    let everything = Metadata::of_everything()?;
    let version = everything.root_package()?.version();
    let folder = target.join("xtask/wheel");
    let tree = folder.join("tree");
    if tree.exists() {
        std::fs::remove_dir_all(&tree)?;
    }
    let (package, record) = (tree.join(NAME), tree.join(format!("{NAME}-{version}.dist-info")));
    let (programs, licences) = (package.join("bin"), record.join("licenses"));
    std::fs::create_dir_all(&programs)?;
    std::fs::create_dir_all(&licences)?;
    for entry in std::fs::read_dir(root().join("kvx-nixl/python").join(NAME))?.flatten() {
        if entry.path().extension().is_some_and(|extension| extension == "py") {
            std::fs::copy(entry.path(), package.join(entry.file_name()))?;
        }
    }
    for file in ["kvx", PLUGIN] {
        let to = programs.join(file);
        std::fs::copy(target.join("release").join(file), &to)?;
        std::fs::set_permissions(&to, std::fs::Permissions::from_mode(0o755))?;
    }
    // `kvx mooncake-adapter` takes them where there is no compiler.
    peers::portable_adapter(&programs, deadline)?;
    check_plugin(&programs.join(PLUGIN), &python, deadline)?;
    for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
        std::fs::copy(root().join(licence), licences.join(licence))?;
    }
    std::fs::write(licences.join("THIRD-PARTY.txt"), third_parties(&everything, deadline)?)?;
    let readme = std::fs::read_to_string(root().join("kvx-nixl/README.md"))?;
    std::fs::write(
        record.join("METADATA"),
        format!(
            "Metadata-Version: 2.4\nName: kvx-nixl\nVersion: {version}\n\
             Summary: kvx as a plug-in of NIXL: the backend KVX for vLLM as it is\n\
             License-Expression: Apache-2.0 OR MIT\nLicense-File: LICENSE-APACHE\nLicense-File: LICENSE-MIT\n\
             License-File: THIRD-PARTY.txt\nRequires-Python: >=3.9\nDescription-Content-Type: text/markdown\n\n{readme}"
        ),
    )?;
    std::fs::write(
        record.join("WHEEL"),
        format!("Wheel-Version: 1.0\nGenerator: kvx xtask\nRoot-Is-Purelib: false\nTag: py3-none-{TAG}\n"),
    )?;
    std::fs::write(record.join("entry_points.txt"), "[console_scripts]\nkvx = kvx_nixl.__main__:kvx\n")?;
    let mut pack = Command::new(&python);
    pack.args(["-m", "wheel", "pack"]).arg(&tree).arg("--dest-dir").arg(&folder);
    must_succeed(pack, deadline)?;
    let wheel = folder.join(format!("{NAME}-{version}-py3-none-{TAG}.whl"));
    audit(&wheel, &python, deadline)?;
    Ok(wheel)
}

/// Returns an error if the plug-in is too large, or needs a library that a machine might lack.
fn check_plugin(plugin: &Path, python: &Path, deadline: Deadline) -> Result<()> {
    // By pyelftools, which auditwheel brings.
    const NEEDED: &str = "
import sys
from elftools.elf.elffile import ELFFile
tags = ELFFile(open(sys.argv[1], 'rb')).get_section_by_name('.dynamic').iter_tags()
print(*(tag.needed for tag in tags if tag.entry.d_tag == 'DT_NEEDED'))
";
    let bytes = std::fs::metadata(plugin)?.len();
    if bytes > MOST_BYTES {
        return Err(format!("{PLUGIN} has {bytes} bytes, more than {MOST_BYTES}").into());
    }
    let mut ask = Command::new(python);
    ask.args(["-c", NEEDED]).arg(plugin);
    let needed = output_of(ask, deadline.left())?;
    println!("{PLUGIN}: {bytes} bytes, needs {}", needed.trim());
    match needed.split_whitespace().find(|name| !MAY_NEED.contains(name)) {
        Some(other) => Err(format!("{PLUGIN} needs {other}, which is neither glibc's nor libgcc_s").into()),
        None if needed.trim().is_empty() => Err(format!("{PLUGIN} needs no library: it was not read").into()),
        None => Ok(()),
    }
}

/// Returns the crates in the two libraries with their licences, and each licence's text once.
fn third_parties(everything: &Metadata, deadline: Deadline) -> Result<String> {
    let line = ["tree", "-p", "kvx-nixl", "-p", "kvx-cli", "-e", "normal", "--prefix", "none"];
    let built_in = tree_crates(&output_of(process::cargo(line), deadline.left())?);
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut page = "Built with these crates:\n\n".to_owned();
    for package in everything.packages().filter(|package| !package.is_member()) {
        let name = package.to_string();
        if !built_in.contains(&name) {
            continue;
        }
        page += &format!("{name}: {}\n", package.license.as_deref().unwrap_or("see below"));
        let files: BTreeSet<_> =
            std::fs::read_dir(package.folder())?.flatten().map(|entry| entry.path()).collect();
        for file in files.iter().filter(|file| is_licence(file)) {
            let text = String::from_utf8_lossy(&std::fs::read(file)?).replace("\r\n", "\n");
            texts.entry(text.trim().to_owned()).or_default().push(name.clone());
        }
    }
    for (text, names) in texts {
        page += &format!("\n{}\n{}\n\n{text}\n", "-".repeat(80), names.join(", "));
    }
    Ok(page)
}

fn is_licence(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy().to_ascii_uppercase();
    let starts = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];
    file.is_file() && starts.iter().any(|start| name.starts_with(start))
}

/// Returns an error if auditwheel says that the wheel needs a newer system than its tag.
fn audit(wheel: &Path, python: &Path, deadline: Deadline) -> Result<()> {
    let mut show = Command::new(python);
    show.args(["-m", "auditwheel", "show"]).arg(wheel);
    let finished = process::run(show, deadline.left(), Output::Quiet)?;
    println!("{}", finished.output.trim());
    match (glibc(&finished.output), glibc(TAG)) {
        (Some(needed), Some(tagged)) if needed <= tagged => Ok(()),
        (needed, _) => Err(format!("the wheel needs glibc 2.{needed:?} by auditwheel, not {TAG}").into()),
    }
}

/// Returns the minor version of glibc in the first `manylinux_2_…` of a text.
fn glibc(text: &str) -> Option<u32> {
    text.split_once("manylinux_2_")?.1.split_once('_')?.0.parse().ok()
}

/// Does what docs/vllm.md tells users of the wheel, in an environment with NIXL.
fn used_in_a_new_environment(wheel: &Path, target: &Path, deadline: Deadline) -> Result<()> {
    let environment = Environment(target.join("peers/wheel/clean"));
    if environment.0.exists() {
        std::fs::remove_dir_all(&environment.0)?;
    }
    environment.create(deadline)?;
    let packages = environment.find("").ok_or("a new environment has no packages")?;
    // A copy of NIXL's wheel, so that what is linked into it stays in this environment.
    let nixl = Environment::of(target, "nixl").find("nixl_cu12");
    let nixl = nixl.ok_or("NIXL's wheel is not installed: cargo xtask test --install")?;
    for entry in std::fs::read_dir(nixl.parent().ok_or("NIXL lies in no folder")?)?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if ["nixl_cu12", ".nixl_cu12", "numpy"].iter().any(|start| name.starts_with(start)) {
            let mut copy = Command::new("cp");
            copy.args(["-a", "--reflink=auto"]).arg(entry.path()).arg(&packages);
            must_succeed(copy, deadline)?;
        }
    }
    let plugin = packages.join(".nixl_cu12.mesonpy.libs/plugins").join(PLUGIN);
    if plugin.symlink_metadata().is_ok() {
        std::fs::remove_file(&plugin)?; // the environment that was copied has one
    }
    environment.install(["--no-index".to_owned(), wheel.display().to_string()], deadline)?;
    for (command, is_there) in [("install", true), ("check", true), ("remove", false)] {
        let mut run = Command::new(environment.python());
        run.args(["-m", NAME, command]).env_remove("NIXL_PLUGIN_DIR").env_remove("KVX_NIXL_PLUGIN");
        let shown = format!("{run:?}");
        println!("{shown}");
        let finished = process::run(run, deadline.left(), Output::Shown)?;
        let moved =
            command != "check" || finished.output.contains("KVX: 1024 blocks of 4 KiB read and verified");
        if !finished.succeeded() || !moved || plugin.exists() != is_there {
            return Err(format!("{shown}: {}; {PLUGIN} exists: {}", finished.end, plugin.exists()).into());
        }
    }
    let engine = peers::mooncake_engine(target);
    let engine = engine.ok_or("Mooncake's wheel is not installed: cargo xtask test --install")?;
    let mut version = Command::new(environment.0.join("bin/kvx"));
    version.arg("--version");
    must_succeed(version, deadline)?;
    let mut adapter = Command::new(environment.0.join("bin/kvx"));
    adapter.args(["mooncake-adapter", "--engine"]).arg(engine);
    must_succeed(adapter, deadline)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auditwheels_answer_and_licences_are_recognised() {
        let output = "x.whl is consistent with the following platform tag: \"manylinux_2_35_x86_64\".";
        assert_eq!([glibc(output), glibc(TAG), glibc("linux_x86_64")], [Some(35), Some(34), None]);
        let [mit, readme, none] = ["LICENSE-MIT", "README.md", "LICENSE-NONE"].map(|name| root().join(name));
        assert!(is_licence(&mit) && !is_licence(&readme) && !is_licence(&none));
    }
}
