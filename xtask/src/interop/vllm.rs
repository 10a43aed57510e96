//! `cargo xtask interop vllm`: runs vLLM in one fleet with `kvx serve`; with `--kvx`, a pair of
//! vLLMs with kvx inside their NIXL; with `--connector kvx`, vLLMs with kvx's own connector.
//!
//! It downloads gigabytes, and takes half an hour or more on an otherwise idle machine.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::metadata::Metadata;
use crate::process::{self, Deadline, must_succeed};
use crate::{Result, root};

/// The limit of the installation.
const SET_UP: Duration = Duration::from_secs(60 * 60);
/// The limit of the run.
const RUN: Duration = Duration::from_secs(2 * 60 * 60);
/// The options of `cargo xtask interop vllm`.
#[derive(Args, Debug, PartialEq)]
pub(crate) struct Options {
    /// Run a pair of vLLMs with the backend KVX in their NIXL, without `kvx serve`; half an hour
    #[arg(long, conflicts_with = "model_config")]
    kvx: bool,
    /// The connector of the fleet; mooncake has the part `bare` too, and kvx is kvx's own, in an
    /// unpatched vLLM (parts SHM, TCP, serve, stock, proxy, unit, versions, overhead,
    /// times, wrong); neither goes with --kvx
    #[arg(long, value_enum, default_value_t = Connector::Nixl)]
    connector: Connector,
    /// Install and build what it needs, and run nothing
    #[arg(long)]
    set_up: bool,
    /// Only this part (pairs, a model's name, faults, aborts, fleet; with --kvx: SHM, TCP, UCX,
    /// `faults SHM`, `faults TCP`, aborts, hosts); may be repeated
    #[arg(long, value_name = "PART", verbatim_doc_comment)]
    only: Vec<String>,
    /// Models and block sizes, in the form of xtask/src/interop/vllm/mixed.json or mooncake.json
    #[arg(long, value_name = "FILE")]
    model_config: Option<PathBuf>,
}

/// A connector of vLLM.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Connector {
    Nixl,
    Mooncake,
    Kvx,
}

/// Runs the command; returns false if a check failed.
pub(super) fn run(options: &Options) -> Result<bool> {
    let mooncake = options.connector == Connector::Mooncake;
    let own = options.connector == Connector::Kvx;
    if options.kvx && (mooncake || own) {
        return Err("`--kvx` puts kvx into vLLM's NIXL; leave `--connector` out".into());
    }
    let target = Metadata::of_members()?.target_directory;
    let work = target.join("peers/vllm");
    let mut set_up = Command::new("python3");
    set_up.arg(script("set_up.py")).arg(&work);
    must_succeed(set_up, Deadline::after(SET_UP))?;
    super::build("kvx-nixl")?; // built alone, so that it contains only what it needs
    if !options.kvx {
        super::build("kvx-cli")?;
    }
    let site = target.join("xtask/site");
    if own {
        super::build("kvx-python")?;
        package(&target, &site)?;
    }
    if options.set_up {
        return Ok(true);
    }
    let (program, page) = if options.kvx {
        ("run.py", "docs/operations/vllm.md")
    } else if own {
        ("connector.py", "docs/operations/vllm-connector.md")
    } else {
        ("mixed.py", "docs/operations/mixed-fleet.md")
    };
    let mut run = Command::new(work.join("venv/bin/python"));
    run.arg(script(program)).arg(&work).arg(target.join("release")).arg(root().join(page));
    if own {
        run.arg(&site);
    } else if !options.kvx {
        let usual = script(if mooncake { "mooncake.json" } else { "mixed.json" });
        // The script runs in another folder.
        run.arg(std::path::absolute(options.model_config.as_ref().unwrap_or(&usual))?);
    }
    run.args(&options.only).env("PYTHONUNBUFFERED", "1").env("PYTHONDONTWRITEBYTECODE", "1");
    process::shown_to_succeed(run, RUN)
}

/// Makes the Python package `kvx` of this build in a folder.
fn package(target: &Path, site: &Path) -> Result<()> {
    let package = site.join("kvx");
    std::fs::create_dir_all(&package)?;
    std::fs::copy(target.join("release/libkvx_python.so"), package.join("_kvx.abi3.so"))?;
    for file in ["__init__.py", "__main__.py", "vllm.py"] {
        std::fs::copy(root().join("kvx-python/python/kvx").join(file), package.join(file))?;
    }
    Ok(())
}

fn script(name: &str) -> PathBuf {
    root().join("xtask/src/interop/vllm").join(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn text(path: &std::path::Path) -> String {
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn pages_have_the_command_lines_that_the_scripts_run() {
        let page = text(&root().join("docs/operations/vllm.md"));
        let line = page.lines().find(|line| line.starts_with("vllm serve MODEL ")).unwrap();
        for part in
            ["--kv-transfer-config '", "\"backends\": [\"KVX\"]", "\"kv_role\": \"kv_producer\""]
        {
            assert!(line.contains(part), "{line}");
        }
        let page = text(&root().join("docs/operations/mixed-fleet.md"));
        for program in ["vllm serve MODEL ", "kvx serve MODEL "] {
            let lines: Vec<_> = page.lines().filter(|line| line.starts_with(program)).collect();
            assert_eq!(lines.len(), 3, "mixed.py takes one of each: {lines:?}");
            let count = |mark| lines.iter().filter(|line| line.contains(mark)).count();
            let marks = ["\"KVX\"", "\"MooncakeConnector\"", "--kv-transfer-config '{"];
            assert_eq!(marks.map(count), [1, 1, 3], "{lines:?}");
        }
    }

    #[test]
    fn a_case_has_fields_that_make_model_takes() {
        let mixed = text(&script("mixed.py"));
        let (shape, _) = mixed.split_once("SHAPE = (").unwrap().1.split_once(')').unwrap();
        let shape: Vec<_> = shape.split(',').map(|word| word.trim().trim_matches('"')).collect();
        let flags = text(&root().join("kvx-cli/src/make_model.rs"));
        for field in &shape {
            assert!(flags.contains(&format!("\n    {field}: ")), "kvx make-model has no --{field}");
        }
        for name in ["mixed.json", "mooncake.json"] {
            let cases: Value = serde_json::from_str(&text(&script(name))).unwrap();
            for field in
                cases.as_array().unwrap().iter().flat_map(|case| case.as_object().unwrap().keys())
            {
                let known = ["name", "block_size", "backend"].contains(&&**field);
                assert!(known || shape.contains(&&**field), "{field}");
            }
        }
    }

    #[test]
    fn the_tested_versions_of_vllm_are_the_same_everywhere() {
        let quoted = |text: &str, begin: &str, end: &str| -> Vec<String> {
            let (listed, _) = text.split_once(begin).unwrap().1.split_once(end).unwrap();
            listed.split('"').skip(1).step_by(2).map(str::to_owned).collect()
        };
        let class = text(&root().join("kvx-python/python/kvx/vllm.py"));
        let tested = quoted(&class, "\nTESTED = (", ")");
        let set_up = text(&script("set_up.py"));
        let installed = &quoted(&set_up, "\nVERSION = ", "\n")[0];
        let scripts =
            text(&script("versions.py")).replace("INSTALLED:", &format!("\"{installed}\":"));
        let run = quoted(&scripts, "\nVERSIONS = {", "}");
        let run: Vec<_> = run.iter().step_by(2).filter_map(|full| full.rsplit_once('.')).collect();
        assert_eq!(run.iter().map(|(version, _)| *version).collect::<Vec<_>>(), tested);
        let page = text(&root().join("docs/operations/vllm-connector.md"));
        for version in &tested {
            assert!(
                page.contains(&format!("| {version}.0 |")),
                "the page has no row for {version}"
            );
        }
    }

    #[test]
    fn every_requirement_has_its_version() {
        let wanted = text(&script("requirements.txt"));
        let mut lines = wanted.lines().filter(|line| !line.starts_with('#'));
        assert!(lines.all(|line| line.split("==").count() == 2), "{wanted}");
    }
}
