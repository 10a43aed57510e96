//! Tests of the crates' structure: modules that use each other in a circle can only be understood
//! together.
//!
//! They read `use` declarations and paths in the text, so macros and globs are not seen. A module
//! that re-exports what its own child defines (`pub use child::Name`) does not use the child.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use kvx_testkit::test;

/// A module's path within its crate; the crate's root is empty.
type Module = Vec<String>;
/// A path that appears in the text of a module.
type NamePath = Vec<String>;
/// The text of each module.
type Texts = BTreeMap<Module, String>;
/// The modules that each module uses.
type Uses = BTreeMap<Module, BTreeSet<Module>>;
/// The names that each module re-exports, with their paths.
type Exports<'a> = BTreeMap<&'a Module, BTreeMap<String, NamePath>>;

/// Returns the folder of kvx-core's sources.
fn core() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kvx-core/src")
}

/// Returns what each module under `root` uses outside of its tests.
fn uses(root: &Path) -> std::io::Result<Uses> {
    let mut texts = Texts::new();
    read(root, &mut Vec::new(), &mut texts)?;
    let exports: Exports<'_> = texts
        .iter()
        .map(|(module, text)| {
            let public = paths(text).into_iter().filter(|(_, is_public)| *is_public);
            (module, public.filter_map(|(path, _)| Some((path.last()?.clone(), path))).collect())
        })
        .collect();
    let mut uses = Uses::new();
    for (module, text) in texts.iter().filter(|(module, _)| !module.is_empty()) {
        let is_child =
            |path: &[String]| texts.contains_key(&[module.as_slice(), &path[..1]].concat());
        let used =
            paths(text).into_iter().filter(|(path, is_public)| !(*is_public && is_child(path)));
        let used = used
            .filter_map(|(path, _)| resolve(&absolute(module, &path, &texts)?, &texts, &exports));
        uses.insert(
            module.clone(),
            used.filter(|used| used != module && !used.is_empty()).collect(),
        );
    }
    Ok(uses)
}

/// Returns the circles among modules, the largest first.
fn circles(uses: &Uses) -> Vec<Vec<String>> {
    let mut circles: BTreeSet<BTreeSet<Module>> = BTreeSet::new();
    for module in uses.keys() {
        let in_circle = |other: &Module| other == module || reached(other, uses).contains(module);
        circles.insert(reached(module, uses).into_iter().filter(in_circle).collect());
    }
    let names = |circle: &BTreeSet<Module>| circle.iter().map(|module| module.join("::")).collect();
    let mut circles: Vec<Vec<String>> =
        circles.iter().filter(|circle| circle.len() > 1).map(names).collect();
    circles.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
    circles
}

/// Returns the module and everything that it uses, directly or not.
fn reached(module: &Module, uses: &Uses) -> BTreeSet<Module> {
    let (mut reached, mut left) = (BTreeSet::from([module.clone()]), vec![module]);
    while let Some(next) = left.pop() {
        left.extend(
            uses.get(next).into_iter().flatten().filter(|used| reached.insert((*used).clone())),
        );
    }
    reached
}

/// Reads the texts of the modules in a folder, without comments and tests.
fn read(folder: &Path, at: &mut Module, texts: &mut Texts) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            at.push(name);
            read(&path, at, texts)?;
            at.pop();
        } else if path.extension().is_some_and(|extension| extension == "rs") && name != "tests" {
            let module = match name.as_str() {
                "mod" | "lib" => at.clone(),
                _ => [at.as_slice(), &[name]].concat(),
            };
            let text = std::fs::read_to_string(&path)?;
            let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
            let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
            texts.insert(module, lines.collect::<Vec<_>>().join("\n"));
        }
    }
    Ok(())
}

/// Returns the paths in a text, each with whether a declaration re-exports it.
fn paths(text: &str) -> Vec<(NamePath, bool)> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let mut paths = Vec::new();
    for statement in text.split(';') {
        let declaration = statement.rmatch_indices("use ").next().filter(|(at, _)| {
            let line = statement[..*at].rsplit('\n').next().unwrap_or_default().trim();
            line.is_empty() || line == "pub" || (line.starts_with("pub(") && line.ends_with(')'))
        });
        let code = declaration.map_or(statement, |(at, _)| &statement[..at]);
        if let Some((at, _)) = declaration {
            let is_public = code.lines().last().is_some_and(|line| line.contains("pub"));
            let mut expanded = Vec::new();
            expand(&[], &statement[at + 4..], &mut expanded);
            paths.extend(expanded.into_iter().map(|path| (path, is_public)));
        }
        let mentioned = code.split(|c| !is_part(c)).filter(|path| path.contains("::"));
        paths.extend(mentioned.map(|path| (names(path).collect(), false)));
    }
    paths.retain(|(path, _)| !path.is_empty());
    paths
}

fn names(path: &str) -> impl Iterator<Item = String> {
    path.split("::").map(|name| name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// Expands a tree like `a::{b, c::{d, e}}` into its paths.
fn expand(before: &[String], tree: &str, paths: &mut Vec<NamePath>) {
    let (head, inner) = match tree.split_once('{') {
        Some((head, inner)) => (head, inner.trim_end().strip_suffix('}')),
        None => (tree, None),
    };
    let head = head.split(" as ").next().unwrap_or_default();
    let path: NamePath = before.iter().cloned().chain(names(head)).collect();
    let Some(inner) = inner else { return paths.push(path) };
    let mut depth = 0;
    let parts = inner.split(|c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    });
    parts.filter(|part| !part.trim().is_empty()).for_each(|part| expand(&path, part, paths));
}

/// Returns a path from the root of the crate, or `None` if it leads out of the crate.
fn absolute(module: &Module, path: &[String], texts: &Texts) -> Option<NamePath> {
    let parents = path.iter().take_while(|name| *name == "super").count();
    match path.first()?.as_str() {
        "crate" => Some(path[1..].to_vec()),
        "self" => Some([module.as_slice(), &path[1..]].concat()),
        "super" => Some([&module[..module.len().checked_sub(parents)?], &path[parents..]].concat()),
        _ => {
            let child = [module.as_slice(), path].concat();
            texts.contains_key(&child[..=module.len()].to_vec()).then_some(child)
        }
    }
}

/// Returns the module that defines the last name of a path, which other modules may re-export.
fn resolve(path: &[String], texts: &Texts, exports: &Exports<'_>) -> Option<Module> {
    let mut path = path.to_vec();
    for _ in 0..8 {
        let depth =
            (0..=path.len()).rev().find(|depth| texts.contains_key(&path[..*depth].to_vec()))?;
        let module: Module = path[..depth].to_vec();
        let elsewhere = path.get(depth).and_then(|name| exports.get(&module)?.get(name));
        match elsewhere.and_then(|elsewhere| absolute(&module, elsewhere, texts)) {
            Some(elsewhere) => path = elsewhere,
            None => return Some(module),
        }
    }
    None
}

/// The circles of more than three modules that are left: the crate, and the number of modules in
/// its largest one. They may only shrink.
const LARGER: &[(&str, usize)] = &[];

/// Returns the source folders of all crates of the workspace.
fn crates() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = std::fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let members = manifest.split_once("members = [").unwrap().1.split_once(']').unwrap().0;
    let members = members.split(',').map(|name| name.trim().trim_matches('"')).chain(["."]);
    members.map(|name| root.join(name).join("src")).collect()
}

#[test]
fn circles_have_at_most_three_modules() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut read = 0;
    for sources in crates() {
        let uses = uses(&sources).unwrap();
        read += uses.len();
        let name = sources.strip_prefix(root).unwrap().parent().unwrap().display().to_string();
        let allowed = LARGER.iter().find(|(of, _)| *of == name).map_or(3, |(_, modules)| *modules);
        if let Some(largest) = circles(&uses).first() {
            assert!(
                largest.len() <= allowed,
                "{name} has a circle of {} modules, where {allowed} are allowed: {}. Move what \
                 they share one layer down, or split a module",
                largest.len(),
                largest.join(", ")
            );
        }
    }
    assert!(read > 500, "{read} modules: the sources were not read");
}

/// Device memory refers to the trait that copies it, and an implementation of the trait creates
/// device memory.
#[test]
fn core_has_no_circle_but_that_of_memory() {
    let uses = uses(&core()).unwrap();
    assert_eq!(circles(&uses), [["memory", "memory::device", "memory::pool"]]);
}

/// The layers are the groups of modules in `lib.rs`, highest first.
#[test]
fn core_uses_only_lower_layers() {
    let root = core();
    let lib = std::fs::read_to_string(root.join("lib.rs")).unwrap();
    let (mut groups, mut group) = (BTreeMap::new(), 0);
    for paragraph in lib.split("\n\n") {
        group += usize::from(paragraph.starts_with("// "));
        for line in paragraph.lines().filter(|line| line.ends_with(';')) {
            if let Some((_, name)) = line.split_once("mod ") {
                groups.insert(name.trim_end_matches(';').to_owned(), group);
            }
        }
    }
    let last = group - 1; // the last two groups count as one
    for (module, used) in uses(&root).unwrap() {
        for used in used {
            let (user, lower) = (groups[&module[0]].min(last), groups[&used[0]].min(last));
            assert!(user <= lower, "{} uses {}", module.join("::"), used.join("::"));
        }
    }
}

/// Authors of a backend or an engine read core, so code beyond 10,000 lines must move out of it.
/// Too few lines or files mean that the test did not read its sources.
#[test]
fn core_stays_small_and_its_unsafe_code_in_six_files() {
    let mut texts = Texts::new();
    read(&core(), &mut Vec::new(), &mut texts).unwrap();
    let lines =
        texts.values().flat_map(|text| text.lines()).filter(|line| !line.trim().is_empty()).count();
    assert!((5_000..=10_000).contains(&lines), "{lines} lines");
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let is_unsafe = |text: &&String| text.split(|c| !is_name(c)).any(|word| word == "unsafe");
    let files = texts.values().filter(is_unsafe).count();
    assert!((1..=6).contains(&files), "{files} files with unsafe code");
}

#[test]
fn a_circle_is_found_through_re_exports() {
    let folder = std::env::temp_dir().join(format!("kvx-circles-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("c")).unwrap();
    for (file, text) in [
        ("lib.rs", "mod a;\nmod b;\nmod c;\npub use b::{B, More as Other};\n"),
        ("a.rs", "use std::fmt;\nuse crate::{B, c::C};\n// use crate::b::Comment;\n"),
        ("b.rs", "fn f() { crate::c::inner::g() }\n#[cfg(test)]\nmod tests { use crate::a; }\n"),
        ("c/mod.rs", "mod inner;\npub use inner::C;\n"),
        ("c/inner.rs", "use super::super::a;\npub struct C;\n"),
    ] {
        std::fs::write(folder.join(file), text).unwrap();
    }
    let found = uses(&folder);
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(circles(&found.unwrap()), [["a", "b", "c::inner"]]);
}
