//! What the documents say is so: their commands run, the files that they name are there, no page has grown too long.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

use std::path::{Path, PathBuf};

/// Commands that the documents show, each with where it runs: a file, and the words in it.
const RUN: &[(&str, &str, &str)] = &[
    ("cargo run --release -- demo", "xtask/src/test/steps.rs", "run --release -- demo"),
    ("cargo bench --bench costs", "xtask/src/test/steps.rs", "bench --bench costs -- --test"),
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
    // The rehearsal packs, unpacks and runs.
    ("cargo xtask gpu --pack", "xtask/src/test/steps.rs", "xtask gpu --rehearse"),
    (
        "export KVX_MOONCAKE_LIB=$PWD/target/peers/mooncake/libkvx_mooncake_adapter.so",
        "kvx-mooncake/tests/adapter/mod.rs",
        "libkvx_mooncake_adapter.so",
    ),
];

/// What marks a command that no test can run.
const NEEDS: &str = "needs an";
const LONGEST_PAGE: usize = 200;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every page for people: at the root, in `docs`, and beside each crate.
fn pages() -> Vec<PathBuf> {
    let folders = std::fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().path());
    let own = folders.filter(|path| path.join("Cargo.toml").exists() || path.ends_with("docs"));
    let mut pages: Vec<_> = own.chain([root().to_owned()]).flat_map(markdown).collect();
    pages.sort();
    assert!(pages.len() > 20, "{pages:?}");
    pages
}

fn markdown(folder: PathBuf) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|end| end == "md")).collect()
}

fn shown(page: &Path) -> String {
    page.strip_prefix(root()).unwrap().display().to_string()
}

#[test]
fn every_command_is_run_by_a_test_or_names_the_hardware_that_it_needs() {
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
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
        let text =
            std::fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(text.contains(words), "`{command}` is said to run by {file}, which has no {words:?}");
    }
}

#[test]
fn the_files_that_pages_name_are_there() {
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        let folder = page.parent().unwrap();
        let links = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link);
        for link in links.filter(|link| !link.contains("://") && !link.starts_with('#') && is_path(link)) {
            let path = link.split('#').next().unwrap_or_default();
            assert!(folder.join(path).exists(), "{}: no file {link}", shown(&page));
        }
    }
    // Names of files below the root, in the page that tells where things are.
    let map = std::fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
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
        let lines = std::fs::read_to_string(&page).unwrap().lines().count();
        assert!(lines <= LONGEST_PAGE, "{}: {lines} lines, of {LONGEST_PAGE}", shown(&page));
    }
}
