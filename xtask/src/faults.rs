//! `cargo xtask faults`: what becomes of work when something fails beside it, over each backend, as one table.

use std::time::Duration;

use crate::Result;
use crate::process::{self, Output};

/// What a build and all of it may take.
const LIMIT: Duration = Duration::from_secs(60 * 60);

/// One run: backend, trouble, moment, how transfers ended, and three times.
type Row<'a> = [&'a str; 7];

/// Has every trouble at every moment over each backend, or those that are named; false if anything was wrong.
pub(crate) fn run(only: &[String]) -> Result<bool> {
    let mut cargo =
        process::cargo(["test", "--release", "--package", "kvx-transfer", "--test", "faults", "--"]);
    cargo.arg("--nocapture").args(only).env("KVX_FAULTS_ALL", "1");
    let finished = process::run(cargo, LIMIT, Output::Shown)?;
    println!("\n{}\n{}", table(&rows(&finished.output)), finished.end);
    Ok(finished.succeeded())
}

/// The rows among what the program wrote.
fn rows(output: &str) -> Vec<Row<'_>> {
    let row = |line| {
        let (_, cells) = str::split_once(line, "| ")?;
        let cells: Vec<&str> = cells.trim().trim_end_matches('|').split('|').map(str::trim).collect();
        cells.try_into().ok()
    };
    output.lines().filter_map(row).collect()
}

/// A line for each trouble and moment, a column for each backend: how transfers ended, and after how many ms; when
/// their memory was free; when work went on.
fn table(rows: &[Row<'_>]) -> String {
    let mut backends: Vec<&str> = Vec::new();
    let mut lines: Vec<[&str; 2]> = Vec::new();
    for row in rows {
        if !backends.contains(&row[0]) {
            backends.push(row[0]);
        }
        if !lines.contains(&[row[1], row[2]]) {
            lines.push([row[1], row[2]]);
        }
    }
    let mut text = format!("| the peer is | this side is | {} |\n", backends.join(" | "));
    text += &format!("|---|---|{}\n", "---|".repeat(backends.len()));
    for line in lines {
        let cell = |backend: &&str| {
            let row = rows.iter().find(|row| row[0] == *backend && row[1..3] == line);
            row.map_or_else(String::new, |[.., ended, after, settled, works]| {
                format!("{ended}; {after}, {settled}, {works}")
            })
        };
        let cells: Vec<String> = backends.iter().map(cell).collect();
        text += &format!("| {} | {} | {} |\n", line[0], line[1], cells.join(" | "));
    }
    text
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
        assert_eq!(table(&rows(output)), wanted);
    }
}
