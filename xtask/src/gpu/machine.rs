//! The machine under test: its device, and what it lacks.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use super::kit::{Kit, STAND_IN};
use super::parts::Needs;
use crate::Result;
use crate::process::{self, End, Finished, Output};

/// The time limit of the search for devices, and of the first start of Python.
const LOOK_LIMIT: Duration = Duration::from_secs(60);

/// Asks a Python for its version and for modules, without importing them: PyTorch takes seconds.
const PROBE: &str = "\
import importlib.util, json, sysconfig
print(json.dumps({
    'suffix': sysconfig.get_config_var('EXT_SUFFIX'),
    'numpy': importlib.util.find_spec('numpy') is not None,
    'torch': importlib.util.find_spec('torch') is not None,
}))";

/// The device under test.
pub(crate) struct Device {
    /// A line about the device, the CPU and the kernel.
    pub(crate) description: String,
    pub(crate) is_stand_in: bool,
}

/// What is missing, with the reasons and remedies.
pub(crate) struct Missing(Vec<(Needs, String)>);

/// A Python's answer to [`PROBE`].
#[derive(Deserialize)]
struct Python {
    /// The ending of the names of modules in C.
    suffix: String,
    numpy: bool,
    torch: bool,
}

impl Missing {
    /// Looks for everything that parts need. Over the stand-in, the driver allocates tensors,
    /// without PyTorch.
    pub(crate) fn from(kit: &Kit, python: &Path, stand_in: bool) -> Missing {
        let mut missing = Vec::new();
        for needs in [Needs::Ucx, Needs::Nixl, Needs::KvxInNixl] {
            if kit.library(needs).is_none() {
                let peers = kit.peers.display();
                let why = format!(
                    "{needs:?} is not in {peers}: cargo xtask test --install, then make the kit"
                );
                missing.push((needs, why));
            }
        }
        missing.extend(without_torch(kit, python, stand_in).map(|why| (Needs::Torch, why)));
        Missing(missing)
    }

    /// Returns why something that needs this cannot run, if it cannot.
    pub(crate) fn why(&self, needs: Needs) -> Option<&str> {
        self.0.iter().find(|(missing, _)| *missing == needs).map(|(_, why)| &**why)
    }

    /// Returns all reasons.
    pub(crate) fn all(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(_, why)| &**why)
    }
}

impl Device {
    /// Finds the first NVIDIA device. The error says why there is none, and what to do.
    pub(crate) fn first(kit: &Kit) -> Result<Device> {
        let mut command = kit.command("kvx")?;
        command.args(["devices", "--json"]);
        let Finished { end, output } = process::run(command, LOOK_LIMIT, Output::Quiet)?;
        if !matches!(end, End::Exited(status) if status.success()) {
            return Err(format!("{} ({end})", output.trim()).into());
        }
        // Warnings may come before the list, and after it.
        let list = output.find("[\n").map_or("", |at| &output[at..]);
        let mut lists = serde_json::Deserializer::from_str(list).into_iter::<Vec<Value>>();
        let devices = lists.next().ok_or("kvx devices lists nothing")??;
        let device = devices.iter().find(|device| device["kind"] == "cuda");
        let device = device
            .ok_or("there is no NVIDIA device, only others; run kvx devices for the reason")?;
        let [name, bus, version] =
            ["name", "bus", "version"].map(|field| device[field].as_str().unwrap_or_default());
        let description = described(&format!("{name} at {bus}, driver for CUDA {version}"));
        Ok(Device { description, is_stand_in: version.contains(STAND_IN) })
    }
}

/// Returns a line about the machine that figures come from.
fn described(device: &str) -> String {
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let model = model.trim_start_matches([' ', '\t', ':']);
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{device}; {cores} CPUs ({model}), Linux {}", kernel.trim())
}

/// Returns why tensors cannot be moved inside NIXL, if they cannot.
fn without_torch(kit: &Kit, python: &Path, stand_in: bool) -> Option<String> {
    let Some(packages) = kit.nixl_packages() else {
        return Some("NIXL's Python package is not in the kit: cargo xtask test --install".into());
    };
    let mut probe = Command::new(python);
    probe.args(["-c", PROBE]);
    let shown = python.display();
    let answer = process::output_of(probe, LOOK_LIMIT)
        .and_then(|output| Ok(serde_json::from_str::<Python>(&output)?));
    let found = match answer {
        Ok(found) => found,
        Err(error) => return Some(format!("no Python: {error}; name one with --python")),
    };
    if !found.numpy || !(found.torch || stand_in) {
        return Some(format!("{shown} lacks NumPy or PyTorch: name another with --python"));
    }
    let module = format!("nixl_cu12/_bindings{}", found.suffix);
    (!packages.join(&module).is_file()).then(|| {
        format!("the kit has no {module} for {shown}: name another with --python, or add its version to pack.py")
    })
}
