//! Tests of the documents: the files that they name exist, and no page is too long. (kvx-cli's
//! tests run their commands.)

use std::path::{Path, PathBuf};

use kvx_testkit::test;

use crate::examples;

/// The URL that README's links begin with. Rustdoc shows README too, and relative links lead
/// nowhere there.
const TREE: &str = "https://github.com/kvx-project/kvx/blob/main/";

const LONGEST_PAGE: usize = 200;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(file: &Path) -> String {
    std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// Returns all Markdown pages, except those in hidden and target directories.
fn pages() -> Vec<PathBuf> {
    let (mut pages, mut folders) = (Vec::new(), vec![root().to_owned()]);
    while let Some(folder) = folders.pop() {
        folders.extend(entries(&folder).filter(|path| path.is_dir() && is_kept(path)));
        pages.extend(
            entries(&folder).filter(|path| path.extension().is_some_and(|end| end == "md")),
        );
    }
    pages.sort();
    assert!(pages.len() > 40, "{pages:?}");
    pages
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path())
}

/// Returns whether a folder is neither hidden nor a target directory.
fn is_kept(folder: &Path) -> bool {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    !name.starts_with('.') && name != "target"
}

fn shown(page: &Path) -> String {
    page.strip_prefix(root()).unwrap().display().to_string()
}

#[test]
fn the_files_that_pages_name_are_there() {
    for page in pages() {
        let text = read(&page);
        let folder = page.parent().unwrap();
        let links =
            text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link);
        for link in links.filter(|link| !link.starts_with('#')) {
            let in_tree = link.strip_prefix(TREE);
            if in_tree.is_none() && (link.contains("://") || !is_path(link)) {
                continue;
            }
            let path = in_tree.unwrap_or(link).split('#').next().unwrap_or_default();
            let file = if in_tree.is_some() { root().join(path) } else { folder.join(path) };
            assert!(file.exists(), "{}: no file {link}", shown(&page));
            let in_rustdoc = page == root().join("README.md");
            assert!(in_tree.is_some() || !in_rustdoc, "README.md: write {TREE}{link}");
        }
    }
    // CONTRIBUTING.md, which maps the repository, names files below the root.
    let map = read(&root().join("CONTRIBUTING.md"));
    let mut named = 0;
    for name in map.split('`').skip(1).step_by(2).filter(|name| name.contains('/') && is_path(name))
    {
        assert!(root().join(name).exists(), "CONTRIBUTING.md: no file {name}");
        named += 1;
    }
    assert!(named > 30, "{named}");
}

/// Returns whether the text looks like a file name, and not like a Rust item or a command.
fn is_path(name: &str) -> bool {
    name.chars().all(|c| c.is_alphanumeric() || "/.-_#".contains(c)) && name.contains(['/', '.'])
}

#[test]
fn no_page_is_too_long_to_be_read() {
    for page in pages() {
        // Readers look up rows in these two files; they do not read them through.
        if page.ends_with("CONTRACT.md") || page.ends_with("vllm-parity.md") {
            continue;
        }
        let lines = read(&page).lines().count();
        assert!(
            lines <= LONGEST_PAGE,
            "{}: {lines} lines, at most {LONGEST_PAGE} allowed",
            shown(&page)
        );
    }
}

#[test]
fn every_example_is_run_by_the_tests_and_linked_from_the_readme() {
    let readme = read(&root().join("README.md"));
    let mut names = Vec::new();
    for path in entries(&root().join("examples"))
        .filter(|path| path.extension().is_some_and(|end| end == "rs"))
    {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let is_run = examples::ALL.iter().any(|example| example.name == name);
        assert!(is_run, "tests/it/examples.rs does not run examples/{name}.rs");
        assert!(
            readme.contains(&format!("]({TREE}examples/{name}.rs)")),
            "README.md: no link to {name}"
        );
        names.push(name);
    }
    assert!(names.len() >= 6, "{names:?}");
    for program in entries(&root().join("interop")).filter(|path| path.join("Cargo.toml").exists())
    {
        let name = program.file_name().unwrap().to_str().unwrap();
        assert!(
            readme.contains(&format!("]({TREE}interop/{name}/")),
            "README.md: no link to interop/{name}"
        );
    }
}

#[test]
fn the_readme_leads_to_every_page_of_docs() {
    let readme = read(&root().join("README.md"));
    for page in entries(&root().join("docs")) {
        let name = page.file_name().unwrap().to_str().unwrap();
        assert!(
            readme.contains(&format!("]({TREE}docs/{name})")),
            "README.md: no link to docs/{name}"
        );
    }
}
