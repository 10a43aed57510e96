//! Modules of a crate that use each other in a circle: whoever wants to understand one has to read all of them.
//!
//! It reads `use` declarations and paths in the text, so macros and globs are not seen. A module that shows what its
//! own child holds (`pub use child::Name`) does not use it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A module's path within its crate; the crate's root is empty.
pub(crate) type Module = Vec<String>;

/// What each module uses.
type Uses = BTreeMap<Module, BTreeSet<Module>>;

/// What each module under `root` uses. Tests do not count.
fn uses(root: &Path) -> crate::Result<Uses> {
    let mut texts = BTreeMap::new();
    read(root, &mut Vec::new(), &mut texts)?;
    let shown: BTreeMap<&Module, BTreeMap<String, Vec<String>>> = texts
        .iter()
        .map(|(module, text)| {
            let shown = declared(text).into_iter().filter(|(_, is_public)| *is_public);
            (module, shown.filter_map(|(path, _)| Some((path.last()?.clone(), path))).collect())
        })
        .collect();
    let mut uses = Uses::new();
    for (module, text) in &texts {
        let own = |path: &[String]| texts.contains_key(&[module.as_slice(), &path[..1]].concat());
        let declared = declared(text).into_iter().filter(|(path, is_public)| !(*is_public && own(path)));
        let paths = declared.map(|(path, _)| path).chain(mentioned(text));
        let used = paths.filter_map(|path| resolve(&absolute(module, &path, &texts)?, &texts, &shown));
        let used = used.filter(|used| used != module && !used.is_empty()).collect();
        if !module.is_empty() {
            uses.insert(module.clone(), used);
        }
    }
    Ok(uses)
}

/// The circles among modules, the largest first.
fn circles(uses: &Uses) -> Vec<Vec<String>> {
    let mut circles: Vec<Vec<String>> = Vec::new();
    let mut seen = BTreeSet::new();
    for module in uses.keys() {
        if seen.contains(module) {
            continue;
        }
        let circle: Vec<Module> = reached(module, uses)
            .into_iter()
            .filter(|other| other == module || reached(other, uses).contains(module))
            .collect();
        seen.extend(circle.iter().cloned());
        if circle.len() > 1 {
            circles.push(circle.iter().map(|module| module.join("::")).collect());
        }
    }
    circles.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
    circles
}

/// The module and whatever it uses, at whatever distance.
fn reached(module: &Module, uses: &Uses) -> BTreeSet<Module> {
    let mut reached = BTreeSet::from([module.clone()]);
    let mut left = vec![module];
    while let Some(next) = left.pop() {
        for used in uses.get(next).into_iter().flatten() {
            if reached.insert(used.clone()) {
                left.push(used);
            }
        }
    }
    reached
}

/// The texts of the modules in a folder, without comments and tests.
pub(crate) fn read(
    folder: &Path,
    at: &mut Module,
    texts: &mut BTreeMap<Module, String>,
) -> crate::Result<()> {
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

/// The paths of `use` declarations, each with whether they show the name to others.
fn declared(text: &str) -> Vec<(Vec<String>, bool)> {
    let mut paths = Vec::new();
    for (before, tree) in text.split(';').filter_map(declaration) {
        let is_public = before.lines().last().is_some_and(|line| line.contains("pub"));
        let mut expanded = Vec::new();
        expand(&[], tree, &mut expanded);
        paths.extend(expanded.into_iter().map(|path| (path, is_public)));
    }
    paths
}

/// What stands before `use` and after it, if this statement ends in a declaration.
fn declaration(statement: &str) -> Option<(&str, &str)> {
    let at = statement.rfind("use ").filter(|at| is_start(&statement[..*at]))?;
    Some((&statement[..at], &statement[at + 4..]))
}

/// True if a declaration may follow this text.
fn is_start(before: &str) -> bool {
    let line = before.rsplit('\n').next().unwrap_or_default().trim();
    line.is_empty() || line == "pub" || (line.starts_with("pub(") && line.ends_with(')'))
}

/// Writes out what `a::{b, c::{d, e}}` names.
fn expand(before: &[String], tree: &str, paths: &mut Vec<Vec<String>>) {
    let (head, inner) = match tree.split_once('{') {
        Some((head, inner)) => (head, inner.trim_end().strip_suffix('}')),
        None => (tree, None),
    };
    let head = head.split(" as ").next().unwrap_or_default();
    let names = head.split("::").map(|name| name.trim().to_owned()).filter(|name| !name.is_empty());
    let path: Vec<String> = before.iter().cloned().chain(names).collect();
    let Some(inner) = inner else { return paths.push(path) };
    let (mut depth, mut start) = (0, 0);
    for (at, c) in inner.char_indices().chain([(inner.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if !inner[start..at].trim().is_empty() {
                    expand(&path, &inner[start..at], paths);
                }
                start = at + 1;
            }
            _ => {}
        }
    }
}

/// Paths within the code outside of declarations.
fn mentioned(text: &str) -> Vec<Vec<String>> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    text.split(';')
        .map(|statement| declaration(statement).map_or(statement, |(before, _)| before))
        .flat_map(|statement| statement.split(|c| !is_part(c)))
        .filter(|path| path.contains("::"))
        .map(|path| path.split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect())
        .filter(|path: &Vec<String>| !path.is_empty())
        .collect()
}

/// A path from the root of the crate; `None` if it leads out of it.
fn absolute(module: &Module, path: &[String], texts: &BTreeMap<Module, String>) -> Option<Vec<String>> {
    let first = path.first()?;
    let parents = path.iter().take_while(|name| *name == "super").count();
    match first.as_str() {
        "crate" => Some(path[1..].to_vec()),
        "self" => Some([module.as_slice(), &path[1..]].concat()),
        "super" => Some([&module[..module.len().checked_sub(parents)?], &path[parents..]].concat()),
        _ => {
            let child = [module.as_slice(), path].concat();
            texts.contains_key(&child[..=module.len()].to_vec()).then_some(child)
        }
    }
}

/// The module in which the last name of a path is written, also when another module shows it.
fn resolve(
    path: &[String],
    texts: &BTreeMap<Module, String>,
    shown: &BTreeMap<&Module, BTreeMap<String, Vec<String>>>,
) -> Option<Module> {
    let mut path = path.to_vec();
    for _ in 0..8 {
        let depth = (0..=path.len()).rev().find(|depth| texts.contains_key(&path[..*depth].to_vec()))?;
        let module: Module = path[..depth].to_vec();
        let elsewhere = path.get(depth).and_then(|name| shown.get(&module)?.get(name));
        match elsewhere.and_then(|elsewhere| absolute(&module, elsewhere, texts)) {
            Some(elsewhere) => path = elsewhere,
            None => return Some(module),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory of a device names who copies it, and who copies makes such memory.
    #[test]
    fn core_has_no_circle_but_that_of_memory() {
        let uses = uses(&crate::root().join("kvx-core/src")).expect("its sources are read");
        assert_eq!(circles(&uses), [["memory", "memory::device", "memory::pool"]]);
    }

    /// As `lib.rs` of core says of its groups.
    #[test]
    fn core_uses_only_what_stands_below() {
        let root = crate::root().join("kvx-core/src");
        let lib = std::fs::read_to_string(root.join("lib.rs")).expect("lib.rs is read");
        let (mut groups, mut group) = (BTreeMap::new(), 0);
        for paragraph in lib.split("\n\n") {
            group += usize::from(paragraph.starts_with("// "));
            for line in paragraph.lines().filter(|line| line.ends_with(';')) {
                if let Some((_, name)) = line.split_once("mod ") {
                    groups.insert(name.trim_end_matches(';').to_owned(), group);
                }
            }
        }
        let last = group - 1; // and the one after it
        for (module, used) in uses(&root).expect("its sources are read") {
            for used in used {
                let (ours, theirs) = (groups[&module[0]].min(last), groups[&used[0]].min(last));
                assert!(ours <= theirs, "{} uses {}", module.join("::"), used.join("::"));
            }
        }
    }

    #[test]
    fn a_circle_is_found_through_names_that_others_show() {
        let folder = std::env::temp_dir().join(format!("kvx-circles-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("c")).expect("a folder");
        for (file, text) in [
            ("lib.rs", "mod a;\nmod b;\nmod c;\npub use b::{B, More as Other};\n"),
            ("a.rs", "use std::fmt;\nuse crate::{B, c::C};\n// use crate::b::Comment;\n"),
            (
                "b.rs",
                "pub struct B;\nfn f() { crate::c::inner::g() }\n#[cfg(test)]\nmod tests { use crate::a; }\n",
            ),
            ("c/mod.rs", "mod inner;\npub use inner::C;\n"),
            ("c/inner.rs", "use super::super::a;\npub struct C;\n"),
        ] {
            std::fs::write(folder.join(file), text).expect("a file");
        }
        let found = uses(&folder);
        std::fs::remove_dir_all(&folder).expect("it was made");
        assert_eq!(circles(&found.expect("they are read")), [["a", "b", "c::inner"]]);
    }
}
