//! Tests that CI runs the README's two commands. (The doc tests of the facade run its Rust blocks.)

use kvx_testkit::test;

const README: &str = include_str!("../../README.md");

/// Returns the lines of the first block of `language`.
fn first_block(language: &str) -> Vec<&'static str> {
    let fence = format!("```{language}");
    let lines = README.lines().skip_while(|line| *line != fence).skip(1);
    lines.take_while(|line| *line != "```").collect()
}

#[test]
fn the_two_commands_are_the_readmes_first() {
    assert_eq!(first_block("sh"), ["cargo run --release -- demo", "cargo xtask test --install"]);
    let first = README.lines().find(|line| line.starts_with("```"));
    assert_eq!(first, Some("```sh"), "the commands come before any other block");
}

#[test]
fn ci_runs_the_second_command_and_requires_all_of_it() {
    let script = include_str!("../../.ci/run");
    let commands: Vec<_> = script.lines().filter(|line| line.starts_with("cargo ")).collect();
    assert_eq!(commands, [format!("{} --require all", first_block("sh")[1])]);
}

#[test]
fn the_table_of_backends_names_each_with_its_feature() {
    let rows: Vec<_> = README.lines().filter(|line| line.starts_with("| `")).collect();
    for known in kvx::registry().known_names() {
        let name = format!("`{}`", known.name);
        let row =
            rows.iter().find(|row| row.split('|').nth(1).is_some_and(|cell| cell.contains(&name)));
        let row = row.unwrap_or_else(|| panic!("README.md has no row for {name}"));
        assert!(known.aliases.iter().all(|alias| row.contains(&format!("`{alias}`"))), "{row}");
        let feature = known.feature.expect("README.md has a row for each backend of this release");
        assert!(row.contains(&format!("`{feature}`")), "{row}");
    }
}

const TWO_ENGINES: &str = include_str!("../../examples/two_engines.rs");

/// Returns the lines of kvx in the example of an engine: those between the marks, without comments
/// and blank lines.
fn lines_of_kvx() -> Vec<&'static str> {
    let mut lines: Vec<_> = TWO_ENGINES.lines().map(str::trim).collect();
    let mark = |mark: &str| {
        lines.iter().position(|line| *line == mark).expect("the example has the marks")
    };
    let (from, to) = (mark("// ---- kvx ----"), mark("// ---- engine ----"));
    lines.truncate(to);
    lines.drain(..=from);
    lines.retain(|line| !line.is_empty() && !line.starts_with("//"));
    lines
}

#[test]
fn an_engine_needs_at_most_45_lines_of_kvx() {
    let lines = lines_of_kvx().len();
    assert!((20..=45).contains(&lines), "{lines} lines");
    // The rest of the engine uses only leases and held blocks of kvx.
    let engine =
        TWO_ENGINES.split("// ---- engine ----").nth(1).expect("the example has the marks");
    assert!(
        !engine.contains("use kvx") && !engine.contains("kvx::"),
        "the toy engine must use kvx only through the functions between the marks"
    );
}

#[test]
fn the_lines_of_an_engine_are_the_examples() {
    let page = include_str!("../../docs/library/engines.md");
    let shown =
        page.lines().skip_while(|line| *line != "```rs").skip(1).take_while(|line| *line != "```");
    let shown: Vec<_> = shown.map(str::trim).filter(|line| !line.is_empty()).collect();
    assert_eq!(shown.len(), 2);
    for line in shown {
        assert!(lines_of_kvx().contains(&line), "not in examples/two_engines.rs: {line}");
    }
}
