//! The figures of a replay as a table.

use std::io::{self, Write};

use super::statistics::{Percentiles, ServiceLevel, Summary};

/// A row: its name, and a cell for each endpoint.
pub(super) type Row = (String, Vec<String>);

/// Returns the rows of the table, the heading first.
pub(super) fn rows(summaries: &[Summary], level: &ServiceLevel) -> Vec<Row> {
    let row = |name: String, cell: &dyn Fn(&Summary) -> String| -> Row {
        (name, summaries.iter().map(cell).collect())
    };
    let mut rows = vec![
        row(String::new(), &|one| one.url.clone()),
        row("requests".to_owned(), &|one| one.requests.to_string()),
        row("not sent".to_owned(), &|one| one.not_sent.to_string()),
    ];
    let mut kinds: Vec<&String> = summaries.iter().flat_map(|one| one.errors.keys()).collect();
    kinds.sort();
    kinds.dedup();
    rows.push(row("failed".to_owned(), &|one| one.failed().to_string()));
    for kind in kinds {
        let count = |one: &Summary| one.errors.get(kind).copied().unwrap_or(0).to_string();
        rows.push(row(format!("  {kind}"), &count));
    }
    let times: [(&str, fn(&Summary) -> Option<Percentiles>); 4] = [
        ("first token", |one| one.ttft_ms),
        ("per token", |one| one.per_token_ms),
        ("whole answer", |one| one.total_ms),
        ("sent late", |one| one.late_ms),
    ];
    for (name, of) in times {
        for (percentile, at) in PERCENTILES {
            let cell = |one: &Summary| of(one).map_or("-".to_owned(), |times| figure(at(&times)));
            rows.push(row(format!("{name}, {percentile}, ms"), &cell));
        }
    }
    let ms = |time: std::time::Duration| figure(time.as_secs_f64() * 1e3);
    let (first, token) = (ms(level.first_token), ms(level.per_token));
    rows.extend([
        row("answers/s".to_owned(), &|one| figure(one.answers_per_second)),
        row("generated tokens/s".to_owned(), &|one| figure(one.tokens_per_second)),
        row(format!("goodput/s ({first} ms, {token} ms)"), &|one| figure(one.goodput_per_second)),
        row("  part of the requests".to_owned(), &|one| percent(Some(one.within_level))),
        row("prompts cached, by answers".to_owned(), &|one| percent(one.cached_part)),
    ]);
    if summaries.iter().any(|one| one.cache_hit_part.is_some()) {
        rows.push(row("prompts cached, by metrics".to_owned(), &|one| percent(one.cache_hit_part)));
    }
    rows.push(row("sent late, most, ms".to_owned(), &|one| figure(one.most_late_ms)));
    rows
}

const PERCENTILES: [(&str, fn(&Percentiles) -> f64); 3] =
    [("p50", |times| times.p50), ("p90", |times| times.p90), ("p99", |times| times.p99)];

/// Returns a number with at most three significant digits after those before the point.
fn figure(value: f64) -> String {
    match value {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn percent(part: Option<f64>) -> String {
    part.map_or("-".to_owned(), |part| format!("{:.1} %", 100.0 * part))
}

/// Prints rows in columns.
pub(super) fn print(rows: &[Row], out: &mut impl Write) -> io::Result<()> {
    let length = |text: &String| text.chars().count();
    let first = rows.iter().map(|(name, _)| length(name)).max().unwrap_or(0);
    let columns = rows.first().map_or(0, |(_, cells)| cells.len());
    let widths: Vec<usize> = (0..columns)
        .map(|at| rows.iter().map(|(_, cells)| length(&cells[at])).max().unwrap_or(0))
        .collect();
    for (name, cells) in rows {
        write!(out, "{name:first$}")?;
        for (cell, width) in cells.iter().zip(&widths) {
            write!(out, "  {cell:>width$}")?;
        }
        writeln!(out)?;
    }
    Ok(())
}
