//! `cargo xtask faults`: what becomes of work when something fails beside it, over each backend, as one table;
//! `cargo xtask faults connector`: what becomes of the loads of engines, and of their blocks, as a table for each.

use std::time::Duration;

use crate::Result;
use crate::process::{self, Output};

/// What a build and all of it may take.
const LIMIT: Duration = Duration::from_secs(60 * 60);

/// One run: backend, trouble, moment, how transfers ended, and three times.
type FaultRow<'a> = [&'a str; 7];

/// Has every trouble at every moment over each backend, or what is named; false if anything was wrong.
pub(crate) fn run(connector: bool, only: Option<&str>) -> Result<bool> {
    let test = if connector { "engines" } else { "faults" };
    let mut cargo = process::cargo(["test", "--release", "--package", "kvx-transfer", "--test", test]);
    if connector {
        cargo.args(["--features", "connector"]);
    }
    cargo.args(["--", "--nocapture"]).args(only).env("KVX_FAULTS_ALL", "1");
    let finished = process::run(cargo, LIMIT, Output::Shown)?;
    let rows = rows(&finished.output);
    if rows.is_empty() {
        return Err("nothing was run: no run has that in its name, or nothing could be built".into());
    }
    let table = if connector { by_moment(&rows) } else { by_backend(&rows) };
    println!("\n{table}\n{}", finished.end);
    Ok(finished.succeeded())
}

/// The rows among what the program wrote.
fn rows(output: &str) -> Vec<FaultRow<'_>> {
    let row = |line| {
        let (_, cells) = str::split_once(line, "| ")?;
        let cells: Vec<&str> = cells.trim().trim_end_matches('|').split('|').map(str::trim).collect();
        cells.try_into().ok()
    };
    output.lines().filter_map(row).collect()
}

/// A line for each trouble and moment, a column for each backend: how transfers ended, and after how many ms; when
/// their memory was free; when work went on.
fn by_backend(rows: &[FaultRow<'_>]) -> String {
    let backends = distinct(rows, |row| row[0]);
    let mut text = format!("| the peer is | this side is | {} |\n", backends.join(" | "));
    text += &format!("|---|---|{}\n", "---|".repeat(backends.len()));
    for line in distinct(rows, |row| [row[1], row[2]]) {
        let of = |backend: &&str| cell(rows, [backend, line[0], line[1]]);
        let cells: Vec<String> = backends.iter().map(of).collect();
        text += &format!("| {} | {} | {} |\n", line[0], line[1], cells.join(" | "));
    }
    text
}

/// For each backend a line for each who fails and how, a column for each moment.
fn by_moment(rows: &[FaultRow<'_>]) -> String {
    let mut text = String::new();
    let moments = distinct(rows, |row| row[2]);
    for backend in distinct(rows, |row| row[0]) {
        text += &format!("| {backend} | {} |\n|---|{}\n", moments.join(" | "), "---|".repeat(moments.len()));
        for who in distinct(rows, |row| row[1]) {
            let cells: Vec<String> =
                moments.iter().map(|moment| cell(rows, [backend, who, moment])).collect();
            text += &format!("| {who} | {} |\n", cells.join(" | "));
        }
        text += "\n";
    }
    text
}

/// What stands there, each once, in the order in which it comes.
fn distinct<'a, T: PartialEq>(rows: &[FaultRow<'a>], of: impl Fn(&FaultRow<'a>) -> T) -> Vec<T> {
    let mut found = Vec::new();
    for one in rows.iter().map(of) {
        if !found.contains(&one) {
            found.push(one);
        }
    }
    found
}

/// How that run ended, and three times.
fn cell(rows: &[FaultRow<'_>], run: [&str; 3]) -> String {
    let row = rows.iter().find(|row| row[..3] == run);
    row.map_or_else(String::new, |[.., ended, after, settled, works]| {
        format!("{ended}; {after}, {settled}, {works}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_a_line_for_each_trouble_and_a_column_for_each_backend() {
        let output = "running 2 tests\ntest a ... | SHM | killed | idle | 24 peer_lost | 6 | 0 | 45 |\nok\n\
            | TCP | killed | idle | 24 peer_lost | 3 | held | 41 |\nok\n| TCP | shut down | idle | **why** | | | |\n";
        let wanted = "| the peer is | this side is | SHM | TCP |\n|---|---|---|---|\n\
            | killed | idle | 24 peer_lost; 6, 0, 45 | 24 peer_lost; 3, held, 41 |\n\
            | shut down | idle |  | **why**; , ,  |\n";
        assert_eq!(by_backend(&rows(output)), wanted);
    }

    #[test]
    fn what_engines_suffer_has_a_table_for_each_backend() {
        let output = "| TCP | decode rank killed | queued | lost | 6 | 0 | 45 |\n\
            | TCP | decode rank killed | idle | lost | 7 | 0 | 5 |\n\
            | MooncakeConnector SHM | decode rank killed | idle | lost | 3 | its blocks are kept | 41 |\n";
        let wanted = "| TCP | queued | idle |\n|---|---|---|\n\
            | decode rank killed | lost; 6, 0, 45 | lost; 7, 0, 5 |\n\n\
            | MooncakeConnector SHM | queued | idle |\n|---|---|---|\n\
            | decode rank killed |  | lost; 3, its blocks are kept, 41 |\n\n";
        assert_eq!(by_moment(&rows(output)), wanted);
    }
}
