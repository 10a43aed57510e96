//! `kvx nixl`: the NIXLs of this machine, and kvx inside them as their backend KVX.

mod check;

use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use clap::Args;
use plugin_KVX::installed;
use serde::Serialize;

use crate::Result;
use crate::wheels::{self, Environments};

/// What NIXL opens.
const PLUGIN: &str = "libplugin_KVX.so";
/// Names the plug-in, if it does not lie beside this program.
const VARIABLE: &str = "KVX_NIXL_PLUGIN";

#[derive(Args)]
pub(crate) struct Arguments {
    /// One JSON object per NIXL.
    #[arg(long, conflicts_with_all = ["install", "remove", "check"])]
    json: bool,
    /// Link the backend KVX into this NIXL: a Python environment, a folder of packages, a folder with libnixl.so; or
    /// make this folder for NIXL_PLUGIN_DIR.
    #[arg(long, value_name = "DIR|WHEEL", conflicts_with_all = ["remove", "check"])]
    install: Option<PathBuf>,
    /// Take back what --install has linked there.
    #[arg(long, value_name = "DIR|WHEEL", conflicts_with = "check")]
    remove: Option<PathBuf>,
    /// Run two agents of each NIXL in a wheel over KVX, and say what moved and how fast, beside its own UCX.
    #[arg(long)]
    check: bool,
}

/// A NIXL of this machine.
#[derive(Serialize)]
struct Nixl {
    library: PathBuf,
    /// Its name and version, where KVX can serve it.
    serves: Option<String>,
    /// Why KVX cannot.
    refused: Option<String>,
    plugins: PathBuf,
    /// What its backend KVX is now.
    installed: Option<PathBuf>,
}

impl Nixl {
    fn of(library: &Path) -> Nixl {
        let verdict = installed::verdict(library);
        let plugins = installed::plugins_of(library);
        let link = plugins.join(PLUGIN);
        let installed = link.symlink_metadata().is_ok().then(|| std::fs::read_link(&link).unwrap_or(link));
        Nixl {
            library: library.to_owned(),
            refused: verdict.as_ref().err().map(ToString::to_string),
            serves: verdict.ok(),
            plugins,
            installed,
        }
    }
}

pub(crate) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<()> {
    if let Some(place) = &arguments.install {
        return install(place, &plugin()?, out);
    }
    if let Some(place) = &arguments.remove {
        return remove(place, out);
    }
    let found: Vec<_> =
        wheels::nixls(&Environments::of_process()).iter().map(|library| Nixl::of(library)).collect();
    if arguments.check {
        return check::run(&found, &plugin()?, out);
    }
    if arguments.json {
        for nixl in &found {
            writeln!(out, "{}", serde_json::to_string(nixl)?)?;
        }
        return Ok(());
    }
    if found.is_empty() {
        writeln!(out, "no NIXL was found; looked in {} and where images have it", wheels::PLACES)?;
    }
    for nixl in &found {
        writeln!(out, "{}", nixl.library.display())?;
        match (&nixl.serves, &nixl.refused) {
            (Some(name), _) => writeln!(out, "  {name}: KVX serves it")?,
            (None, Some(why)) => writeln!(out, "  KVX refuses it: {why}")?,
            (None, None) => {}
        }
        match &nixl.installed {
            Some(target) => writeln!(out, "  its backend KVX is {}", target.display())?,
            None => writeln!(out, "  it has no backend KVX: kvx nixl --install {}", nixl.plugins.display())?,
        }
    }
    Ok(())
}

/// The plug-in's file: the variable's, else the one beside this program or in the `lib` beside its folder.
fn plugin() -> Result<PathBuf> {
    let named = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from);
    let program = std::env::current_exe()?.canonicalize()?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    let beside = [folder.join(PLUGIN), folder.join("deps").join(PLUGIN), folder.join("../lib").join(PLUGIN)];
    let found = named.into_iter().chain(beside).find(|file| file.is_file());
    let found = found.ok_or_else(|| {
        format!(
            "{PLUGIN} does not lie beside this program: build it with `cargo build --release -p kvx-nixl`, or set \
             {VARIABLE}"
        )
    })?;
    Ok(found.canonicalize()?)
}

/// The folder of plug-ins that somebody means: a NIXL's own, which is told, or any other.
fn folder_at(place: &Path) -> (PathBuf, Option<PathBuf>) {
    let library = |folder: &Path| Some(folder.join("libnixl.so")).filter(|file| file.exists());
    let above = place.file_name().is_some_and(|name| name == "plugins").then(|| place.parent()).flatten();
    let own = library(place)
        .or_else(|| above.and_then(library))
        .or_else(|| wheels::nixls_below(place).into_iter().next());
    match own {
        Some(library) => (installed::plugins_of(&library), Some(library)),
        None => (place.to_owned(), None),
    }
}

fn install(place: &Path, plugin: &Path, out: &mut impl Write) -> Result<()> {
    let (folder, nixl) = folder_at(place);
    if let Some(library) = &nixl {
        installed::verdict(library).map_err(|why| why.to_string())?;
    }
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let link = folder.join(PLUGIN);
    match link.symlink_metadata() {
        Ok(there) if there.is_symlink() => std::fs::remove_file(&link)?,
        Ok(_) => {
            return Err(
                format!("{} is a file that kvx has not linked: remove it first", link.display()).into()
            );
        }
        Err(_) => {}
    }
    symlink(plugin, &link).map_err(|error| format!("{}: {error}", link.display()))?;
    writeln!(out, "{} is {}", link.display(), plugin.display())?;
    if nixl.is_none() {
        let folder = std::path::absolute(&folder)?;
        writeln!(out, "no NIXL lies there: export NIXL_PLUGIN_DIR={}", folder.display())?;
        writeln!(out, "it takes the place of NIXL's own folder: such a process has the backend KVX alone")?;
    }
    writeln!(out, "vLLM takes it by \"kv_connector_extra_config\": {{\"backends\": [\"KVX\"]}}")?;
    Ok(())
}

fn remove(place: &Path, out: &mut impl Write) -> Result<()> {
    let (folder, _) = folder_at(place);
    let link = folder.join(PLUGIN);
    match link.symlink_metadata() {
        Ok(there) if there.is_symlink() => {
            std::fs::remove_file(&link)?;
            writeln!(out, "{} is gone", link.display())?;
            Ok(())
        }
        Ok(_) => Err(format!("{} is a file that kvx has not linked: it stays", link.display()).into()),
        Err(_) => Err(format!("{} is not there", link.display()).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that goes when it is dropped.
    struct Folder(PathBuf);

    impl Drop for Folder {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).ok();
        }
    }

    fn folder(name: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("kvx-nixl-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    #[test]
    fn a_folder_for_the_variable_is_made_and_taken_back() {
        let root = folder("install");
        let (plugin, place) = (root.0.join("built.so"), root.0.join("new/plugins"));
        std::fs::write(&plugin, "").unwrap();
        for _ in 0..2 {
            let mut said = Vec::new();
            install(&place, &plugin, &mut said).unwrap();
            assert!(String::from_utf8(said).unwrap().contains("export NIXL_PLUGIN_DIR=/"));
        }
        assert_eq!(std::fs::read_link(place.join(PLUGIN)).unwrap(), plugin);
        remove(&place, &mut Vec::new()).unwrap();
        assert!(remove(&place, &mut Vec::new()).unwrap_err().to_string().contains("is not there"));
        std::fs::write(place.join(PLUGIN), "somebody's").unwrap();
        assert!(
            install(&place, &plugin, &mut Vec::new()).unwrap_err().to_string().contains("has not linked")
        );
        assert!(remove(&place, &mut Vec::new()).unwrap_err().to_string().contains("it stays"));
    }

    #[test]
    fn a_nixl_is_found_by_any_of_its_folders_and_refused_in_words() {
        let root = folder("wheel");
        let packages = root.0.join("lib/python3.11/site-packages");
        let libraries = packages.join(".nixl_cu12.mesonpy.libs");
        std::fs::create_dir_all(libraries.join("plugins")).unwrap();
        std::fs::create_dir_all(packages.join("nixl_cu12-0.2.0.dist-info")).unwrap();
        std::fs::write(libraries.join("libnixl.so"), "").unwrap();
        for place in [&root.0, &packages, &libraries, &libraries.join("plugins")] {
            let (plugins, library) = folder_at(place);
            assert_eq!(plugins, libraries.join("plugins"), "{}", place.display());
            assert_eq!(library, Some(libraries.join("libnixl.so")));
            let why = install(place, Path::new("/nonexistent"), &mut Vec::new()).unwrap_err().to_string();
            assert!(why.contains("NIXL 0.2.0 was not tried"), "{why}");
        }
        let nixl = Nixl::of(&libraries.join("libnixl.so"));
        assert!(nixl.serves.is_none() && nixl.refused.is_some() && nixl.installed.is_none());
    }
}
