//! What the documents say is so: their commands run, the files that they name are there, no page has grown too long.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

use std::path::{Path, PathBuf};

/// Commands that the documents show, each with where it runs: a file, and the words in it.
const RUN: &[(&str, &str, &str)] = &[
    ("cargo run --release -- demo", "xtask/src/test/steps.rs", "run --release -- demo"),
    ("cargo bench --bench costs", "xtask/src/test/steps.rs", "--bench costs -- --test"),
    ("cargo xtask test --install", ".ci/run", "cargo xtask test --install"),
    ("cargo xtask test --whole", ".ci/run", "--whole"),
    // The runner cannot run itself: what its options choose is tested.
    ("cargo xtask test --fast", "xtask/src/test/steps.rs", "of(Tier::Fast, None)"),
    ("cargo xtask test --crate kvx-core", "xtask/src/test/steps.rs", "of(Tier::Usual, Some("),
    // Its `main` is a suite, and cargo runs it as a test.
    (
        "cargo test -p kvx-backend --example smallest_backend",
        "kvx-backend/Cargo.toml",
        "name = \"smallest_backend\"\ntest = true",
    ),
    ("cargo build --release -p kvx-cli", "xtask/src/test/steps.rs", "run --release -- demo"),
    ("cargo build --release -p kvx-nixl", "kvx-cli/tests/program.rs", "libplugin_KVX.so"),
    ("cargo xtask wheel", "xtask/src/test/steps.rs", "xtask wheel --check"),
    ("target/release/kvx nixl", "kvx-cli/tests/program.rs", "&[\"nixl\"]"),
    (
        "target/release/kvx nixl --install \"$VIRTUAL_ENV\"",
        "kvx-cli/tests/program.rs",
        "&[\"nixl\", \"--install\", place]",
    ),
    ("target/release/kvx nixl --check", "kvx-cli/tests/program.rs", "&[\"nixl\", \"--check\"]"),
    (
        "kvx proxy --prefiller-hosts 10.0.0.1 10.0.0.2 --prefiller-ports 8100 8100 --decoder-hosts 10.0.0.3 --decoder-ports 8200",
        "kvx-cli/tests/proxy/commands.rs",
        "\"--prefiller-hosts\"",
    ),
    (
        "kvx proxy --prefill http://10.0.0.1:8010 8998 --decode http://10.0.0.2:8020",
        "kvx-cli/tests/proxy/commands.rs",
        "\"--prefill\"",
    ),
    ("kvx proxy --config fleet.toml", "kvx-cli/tests/proxy/choice.rs", "&[\"--config\", file.path()]"),
    (
        "kvx proxy --config fleet.toml --check",
        "kvx-cli/tests/proxy/commands.rs",
        "&[\"--config\", file.path(), \"--check\"]",
    ),
    (
        "kvx proxy --compare http://10.0.0.9:8000 http://10.0.0.1:8100",
        "kvx-cli/tests/proxy/commands.rs",
        "&[\"--compare\", &first, &second]",
    ),
    ("kvx probe 10.0.0.1:5600", "kvx-cli/tests/probe.rs", "&[\"probe\", &address]"),
    (
        "kvx probe 10.0.0.1:5600 -- --model Qwen/Qwen3-0.6B --dtype half",
        "kvx-cli/tests/probe.rs",
        "probe(&[\"--dtype\", \"half\"])",
    ),
    ("kvx secret fleet.secret", "kvx-cli/tests/program.rs", "&[\"secret\", file]"),
    (
        "cargo run --release -- make-model /tmp/tiny --arch qwen3",
        "kvx-cli/tests/program.rs",
        "[\"make-model\", place, \"--arch\", \"qwen3\"",
    ),
    (
        "cargo run --release -- serve /tmp/tiny --port 8100",
        "kvx-cli/tests/serve/server.rs",
        "command.arg(\"serve\").arg(model)",
    ),
    // The rehearsal packs, unpacks and runs.
    ("cargo xtask gpu --pack", "xtask/src/test/steps.rs", "xtask gpu --rehearse"),
    (
        "export KVX_MOONCAKE_LIB=$PWD/target/peers/mooncake/libkvx_mooncake_adapter.so",
        "kvx-mooncake/tests/adapter/mod.rs",
        "libkvx_mooncake_adapter.so",
    ),
];

/// Where README's links begin: it is the facade's front page in rustdoc too, and there others lead nowhere.
const TREE: &str = "https://github.com/kvx-project/kvx/blob/main/";

/// What marks a command that no test can run.
const NEEDS: &str = "needs an";
const LONGEST_PAGE: usize = 200;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(file: &Path) -> String {
    std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// Every page for people, wherever it lies; what builds is left out.
fn pages() -> Vec<PathBuf> {
    let (mut pages, mut folders) = (Vec::new(), vec![root().to_owned()]);
    while let Some(folder) = folders.pop() {
        folders.extend(entries(&folder).filter(|path| path.is_dir() && is_kept(path)));
        pages.extend(entries(&folder).filter(|path| path.extension().is_some_and(|end| end == "md")));
    }
    pages.sort();
    assert!(pages.len() > 40, "{pages:?}");
    pages
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path())
}

/// Whether it is neither hidden nor what cargo has built.
fn is_kept(folder: &Path) -> bool {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    !name.starts_with('.') && name != "target"
}

fn shown(page: &Path) -> String {
    page.strip_prefix(root()).unwrap().display().to_string()
}

#[test]
fn every_command_is_run_by_a_test_or_names_the_hardware_that_it_needs() {
    for page in pages() {
        let text = read(&page);
        let mut in_shell = false;
        for line in text.lines() {
            match line.strip_prefix("```") {
                Some(language) => in_shell = language == "sh",
                None if in_shell && !line.contains(NEEDS) => {
                    let command = line.split(" #").next().unwrap_or_default().trim();
                    let row = RUN.iter().find(|(known, ..)| *known == command);
                    assert!(row.is_some(), "{}: nothing runs `{command}`", shown(&page));
                }
                None => {}
            }
        }
    }
    for (command, file, words) in RUN {
        let text = read(&root().join(file));
        assert!(text.contains(words), "`{command}` is said to run by {file}, which has no {words:?}");
    }
}

#[test]
fn the_files_that_pages_name_are_there() {
    for page in pages() {
        let text = read(&page);
        let folder = page.parent().unwrap();
        let links = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link);
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
    // Names of files below the root, in the page that tells where things are.
    let map = read(&root().join("CONTRIBUTING.md"));
    let mut named = 0;
    for name in map.split('`').skip(1).step_by(2).filter(|name| name.contains('/') && is_path(name)) {
        assert!(root().join(name).exists(), "CONTRIBUTING.md: no file {name}");
        named += 1;
    }
    assert!(named > 30, "{named}");
}

/// Whether it looks like a file's name, and not like an item of Rust or a command.
fn is_path(name: &str) -> bool {
    name.chars().all(|c| c.is_alphanumeric() || "/.-_#".contains(c)) && name.contains(['/', '.'])
}

#[test]
fn no_page_is_too_long_to_be_read() {
    for page in pages() {
        // Tables of the contract and of vLLM's checklist are looked up, not read.
        if page.ends_with("CONTRACT.md") || page.ends_with("vllm-parity.md") {
            continue;
        }
        let lines = read(&page).lines().count();
        assert!(lines <= LONGEST_PAGE, "{}: {lines} lines, of {LONGEST_PAGE}", shown(&page));
    }
}

#[test]
fn every_example_is_run_by_the_tests_and_linked_from_the_readme() {
    let [readme, manifest] = ["README.md", "Cargo.toml"].map(|file| read(&root().join(file)));
    let mut names = Vec::new();
    for path in
        entries(&root().join("examples")).filter(|path| path.extension().is_some_and(|end| end == "rs"))
    {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let row = format!("[[example]]\nname = \"{name}\"\nharness = false\ntest = true\n");
        assert!(manifest.contains(&row), "Cargo.toml does not have the tests run examples/{name}.rs");
        assert!(readme.contains(&format!("]({TREE}examples/{name}.rs)")), "README.md: no link to {name}");
        names.push(name);
    }
    assert!(names.len() >= 6, "{names:?}");
    for program in entries(&root().join("interop")).filter(|path| path.join("Cargo.toml").exists()) {
        let name = program.file_name().unwrap().to_str().unwrap();
        assert!(readme.contains(&format!("]({TREE}interop/{name}/")), "README.md: no link to interop/{name}");
    }
}

#[test]
fn the_readme_leads_to_every_page_of_docs() {
    let readme = read(&root().join("README.md"));
    for page in entries(&root().join("docs")) {
        let name = page.file_name().unwrap().to_str().unwrap();
        assert!(readme.contains(&format!("]({TREE}docs/{name})")), "README.md: no link to docs/{name}");
    }
}
