//! Checks docs/project/vllm-parity.md: every item of the checklist names a test, and every named test
//! exists.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use kvx_testkit::test;

/// Returns the folder of this crate.
fn here() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn page() -> String {
    std::fs::read_to_string(here().join("../docs/project/vllm-parity.md")).unwrap()
}

/// Returns the rows that name a test: item, file, function.
fn rows(page: &str) -> Vec<(u32, String, String)> {
    let row = |line: &str| {
        let mut cells = line.strip_prefix('|')?.strip_suffix('|')?.split('|').map(str::trim);
        let (item, _what, test) = (cells.next()?, cells.next()?, cells.next()?);
        let (file, function) = test.strip_prefix('`')?.strip_suffix('`')?.rsplit_once("::")?;
        let items: Result<Vec<u32>, _> = item.split(", ").map(str::parse).collect();
        Some((items.ok()?, file.to_owned(), function.to_owned()))
    };
    let each = |(items, file, function): (Vec<u32>, String, String)| {
        items.into_iter().map(move |item| (item, file.clone(), function.clone()))
    };
    page.lines().filter_map(row).flat_map(each).collect()
}

/// Returns whether a file has a test function with this name.
fn has_test(source: &str, function: &str) -> bool {
    // A test program with its own main lists its trials by name, on one line or on several.
    let flat: String = source.split_whitespace().collect();
    if flat.contains(&format!("(\"{function}\","))
        || flat.contains(&format!("name:\"{function}\","))
    {
        return true;
    }
    // A program with async tests lists functions that are `async` and take no arguments.
    if source.contains(&format!("pub(crate) async fn {function}() {{")) {
        return true;
    }
    let lines: Vec<_> = source.lines().map(str::trim).collect();
    let named = lines.iter().position(|line| line.starts_with(&format!("fn {function}(")));
    let Some(at) = named else { return false };
    let above =
        lines[..at].iter().rev().take_while(|line| line.starts_with('#') || line.starts_with("//"));
    above.into_iter().any(|line| ["#[test]", "#[test(own_process)]"].contains(line))
}

fn missing(folder: &Path, page: &str) -> Vec<String> {
    let exists = |file: &str, function: &str| {
        std::fs::read_to_string(folder.join(file)).is_ok_and(|source| has_test(&source, function))
    };
    let rows = rows(page).into_iter();
    rows.filter(|(_, file, function)| !exists(file, function))
        .map(|(item, file, function)| format!("{item}: {file}::{function}"))
        .collect()
}

#[test]
fn every_item_of_the_checklist_names_a_test() {
    let items: BTreeSet<_> = rows(&page()).into_iter().map(|(item, ..)| item).collect();
    assert_eq!(items, (1..=48).chain(55..=65).collect());
}

#[test]
fn every_row_with_the_runtime_names_a_test_or_where_it_is_left() {
    let page = page();
    let (_, after) = page.split_once("## With the runtime").unwrap();
    let rows: Vec<_> = after
        .lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| item"))
        .collect();
    assert!(rows.len() > 10, "{rows:#?}");
    let left = |row: &&&str| !row.contains("::") && !row.ends_with("| left |");
    assert_eq!(rows.iter().filter(left).collect::<Vec<_>>(), [] as [&&str; 0]);
}

#[test]
fn every_test_that_the_page_names_exists() {
    let missing = missing(&here(), &page());
    assert!(
        missing.is_empty(),
        "docs/project/vllm-parity.md names tests that do not exist: {missing:#?}"
    );
}

#[test]
fn a_test_that_does_not_exist_is_found() {
    let named = |test: &str| format!("| 1 | something | `{test}` |");
    let missing = |test: &str| missing(&here(), &named(test)).len();
    assert_eq!(missing("tests/it/parity.rs::a_test_that_does_not_exist_is_found"), 0);
    assert_eq!(missing("tests/it/parity.rs::never_written"), 1);
    assert_eq!(missing("tests/it/parity.rs::has_test"), 1, "a function that is not a test");
    assert_eq!(missing("tests/it/nowhere.rs::has_test"), 1);
}
