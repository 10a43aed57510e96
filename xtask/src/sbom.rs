//! Lists the crates in the published files as CycloneDX JSON (an SBOM): those that cargo compiles,
//! with their licences, hashes and dependencies. The same sources yield the same bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::features::tree_crates;
use crate::metadata::{self, Metadata, Package, rustc};
use crate::{Result, process};

/// The version of CycloneDX.
const SPEC: &str = "1.6";
/// The time limit of a call that compiles nothing.
const LIMIT: Duration = Duration::from_secs(300);

/// A published file and the packages in it.
struct Subject {
    name: &'static str,
    kind: &'static str,
    /// The packages that are built for it, each alone.
    packages: &'static [&'static str],
}

/// Everything that has a list: a program, a library, and the wheel with
/// both and the connector for vLLM.
static SUBJECTS: [Subject; 3] = [
    Subject { name: "kvx", kind: "application", packages: &["kvx-cli"] },
    Subject { name: "libplugin_KVX.so", kind: "library", packages: &["kvx-nixl"] },
    Subject { name: "kvx.whl", kind: "library", packages: &["kvx-cli", "kvx-nixl", "kvx-python"] },
];

/// The file `Cargo.lock`.
#[derive(Deserialize)]
struct Lock {
    package: Vec<Locked>,
}

/// A package in `Cargo.lock`.
#[derive(Deserialize)]
struct Locked {
    name: String,
    version: String,
    /// The SHA-256 of the registry's package; packages from paths have none.
    checksum: Option<String>,
}

/// Packages as `name version`, with the packages that each depends on.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// The packages of a workspace.
pub(crate) struct Packages<'a> {
    /// Makes a call of cargo in the workspace.
    cargo: &'a dyn Fn(&str) -> Command,
    metadata: Metadata,
    lock: Lock,
    /// The output of `rustc -vV`.
    compiler: String,
    /// The time that the environment sets; without one the lists have none.
    timestamp: Option<String>,
}

impl<'a> Packages<'a> {
    pub(crate) fn load(cargo: &'a dyn Fn(&str) -> Command) -> Result<Self> {
        let compiler = rustc("-vV")?;
        let host = metadata::host(&compiler)?;
        let line = format!("metadata --format-version 1 --all-features --filter-platform {host}");
        let metadata = Metadata::parse(cargo(&line))?;
        let lock = std::fs::read_to_string(metadata.workspace_root.join("Cargo.lock"))?;
        let (lock, timestamp) = (toml::from_str(&lock)?, timestamp()?);
        Ok(Packages { cargo, metadata, lock, compiler, timestamp })
    }

    fn tree(&self, package: &str, options: &str) -> Result<String> {
        process::output_of((self.cargo)(&format!("tree --locked -p {package} {options}")), LIMIT)
    }

    /// Returns what cargo would compile for a package, as `name version`.
    pub(crate) fn to_compile(&self, package: &str) -> Result<BTreeSet<String>> {
        Ok(tree_crates(&self.tree(package, "-e normal,build --prefix none")?))
    }

    /// Writes the list of each subject into a folder, and returns their differences from what cargo
    /// compiles for a package.
    pub(crate) fn write_lists(
        &self,
        folder: &Path,
        compiled: impl Fn(&str) -> Result<BTreeSet<String>>,
    ) -> Result<Vec<String>> {
        std::fs::create_dir_all(folder)?;
        let mut failures = Vec::new();
        for subject in &SUBJECTS {
            let list = self.list(subject)?;
            let mut all = BTreeSet::new();
            for package in subject.packages {
                all.extend(compiled(package)?);
            }
            let listed = components(&list);
            for (has, other, lacks) in [(&all, &listed, "lacks"), (&listed, &all, "must not have")]
            {
                let wrong = has.difference(other);
                failures.extend(wrong.map(|id| format!("SBOM of {} {lacks} {id}", subject.name)));
            }
            let path = folder.join(format!("{}.cdx.json", subject.name));
            std::fs::write(path, format!("{list:#}\n"))?;
        }
        Ok(failures)
    }

    /// Lists the components of a subject.
    fn list(&self, subject: &Subject) -> Result<Value> {
        let (mut graph, mut linked) = (Graph::new(), BTreeSet::new());
        let mut roots = Vec::new();
        for package in subject.packages {
            let (root, edges) = graph_of(&self.tree(package, "-e normal,build --prefix depth")?)
                .ok_or_else(|| format!("unexpected output of cargo tree -p {package}"))?;
            roots.push(reference(&root));
            for (id, dependencies) in edges {
                graph.entry(id).or_default().extend(dependencies);
            }
            linked
                .extend(tree_crates(&self.tree(package, "-e normal,no-proc-macro --prefix none")?));
        }
        let packages: BTreeMap<_, _> =
            self.metadata.packages.iter().map(|package| (package.to_string(), package)).collect();
        let mut components = Vec::new();
        for id in graph.keys() {
            let package = packages.get(id).ok_or_else(|| format!("cargo metadata lacks {id}"))?;
            components.push(self.component(package, linked.contains(id)));
        }
        let dependencies = graph.iter().map(|(id, dependencies)| {
            let on: Vec<_> = dependencies.iter().map(|id| reference(id)).collect();
            json!({"ref": reference(id), "dependsOn": on})
        });
        let this = json!({"ref": subject.name, "dependsOn": roots});
        let facade = self.metadata.root_package()?;
        let mut metadata = json!({
            "component": {"type": subject.kind, "bom-ref": subject.name, "name": subject.name,
                "version": facade.version},
            "tools": {"components": [{"type": "application", "name": "cargo xtask"}]},
            "properties": [
                {"name": "kvx:rustc", "value": self.compiler.lines().next()},
                {"name": "kvx:target", "value": metadata::host(&self.compiler)?}],
        });
        if let Some(timestamp) = &self.timestamp {
            metadata["timestamp"] = json!(timestamp);
        }
        Ok(json!({
            "bomFormat": "CycloneDX", "specVersion": SPEC, "version": 1, "metadata": metadata,
            "components": components,
            "dependencies": std::iter::once(this).chain(dependencies).collect::<Vec<_>>(),
        }))
    }

    /// Describes a package. Those that only a build runs, such as procedural macros, have the scope
    /// `excluded`.
    fn component(&self, package: Package<'_>, is_linked: bool) -> Value {
        let id = package.to_string();
        // Older manifests separate alternatives by a slash.
        let licence = package.others.get("license").and_then(Value::as_str).unwrap_or_default();
        let mut component = json!({
            "type": "library", "bom-ref": reference(&id), "name": package.name,
            "version": package.version, "scope": if is_linked { "required" } else { "excluded" },
            "licenses": [{"expression": licence.replace(" / ", " OR ").replace('/', " OR ")}],
        });
        // A member that is not published has no place in the registry, where its name may be
        // another crate's.
        if !package.is_member() || package.publish.is_none() {
            let version = package.version.replace('+', "%2B");
            component["purl"] = json!(format!("pkg:cargo/{}@{version}", package.name));
        }
        let mut locked = self.lock.package.iter();
        let locked = locked.find(|it| it.name == package.name && it.version == package.version);
        if let Some(checksum) = locked.and_then(|it| it.checksum.as_ref()) {
            component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
        }
        component
    }
}

/// Returns how entries of a list refer to the package `name version`.
fn reference(id: &str) -> String {
    id.replace(' ', "@")
}

/// Returns the components of a list as `name version`.
fn components(list: &Value) -> BTreeSet<String> {
    let components = list["components"].as_array().into_iter().flatten();
    components.map(|it| format!("{} {}", text(&it["name"]), text(&it["version"]))).collect()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Parses `cargo tree --prefix depth`: returns the first package, and all with their dependencies.
fn graph_of(tree: &str) -> Option<(String, Graph)> {
    let (mut graph, mut above) = (Graph::new(), Vec::<String>::new());
    for line in tree.lines() {
        let (depth, package) = line.split_at(line.find(|c: char| !c.is_ascii_digit())?);
        let id = tree_crates(package).pop_first()?;
        above.truncate(depth.parse().ok()?);
        if let Some(dependent) = above.last() {
            graph.entry(dependent.clone()).or_default().insert(id.clone());
        }
        graph.entry(id.clone()).or_default();
        above.push(id);
    }
    Some((above.into_iter().next()?, graph))
}

/// Returns the time of `SOURCE_DATE_EPOCH`, if it is set, as CycloneDX writes it.
fn timestamp() -> Result<Option<String>> {
    let Some(seconds) = std::env::var_os("SOURCE_DATE_EPOCH") else { return Ok(None) };
    let mut date = Command::new("date");
    date.args(["-u", "+%Y-%m-%dT%H:%M:%SZ", "-d"]).arg(format!("@{}", seconds.display()));
    Ok(Some(process::output_of(date, LIMIT)?.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "0kvx-cli v0.1.0 (/w/kvx-cli)\n1kvx-core v0.1.0 (/w/kvx-core)\n\
                        2libc v0.2.186\n2slab v0.4.12\n1libc v0.2.186 (*)\n1serde v1.0.228+x\n";

    /// The packages of `Cargo.lock` as `name version`.
    type Lock = BTreeMap<String, toml::Table>;

    fn lock() -> Lock {
        let text = std::fs::read_to_string(crate::root().join("Cargo.lock")).unwrap();
        let table: toml::Table = toml::from_str(&text).unwrap();
        let packages = table["package"].as_array().unwrap().iter();
        let packages = packages.map(|package| package.as_table().unwrap().clone());
        packages
            .map(|it| (format!("{} {}", str_of(&it, "name"), str_of(&it, "version")), it))
            .collect()
    }

    fn str_of<'a>(table: &'a toml::Table, key: &str) -> &'a str {
        table[key].as_str().unwrap()
    }

    fn array(value: &Value) -> impl Iterator<Item = &Value> {
        value.as_array().into_iter().flatten()
    }

    /// Returns the rules of CycloneDX that a list breaks, and where it contradicts `Cargo.lock`.
    fn broken_rules(list: &Value, lock: &Lock) -> Vec<String> {
        let subject = text(&list["metadata"]["component"]["bom-ref"]);
        let mut wrong = Vec::new();
        if list["bomFormat"] != "CycloneDX" || list["specVersion"] != SPEC || subject.is_empty() {
            wrong.push(format!("it is not CycloneDX {SPEC} about a component"));
        }
        let mut known = BTreeMap::from([(subject, String::new())]);
        for component in array(&list["components"]) {
            let id = format!("{} {}", text(&component["name"]), text(&component["version"]));
            wrong.extend(wrong_field(component, lock.get(&id)).map(|what| format!("{id}: {what}")));
            if known.insert(text(&component["bom-ref"]), id.clone()).is_some() {
                wrong.push(format!("{id}: its bom-ref is not unique"));
            }
        }
        let mut edges = BTreeMap::new();
        for entry in array(&list["dependencies"]) {
            let from = text(&entry["ref"]);
            let on: Vec<_> = array(&entry["dependsOn"]).map(text).collect();
            for to in &on {
                match (known.get(from), known.get(to)) {
                    (Some(from), Some(to)) if from.is_empty() || is_locked(lock, from, to) => {}
                    _ => wrong.push(format!("{from} depends on {to}: not locked, or no component")),
                }
            }
            if !known.contains_key(from) || edges.insert(from, on).is_some() {
                wrong.push(format!("dependencies of {from}: no component, or listed twice"));
            }
        }
        let (mut reached, mut next) = (BTreeSet::new(), vec![subject]);
        while let Some(one) = next.pop() {
            if reached.insert(one) {
                next.extend(edges.get(one).into_iter().flatten());
            }
        }
        let unreached = known.keys().filter(|one| !reached.contains(*one));
        wrong.extend(unreached.map(|one| format!("nothing depends on {one}")));
        wrong
    }

    /// Returns which field of a component is missing or wrong.
    fn wrong_field(component: &Value, locked: Option<&toml::Table>) -> Option<&'static str> {
        let hash = &component["hashes"][0];
        let licence = text(&component["licenses"][0]["expression"]);
        let purl = text(&component["purl"]);
        match locked.map(|locked| locked.get("checksum").and_then(toml::Value::as_str)) {
            None => Some("it is not in Cargo.lock"),
            Some(Some(sum)) if hash["content"] != *sum || hash["alg"] != "SHA-256" => {
                Some("another hash")
            }
            Some(Some(_)) if !purl.starts_with("pkg:cargo/") || purl.contains('+') => {
                Some("no purl")
            }
            _ if licence.is_empty() || licence.contains('/') => Some("no licence expression"),
            _ if component["type"] != "library" => Some("it is no library"),
            _ => None,
        }
    }

    /// Returns whether `Cargo.lock` lets a package depend on another.
    fn is_locked(lock: &Lock, from: &str, to: &str) -> bool {
        let of = lock.get(from).and_then(|locked| locked.get("dependencies"));
        let mut of = of.and_then(toml::Value::as_array).into_iter().flatten();
        // A version follows the name where there are several.
        of.any(|it| it.as_str().is_some_and(|it| it == to || to.split(' ').next() == Some(it)))
    }

    #[test]
    fn a_tree_is_parsed_into_packages_with_their_dependencies() {
        let (root, graph) = graph_of(TREE).unwrap();
        assert_eq!((root.as_str(), graph.len()), ("kvx-cli 0.1.0", 5));
        let of = |id: &str| graph[id].iter().map(String::as_str).collect::<Vec<_>>();
        assert_eq!(of("kvx-cli 0.1.0"), ["kvx-core 0.1.0", "libc 0.2.186", "serde 1.0.228+x"]);
        assert_eq!(of("kvx-core 0.1.0"), ["libc 0.2.186", "slab 0.4.12"]);
        assert!(of("libc 0.2.186").is_empty());
        assert!(graph_of("").is_none() && graph_of("kvx v0.1.0").is_none());
    }

    #[test]
    fn the_lists_of_this_workspace_follow_the_rules_and_repeat_exactly() {
        let cargo = |line: &str| process::cargo(line.split(' '));
        let packages = Packages::load(&cargo).unwrap();
        let lock = lock();
        for subject in &SUBJECTS {
            let list = packages.list(subject).unwrap();
            assert_eq!(broken_rules(&list, &lock), [""; 0], "{}", subject.name);
            assert_eq!(list.to_string(), packages.list(subject).unwrap().to_string());
            let folder = crate::root().display().to_string();
            assert!(!list.to_string().contains(&folder), "{} names {folder}", subject.name);
            let scope = |name| {
                let found = array(&list["components"]).find(|it| it["name"] == name);
                found.map(|it| text(&it["scope"]).to_owned())
            };
            assert_eq!(scope("libc").as_deref(), Some("required"));
            assert_eq!(scope("serde_derive").as_deref().unwrap_or("excluded"), "excluded");
            assert_eq!(scope("criterion"), None, "dependencies of tests are not published");
        }
    }

    #[test]
    fn each_list_has_exactly_what_cargo_compiles() {
        let cargo = |line: &str| process::cargo(line.split(' '));
        let packages = Packages::load(&cargo).unwrap();
        let folder = std::env::temp_dir().join(format!("kvx-xtask-sbom-{}", std::process::id()));
        let to_compile = |package: &str| packages.to_compile(package);
        assert_eq!(packages.write_lists(&folder, to_compile).unwrap(), [""; 0]);
        let other = |package: &str| {
            let mut all = packages.to_compile(package)?;
            assert!(all.insert("openssl 0.10.0".to_owned()));
            Ok(all.into_iter().filter(|id| !id.starts_with("libc ")).collect())
        };
        let found = packages.write_lists(&folder, other).unwrap().join("\n");
        for subject in &SUBJECTS {
            let file = folder.join(format!("{}.cdx.json", subject.name));
            let written: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
            assert_eq!(written["metadata"]["component"]["name"], subject.name);
            for part in ["lacks openssl 0.10.0", "must not have libc "] {
                let part = format!("SBOM of {} {part}", subject.name);
                assert!(found.contains(&part), "{part} is not in:\n{found}");
            }
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn each_defect_of_a_list_is_named() {
        let cargo = |line: &str| process::cargo(line.split(' '));
        let packages = Packages::load(&cargo).unwrap();
        let list = packages.list(&SUBJECTS[0]).unwrap();
        let lock = lock();
        let libc = array(&list["components"]).position(|it| it["name"] == "libc").unwrap();
        let defects: [(&str, &dyn Fn(&mut Value)); 9] = [
            ("is not CycloneDX", &|list| list["specVersion"] = json!("1.2")),
            ("no component", &|list| {
                list["components"].as_array_mut().unwrap().remove(libc);
            }),
            ("not unique", &|list| {
                let again = list["components"][libc].clone();
                list["components"].as_array_mut().unwrap().push(again);
            }),
            ("listed twice", &|list| {
                let again = list["dependencies"][0].clone();
                list["dependencies"].as_array_mut().unwrap().push(again);
            }),
            ("nothing depends on", &|list| list["dependencies"][0]["dependsOn"] = json!([])),
            ("another hash", &|list| list["components"][libc]["hashes"] = json!([])),
            ("no purl", &|list| list["components"][libc]["purl"] = json!(null)),
            ("no licence", &|list| list["components"][libc]["licenses"] = json!([])),
            ("not in Cargo.lock", &|list| list["components"][libc]["version"] = json!("0.1.0")),
        ];
        for (expected, plant) in defects {
            let mut list = list.clone();
            plant(&mut list);
            let wrong = broken_rules(&list, &lock).join("\n");
            assert!(wrong.contains(expected), "{expected} is not in:\n{wrong}");
        }
    }
}
