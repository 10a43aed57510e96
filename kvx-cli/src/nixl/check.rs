//! `kvx nixl --check`: transfers between two agents of a wheel's NIXL in two processes, over KVX
//! and over its own UCX.

use std::io::Write;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::Deserialize;

use super::{Nixl, PLUGIN};
use crate::progress::Progress;
use crate::{Result, bytes};

/// The script that runs in the wheel's Python: `python -c SCRIPT BACKEND MODULE`.
const SCRIPT: &str = include_str!("check.py");
/// The backends, which take turns.
const BACKENDS: [&str; 2] = ["KVX", "UCX"];
/// The number of runs of each backend, each in two new processes.
const RUNS: usize = 3;
/// About how long a run takes.
const RUN: Duration = Duration::from_millis(1500);

/// A folder that is removed when this is dropped.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// The output of the script.
#[derive(Deserialize)]
struct Told {
    /// The distribution and its version.
    wheel: String,
    /// The files of NIXL that Python has loaded.
    libraries: Vec<PathBuf>,
    reads: Vec<Read>,
}

#[derive(Deserialize)]
struct Read {
    count: u64,
    length: u64,
    /// The median of the run's reads.
    seconds: f64,
}

impl Read {
    fn blocks(&self) -> String {
        format!("{} blocks of {}", self.count, bytes::show(self.length))
    }

    fn rate(&self) -> f64 {
        (self.count * self.length) as f64 / self.seconds / 1e9
    }
}

/// The runs of one backend, or the reason why one has failed.
struct Series {
    backend: &'static str,
    runs: std::result::Result<Vec<Told>, String>,
    /// The route of the bytes, as the backend's log names it.
    route: Option<String>,
}

/// Returns the Python of the environment that contains a wheel's library.
fn python_of(library: &Path) -> Option<PathBuf> {
    library.ancestors().map(|folder| folder.join("bin/python3")).find(|python| python.exists())
}

/// Returns the Python module of the wheel that contains a library, or an empty text.
fn module_of(library: &Path) -> &str {
    let folder = library.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    let module = folder.and_then(|name| name.strip_prefix('.')?.strip_suffix(".mesonpy.libs"));
    module.unwrap_or_default()
}

pub(super) fn run(found: &[Nixl], plugin: &Path, out: &mut impl Write) -> Result<()> {
    // Create a new folder for this user alone: NIXL loads the files in it.
    let name = format!(
        "kvx-nixl-check-{}-{:x}",
        std::process::id(),
        std::time::UNIX_EPOCH.elapsed()?.as_nanos()
    );
    let folder = std::env::temp_dir().join(name);
    std::fs::DirBuilder::new().mode(0o700).create(&folder)?;
    let plugins = Folder(folder);
    std::os::unix::fs::symlink(plugin, plugins.0.join(PLUGIN))?;
    let mut checked = Vec::new();
    for nixl in found {
        let Some(name) = &nixl.serves else { continue };
        match python_of(&nixl.library) {
            Some(python) => checked.push((nixl, name, python)),
            None => writeln!(
                out,
                "{}: it is not in a Python environment, so it cannot be checked",
                nixl.library.display()
            )?,
        }
    }
    let steps = checked.len() * BACKENDS.len() * RUNS;
    let mut progress = Progress::new(steps, RUN * steps as u32);
    let mut failed = Vec::new();
    for (nixl, name, python) in &checked {
        let all = measure(nixl, name, python, &plugins.0, &mut progress)?;
        progress.clear();
        report(name, python, plugin, &all, out)?;
        if all.iter().any(|series| series.backend == "KVX" && series.runs.is_err()) {
            failed.push(name.as_str());
        }
    }
    drop(progress);
    // The checks above used the plug-in of this program; report what an engine finds as well.
    for nixl in found.iter().filter(|nixl| nixl.serves.is_some() && !nixl.is_there) {
        writeln!(out, "{}: {}", nixl.library.display(), nixl.installation())?;
    }
    match (checked.len(), failed.is_empty()) {
        (0, _) => {
            Err("no NIXL that KVX supports was found in a Python environment; `kvx nixl` says why"
                .into())
        }
        (_, true) => Ok(()),
        (_, false) => Err(format!("KVX did not work in {}", failed.join(", ")).into()),
    }
}

/// Runs each backend so many times, in turn.
fn measure(
    nixl: &Nixl,
    name: &str,
    python: &Path,
    plugins: &Path,
    progress: &mut Progress,
) -> Result<Vec<Series>> {
    let new = |backend| Series { backend, runs: Ok(Vec::new()), route: None };
    let mut all = Vec::from_iter(BACKENDS.map(new));
    for turn in 1..=RUNS {
        for series in &mut all {
            let what = format!("{name}: {}, run {turn} of {RUNS}", series.backend);
            progress.show(&what);
            if let Ok(runs) = &mut series.runs {
                match run_once(nixl, series.backend, python, plugins)? {
                    Ok((told, route)) => {
                        runs.push(told);
                        series.route = route;
                    }
                    Err(why) => series.runs = Err(why),
                }
            }
            progress.step(&what);
        }
    }
    Ok(all)
}

/// Runs the script. Returns its output and the route, or the reason why it has failed.
fn run_once(
    nixl: &Nixl,
    backend: &str,
    python: &Path,
    plugins: &Path,
) -> Result<std::result::Result<(Told, Option<String>), String>> {
    let mut command = Command::new(python);
    command.args(["-c", SCRIPT, backend, module_of(&nixl.library)]).stdin(Stdio::null());
    // UCX names its lanes at this level.
    command.env_remove("NIXL_PLUGIN_DIR").env("UCX_LOG_LEVEL", "info");
    if backend == "KVX" {
        command.env("NIXL_PLUGIN_DIR", plugins);
    }
    let output = command.output()?;
    let log = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let told = log.lines().filter(|line| line.starts_with("KVX:")).chain(log.lines().last());
        let told = told.collect::<Vec<_>>().join("\n    ");
        return Ok(Err(if told.is_empty() { output.status.to_string() } else { told }));
    }
    let told: Told = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("the output of {}: {error}", python.display()))?;
    let same = |library: &PathBuf| library.canonicalize().ok() == nixl.library.canonicalize().ok();
    if !told.libraries.iter().any(same) {
        let loaded: Vec<_> = told.libraries.iter().map(|path| path.display().to_string()).collect();
        let (python, loaded) = (python.display(), loaded.join(", "));
        return Ok(Err(format!("{python} has loaded {loaded} instead of this NIXL")));
    }
    Ok(Ok((told, route(&log))))
}

/// Finds the route of the bytes between the two agents in the log of a backend.
fn route(log: &str) -> Option<String> {
    let kvx =
        |line: &str| line.strip_prefix("KVX: agent reader reaches owner by ").map(str::to_owned);
    let ucx = |line: &str| {
        let (_, lanes) = line.split_once(" intra-node cfg#")?;
        let lanes = lanes.split_once(' ')?.1;
        Some(lanes.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    log.lines().find_map(|line| kvx(line).or_else(|| ucx(line)))
}

fn report(
    name: &str,
    python: &Path,
    plugin: &Path,
    all: &[Series],
    out: &mut impl Write,
) -> Result<()> {
    let told = all.iter().find_map(|series| series.runs.as_ref().ok()?.first());
    let wheel = told.map_or(name, |told| &told.wheel);
    writeln!(out, "{wheel}, {}, with {}", python.display(), plugin.display())?;
    for series in all {
        let runs = match &series.runs {
            Ok(runs) => runs,
            Err(why) => {
                writeln!(out, "  {}: {why}", series.backend)?;
                continue;
            }
        };
        let first = runs.first().map_or(&[][..], |run| &run.reads);
        for (at, read) in first.iter().enumerate() {
            let mut rates: Vec<_> = runs.iter().map(|run| run.reads[at].rate()).collect();
            rates.sort_by(f64::total_cmp);
            writeln!(
                out,
                "  {}: {:<21} {:>6.2} GB/s, {:.2} to {:.2} in {} runs",
                series.backend,
                read.blocks(),
                rates[rates.len() / 2],
                rates[0],
                rates[rates.len() - 1],
                rates.len(),
            )?;
        }
        let route = series.route.as_deref().unwrap_or("its log names none");
        writeln!(out, "       route: {route}")?;
    }
    if told.is_none() {
        return Ok(());
    }
    writeln!(
        out,
        "  Medians of {RUNS} runs, in turn, each between two new processes; every block was compared."
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_route_is_that_between_the_two_agents() {
        let kvx = "KVX: agent reader in NIXL 1.5.1: kvx 0.1.0\n\
                   KVX: agent reader reaches owner by SHM: chosen, shared memory; TCP: not needed\n";
        assert_eq!(route(kvx).unwrap(), "SHM: chosen, shared memory; TCP: not needed");
        // Newer releases write the agent's name, older ones the context's.
        for name in ["reader", "ucp_context_0"] {
            let ucx = format!(
                "[1.2] [vm:3:0] ucp_worker.c:1997 UCX  INFO    {name} self cfg#0 rma(self)  am(self)\n\
                 [1.3] [vm:3:0] ucp_worker.c:1997 UCX  INFO    {name} intra-node cfg#1 rma_am(tcp/lo)  am(cma/memory)\n"
            );
            assert_eq!(route(&ucx).unwrap(), "rma_am(tcp/lo) am(cma/memory)");
        }
        assert_eq!(route("NIXL INFO Backend UCX was instantiated"), None);
    }

    #[test]
    fn the_module_is_that_of_the_library() {
        let library = "/venv/lib/python3.12/site-packages/.nixl_cu13.mesonpy.libs/libnixl.so";
        assert_eq!(module_of(Path::new(library)), "nixl_cu13");
        assert_eq!(module_of(Path::new("/usr/local/nixl/lib64/libnixl.so")), "");
    }
}
