//! Tests of the documents: the files that they name exist, and no page is too long. (kvx-cli's
//! tests run their commands.)

use std::path::{Path, PathBuf};

use kvx_testkit::test;

use crate::examples;

/// The most lines of a page.
const LONGEST_PAGE: usize = 200;
/// The most bytes of README.
const LONGEST_README: usize = 6656;

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
            if link.contains("://") || !is_path(link) {
                continue;
            }
            let file = folder.join(link.split('#').next().unwrap_or_default());
            assert!(file.exists(), "{}: no file {link}", shown(&page));
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
fn the_readme_is_short() {
    let length = read(&root().join("README.md")).len();
    assert!(length <= LONGEST_README, "README.md: {length} bytes, of {LONGEST_README}");
}

#[test]
fn every_example_is_run_by_the_tests_and_linked_from_the_library_part() {
    let library: String = pages_of("docs/library").iter().map(|page| read(page)).collect();
    let mut names = Vec::new();
    for path in entries(&root().join("examples"))
        .filter(|path| path.extension().is_some_and(|end| end == "rs"))
    {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let is_run = examples::ALL.iter().any(|example| example.name == name);
        assert!(is_run, "tests/it/examples.rs does not run examples/{name}.rs");
        assert!(
            library.contains(&format!("](../../examples/{name}.rs)")),
            "docs/library: no link to {name}"
        );
        names.push(name);
    }
    assert!(names.len() >= 6, "{names:?}");
    for program in entries(&root().join("interop")).filter(|path| path.join("Cargo.toml").exists())
    {
        let name = program.file_name().unwrap().to_str().unwrap();
        assert!(
            library.contains(&format!("](../../interop/{name}/")),
            "docs/library: no link to interop/{name}"
        );
    }
}

/// Returns the pages in a folder, and in those below it.
fn pages_of(folder: &str) -> Vec<PathBuf> {
    let folder = root().join(folder);
    pages().into_iter().filter(|page| page.starts_with(&folder)).collect()
}

#[test]
fn the_summary_leads_to_every_page_of_docs() {
    let summary = read(&root().join("docs/SUMMARY.md"));
    let pages = pages_of("docs");
    for page in pages.iter().filter(|page| !page.ends_with("SUMMARY.md")) {
        let name = shown(page);
        let name = name.strip_prefix("docs/").unwrap();
        assert!(summary.contains(&format!("]({name})")), "docs/SUMMARY.md: no link to {name}");
    }
    assert!(pages.len() > 20, "{pages:?}");
}
