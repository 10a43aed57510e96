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
    let of = |backend: &str| rows.iter().copied().filter(|row| row[0] == backend).collect::<Vec<_>>();
    if connector {
        for backend in distinct(rows.iter().map(|row| row[0])) {
            println!("\n{}", table(backend, &of(backend), |row| row[1].to_owned(), |row| row[2]));
        }
    } else {
        let line = |row: &FaultRow<'_>| format!("{} | {}", row[1], row[2]);
        println!("\n{}", table("the peer is | this side is", &rows, line, |row| row[0]));
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

/// Formats a table with a line and a column for each value of these, in their order: how transfers ended, after how
/// many ms, when their memory was free, and when work continued.
fn table<'a>(
    head: &str,
    rows: &[FaultRow<'a>],
    line: impl Fn(&FaultRow<'a>) -> String,
    column: impl Fn(&FaultRow<'a>) -> &'a str,
) -> String {
    let columns = distinct(rows.iter().map(&column));
    let rules = "---|".repeat(columns.len() + head.split('|').count());
    let mut text = format!("| {head} | {} |\n|{rules}\n", columns.join(" | "));
    for name in distinct(rows.iter().map(&line)) {
        let cell = |at: &&str| {
            let row = rows.iter().find(|row| line(row) == name && column(row) == *at);
            row.map_or_else(String::new, |[.., ended, after, free, works]| {
                format!("{ended}; {after}, {free}, {works}")
            })
        };
        text += &format!("| {name} | {} |\n", columns.iter().map(cell).collect::<Vec<_>>().join(" | "));
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
        let line = |row: &FaultRow<'_>| format!("{} | {}", row[1], row[2]);
        assert_eq!(table("the peer is | this side is", &rows(output), line, |row| row[0]), wanted);
    }
}
