//! The plugins beside the library, and why one cannot be loaded: NIXL reports only that there is
//! none.

use std::path::{Path, PathBuf};

use kvx_backend::{elf, loader};
use kvx_core::backend::Unavailable;

use super::library::{CURE, Library};

/// NIXL's own variable for the folder of its plugins.
const FOLDER: &str = "NIXL_PLUGIN_DIR";

/// A plugin that can be loaded.
pub(crate) struct Plugin {
    /// The plugin's file.
    pub(crate) path: PathBuf,
}

impl Plugin {
    /// Loads a plugin, as NIXL will. Errors: the names of the libraries that it lacks.
    pub(crate) fn check(library: &Library, name: &str) -> Result<Plugin, Unavailable> {
        let folder = match std::env::var_os(FOLDER).filter(|folder| !folder.is_empty()) {
            Some(folder) => PathBuf::from(folder),
            None => library.path().parent().unwrap_or(Path::new("/")).join("plugins"),
        };
        let path = folder.join(format!("libplugin_{name}.so"));
        if !path.exists() {
            let there = names(&folder);
            let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
            return Err(Unavailable::because(
                format!("NIXL has no plugin {name} in {}; available: {there}", folder.display()),
                format!("name one of these in rixl.plugin, or {CURE}"),
            ));
        }
        match loader::preload(&path) {
            Ok(()) => Ok(Plugin { path }),
            Err(reason) => {
                let missing = elf::missing_libraries(&path);
                let why = if missing.is_empty() {
                    reason
                } else {
                    format!("missing {}", missing.join(", "))
                };
                Err(Unavailable::because(
                    format!("NIXL's plugin {} cannot be loaded: {why}", path.display()),
                    "install the missing libraries, or name another plugin in rixl.plugin",
                ))
            }
        }
    }
}

/// Returns the names of the plugins in a folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        Some(name.strip_prefix("libplugin_")?.strip_suffix(".so")?.to_owned())
    });
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}
