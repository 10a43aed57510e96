//! `kvx nixl`: lists the NIXL installations of this machine, and installs kvx in them as backend
//! KVX.

mod check;

use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use clap::Args;
use plugin_KVX::installation;
use serde::Serialize;

use crate::Result;
use crate::wheels::{self, Environments};

/// The file name that NIXL opens.
const PLUGIN: &str = "libplugin_KVX.so";
/// The variable that names the plug-in, if it is not next to this program.
const VARIABLE: &str = "KVX_NIXL_PLUGIN";

#[derive(Args)]
pub(crate) struct Arguments {
    /// Print one JSON object per NIXL.
    #[arg(long, conflicts_with_all = ["install", "remove", "check"])]
    json: bool,
    /// Link the backend KVX into this NIXL: a Python environment, a folder of packages, or a folder
    /// with libnixl.so. Any other folder is created for NIXL_PLUGIN_DIR.
    #[arg(long, value_name = "DIR|WHEEL", conflicts_with_all = ["remove", "check"])]
    install: Option<PathBuf>,
    /// Remove the link that --install has created there.
    #[arg(long, value_name = "DIR|WHEEL", conflicts_with = "check")]
    remove: Option<PathBuf>,
    /// Transfer blocks between two agents of each NIXL wheel, over KVX and over its own UCX, in
    /// turn, and print the rates with their spread and the routes.
    #[arg(long)]
    check: bool,
}

/// A NIXL installation of this machine.
#[derive(Serialize)]
struct Nixl {
    library: PathBuf,
    /// The version of the installation's wheel; `None` if it was built from source.
    version: Option<String>,
    /// The name of the installation, if KVX supports it.
    serves: Option<String>,
    /// The reason that KVX does not support the installation.
    refused: Option<String>,
    plugins: PathBuf,
    /// The target of the link that is its backend KVX.
    installed: Option<PathBuf>,
    /// True if the target of the link exists.
    is_there: bool,
}

impl Nixl {
    fn of(library: &Path) -> Nixl {
        let verdict = installation::verdict(library);
        let plugins = installation::plugins_of(library);
        let link = plugins.join(PLUGIN);
        let installed =
            link.symlink_metadata().is_ok().then(|| std::fs::read_link(&link).unwrap_or(link));
        Nixl {
            library: library.to_owned(),
            version: installation::version_of(library),
            refused: verdict.as_ref().err().map(ToString::to_string),
            serves: verdict.ok(),
            is_there: plugins.join(PLUGIN).exists(),
            plugins,
            installed,
        }
    }

    /// Describes the backend KVX of this NIXL, and what to do if there is none.
    fn installation(&self) -> String {
        match &self.installed {
            Some(target) if self.is_there => format!("its backend KVX is {}", target.display()),
            Some(target) => format!(
                "its backend KVX is a link to {}, which does not exist: run kvx nixl --install {}, or --remove",
                target.display(),
                self.plugins.display()
            ),
            None => {
                format!("it has no backend KVX: run kvx nixl --install {}", self.plugins.display())
            }
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
    let found: Vec<_> = wheels::nixls(&Environments::of_process())
        .iter()
        .map(|library| Nixl::of(library))
        .collect();
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
        writeln!(
            out,
            "no NIXL was found; looked in {} and the usual places in images",
            wheels::PLACES
        )?;
    }
    for nixl in &found {
        writeln!(out, "{}", nixl.library.display())?;
        match (&nixl.serves, &nixl.refused) {
            (Some(name), _) => writeln!(out, "  {name}: KVX supports it")?,
            (None, Some(why)) => writeln!(out, "  KVX does not support it: {why}")?,
            (None, None) => {}
        }
        writeln!(out, "  {}", nixl.installation())?;
    }
    if let Some(folder) = std::env::var_os("NIXL_PLUGIN_DIR").filter(|value| !value.is_empty()) {
        let folder = Path::new(&folder);
        let has = if folder.join(PLUGIN).exists() { "KVX" } else { "no KVX" };
        writeln!(
            out,
            "NIXL_PLUGIN_DIR is {}, which replaces the plug-in folders of all of these, and has \
             {has}",
            folder.display()
        )?;
    }
    Ok(())
}

/// Returns the plug-in's file: the one that the variable names, else the one next to this program
/// or in the `lib` next to its folder.
fn plugin() -> Result<PathBuf> {
    let named = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from);
    let program = std::env::current_exe()?.canonicalize()?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    let beside = [folder.join(PLUGIN), folder.join("../lib").join(PLUGIN)];
    let found = named.into_iter().chain(beside).find(|file| file.is_file());
    let found = found.ok_or_else(|| {
        format!(
            "{PLUGIN} is not next to this program: build it with `cargo build --release -p kvx-nixl`, or set \
             {VARIABLE}"
        )
    })?;
    Ok(found.canonicalize()?)
}

/// Returns the folders of plug-ins at a place: those of the NIXLs there, each with its library, or
/// the place itself.
fn folders_at(place: &Path) -> Vec<(PathBuf, Option<PathBuf>)> {
    let library = |folder: &Path| Some(folder.join("libnixl.so")).filter(|file| file.exists());
    let above =
        place.file_name().is_some_and(|name| name == "plugins").then(|| place.parent()).flatten();
    let own = library(place).or_else(|| above.and_then(library));
    let libraries = own.map_or_else(|| wheels::nixls_below(place), |library| vec![library]);
    if libraries.is_empty() {
        return vec![(place.to_owned(), None)];
    }
    libraries
        .into_iter()
        .map(|library| (installation::plugins_of(&library), Some(library)))
        .collect()
}

/// Returns true for a link that this program made: its target is an absolute path of a plug-in of
/// this name.
fn is_ours(link: &Path) -> bool {
    std::fs::read_link(link).is_ok_and(|target| {
        target.is_absolute() && target.file_name().is_some_and(|name| name == PLUGIN)
    })
}

fn install(place: &Path, plugin: &Path, out: &mut impl Write) -> Result<()> {
    if plugin.file_name().is_none_or(|name| name != PLUGIN) {
        return Err(format!(
            "{} must be named {PLUGIN}, the name that NIXL opens",
            plugin.display()
        )
        .into());
    }
    for (folder, nixl) in folders_at(place) {
        if nixl.is_none() && place.join("pyvenv.cfg").exists() {
            return Err(
                format!("{} has no NIXL: pip install nixl there first", place.display()).into()
            );
        }
        if let Some(library) = &nixl {
            installation::verdict(library).map_err(|why| why.to_string())?;
        }
        std::fs::create_dir_all(&folder)
            .map_err(|error| format!("{}: {error}", folder.display()))?;
        let link = folder.join(PLUGIN);
        if link.symlink_metadata().is_ok() && !is_ours(&link) {
            return Err(
                format!("{} was not installed by kvx: remove it first", link.display()).into()
            );
        }
        // Create the link under another name first, so that there is one at any time.
        let new = folder.join(format!(".{PLUGIN}.{}", std::process::id()));
        symlink(plugin, &new).map_err(|error| format!("{}: {error}", new.display()))?;
        std::fs::rename(&new, &link).inspect_err(|_| drop(std::fs::remove_file(&new)))?;
        writeln!(out, "{} links to {}", link.display(), plugin.display())?;
        if nixl.is_none() {
            let folder = std::path::absolute(&folder)?;
            writeln!(
                out,
                "it has no NIXL; to use it, export NIXL_PLUGIN_DIR={}",
                folder.display()
            )?;
            writeln!(
                out,
                "it replaces NIXL's own folder: a process with this variable has the backend KVX only"
            )?;
        }
    }
    writeln!(
        out,
        "vLLM selects it with \"kv_connector_extra_config\": {{\"backends\": [\"KVX\"]}}"
    )?;
    Ok(())
}

fn remove(place: &Path, out: &mut impl Write) -> Result<()> {
    let links: Vec<_> =
        folders_at(place).into_iter().map(|(folder, _)| folder.join(PLUGIN)).collect();
    let there: Vec<_> = links.iter().filter(|link| link.symlink_metadata().is_ok()).collect();
    if let Some(strange) = there.iter().find(|link| !is_ours(link)) {
        return Err(
            format!("{} was not installed by kvx: it is not removed", strange.display()).into()
        );
    }
    if there.is_empty() {
        let links: Vec<_> = links.iter().map(|link| link.display().to_string()).collect();
        return Err(format!("{} does not exist", links.join(", ")).into());
    }
    for link in there {
        std::fs::remove_file(link)?;
        writeln!(out, "removed {}", link.display())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that is removed when this is dropped.
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
    fn a_folder_for_the_variable_is_created_and_removed() {
        let root = folder("install");
        let (plugin, place) = (root.0.join("built").join(PLUGIN), root.0.join("new/plugins"));
        std::fs::create_dir_all(root.0.join("built")).unwrap();
        std::fs::write(&plugin, "").unwrap();
        for _ in 0..2 {
            let mut said = Vec::new();
            install(&place, &plugin, &mut said).unwrap();
            assert!(String::from_utf8(said).unwrap().contains("export NIXL_PLUGIN_DIR=/"));
        }
        assert_eq!(std::fs::read_link(place.join(PLUGIN)).unwrap(), plugin);
        remove(&place, &mut Vec::new()).unwrap();
        assert!(
            remove(&place, &mut Vec::new()).unwrap_err().to_string().contains("does not exist")
        );
        let stays = |place: &Path| {
            let refused = install(place, &plugin, &mut Vec::new()).unwrap_err().to_string();
            assert!(refused.contains("was not installed by kvx"), "{refused}");
            assert!(
                remove(place, &mut Vec::new())
                    .unwrap_err()
                    .to_string()
                    .contains("it is not removed")
            );
            std::fs::remove_file(place.join(PLUGIN)).unwrap();
        };
        std::fs::write(place.join(PLUGIN), "somebody's").unwrap();
        stays(&place);
        symlink("libplugin_KVX.so.1", place.join(PLUGIN)).unwrap();
        stays(&place);
    }

    #[test]
    fn a_nixl_is_found_by_any_of_its_folders_and_rejected_with_a_reason() {
        let root = folder("wheel");
        let packages = root.0.join("lib/python3.11/site-packages");
        let libraries = packages.join(".nixl_cu12.mesonpy.libs");
        std::fs::create_dir_all(libraries.join("plugins")).unwrap();
        std::fs::create_dir_all(packages.join("nixl_cu12-0.2.0.dist-info")).unwrap();
        std::fs::write(libraries.join("libnixl.so"), "").unwrap();
        for place in [&root.0, &packages, &libraries, &libraries.join("plugins")] {
            let expected = (libraries.join("plugins"), Some(libraries.join("libnixl.so")));
            assert_eq!(folders_at(place), [expected], "{}", place.display());
            let plugin = Path::new("/nonexistent").join(PLUGIN);
            let why = install(place, &plugin, &mut Vec::new()).unwrap_err().to_string();
            assert!(why.contains("NIXL 0.2.0 was not tried"), "{why}");
        }
        let bare = root.0.join("bare");
        std::fs::create_dir_all(&bare).unwrap();
        std::fs::write(bare.join("pyvenv.cfg"), "").unwrap();
        let why =
            install(&bare, &Path::new("/nonexistent").join(PLUGIN), &mut Vec::new()).unwrap_err();
        assert!(why.to_string().contains("has no NIXL"), "{why}");
        // As `python -m venv` links it.
        symlink("lib", root.0.join("lib64")).unwrap();
        assert_eq!(folders_at(&root.0).len(), 1);
        let nixl = Nixl::of(&libraries.join("libnixl.so"));
        assert_eq!(nixl.version.as_deref(), Some("0.2.0"));
        assert!(nixl.serves.is_none() && nixl.refused.is_some() && nixl.installed.is_none());
        assert!(nixl.installation().contains("no backend KVX"));
        symlink("/nowhere/libplugin_KVX.so", libraries.join("plugins").join(PLUGIN)).unwrap();
        let dangling = Nixl::of(&libraries.join("libnixl.so")).installation();
        assert!(dangling.contains("does not exist: run kvx nixl --install"), "{dangling}");
    }
}
