//! The NIXL that has loaded this library: its folder, its version, and whether kvx knows its
//! interface.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use kvx_backend::version::Version;

use crate::log::warn;
use crate::version::{self, ANY};
use crate::vtable::{self, SlotOrder, TableRefusal};

/// A NIXL with a known interface.
pub(crate) struct Installation {
    pub(crate) order: SlotOrder,
    /// The installation's name in messages.
    pub(crate) name: String,
}

impl Installation {
    /// Returns the NIXL in this process.
    ///
    /// # Errors
    /// There is none, there are several that differ, the version was not tested, or the table is
    /// incomplete.
    pub(crate) fn of_process() -> Result<Installation, TableRefusal> {
        let maps = std::fs::read_to_string("/proc/self/maps")
            .map_err(|error| TableRefusal(error.to_string()))?;
        let any = std::env::var_os(ANY).is_some_and(|value| value == "1");
        let mut found: Option<Installation> = None;
        for library in libraries(&maps) {
            let installed = Installation::at(library, any)?;
            match &found {
                Some(first) if !first.order.agrees(&installed.order) => {
                    return Err(TableRefusal(format!(
                        "two NIXLs are in this process, {} and {}, and their backends differ",
                        first.name, installed.name
                    )));
                }
                _ => found = Some(installed),
            }
        }
        found.ok_or_else(|| TableRefusal("there is no libnixl.so in this process".into()))
    }

    fn at(library: &Path, any: bool) -> Result<Installation, TableRefusal> {
        let version = Version::of_wheel(library);
        let name = match version {
            Some(version) => format!("NIXL {version}"),
            None => format!("the NIXL of {}", library.display()),
        };
        if let Some(version) = version
            && !version::is_tried(version)
            && !any
        {
            return Err(TableRefusal(format!(
                "NIXL {version} was not tried with KVX, {} were: install one of them, or set {ANY}=1 at your own risk",
                version::tried()
            )));
        }
        let folder = library.parent().unwrap_or(Path::new("/")).join("plugins");
        let order = vtable::order_in(&folder, any)
            .map_err(|why| TableRefusal(format!("{name} is not one that KVX can serve: {why}")))?;
        if version.is_none() {
            warn(format_args!(
                "{name} reports no version: KVX relies on the function tables of its plug-ins"
            ));
        }
        Ok(Installation { order, name })
    }
}

/// Returns the files called `libnixl.so` in the list of a process's mappings.
fn libraries(maps: &str) -> BTreeSet<&Path> {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    paths.filter(|path| path.file_name().is_some_and(|name| name == "libnixl.so")).collect()
}

/// Returns the name of the NIXL with this `libnixl.so`, or the reason why KVX rejects it.
pub fn verdict(library: &Path) -> Result<String, TableRefusal> {
    Installation::at(library, false).map(|installed| installed.name)
}

/// Returns the version of the wheel that contains a `libnixl.so`.
pub fn version_of(library: &Path) -> Option<String> {
    Version::of_wheel(library).map(|version| version.to_string())
}

/// Returns the folder of plug-ins that belongs to a `libnixl.so`.
pub fn plugins_of(library: &Path) -> PathBuf {
    library.parent().unwrap_or(Path::new("/")).join("plugins")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_libraries_of_a_process_are_found_once_each() {
        let maps = "7f00-7f01 r-xp 00000000 fe:00 12  /a b/.nixl_cu12.mesonpy.libs/libnixl.so\n\
            7f01-7f02 rw-p 00000000 fe:00 12  /a b/.nixl_cu12.mesonpy.libs/libnixl.so\n\
            7f02-7f03 rw-p 00000000 00:00 0 \n7f03-7f04 r--p 00000000 fe:00 13 /a/libnixl_capi.so\n";
        let found: Vec<_> = libraries(maps).into_iter().collect();
        assert_eq!(found, [Path::new("/a b/.nixl_cu12.mesonpy.libs/libnixl.so")]);
    }
}
