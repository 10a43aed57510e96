//! `kvx bench compare`: the points of two runs, before and after a change or on two machines.
//!
//! The interval of a row is a percentile bootstrap of the ratio of medians over both files' rounds. A
//! file with several runs is resampled by runs first: rounds of one run have more in common. Its
//! resamples depend on a fixed seed, so that the same files give the same verdicts.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use serde::{Deserialize, Serialize};

use super::machine::Machine;
use super::points::{Backing, BenchOp, Pattern, Random, Wait, name};
use super::rounds::{median, quantile, round, significant};
use crate::printable::printable;
use crate::{Result, bytes};

/// The fewest rounds of a side with which an interval of 95 % exists: with n rounds, the median
/// lies outside all of them with a probability of 2 / 2^n.
const LEAST_ROUNDS: usize = 6;
const RESAMPLES: usize = 4000;
const SEED: u64 = 1;
/// The longest line of a file. Lines of `kvx bench` have about 2,000 bytes.
const LONGEST_LINE: u64 = 1 << 20;
/// The most points of a file.
const MOST_POINTS: usize = 100_000;
/// The most rounds of a point, and machines of a file.
const MOST_ROUNDS: usize = 10_000;
const MOST_MACHINES: usize = 100;
/// The rates that a machine may have, GB/s.
const RATES: std::ops::RangeInclusive<f64> = 1e-9..=1e9;

/// The arguments of `kvx bench compare`.
#[derive(Args)]
pub(crate) struct CompareArguments {
    /// The JSON lines of the first run: `kvx bench --json > A.json`. Several runs in one file, one
    /// after the other, count as one with more rounds.
    #[arg(value_name = "A.json")]
    first: PathBuf,
    /// The JSON lines of the second run.
    #[arg(value_name = "B.json")]
    second: PathBuf,
    /// Exit with 1 if B is slower than A by more than this at any point, and the interval shows
    /// that it is slower, or if B lacks a point of A.
    #[arg(long, value_name = "PERCENT")]
    fail_if_slower: Option<f64>,
    /// Print JSON lines instead of a table.
    #[arg(long)]
    json: bool,
}

/// The properties that two points must share to be compared.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct PointKey {
    backend: String,
    op: BenchOp,
    block: u64,
    count: u32,
    pattern: Pattern,
    memory: Backing,
    wait: Wait,
}

/// The part of a line of `kvx bench --json` that a comparison needs.
#[derive(Deserialize)]
struct MeasuredPoint {
    #[serde(flatten)]
    key: PointKey,
    verified: bool,
    #[serde(default)]
    round_gbps: Vec<f64>,
    #[serde(default)]
    machine: Machine,
}

/// The runs of a file.
#[derive(Debug, Default)]
struct Runs {
    /// The rounds of each run of each point, GB/s.
    points: BTreeMap<PointKey, Vec<Vec<f64>>>,
    machines: Vec<Machine>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Verdict {
    Faster,
    Slower,
    NoDifferenceShown,
    OnlyInA,
    OnlyInB,
}

impl Verdict {
    fn text(self) -> &'static str {
        match self {
            Verdict::Faster => "faster",
            Verdict::Slower => "slower",
            Verdict::NoDifferenceShown => "no difference shown",
            Verdict::OnlyInA => "only in A",
            Verdict::OnlyInB => "only in B",
        }
    }
}

/// A line of output.
#[derive(Debug, Serialize)]
struct ComparedPoint {
    mode: &'static str,
    #[serde(flatten)]
    key: PointKey,
    /// Medians, 1e9 bytes per second.
    a_gbps: Option<f64>,
    b_gbps: Option<f64>,
    /// B's median divided by A's.
    #[serde(skip)]
    exact: Option<f64>,
    /// The same, rounded, with the ends of its interval.
    ratio: Option<f64>,
    ratio_low: Option<f64>,
    ratio_high: Option<f64>,
    verdict: Verdict,
    a_rounds: usize,
    b_rounds: usize,
}

/// Runs the command.
pub(crate) fn run(arguments: &CompareArguments, out: &mut dyn Write) -> Result<()> {
    if let Some(percent) = arguments.fail_if_slower
        && !(0.0..100.0).contains(&percent)
    {
        return Err(format!("--fail-if-slower {percent}: write a percentage below 100").into());
    }
    let (a, b) = (read(&arguments.first)?, read(&arguments.second)?);
    let rows = compared(&a, &b);
    if !rows.iter().any(|row| row.ratio.is_some()) {
        return Err("the files have no point in common; measure both with the same flags".into());
    }
    if arguments.json {
        for row in &rows {
            writeln!(out, "{}", serde_json::to_string(row)?)?;
        }
    } else {
        print(arguments, (&a, &b), &rows, out)?;
    }
    out.flush()?;
    let Some(percent) = arguments.fail_if_slower else { return Ok(()) };
    let failed = rows.iter().filter(|row| {
        row.verdict == Verdict::Slower && row.exact.is_some_and(|r| r < 1.0 - percent / 100.0)
    });
    let lost = rows.iter().filter(|row| row.verdict == Verdict::OnlyInA).count();
    match failed.count() {
        0 if lost == 0 => Ok(()),
        0 => Err(format!("{lost} of A's points are not in B, so that they may be slower").into()),
        1 => Err(format!("1 point is slower by more than {percent} %").into()),
        count => Err(format!("{count} points are slower by more than {percent} %").into()),
    }
}

fn read(path: &Path) -> Result<Runs> {
    let file = File::open(path).map_err(|error| {
        format!("cannot read {}: {error}; write it by `kvx bench --json > FILE`", path.display())
    })?;
    runs(BufReader::new(file)).map_err(|why| {
        let measure = "write it by `kvx bench --json > FILE`";
        format!("{}: {why}; {measure}", path.display()).into()
    })
}

/// Reads lines. Those of other measurements, such as `--idle`, are left out.
fn runs(mut lines: impl std::io::BufRead) -> Result<Runs> {
    let mut runs = Runs::default();
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        if lines.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        let wrong = |why: &dyn std::fmt::Display| format!("line {number}: {why}");
        if line.len() as u64 == LONGEST_LINE {
            return Err(wrong(&"longer than any line of kvx bench").into());
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        let value: serde_json::Value =
            serde_json::from_slice(&line).map_err(|error| wrong(&error))?;
        if value.get("mode").is_some() {
            continue;
        }
        let point: MeasuredPoint = serde_json::from_value(value).map_err(|error| wrong(&error))?;
        let rounds = &point.round_gbps;
        if !rounds.iter().all(|rate| RATES.contains(rate)) {
            let (low, high) = (RATES.start(), RATES.end());
            return Err(wrong(&format!(
                "a rate in round_gbps is not between {low:e} and {high:e}"
            ))
            .into());
        }
        if !point.verified {
            return Err(wrong(&"wrong bytes arrived at this point, which has no speed").into());
        }
        let known = runs.points.entry(point.key).or_default();
        known.extend((!rounds.is_empty()).then(|| rounds.clone()));
        if count(known) > MOST_ROUNDS {
            return Err(wrong(&format!("more than {MOST_ROUNDS} rounds of one point")).into());
        }
        if runs.points.len() > MOST_POINTS {
            return Err(wrong(&format!("more than {MOST_POINTS} points")).into());
        }
        if !runs.machines.contains(&point.machine) {
            runs.machines.push(point.machine);
        }
        if runs.machines.len() > MOST_MACHINES {
            return Err(wrong(&format!("more than {MOST_MACHINES} machines")).into());
        }
    }
    if runs.points.is_empty() {
        return Err("it has no points".into());
    }
    let few = runs.points.iter().find(|(_, rounds)| count(rounds) < LEAST_ROUNDS);
    if let Some((PointKey { backend, op, block, count, .. }, rounds)) = few {
        let (op, block, rounds) = (name(*op), bytes::show(*block), self::count(rounds));
        return Err(format!(
            "{backend} {op} {block} x{count} has {rounds} rounds (round_gbps), and an interval needs \
             {LEAST_ROUNDS}"
        )
        .into());
    }
    Ok(runs)
}

/// Returns the number of rounds of all runs.
fn count(runs: &[Vec<f64>]) -> usize {
    runs.iter().map(Vec::len).sum()
}

fn compared(a: &Runs, b: &Runs) -> Vec<ComparedPoint> {
    let only_b = b.points.keys().filter(|key| !a.points.contains_key(key));
    let keys = a.points.keys().chain(only_b);
    keys.map(|key| {
        let (a, b) = (a.points.get(key), b.points.get(key));
        let rate = |runs: Option<&Vec<Vec<f64>>>| {
            runs.and_then(|runs| median(runs.iter().flatten().copied()))
                .map(|rate| significant(rate, 5))
        };
        let ratio = a.zip(b).and_then(|(a, b)| RatioOfMedians::of(a, b));
        let verdict = match (&ratio, a.is_some()) {
            (Some(ratio), _) if ratio.low > 1.0 => Verdict::Faster,
            (Some(ratio), _) if ratio.high < 1.0 => Verdict::Slower,
            (Some(_), _) => Verdict::NoDifferenceShown,
            (None, true) => Verdict::OnlyInA,
            (None, false) => Verdict::OnlyInB,
        };
        let part = |of: fn(&RatioOfMedians) -> f64| ratio.as_ref().map(|ratio| round(of(ratio), 4));
        ComparedPoint {
            mode: "compare",
            key: key.clone(),
            a_gbps: rate(a),
            b_gbps: rate(b),
            exact: ratio.as_ref().map(|ratio| ratio.median),
            ratio: part(|ratio| ratio.median),
            ratio_low: part(|ratio| ratio.low),
            ratio_high: part(|ratio| ratio.high),
            verdict,
            a_rounds: a.map_or(0, |runs| count(runs)),
            b_rounds: b.map_or(0, |runs| count(runs)),
        }
    })
    .collect()
}

/// The ratio of two medians, with its interval of 95 %.
#[derive(Debug)]
struct RatioOfMedians {
    median: f64,
    low: f64,
    high: f64,
}

impl RatioOfMedians {
    fn of(a: &[Vec<f64>], b: &[Vec<f64>]) -> Option<Self> {
        let mut random = Random::new(SEED);
        let mut picked = Vec::new();
        let mut resampled = |runs: &[Vec<f64>]| {
            picked.clear();
            let mut below = |count: usize| (random.next() % count as u64) as usize;
            for turn in 0..runs.len() {
                let run = if runs.len() > 1 { &runs[below(runs.len())] } else { &runs[turn] };
                picked.extend((0..run.len()).map(|_| run[below(run.len())]));
            }
            median(picked.iter().copied())
        };
        let mut ratios = Vec::with_capacity(RESAMPLES);
        for _ in 0..RESAMPLES {
            ratios.push(resampled(b)? / resampled(a)?);
        }
        let of_all = |runs: &[Vec<f64>]| median(runs.iter().flatten().copied());
        Some(RatioOfMedians {
            median: of_all(b)? / of_all(a)?,
            low: quantile(ratios.iter().copied(), 0.025)?,
            high: quantile(ratios, 0.975)?,
        })
    }
}

fn print(
    arguments: &CompareArguments,
    (a, b): (&Runs, &Runs),
    rows: &[ComparedPoint],
    out: &mut dyn Write,
) -> Result<()> {
    let lacks = |one: &Runs, other: &Runs| {
        other.machines.iter().any(|machine| !one.machines.contains(machine))
    };
    let differ = lacks(a, b) || lacks(b, a);
    for (letter, path, runs) in [("A", &arguments.first, a), ("B", &arguments.second, b)] {
        write!(out, "{letter}: {}", path.display())?;
        for machine in &runs.machines {
            let Machine { kvx, cpu, cores, memory, kernel } = machine;
            let memory = *memory as f64 / f64::from(1 << 30);
            let words = format!("kvx {kvx} on {cpu}, {cores} cores, {memory:.1} GiB, {kernel}");
            write!(out, ", {}", printable(&words))?;
        }
        writeln!(out)?;
    }
    if differ {
        writeln!(out, "The machines or versions differ.")?;
    }
    writeln!(
        out,
        "\n{:<9} {:<5} {:>8} {:>6} {:<9} {:<11} {:<5} {:>8} {:>8} {:>6} {:<16} B IS",
        "BACKEND",
        "OP",
        "BLOCK",
        "COUNT",
        "PATTERN",
        "MEMORY",
        "WAIT",
        "A GB/s",
        "B GB/s",
        "B/A",
        "95 % INTERVAL"
    )?;
    let rate = |rate: Option<f64>| rate.map_or("-".to_owned(), |rate| format!("{rate:.3}"));
    for row in rows {
        let PointKey { backend, op, block, count, pattern, memory, wait } = &row.key;
        let interval = match (row.ratio_low, row.ratio_high) {
            (Some(low), Some(high)) => format!("{low:.3} to {high:.3}"),
            _ => "-".to_owned(),
        };
        writeln!(
            out,
            "{:<9} {:<5} {:>8} {count:>6} {:<9} {:<11} {:<5} {:>8} {:>8} {:>6} {interval:<16} {}",
            printable(backend),
            name(*op),
            bytes::show(*block),
            name(*pattern),
            name(*memory),
            name(*wait),
            rate(row.a_gbps),
            rate(row.b_gbps),
            row.ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.3}")),
            row.verdict.text()
        )?;
    }
    let all = [
        Verdict::Faster,
        Verdict::Slower,
        Verdict::NoDifferenceShown,
        Verdict::OnlyInA,
        Verdict::OnlyInB,
    ];
    let counts = all
        .map(|verdict| (rows.iter().filter(|row| row.verdict == verdict).count(), verdict.text()));
    let counts = counts.iter().filter(|(count, _)| *count > 0);
    let counts: Vec<_> = counts.map(|(count, verdict)| format!("{count} {verdict}")).collect();
    writeln!(
        out,
        "\nB at {} points: {}.\n\
         B/A: B's median of the rounds divided by A's. The interval is a bootstrap over the rounds;\n\
         a difference is shown if 1 lies outside. Where nothing changed, about 1 point of 20 shows\n\
         one by chance. Rounds of one run do not show what differs between runs: measure A and B\n\
         five times or more in turn, and append the runs to their files.",
        rows.len(),
        counts.join(", ")
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(block: u64, rates: &[f64]) -> String {
        let point = serde_json::json!({
            "backend": "SHM", "op": "read", "block": block, "count": 8, "pattern": "scattered",
            "memory": "kvx", "wait": "block", "gbps": 1.0, "verified": true, "round_gbps": rates,
        });
        format!("{point}\n")
    }

    /// Returns rates around `rate` with a spread of about 10 %.
    fn rates(rate: f64, random: &mut Random) -> Vec<f64> {
        let mut unit = || (random.next() >> 11) as f64 / (1u64 << 53) as f64;
        (0..11).map(|_| rate * (0.9 + 0.1 * (unit() + unit()))).collect()
    }

    #[test]
    fn verdicts_are_right_and_depend_on_nothing_but_the_files() {
        let random = &mut Random::new(7);
        let mut files = [String::new(), String::new()];
        for (block, ratio) in [(8, 1.0), (16, 1.5), (32, 0.5)] {
            files[0] += &line(block, &rates(2.0, random));
            files[1] += &line(block, &rates(2.0 * ratio, random));
        }
        files[0] += &line(64, &[1.0; 6]);
        files[1] += &line(128, &[1.0; 6]);
        let read = |at: usize| runs(files[at].as_bytes()).unwrap();
        let rows = compared(&read(0), &read(1));
        let verdicts: Vec<_> = rows.iter().map(|row| (row.key.block, row.verdict)).collect();
        assert_eq!(
            verdicts,
            [
                (8, Verdict::NoDifferenceShown),
                (16, Verdict::Faster),
                (32, Verdict::Slower),
                (64, Verdict::OnlyInA),
                (128, Verdict::OnlyInB)
            ]
        );
        for (row, ratio) in rows.iter().zip([1.0, 1.5, 0.5]) {
            let (low, high) = (row.ratio_low.unwrap(), row.ratio_high.unwrap());
            assert!(low <= ratio && ratio <= high && low < high, "{row:?}");
        }
        let again = compared(&read(0), &read(1));
        assert_eq!(format!("{rows:?}"), format!("{again:?}"));
    }

    /// An interval that is too narrow shows differences where there are none.
    #[test]
    fn equal_machines_differ_at_about_one_point_of_twenty() {
        let random = &mut Random::new(3);
        let pairs = 300;
        let differs = (0..pairs).filter(|_| {
            let (a, b) = ([rates(2.0, random)], [rates(2.0, random)]);
            let ratio = RatioOfMedians::of(&a, &b).unwrap();
            ratio.low > 1.0 || ratio.high < 1.0
        });
        let differs = differs.count();
        assert!((3..=pairs * 9 / 100).contains(&differs), "{differs} of {pairs}");
    }

    /// Runs of one machine differ by more than their rounds do, by the place of the memory.
    #[test]
    fn equal_machines_with_runs_that_differ_are_not_told_apart_often() {
        let random = &mut Random::new(5);
        let (pairs, runs) = (40, 6);
        let mut file = || -> Vec<Vec<f64>> {
            let mut run = || {
                let place = rates(2.0, random)[0]; // within 10 %
                rates(place, random)
            };
            (0..runs).map(|_| run()).collect()
        };
        let differs = (0..pairs).filter(|_| {
            let ratio = RatioOfMedians::of(&file(), &file()).unwrap();
            ratio.low > 1.0 || ratio.high < 1.0
        });
        let differs = differs.count();
        assert!(differs <= pairs * 20 / 100, "{differs} of {pairs}");
    }

    #[test]
    fn runs_in_one_file_stay_apart() {
        let twice = line(8, &[1.0; 11]) + "\n{\"mode\": \"idle\"}\n" + &line(8, &[2.0; 11]);
        let runs = runs(twice.as_bytes()).unwrap();
        assert_eq!(runs.points.into_values().collect::<Vec<_>>(), [[[1.0; 11], [2.0; 11]]]);
    }

    #[test]
    fn files_that_cannot_be_compared_are_rejected_with_the_line() {
        let wrong_bytes = line(8, &[1.0; 11]).replace("true", "false");
        for (file, why) in [
            (String::new(), "it has no points"),
            ("no JSON".to_owned(), "line 1: expected"),
            (line(8, &[1.0; 11]) + "{}\n", "line 2: missing field"),
            (
                line(8, &[1.0; 3]),
                "SHM read 8 bytes x8 has 3 rounds (round_gbps), and an interval needs 6",
            ),
            (line(8, &[0.0; 11]), "line 1: a rate in round_gbps is not between 1e-9 and 1e9"),
            (line(8, &[1e-320; 11]), "line 1: a rate in round_gbps is not between"),
            (line(8, &[1.0; 10_001]), "line 1: more than 10000 rounds of one point"),
            (wrong_bytes, "line 1: wrong bytes arrived"),
            ("x".repeat(2 << 20), "line 1: longer than any line"),
        ] {
            let error = runs(file.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with(why), "{error}");
        }
    }
}
