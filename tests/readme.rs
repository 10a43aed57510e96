//! The README's two commands are what CI runs. (Its Rust blocks are doc tests of the facade.)

const README: &str = include_str!("../README.md");

/// The first block of `language`, line by line.
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
    let script = include_str!("../.ci/run");
    let commands: Vec<_> = script.lines().filter(|line| line.starts_with("cargo ")).collect();
    assert_eq!(commands, [format!("{} --require all --whole", first_block("sh")[1])]);
}

#[test]
fn the_table_of_backends_names_each_with_its_feature() {
    let rows: Vec<_> = README.lines().filter(|line| line.starts_with("| `")).collect();
    for known in kvx::KNOWN {
        let name = format!("`{}`", known.name);
        let row = rows.iter().find(|row| row.split('|').nth(1).is_some_and(|cell| cell.contains(&name)));
        let row = row.unwrap_or_else(|| panic!("README.md has no row for {name}"));
        assert!(known.aliases.iter().all(|alias| row.contains(&format!("`{alias}`"))), "{row}");
        let feature = known.feature.expect("README.md has a row for each backend of this release");
        assert!(row.contains(&format!("`{feature}`")), "{row}");
    }
}
