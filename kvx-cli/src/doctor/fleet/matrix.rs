//! The pairs of a fleet as a matrix.

use std::fmt::Write as _;

use kvx_proxy::{FleetTrial, PairOutcome, PairReport};

use super::super::finding::WIDTH;

/// Draws a row for each prefill instance, and a column for each decode instance. With many columns,
/// a cell is one character.
pub(super) fn text(trial: &FleetTrial) -> String {
    let mut text = String::new();
    let mut pools: Vec<&str> = Vec::new();
    for pair in &trial.pairs {
        if !pools.contains(&&*pair.pool) {
            pools.push(&pair.pool);
        }
    }
    for pool in &pools {
        let pairs: Vec<_> = trial.pairs.iter().filter(|pair| pair.pool == *pool).collect();
        if pools.len() > 1 {
            let _ = writeln!(text, "Pool {pool}");
        }
        one(&pairs, &mut text);
    }
    text
}

fn one(pairs: &[&PairReport], text: &mut String) {
    let distinct = |name: fn(&PairReport) -> &str| {
        let mut names: Vec<&str> = pairs.iter().map(|pair| name(pair)).collect();
        names.sort_unstable();
        names.dedup();
        names
    };
    let (prefills, decodes) = (distinct(|pair| &pair.prefill), distinct(|pair| &pair.decode));
    let of = |prefill: &str, decode: &str| {
        pairs.iter().find(|pair| pair.prefill == prefill && pair.decode == decode)
    };
    let names = prefills.iter().map(|name| name.chars().count()).max().unwrap_or(0) + 9;
    let cells: Vec<Vec<String>> = prefills
        .iter()
        .map(|prefill| {
            decodes
                .iter()
                .map(|decode| of(prefill, decode).map_or_else(String::new, |pair| cell(pair)))
                .collect()
        })
        .collect();
    let widest = |at: usize| {
        let heading = decodes[at].chars().count() + 7;
        cells.iter().map(|row| row[at].chars().count()).chain([heading]).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..decodes.len()).map(widest).collect();
    if names + widths.iter().map(|width| width + 2).sum::<usize>() > WIDTH {
        return symbols(&prefills, &decodes, of, names, text);
    }
    let mut heading = format!("{:names$}", "");
    for (decode, width) in decodes.iter().zip(&widths) {
        let _ = write!(heading, "  {:width$}", format!("decode {decode}"));
    }
    let _ = writeln!(text, "{}", heading.trim_end());
    for (prefill, row) in prefills.iter().zip(&cells) {
        let mut line = format!("{:names$}", format!("prefill {prefill}"));
        for (cell, width) in row.iter().zip(&widths) {
            let _ = write!(line, "  {cell:width$}");
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
}

fn symbols<'a>(
    prefills: &[&str],
    decodes: &[&str],
    of: impl Fn(&str, &str) -> Option<&'a &'a PairReport>,
    names: usize,
    text: &mut String,
) {
    for (at, decode) in decodes.iter().enumerate() {
        let _ = writeln!(text, "{:names$}  {}decode {decode}", "", "| ".repeat(at));
    }
    for prefill in prefills {
        let mut line = format!("{:names$} ", format!("prefill {prefill}"));
        for decode in decodes {
            let mark = of(prefill, decode).map_or(' ', |pair| match pair.outcome {
                PairOutcome::Moved => '+',
                PairOutcome::Computed => 'o',
                PairOutcome::Failed => 'X',
                PairOutcome::Unknown => '?',
                _ => '-',
            });
            let _ = write!(line, " {mark}");
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    let _ = writeln!(text, "+ blocks move, o no block moves, X fails, ? unknown, - not tried");
}

/// Describes a pair in a few words.
fn cell(pair: &PairReport) -> String {
    match (pair.outcome, &pair.transfer) {
        (PairOutcome::Moved, Some(moved)) => {
            let mut words = vec![match moved.bytes {
                0 => format!("{} tokens moved", moved.tokens),
                bytes => super::super::host::system::bytes(bytes),
            }];
            words.extend(rate(pair).map(|rate| format!("{:.2} GB/s", rate / 1e9)));
            words.extend((!moved.backends.is_empty()).then(|| moved.backends.join("+")));
            words.join(", ")
        }
        (PairOutcome::Computed, _) => "NO BLOCK MOVES".to_owned(),
        (PairOutcome::Failed, _) => "FAILS".to_owned(),
        (PairOutcome::Unknown, _) => "answers; unknown".to_owned(),
        _ => "not tried".to_owned(),
    }
}

/// Transfers below this are too short to measure a rate.
const LEAST: u64 = 1 << 20;

/// Returns the bytes per second of a pair's transfer, if it was long enough to tell.
pub(super) fn rate(pair: &PairReport) -> Option<f64> {
    let moved = pair.transfer.as_ref().filter(|moved| moved.bytes >= LEAST)?;
    Some(moved.bytes as f64 / moved.seconds.filter(|seconds| *seconds > 0.0)?)
}

#[cfg(test)]
mod tests {
    use kvx_proxy::Transfer;

    use super::*;

    /// Returns the pairs of one prefill instance with these outcomes.
    fn trial(outcomes: &[PairOutcome]) -> FleetTrial {
        let mut trial = FleetTrial::default();
        for (at, outcome) in outcomes.iter().enumerate() {
            let mut pair = PairReport::default();
            (pair.prefill, pair.decode) = ("p:1".to_owned(), format!("decode-{at}.example:8200"));
            pair.outcome = *outcome;
            let mut moved = Transfer::default();
            (moved.bytes, moved.seconds) = (64 << 20, Some(0.01));
            moved.backends = vec!["TCP".to_owned()];
            pair.transfer = (*outcome == PairOutcome::Moved).then_some(moved);
            trial.pairs.push(pair);
        }
        trial
    }

    #[test]
    fn few_pairs_are_described_and_many_are_characters() {
        use PairOutcome::{Computed, Failed, Moved, Unknown, Untried};
        let few = text(&trial(&[Moved, Computed]));
        assert_eq!(
            few,
            "              decode decode-0.example:8200  decode decode-1.example:8200\n\
             prefill p:1   64 MiB, 6.71 GB/s, TCP        NO BLOCK MOVES\n"
        );
        let many = text(&trial(&[Moved, Computed, Failed, Unknown, Untried]));
        let row = many.lines().find(|line| line.starts_with("prefill")).unwrap();
        assert_eq!(row, "prefill p:1   + o X ? -");
        assert!(many.contains("| | decode decode-2.example:8200\n"), "{many}");
    }
}
