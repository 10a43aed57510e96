//! `cargo xtask faults`: how transfers end when something fails, over each backend, as one table;
//! `cargo xtask faults connector`: how loads of engines end, as one table for each backend.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::Result;
use crate::arguments::FaultsOptions;
use crate::process::{self, Output};

/// The limit of a build and of all runs.
const LIMIT: Duration = Duration::from_secs(60 * 60);

/// One run: backend, fault, moment, how transfers ended, and three times.
type FaultRow<'a> = [&'a str; 7];

/// Runs every fault at every moment over each backend, or only one part; returns false if anything was wrong.
pub(crate) fn run(options: &FaultsOptions) -> Result<bool> {
    let connector = options.connector.is_some();
    // With the connector the program runs what engines suffer, without it what agents do.
    let features = if connector { "connector" } else { "" };
    let mut cargo = process::cargo(["test", "--release", "-p", "kvx-transfer", "--test", "it"]);
    cargo.args(["--features", features, "--", "--nocapture"]).args(&options.only).env("KVX_FAULTS_ALL", "1");
    let finished = process::run(cargo, LIMIT, Output::Shown)?;
    let rows = rows(&finished.output);
    if rows.is_empty() {
        return Err("nothing ran: no run has this in its name, or the build failed".into());
    }
    if connector {
        for backend in distinct(rows.iter().map(|row| row[0])) {
            let cells = rows.iter().filter(|row| row[0] == backend);
            let cells = cells.map(|[_, line, column, ended @ ..]| (line.to_string(), *column, *ended));
            println!("\n{}", table(backend, &Vec::from_iter(cells)));
        }
    } else {
        println!("\n{}", table("the peer is | this side is", &by_backend(&rows)));
    }
    println!("{}", finished.end);
    Ok(finished.succeeded())
}

/// Returns the rows among what the program printed.
fn rows(output: &str) -> Vec<FaultRow<'_>> {
    let row = |line| {
        let (_, cells) = str::split_once(line, "| ")?;
        let cells: Vec<&str> = cells.trim().trim_end_matches('|').split('|').map(str::trim).collect();
        cells.try_into().ok()
    };
    output.lines().filter_map(row).collect()
}

/// A line, a column, and what a table says there: how transfers ended, after how many ms, when their memory was free,
/// and when work continued.
type Cell<'a> = (String, &'a str, [&'a str; 4]);

/// Returns cells with a line for each fault and moment, and a column for each backend.
fn by_backend<'a>(rows: &[FaultRow<'a>]) -> Vec<Cell<'a>> {
    let cells = rows.iter();
    cells
        .map(|[backend, fault, moment, ended @ ..]| (format!("{fault} | {moment}"), *backend, *ended))
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
            cell.map(|(.., [ended, after, free, works])| format!("{ended}; {after}, {free}, {works}"))
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
