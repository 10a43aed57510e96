//! The names of types: within a crate a name is one type, so that who reads it need not ask which one is meant. What is
//! `pub` in the crates that it is built on are words that it is written in: no type of its own has such a name.
//!
//! It reads the formatted text: items of modules, not those within functions or made by macros. What only tests
//! compile is left out, and so are the folders `tests`, `benches` and `examples`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::metadata::{Metadata, Package};

/// Names that are several types of a crate on purpose.
pub(crate) struct Exception {
    /// The crate's folder.
    of: &'static str,
    names: &'static [&'static str],
    /// The modules of which each may have one type of the name. Empty: all modules of the crate's root.
    parts: &'static [&'static str],
}

/// All of them, each with its reason.
pub(crate) const EXCEPTIONS: &[Exception] = &[
    // The same part of each transport: who knows one knows the other.
    Exception {
        of: "kvx-native",
        names: &["Command", "Config", "Machine", "Regions"],
        parts: &["shm", "tcp"],
    },
    // A command's arguments. Outside of the command's module it stands before the name: `bench::Arguments`.
    Exception { of: "kvx-cli", names: &["Arguments"], parts: &[] },
    // Under ThreadSanitizer the second ones are compiled in place of the first.
    Exception { of: "kvx-core", names: &["Condvar", "Mutex"], parts: &["sync::locks", "sync::looks"] },
    // `cargo xtask bindings` writes a table of functions for each native library, and names it so in every crate.
    Exception {
        of: "kvx-mooncake",
        names: &["Functions"],
        parts: &["ffi::bindings", "ffi::adapter_bindings"],
    },
    // Two versions of UCX have different fields in it.
    Exception {
        of: "kvx-ucx",
        names: &["ucp_request_param_t"],
        parts: &["ffi::bindings_1_13", "ffi::bindings_1_22"],
    },
];

/// The crate whose words all others are written in.
const CORE: &str = "kvx-core";

/// The folders that each crate's folder needs.
pub(crate) type BuiltOn = BTreeMap<String, BTreeSet<String>>;

/// Names of the crates that it is built on, which a crate gives to types of its own on purpose.
pub(crate) struct Reuse {
    /// The crate's folder.
    of: &'static str,
    /// Empty: any name.
    names: &'static [&'static str],
}

/// All of them, each with its reason.
pub(crate) const REUSES: &[Reuse] = &[
    // The crate's own error: Rust calls it so in every crate, and its path says whose it is.
    Reuse { of: "kvx-cli", names: &["Result"] },
    Reuse { of: "kvx-proxy", names: &["Error", "Result"] },
    // No user gets them: the drivers that tests load in place of CUDA's and HIP's, and what developers run.
    Reuse { of: "kvx-testkit/stand-in", names: &[] },
    Reuse { of: "xtask", names: &[] },
];

/// A type of a module.
struct Named {
    module: String,
    name: String,
    /// Its own line says `pub` and no more.
    is_pub: bool,
}

/// Names under `root` that are several types of one crate and no exception, and exceptions that are not needed.
pub(crate) fn with_two_meanings(root: &Path, exceptions: &[Exception]) -> crate::Result<Vec<String>> {
    let (mut found, mut used) = (Vec::new(), BTreeSet::new());
    for (package, types) in types_of_crates(root)? {
        let mut modules_of: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for Named { module, name, .. } in types {
            modules_of.entry(name).or_default().insert(module);
        }
        for (name, modules) in modules_of.into_iter().filter(|(_, modules)| modules.len() > 1) {
            let names_it =
                |exception: &&Exception| exception.of == package && exception.names.contains(&name.as_str());
            let exception = exceptions.iter().find(names_it);
            if !exception.is_some_and(|exception| one_a_part(exception.parts, &modules)) {
                let modules = modules.iter().map(|module| shown(module));
                found.push(format!("{package}: {name} in {}", modules.collect::<Vec<_>>().join(", ")));
            }
            used.insert((package.clone(), name));
        }
    }
    for Exception { of, names, .. } in exceptions {
        let unused = names.iter().filter(|name| !used.contains(&((*of).to_owned(), (**name).to_owned())));
        found.extend(unused.map(|name| format!("{of}: {name} needs no exception")));
    }
    Ok(found)
}

/// What each crate of the workspace is built on itself, by their folders. Tests may need more.
pub(crate) fn built_on(root: &Path, workspace: &Metadata) -> BuiltOn {
    let folder =
        |package: Package<'_>| shown_folder(root, Path::new(package.manifest()).parent().unwrap_or(root));
    let folders: BTreeMap<&str, String> =
        workspace.packages().map(|package| (package.name(), folder(package))).collect();
    let below = |package: Package<'_>| {
        let needed =
            package.dependencies().filter(|dependency| dependency.is_path && !dependency.is_for_tests);
        needed.filter_map(|dependency| folders.get(dependency.name).cloned()).collect()
    };
    workspace.packages().map(|package| (folder(package), below(package))).collect()
}

/// Names of types of each crate under `root` which a crate that it is built on has as `pub` ones, and reuses that are
/// not needed. All count as built on [`CORE`].
pub(crate) fn of_crates_below(
    root: &Path,
    built_on: &BuiltOn,
    reuses: &[Reuse],
) -> crate::Result<Vec<String>> {
    let crates: BTreeMap<String, Vec<Named>> = types_of_crates(root)?.into_iter().collect();
    let (mut found, mut used) = (BTreeSet::new(), BTreeSet::new());
    for (package, types) in &crates {
        for below in all_below(package, built_on) {
            let words = crates.get(below).into_iter().flatten().filter(|named| named.is_pub);
            let words: BTreeSet<&str> = words.map(|named| named.name.as_str()).collect();
            for Named { module, name, .. } in types.iter().filter(|named| words.contains(named.name.as_str()))
            {
                let allows_it =
                    |reuse: &&Reuse| reuse.names.is_empty() || reuse.names.contains(&name.as_str());
                match reuses.iter().filter(|reuse| reuse.of == package).find(allows_it) {
                    Some(Reuse { names: [], .. }) => used.insert((package.as_str(), "")),
                    Some(_) => used.insert((package, name)),
                    None => found.insert(format!("{package}: {name} in {} is {below}'s", shown(module))),
                };
            }
        }
    }
    let mut found: Vec<String> = found.into_iter().collect();
    for Reuse { of, names } in reuses {
        let unused = names.iter().filter(|name| !used.contains(&(*of, **name)));
        found.extend(unused.map(|name| format!("{of}: {name} needs no exception")));
        if names.is_empty() && !used.contains(&(*of, "")) {
            found.push(format!("{of} needs no exception"));
        }
    }
    Ok(found)
}

/// What a crate is built on, and what that is.
fn all_below<'a>(package: &'a str, built_on: &'a BuiltOn) -> BTreeSet<&'a str> {
    let (mut all, mut next) = (BTreeSet::from([CORE]), vec![package]);
    while let Some(above) = next.pop() {
        let below = built_on.get(above).into_iter().flatten();
        next.extend(below.map(String::as_str).filter(|below| all.insert(below)));
    }
    all.remove(package);
    all
}

fn shown(module: &str) -> &str {
    if module.is_empty() { "lib" } else { module }
}

/// Whether each module is a part or within one, and no other one is within the same.
fn one_a_part(parts: &[&str], modules: &BTreeSet<String>) -> bool {
    let is_within = |module: &str, part: &str| {
        module.strip_prefix(part).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    };
    let part_of = |module: &String| match parts {
        [] => module.split("::").next().map(str::to_owned),
        parts => parts.iter().find(|part| is_within(module, part)).map(|part| (*part).to_owned()),
    };
    let taken: Option<BTreeSet<String>> = modules.iter().map(part_of).collect();
    taken.is_some_and(|taken| taken.len() == modules.len())
}

/// The types of each crate at and below `root`, with the crate's folder.
fn types_of_crates(root: &Path) -> crate::Result<Vec<(String, Vec<Named>)>> {
    let mut all = Vec::new();
    for folder in folders_of_crates(root)? {
        all.push((shown_folder(root, &folder), types(&folder.join("src"), "", &mut BTreeSet::new())?));
    }
    Ok(all)
}

fn shown_folder(root: &Path, folder: &Path) -> String {
    folder.strip_prefix(root).unwrap_or(folder).display().to_string()
}

/// The folders of crates at and below `root`.
fn folders_of_crates(root: &Path) -> crate::Result<Vec<PathBuf>> {
    let (mut crates, mut folders) = (Vec::new(), vec![root.to_owned()]);
    while let Some(folder) = folders.pop() {
        if folder.join("Cargo.toml").is_file() && folder.join("src").is_dir() {
            crates.push(folder.clone());
        }
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let is_left_out = ["target", "src", "tests", "benches", "examples"].contains(&name.as_str());
            if path.is_dir() && !is_left_out && !name.starts_with('.') {
                folders.push(path);
            }
        }
    }
    crates.sort();
    Ok(crates)
}

/// The types of the modules in a folder, which is that of `module`; `tests` are the modules that only tests compile.
fn types(folder: &Path, module: &str, tests: &mut BTreeSet<String>) -> crate::Result<Vec<Named>> {
    let (mut files, mut folders) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let is_of_folder = ["mod", "lib", "main"].contains(&name.as_str());
        let inner = if is_of_folder { module.to_owned() } else { join(module, &name) };
        if path.is_dir() {
            folders.push((path, inner));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let (of_file, of_tests) = read(&std::fs::read_to_string(&path)?, &inner);
            tests.extend(of_tests);
            files.push((inner, of_file));
        }
    }
    files.retain(|(module, _)| !tests.contains(module));
    folders.retain(|(_, module)| !tests.contains(module));
    let mut types: Vec<Named> = files.into_iter().flat_map(|(_, types)| types).collect();
    for (folder, module) in folders {
        types.extend(self::types(&folder, &module, tests)?);
    }
    Ok(types)
}

fn join(module: &str, name: &str) -> String {
    if module.is_empty() { name.to_owned() } else { format!("{module}::{name}") }
}

/// The types of a file, and its modules elsewhere that only tests compile.
fn read(text: &str, module: &str) -> (Vec<Named>, Vec<String>) {
    let (mut types, mut tests) = (Vec::new(), Vec::new());
    // The modules written here that this line is in, the file's own first; `None`: only tests compile it.
    let mut open = vec![Some(module.to_owned())];
    let mut is_for_tests = false;
    for line in text.lines() {
        let depth = open.len() - 1;
        if depth > 0
            && line
                .strip_suffix('}')
                .is_some_and(|spaces| spaces.len() == 4 * (depth - 1) && spaces.trim().is_empty())
        {
            open.pop();
            continue;
        }
        let item = line.trim_start();
        if item.is_empty() || line.len() - item.len() != 4 * depth || item.starts_with("//") {
            continue;
        }
        if item.starts_with("#[") {
            is_for_tests |= item.starts_with("#[cfg(test)]") || item.starts_with("#[cfg(all(test");
            continue;
        }
        if item.starts_with(')') {
            continue; // the end of an attribute or of an item
        }
        let is_seen = !std::mem::take(&mut is_for_tests);
        let inside = open[depth].clone().filter(|_| is_seen);
        let mut words = words_of(item);
        match (words.next(), words.next()) {
            (Some("mod"), Some(name)) if line.ends_with('{') => {
                open.push(inside.map(|module| join(&module, name)));
            }
            (Some("mod"), Some(name)) if inside.is_none() => tests.push(join(module, name)),
            (Some("struct" | "enum" | "union" | "trait" | "type"), Some(name)) => {
                let is_pub = item.starts_with("pub ");
                types.extend(inside.map(|module| Named { module, name: name.to_owned(), is_pub }));
            }
            _ => {}
        }
    }
    (types, tests)
}

/// The words of an item without who sees it.
fn words_of(item: &str) -> impl Iterator<Item = &str> {
    let seen = item.strip_prefix("pub").map(|rest| match rest.strip_prefix('(') {
        Some(rest) => rest.split_once(')').map_or("", |(_, rest)| rest),
        None => rest,
    });
    let words = seen.unwrap_or(item).split(|c: char| !c.is_alphanumeric() && c != '_');
    words.filter(|word| !word.is_empty() && *word != "unsafe")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is found in a crate of these files.
    fn found(test: &str, files: &[(&str, &str)], exceptions: &[Exception]) -> Vec<String> {
        let files = [&[("a-crate/Cargo.toml", "")], files].concat();
        beneath(test, &files, |root| with_two_meanings(root, exceptions))
    }

    /// What is found under a root of these files.
    fn beneath(
        test: &str,
        files: &[(&str, &str)],
        find: impl FnOnce(&Path) -> crate::Result<Vec<String>>,
    ) -> Vec<String> {
        let root = std::env::temp_dir().join(format!("kvx-names-{test}-{}", std::process::id()));
        for (file, text) in files {
            let path = root.join(file);
            std::fs::create_dir_all(path.parent().expect("it has a folder")).expect("a folder");
            std::fs::write(path, text).expect("a file");
        }
        let found = find(&root);
        std::fs::remove_dir_all(&root).expect("it was made");
        found.expect("they are read")
    }

    #[test]
    fn two_types_of_one_name_are_found_wherever_they_are_and_what_only_tests_have_is_not() {
        let files = [
            (
                "a-crate/src/lib.rs",
                "mod one;\nmod two;\n#[cfg(test)]\nmod tried;\npub mod inner {\n    pub struct A;\n}\n",
            ),
            (
                "a-crate/src/one.rs",
                "pub(crate) struct A<'a>(&'a u8);\nstruct Alone;\nimpl T for A {\n    type B = u8;\n}\n",
            ),
            (
                "a-crate/src/two/mod.rs",
                "mod three;\n#[derive(Debug)]\nenum B {\n    A,\n}\n#[cfg(test)]\nstruct Alone;\n",
            ),
            (
                "a-crate/src/two/three.rs",
                "pub(in crate::two) unsafe trait B {}\nfn f() {\n    struct Alone;\n}\n",
            ),
            ("a-crate/src/tried.rs", "struct Alone;\n"),
            ("a-crate/src/five.rs", "#[cfg(test)]\nmod tried;\n"),
            ("a-crate/src/five/tried/deep.rs", "struct Alone;\n"),
            ("a-crate/tests/all.rs", "struct Alone;\n"),
            (
                "a-crate/src/four.rs",
                "#[cfg(test)]\nmod tests {\n    struct Alone;\n}\n// struct Alone;\n#[cfg(unix)]\ntype C = u8;\n#[cfg(windows)]\ntype C = u16;\n",
            ),
        ];
        assert_eq!(
            found("found", &files, &[]),
            ["a-crate: A in inner, one", "a-crate: B in two, two::three"]
        );
    }

    #[test]
    fn an_exception_is_for_one_type_of_each_part_and_for_as_long_as_it_is_needed() {
        let files = [
            ("a-crate/src/lib.rs", ""),
            ("a-crate/src/shm.rs", "struct A;\nstruct B;\nmod inner {\n    struct B;\n}\n"),
            ("a-crate/src/tcp.rs", "struct A;\nstruct B;\nstruct C;\n"),
            ("a-crate/src/other.rs", "struct C;\n"),
        ];
        let exception = |parts| [Exception { of: "a-crate", names: &["A", "B", "C", "D"], parts }];
        let b = "a-crate: B in shm, shm::inner, tcp";
        let d = "a-crate: D needs no exception";
        assert_eq!(found("some", &files, &exception(&["shm", "tcp"])), [b, "a-crate: C in other, tcp", d]);
        assert_eq!(found("any", &files, &exception(&[])), [b, d]);
    }

    #[test]
    fn a_word_of_the_crates_below_is_no_type_of_ones_own_but_where_an_exception_says_so() {
        let files = [
            ("kvx-core/Cargo.toml", ""),
            (
                "kvx-core/src/lib.rs",
                "pub struct A;\nstruct B;\nmod inner {\n    pub trait C {}\n    pub(crate) type D = u8;\n}\n",
            ),
            ("kvx-core/src/again.rs", "pub struct A;\n#[cfg(test)]\npub struct E;\n"),
            ("one/Cargo.toml", ""),
            (
                "one/src/lib.rs",
                "enum A {\n    C,\n}\nstruct B;\nstruct D;\nstruct E;\n#[cfg(test)]\nstruct C;\npub struct F;\n",
            ),
            ("two/inner/Cargo.toml", ""),
            (
                "two/inner/src/deep/mod.rs",
                "struct F;\nstruct G;\nmod tests {\n    pub(super) type C = u8;\n}\n",
            ),
            ("side/Cargo.toml", ""),
            ("side/src/lib.rs", "pub struct H;\npub struct G;\npub struct A;\n"),
        ];
        let built_on = [("two/inner", "one"), ("one", "kvx-core")];
        let built_on = built_on.map(|(above, below)| (above.to_owned(), [below.to_owned()].into())).into();
        let found =
            |reuses: &[Reuse]| beneath("below", &files, |root| of_crates_below(root, &built_on, reuses));
        let (one, side) = ("one: A in lib is kvx-core's", "side: A in lib is kvx-core's");
        let two = ["two/inner: C in deep::tests is kvx-core's", "two/inner: F in deep is one's"];
        assert_eq!(found(&[]), [one, side, two[0], two[1]]);
        let all = [
            Reuse { of: "one", names: &["A", "C"] },
            Reuse { of: "two/inner", names: &[] },
            Reuse { of: "side", names: &["A"] },
        ];
        assert_eq!(found(&all), ["one: C needs no exception"]);
        let others = [Reuse { of: "two/inner", names: &["C"] }, Reuse { of: "two", names: &[] }];
        assert_eq!(found(&others), [one, side, two[1], "two needs no exception"]);
    }
}
