//! `cargo xtask api`: lists the names that programs can reach, from rustdoc's JSON, which needs a
//! nightly toolchain.
//!
//! The lists are committed in `docs/project/api`, so that a pull request shows the names that it adds and
//! removes.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::metadata::Metadata;
use crate::process::{self, Output};
use crate::test::steps;
use crate::{Result, root};

/// The folder of the lists.
const LISTS: &str = "docs/project/api";

/// A crate whose public names are listed.
struct ListedCrate {
    package: &'static str,
    library: &'static str,
    /// The module whose names are for authors of backends and are counted apart.
    apart: Option<&'static str>,
}

const CRATES: [ListedCrate; 3] = [
    ListedCrate { package: "kvx-transfer", library: "kvx", apart: None },
    ListedCrate { package: "kvx-connector", library: "kvx_connector", apart: None },
    ListedCrate { package: "kvx-core", library: "kvx_core", apart: Some("backend") },
];

/// A name that a program can reach, with what it names.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Name {
    path: Vec<String>,
    kind: String,
}

/// The names of a crate. A module of another crate counts as one name: that crate's list has the
/// rest.
#[derive(Default)]
struct Surface {
    shown: BTreeSet<Name>,
    hidden: BTreeSet<Name>,
}

/// Writes the lists, or only compares them; returns false if a compared one differs.
pub(crate) fn run(check: bool) -> Result<bool> {
    let folder = Metadata::of_members()?.target_directory.join("api");
    let mut same = true;
    for listed in &CRATES {
        document(listed.package, &folder)?;
        let json = std::fs::read(folder.join(format!("doc/{}.json", listed.library)))?;
        let list = Surface::read(&serde_json::from_slice(&json)?).list(listed);
        let path = root().join(LISTS).join(format!("{}.txt", listed.library.replace('_', "-")));
        println!("{}", list.lines().next().unwrap_or_default());
        if !check {
            std::fs::create_dir_all(root().join(LISTS))?;
            std::fs::write(path, list)?;
        } else if std::fs::read_to_string(&path).unwrap_or_default() != list {
            println!("failed: {} differs: run cargo xtask api, and commit it", path.display());
            same = false;
        }
    }
    Ok(same)
}

/// Runs rustdoc on a package with all its features.
fn document(package: &str, folder: &Path) -> Result<()> {
    let mut cargo = Command::new("rustup");
    cargo.current_dir(root()).env("CARGO_TARGET_DIR", folder);
    cargo.args(["run", "nightly", "cargo", "rustdoc", "--quiet", "--lib", "--all-features"]);
    cargo.args(["--package", package, "--", "-Z", "unstable-options", "--output-format", "json"]);
    cargo.args(["--document-hidden-items", "--cap-lints", "allow"]);
    let finished = process::run(cargo, steps::LIMIT, Output::Shown)?;
    if finished.succeeded() {
        return Ok(());
    }
    Err(format!(
        "rustdoc failed on {package} ({}): it needs a nightly toolchain, which `rustup toolchain \
         install nightly` installs",
        finished.end
    )
    .into())
}

impl Surface {
    fn read(document: &Value) -> Surface {
        let mut surface = Surface::default();
        surface.add_module(document, &document["root"], &[], false);
        surface.add_hidden_methods(document);
        surface
    }

    fn add(&mut self, path: Vec<String>, kind: &str, is_hidden: bool) {
        let names = if is_hidden { &mut self.hidden } else { &mut self.shown };
        names.insert(Name { path, kind: kind.to_owned() });
    }

    /// Adds the names of a module of this crate.
    fn add_module(&mut self, document: &Value, id: &Value, path: &[String], is_hidden: bool) {
        let items = item(document, id)["inner"]["module"]["items"].as_array();
        for id in items.into_iter().flatten() {
            let found = item(document, id);
            if found["visibility"] != "public" {
                continue;
            }
            let is_hidden = is_hidden || hides(found);
            let used = &found["inner"]["use"];
            let (target, id) = match used.is_null() {
                true => (found, id),
                false => (item(document, &used["id"]), &used["id"]),
            };
            if used["is_glob"] == true {
                self.add_module(document, id, path, is_hidden);
                continue;
            }
            let name = if used.is_null() { &found["name"] } else { &used["name"] };
            let path = [path, &[name.as_str().unwrap_or_default().to_owned()]].concat();
            let kind = match kind(target) {
                // The item is of another crate, of which rustdoc knows only the kind.
                "" => document["paths"][id.to_string()]["kind"].as_str().unwrap_or("name"),
                kind => kind,
            };
            let is_hidden = is_hidden || hides(target);
            if kind == "module" {
                self.add_module(document, id, &path, is_hidden);
            }
            self.add(path, kind, is_hidden);
        }
    }

    /// Adds public methods and constants of types that are hidden.
    fn add_hidden_methods(&mut self, document: &Value) {
        let items = document["index"].as_object().into_iter().flatten().map(|(_, item)| item);
        for item in items.filter(|item| item["visibility"] == "public" && hides(item)) {
            let (kind, name) = (kind(item), item["name"].as_str().unwrap_or_default());
            let is_listed =
                self.hidden.iter().any(|known| known.path.last().is_some_and(|last| last == name));
            if matches!(kind, "function" | "assoc_const") && !is_listed {
                self.add(vec![format!("?::{name}")], kind, true);
            }
        }
    }

    /// Returns the list as it is committed, its first line with the counts.
    fn list(&self, listed: &ListedCrate) -> String {
        let is_apart = |name: &&Name| Some(name.path[0].as_str()) == listed.apart;
        let count = |names: &mut dyn Iterator<Item = &Name>| {
            names.filter(|name| name.kind != "module").count()
        };
        let own = count(&mut self.shown.iter().filter(|name| !is_apart(name)));
        let apart = count(&mut self.shown.iter().filter(is_apart));
        let mut list = format!("{}: {own} public names", listed.library);
        if let Some(module) = listed.apart {
            let _ = write!(list, " beside {apart} in {module}");
        }
        let _ =
            writeln!(list, ", {} hidden ones (cargo xtask api)", count(&mut self.hidden.iter()));
        for (heading, names) in [("public", &self.shown), ("hidden", &self.hidden)] {
            let _ = writeln!(list, "\n{heading}");
            for Name { path, kind } in names {
                let _ = writeln!(list, "{} ({kind})", path.join("::"));
            }
        }
        list
    }
}

fn item<'a>(document: &'a Value, id: &Value) -> &'a Value {
    &document["index"][id.to_string()]
}

/// Returns the kind of an item; empty for one that the document does not describe.
fn kind(item: &Value) -> &str {
    item["inner"].as_object().and_then(|inner| inner.keys().next()).map_or("", String::as_str)
}

fn hides(item: &Value) -> bool {
    let attributes = item["attrs"].as_array().into_iter().flatten();
    attributes
        .filter_map(|attribute| attribute["other"].as_str())
        .any(|text| text.contains("doc(hidden)"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_are_listed_where_programs_reach_them() {
        let hidden = json!([{"other": "#[doc(hidden)]"}]);
        let document = json!({"root": 0, "index": {
            "0": {"visibility": "public", "attrs": [], "inner": {"module": {"items": [1, 2, 3, 4, 8]}}},
            "1": {"visibility": "public", "attrs": [],
                  "inner": {"use": {"name": "Agent", "id": 90, "is_glob": false}}},
            "2": {"visibility": "public", "attrs": [],
                  "inner": {"use": {"name": "b", "id": 5, "is_glob": true}}},
            "3": {"visibility": "public", "attrs": hidden, "name": "fuzz",
                  "inner": {"module": {"items": [7]}}},
            "4": {"visibility": "crate", "attrs": [], "name": "Own", "inner": {"struct": {}}},
            "5": {"visibility": "crate", "attrs": [], "name": "b", "inner": {"module": {"items": [6]}}},
            "6": {"visibility": "public", "attrs": [], "name": "B", "inner": {"enum": {}}},
            "7": {"visibility": "public", "attrs": [], "name": "run", "inner": {"function": {}}},
            "8": {"visibility": "public", "attrs": [], "name": "backend",
                  "inner": {"module": {"items": [9]}}},
            "9": {"visibility": "public", "attrs": [], "name": "Link", "inner": {"trait": {}}}
        }, "paths": {"90": {"kind": "struct"}}});
        let listed = ListedCrate { package: "k", library: "k", apart: Some("backend") };
        assert_eq!(
            Surface::read(&document).list(&listed),
            "k: 2 public names beside 1 in backend, 1 hidden ones (cargo xtask api)\n\n\
             public\nAgent (struct)\nB (enum)\nbackend (module)\nbackend::Link (trait)\n\n\
             hidden\nfuzz (module)\nfuzz::run (function)\n"
        );
    }
}
