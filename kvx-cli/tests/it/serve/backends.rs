//! The backends that transfer blocks: one backend in the usual run, each of them in the whole one.

use std::path::{Path, PathBuf};

use kvx_testkit::{Tier, skip};
use serde_json::Value;

use crate::serve::server::{Server, ServerArgs};

const BACKENDS: [&str; 5] = ["SHM", "TCP", "UCX", "LIBFABRIC", "RIXL"];

/// A backend, and the variables that it needs.
pub(crate) struct Backend {
    pub(crate) name: &'static str,
    variables: Vec<(&'static str, String)>,
}

impl Backend {
    /// Starts a server that transfers blocks over it; `fields` are of its `--kv-transfer-config`.
    pub(crate) fn server(&self, model: &Path, fields: &Value, told: ServerArgs<'_>) -> Server {
        let own = self.variables.iter().map(|(name, value)| (*name, &**value));
        let variables: Vec<(&str, &str)> = told.variables.iter().copied().chain(own).collect();
        Server::configured(model, self.name, fields, ServerArgs { variables: &variables, ..told })
    }
}

/// Returns the `usual` backend in the usual run, and all in the whole one. Reports which are left
/// out, and why.
pub(crate) fn backends(test: &str, usual: &str) -> Vec<Backend> {
    let wanted = |backend: &&str| {
        *backend == usual || Tier::Whole.runs_or_says(&format!("kvx serve: {test} over {backend}"))
    };
    BACKENDS.into_iter().filter(wanted).filter_map(|backend| here(test, backend)).collect()
}

/// Returns the backend, or reports a skip and returns `None` if it is not installed.
fn here(test: &str, name: &'static str) -> Option<Backend> {
    let variables = match name {
        "RIXL" => {
            nixl().map(|library| vec![("KVX_RIXL_LIB", library.to_string_lossy().into_owned())])
        }
        _ => kvx::registry().require(name, &kvx::Options::new()).is_ok().then(Vec::new),
    };
    if variables.is_none() {
        skip(test, &format!("{name} is not installed"), "cargo xtask test --install");
    }
    variables.map(|variables| Backend { name, variables })
}

/// Returns NIXL's library that `cargo xtask test --install` installs.
fn nixl() -> Option<PathBuf> {
    let environment = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/peers/nixl/venv/lib");
    let file = "site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so";
    let mut pythons = std::fs::read_dir(environment).ok()?.flatten();
    pythons.find_map(|python| Some(python.path().join(file)).filter(|file| file.exists()))
}
