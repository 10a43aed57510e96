//! `cargo xtask soak` runs random work for any time. `cargo xtask faults` prints tables of how
//! transfers end when something fails. Both are about agents or, with `connector`, about engines,
//! and run the facade's tests (docs/project/reliability.md).

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use crate::Result;
use crate::arguments::{FaultsOptions, SoakOptions};
use crate::process::{self, Output};

/// The limit of the build, and of all runs with a fixed length.
const LIMIT: Duration = Duration::from_secs(60 * 60);
/// The most backends that a soak runs over.
const BACKENDS: u32 = 4;

/// Returns a call of the facade's tests. With the feature `connector` they run engines, and agents
/// without it.
fn facade_tests(connector: bool) -> Command {
    let line = "test --release -p kvx-transfer --test it --features";
    let mut cargo = process::cargo(line.split(' '));
    cargo.args([if connector { "connector" } else { "" }, "--", "--nocapture"]);
    cargo
}

/// Soaks each backend in turn; returns false if anything was wrong or has grown.
pub(crate) fn soak(options: &SoakOptions) -> Result<bool> {
    let time = Duration::from_secs(options.minutes * 60);
    let mut cargo = facade_tests(options.connector.is_some());
    // One test at a time, because it measures what its process holds.
    let variable =
        if options.connector.is_some() { "KVX_ENGINE_SOAK_SECONDS" } else { "KVX_SOAK_SECONDS" };
    cargo.arg("--test-threads=1").args(&options.only).env(variable, time.as_secs().to_string());
    process::shown_to_succeed(cargo, time * BACKENDS + LIMIT)
}

/// One run: backend, fault, moment, how transfers ended, and three times.
type FaultRow<'a> = [&'a str; 7];

/// Runs every fault at every moment over each backend, or only one part; returns false if anything
/// was wrong.
pub(crate) fn faults(options: &FaultsOptions) -> Result<bool> {
    let connector = options.connector.is_some();
    let mut cargo = facade_tests(connector);
    let variable = if connector { "KVX_ENGINE_FAULTS_ALL" } else { "KVX_FAULTS_ALL" };
    cargo.args(&options.only).env(variable, "1");
    let finished = process::run(cargo, LIMIT, Output::Shown)?;
    let rows = rows(&finished.output);
    if rows.is_empty() {
        return Err("nothing ran: no run has this in its name, or the build failed".into());
    }
    if connector {
        for backend in distinct(rows.iter().map(|row| row[0])) {
            let cells = rows.iter().filter(|row| row[0] == backend);
            let cells =
                cells.map(|[_, line, column, ended @ ..]| (line.to_string(), *column, *ended));
            println!("\n{}", table(backend, &Vec::from_iter(cells)));
        }
    } else {
        println!("\n{}", table("the peer is | this side is", &by_backend(&rows)));
    }
    println!("{}", finished.end);
    Ok(finished.succeeded())
}

/// Returns the rows in the program's output.
fn rows(output: &str) -> Vec<FaultRow<'_>> {
    let row = |line| {
        let (_, cells) = str::split_once(line, "| ")?;
        let cells: Vec<&str> =
            cells.trim().trim_end_matches('|').split('|').map(str::trim).collect();
        cells.try_into().ok()
    };
    output.lines().filter_map(row).collect()
}

/// A line, a column, and the content of a table's cell: how transfers ended, after how many ms,
/// when their memory was free, and when work continued.
type Cell<'a> = (String, &'a str, [&'a str; 4]);

/// Returns cells with a line for each fault and moment, and a column for each backend.
fn by_backend<'a>(rows: &[FaultRow<'a>]) -> Vec<Cell<'a>> {
    let cells = rows.iter();
    cells
        .map(|[backend, fault, moment, ended @ ..]| {
            (format!("{fault} | {moment}"), *backend, *ended)
        })
        .collect()
}

/// Formats a table with the lines and columns of these cells, in their order.
fn table(head: &str, cells: &[Cell<'_>]) -> String {
    let columns = distinct(cells.iter().map(|(_, column, _)| *column));
    let rules = "---|".repeat(columns.len() + head.split('|').count());
    let mut text = format!("| {head} | {} |\n|{rules}\n", columns.join(" | "));
    for name in distinct(cells.iter().map(|(line, ..)| line)) {
        let cell = |at: &&str| {
            let cell = cells.iter().find(|(line, column, _)| line == name && column == at);
            cell.map(|(.., [ended, after, free, works])| {
                format!("{ended}; {after}, {free}, {works}")
            })
        };
        let cells: Vec<_> = columns.iter().map(|at| cell(at).unwrap_or_default()).collect();
        text += &format!("| {name} | {} |\n", cells.join(" | "));
    }
    text
}

fn distinct<T: Clone + Ord>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = BTreeSet::new();
    all.filter(|one| seen.insert(one.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_a_line_for_each_fault_and_a_column_for_each_backend() {
        let output = "running 2 tests\ntest a ... | SHM | killed | idle | 24 peer_lost | 6 | 0 | 45 |\nok\n\
            | TCP | killed | idle | 24 peer_lost | 3 | held | 41 |\nok\n| TCP | shut down | idle | **why** | | | |\n";
        let wanted = "| the peer is | this side is | SHM | TCP |\n|---|---|---|---|\n\
            | killed | idle | 24 peer_lost; 6, 0, 45 | 24 peer_lost; 3, held, 41 |\n\
            | shut down | idle |  | **why**; , ,  |\n";
        assert_eq!(table("the peer is | this side is", &by_backend(&rows(output))), wanted);
    }
}
