//! `cargo xtask wheel`: the backend KVX and the program `kvx` as a Python wheel, for those whose NIXL came as one.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::Result;
use crate::install::{Wheel, install_wheel, must_succeed, site_packages};
use crate::metadata::Metadata;
use crate::peers;
use crate::process::{self, Output};

/// The limit of the whole command.
const LIMIT: Duration = Duration::from_secs(30 * 60);
/// The oldest glibc that the wheel may ask for is this one's, or an older one.
const TAG: &str = "manylinux_2_34_x86_64";
const NAME: &str = "kvx_nixl";
const PLUGIN: &str = "libplugin_KVX.so";
/// Of the library, which is copied into environments of other people.
const MOST_BYTES: u64 = 4_000_000;
/// The libraries that the plug-in may ask for: those of glibc, and libgcc_s.
const MAY_NEED: [&str; 6] =
    ["ld-linux-x86-64.so.2", "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libgcc_s.so.1"];

/// What packs a wheel, and what looks at it.
const TOOLS: &[Wheel] = &[
    tool("wheel", "0.48.0", "packs a folder into a wheel"),
    tool("packaging", "26.3", "the tools need it"),
    tool("pyelftools", "0.33", "auditwheel needs it"),
    tool("auditwheel", "6.8.2", "says which systems a wheel runs on"),
];

const fn tool(name: &'static str, version: &'static str, why: &'static str) -> Wheel {
    Wheel { peer: "wheel", name, version, why }
}

/// Makes the wheel; with `check`, installs it in a new environment beside a NIXL and uses it there.
pub(crate) fn command(check: bool) -> Result<bool> {
    let until = Instant::now() + LIMIT;
    let target = Metadata::of_members()?.target_directory()?;
    let wheel = make(&target, until)?;
    if check {
        used_in_a_new_environment(&wheel, &target, until)?;
    }
    println!("{}", wheel.display());
    Ok(true)
}

fn make(target: &Path, until: Instant) -> Result<PathBuf> {
    for tool in TOOLS {
        install_wheel(tool, target, until)?;
    }
    // The program as `cargo run --release` builds it, so that it is there already. The library by itself, and last:
    // built with the program it has more in it than it needs.
    for what in [["--bin", "kvx"], ["-p", "kvx-nixl"]] {
        must_succeed(process::cargo(["build", "--release"].into_iter().chain(what)), until)?;
    }
    let everything = Metadata::of_everything()?;
    let version = everything.root_package()?.version().to_owned();
    let folder = target.join("xtask/wheel");
    let tree = folder.join("tree");
    if tree.exists() {
        std::fs::remove_dir_all(&tree)?;
    }
    let (package, record) = (tree.join(NAME), tree.join(format!("{NAME}-{version}.dist-info")));
    std::fs::create_dir_all(package.join("bin"))?;
    std::fs::create_dir_all(record.join("licenses"))?;
    let python = crate::root().join("kvx-nixl/python").join(NAME);
    for entry in std::fs::read_dir(python)?.flatten() {
        if entry.path().extension().is_some_and(|extension| extension == "py") {
            std::fs::copy(entry.path(), package.join(entry.file_name()))?;
        }
    }
    for file in ["kvx", PLUGIN] {
        let to = package.join("bin").join(file);
        std::fs::copy(target.join("release").join(file), &to)?;
        std::fs::set_permissions(&to, std::fs::Permissions::from_mode(0o755))?;
    }
    // `kvx mooncake-adapter` takes them where there is no compiler.
    peers::portable_adapter(&package.join("bin"), until)?;
    let environment = target.join("peers/wheel/venv");
    check_plugin(&package.join("bin").join(PLUGIN), &environment, until)?;
    for licence in ["LICENSE-APACHE", "LICENSE-MIT"] {
        std::fs::copy(crate::root().join(licence), record.join("licenses").join(licence))?;
    }
    let built_in = built_in(until)?;
    std::fs::write(record.join("licenses/THIRD-PARTY.txt"), third_parties(&everything, &built_in)?)?;
    let readme = std::fs::read_to_string(crate::root().join("kvx-nixl/README.md"))?;
    std::fs::write(record.join("METADATA"), metadata(&version, &readme))?;
    std::fs::write(
        record.join("WHEEL"),
        format!("Wheel-Version: 1.0\nGenerator: kvx xtask\nRoot-Is-Purelib: false\nTag: py3-none-{TAG}\n"),
    )?;
    std::fs::write(record.join("entry_points.txt"), "[console_scripts]\nkvx = kvx_nixl.__main__:kvx\n")?;
    let mut pack = Command::new(environment.join("bin/python"));
    pack.args(["-m", "wheel", "pack"]).arg(&tree).arg("--dest-dir").arg(&folder);
    must_succeed(pack, until)?;
    let wheel = folder.join(format!("{NAME}-{version}-py3-none-{TAG}.whl"));
    audited(&wheel, &environment, until)?;
    Ok(wheel)
}

/// Errors: the plug-in has too many bytes, or asks for a library that a machine might lack.
fn check_plugin(plugin: &Path, environment: &Path, until: Instant) -> Result<()> {
    let bytes = std::fs::metadata(plugin)?.len();
    if bytes > MOST_BYTES {
        return Err(format!("{PLUGIN} has {bytes} bytes, at most {MOST_BYTES} are wanted").into());
    }
    let mut ask = Command::new(environment.join("bin/python"));
    ask.args(["-c", NEEDED]).arg(plugin);
    let finished = process::run(ask, left(until), Output::Kept)?;
    if !finished.succeeded() {
        return Err(format!("{PLUGIN} is not read: {}\n{}", finished.end, finished.output).into());
    }
    println!("{PLUGIN}: {bytes} bytes, needs {}", finished.output.trim());
    match strange(&finished.output) {
        Some(other) => Err(format!("{PLUGIN} needs {other}, which is neither glibc's nor libgcc_s").into()),
        None => Ok(()),
    }
}

/// Prints the libraries that a library asks for, by pyelftools, which auditwheel brings.
const NEEDED: &str = "
import sys
from elftools.elf.elffile import ELFFile
tags = ELFFile(open(sys.argv[1], 'rb')).get_section_by_name('.dynamic').iter_tags()
print(*(tag.needed for tag in tags if tag.entry.d_tag == 'DT_NEEDED'))
";

/// The first of these libraries that the plug-in may not ask for; "nothing at all" where there are none.
fn strange(needed: &str) -> Option<&str> {
    let mut names = needed.split_whitespace().peekable();
    if names.peek().is_none() {
        return Some("nothing at all");
    }
    names.find(|name| !MAY_NEED.contains(name))
}

fn metadata(version: &str, readme: &str) -> String {
    format!(
        "Metadata-Version: 2.4\nName: kvx-nixl\nVersion: {version}\n\
         Summary: kvx as a plug-in of NIXL: the backend KVX for vLLM as it is\n\
         License-Expression: Apache-2.0 OR MIT\nLicense-File: LICENSE-APACHE\nLicense-File: LICENSE-MIT\n\
         License-File: THIRD-PARTY.txt\nRequires-Python: >=3.9\nDescription-Content-Type: text/markdown\n\n{readme}"
    )
}

/// The names and versions of the crates in the two libraries.
fn built_in(until: Instant) -> Result<BTreeSet<String>> {
    let line =
        ["tree", "-p", "kvx-nixl", "-p", "kvx-cli", "-e", "normal", "--prefix", "none", "--format", "{p}"];
    let finished = process::run(process::cargo(line), left(until), Output::Kept)?;
    if !finished.succeeded() {
        return Err(format!("cargo {}: {}", line.join(" "), finished.end).into());
    }
    let crates = finished.output.lines().filter_map(|line| {
        let mut words = line.split(' ');
        Some(format!("{} {}", words.next()?, words.next()?.strip_prefix('v')?))
    });
    Ok(crates.collect())
}

/// Whose work is in it, by which licence, and its words, each once.
fn third_parties(everything: &Metadata, built_in: &BTreeSet<String>) -> Result<String> {
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut page = "Built with these crates:\n\n".to_owned();
    for package in everything.packages() {
        let name = package.to_string();
        if package.is_member() || !built_in.contains(&name) {
            continue;
        }
        page.push_str(&format!("{name}: {}\n", package.text("license").unwrap_or("see below")));
        let folder = Path::new(package.manifest()).parent().ok_or("a crate lies nowhere")?;
        let mut files: Vec<_> = std::fs::read_dir(folder)?.flatten().map(|entry| entry.path()).collect();
        files.sort();
        for file in files.iter().filter(|file| is_licence(file)) {
            let text = String::from_utf8_lossy(&std::fs::read(file)?).replace("\r\n", "\n");
            texts.entry(text.trim().to_owned()).or_default().push(name.clone());
        }
    }
    for (text, names) in texts {
        page.push_str(&format!("\n{}\n{}\n\n{text}\n", "-".repeat(80), names.join(", ")));
    }
    Ok(page)
}

fn is_licence(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy().to_ascii_uppercase();
    let starts = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];
    file.is_file() && starts.iter().any(|start| name.starts_with(start))
}

/// The systems that the wheel runs on are at least those of its tag.
fn audited(wheel: &Path, environment: &Path, until: Instant) -> Result<()> {
    let mut show = Command::new(environment.join("bin/python"));
    show.args(["-m", "auditwheel", "show"]).arg(wheel);
    let finished = process::run(show, left(until), Output::Quiet)?;
    println!("{}", finished.output.trim());
    let told = oldest(&finished.output).ok_or("auditwheel names no system that the wheel runs on")?;
    let asked = oldest(&format!("\"{TAG}\"")).ok_or("the tag is one of manylinux")?;
    if told > asked {
        return Err(format!(
            "auditwheel says manylinux_2_{told}, the wheel is to run on manylinux_2_{asked}"
        )
        .into());
    }
    Ok(())
}

/// The glibc of the first `"manylinux_2_…"` in a text.
fn oldest(text: &str) -> Option<u32> {
    let (_, rest) = text.split_once("\"manylinux_2_")?;
    rest.split_once('_')?.0.parse().ok()
}

/// What docs/vllm.md tells users of the wheel to do, in an environment with a NIXL.
fn used_in_a_new_environment(wheel: &Path, target: &Path, until: Instant) -> Result<()> {
    let environment = target.join("peers/wheel/clean");
    if environment.exists() {
        std::fs::remove_dir_all(&environment)?;
    }
    let mut create = Command::new("python3");
    create.args(["-m", "venv"]).arg(&environment);
    must_succeed(create, until)?;
    let packages = site_packages(&environment).find(|folder| folder.is_dir());
    let packages = packages.ok_or("a new environment has no packages")?;
    // A copy of what `--install` has brought: what is linked into it is this environment's alone.
    let nixl =
        site_packages(&target.join("peers/nixl/venv")).find(|packages| packages.join("nixl_cu12").exists());
    let nixl = nixl.ok_or("NIXL's wheel is not installed: cargo xtask test --install")?;
    for entry in std::fs::read_dir(nixl)?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if ["nixl_cu12", ".nixl_cu12", "numpy"].iter().any(|start| name.starts_with(start)) {
            let mut copy = Command::new("cp");
            copy.args(["-a", "--reflink=auto"]).arg(entry.path()).arg(&packages);
            must_succeed(copy, until)?;
        }
    }
    let python = environment.join("bin/python");
    let plugin = packages.join(".nixl_cu12.mesonpy.libs/plugins").join(PLUGIN);
    if plugin.symlink_metadata().is_ok() {
        std::fs::remove_file(&plugin)?; // somebody's own, in the environment that was copied
    }
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--no-index", "--disable-pip-version-check"]).arg(wheel);
    must_succeed(install, until)?;
    for (command, is_there) in [("install", true), ("check", true), ("remove", false)] {
        let mut run = Command::new(&python);
        run.args(["-m", NAME, command]).env_remove("NIXL_PLUGIN_DIR").env_remove("KVX_NIXL_PLUGIN");
        let shown = format!("{run:?}");
        println!("{shown}");
        let finished = process::run(run, left(until), Output::Shown)?;
        let moved =
            command != "check" || finished.output.contains("KVX: 1024 blocks of 4 KiB read and verified");
        if !finished.succeeded() || !moved || plugin.exists() != is_there {
            return Err(format!("{shown}: {}, {} there: {}", finished.end, PLUGIN, plugin.exists()).into());
        }
    }
    let mut version = Command::new(environment.join("bin/kvx"));
    version.arg("--version");
    must_succeed(version, until)?;
    let engine = peers::mooncake_engine(target);
    let engine = engine.ok_or("Mooncake's wheel is not installed: cargo xtask test --install")?;
    let mut adapter = Command::new(environment.join("bin/kvx"));
    adapter.args(["mooncake-adapter", "--engine"]).arg(engine);
    must_succeed(adapter, until)
}

fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_that_auditwheel_names_is_read() {
        let told = "x.whl is consistent with the following platform tag: \"manylinux_2_34_x86_64\".";
        assert_eq!(
            (oldest(told), oldest(&format!("\"{TAG}\"")), oldest("linux_x86_64")),
            (Some(34), Some(34), None)
        );
    }

    #[test]
    fn a_library_of_another_package_is_told() {
        assert_eq!(strange("libc.so.6 libgcc_s.so.1 ld-linux-x86-64.so.2\n"), None);
        assert_eq!(strange("libc.so.6 libstdc++.so.6"), Some("libstdc++.so.6"));
        assert_eq!(strange("\n"), Some("nothing at all"));
    }

    #[test]
    fn a_licence_is_told_by_its_name() {
        let of = |name: &str| is_licence(&crate::root().join(name));
        assert!(of("LICENSE-MIT") && of("LICENSE-APACHE"));
        assert!(!of("README.md") && !of("LICENSE-NONE"));
    }
}
