//! The figures of a point, and their printed form.

use std::io::Write;

use serde::Serialize;

use super::machine::{Machine, unix_time};
use super::points::{Backing, BenchOp, Pattern, Point, Wait, name};
use super::rounds::{Ratio, Round, median, quantile, round, significant};
use crate::{Result, bytes};

/// The fewest rounds whose median is printed alone; for fewer, the number of rounds is printed with
/// it.
pub(crate) const ENOUGH_ROUNDS: usize = 11;

/// The meaning of the table's columns.
const EXPLANATION: &str = "\
GB/s    1e9 bytes per second: the median of the rounds.
LIMIT   The same blocks moved without kvx, in rounds between kvx's: memcpy, bare sockets and so on.
RATIO   kvx's GB/s divided by the limit's in the same round: 1.00 is as fast as without kvx, 0.50
        takes twice the time. In brackets the least and the greatest of the rounds.
us      Microseconds: p50 and p99 of a transfer; to post it; to build its plan, once.
CPU     Seconds of CPU time of both processes for 1e9 bytes.";

/// One line of output. The order of the fields is part of the format: new ones go to the end.
#[derive(Debug, Serialize)]
pub(crate) struct Figures {
    pub(super) backend: &'static str,
    pub(super) op: BenchOp,
    pub(super) block: u64,
    pub(super) count: u32,
    pub(super) pattern: Pattern,
    pub(super) memory: Backing,
    pub(super) wait: Wait,
    pub(super) bytes: u64,
    /// 1e9 bytes per second, the median of the rounds.
    pub(super) gbps: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) post_p50_us: f64,
    pub(super) plan_us: f64,
    /// CPU seconds of both processes per 1e9 bytes.
    pub(super) cpu_s_per_gb: f64,
    pub(super) limit_name: Option<&'static str>,
    pub(super) limit_gbps: Option<f64>,
    /// The median of the ratios of each round.
    pub(super) ratio: Option<f64>,
    pub(super) ratio_min: Option<f64>,
    pub(super) ratio_max: Option<f64>,
    /// True if all bytes arrived correctly.
    pub(crate) verified: bool,
    pub(super) rounds: usize,
    pub(super) limit_p50_us: Option<f64>,
    /// The number of transfers until the same blocks repeat.
    pub(super) lists: u32,
    /// The rate of the best round.
    pub(super) best_gbps: f64,
    pub(super) limit_best_gbps: Option<f64>,
    /// The rate and the median time of each round, in the order of the rounds.
    pub(super) round_gbps: Vec<f64>,
    pub(super) round_p50_us: Vec<f64>,
    /// The limit's rates in the same rounds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) limit_round_gbps: Vec<f64>,
    /// Seconds since 1970, when the point had been measured.
    pub(super) unix_time: u64,
    pub(super) machine: &'static Machine,
    /// Limits of other parts of the path, and further measurements.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) others: Vec<OtherLimit>,
    #[serde(flatten)]
    pub(super) beside: Option<BesideFigures>,
}

/// A further limit.
#[derive(Debug, Serialize)]
pub(super) struct OtherLimit {
    pub(super) name: &'static str,
    pub(super) gbps: f64,
    /// The ratio of kvx's rate to this limit's.
    pub(super) ratio: f64,
}

/// The figures of a companion program.
#[derive(Debug, Serialize)]
pub(super) struct BesideFigures {
    pub(super) beside_name: String,
    pub(super) beside_gbps: f64,
    pub(super) beside_ratio: f64,
    pub(super) beside_ratio_min: f64,
    pub(super) beside_ratio_max: f64,
    pub(super) beside_round_gbps: Vec<f64>,
}

/// The measurements of a point.
#[derive(Default)]
pub(crate) struct Measurements {
    pub(crate) ours: Vec<Round>,
    /// Rounds of the limits that bound the point: the slowest one is its limit.
    pub(crate) limits: Vec<(&'static str, Vec<Round>)>,
    /// Rounds of limits that are only shown.
    pub(crate) others: Vec<(&'static str, Vec<Round>)>,
    pub(crate) beside: Option<(String, Vec<Round>)>,
    /// Seconds to build each plan.
    pub(crate) plans: Vec<f64>,
    /// CPU seconds of both processes, in kvx's rounds.
    pub(crate) cpu_seconds: f64,
    pub(crate) verified: bool,
}

impl Figures {
    pub(crate) fn of(point: &Point, measured: &Measurements) -> Result<Self> {
        let shape = point.shape;
        let Measurements { ours, limits, others, beside, plans, cpu_seconds, verified } = measured;
        let rates = |rounds: &[Round]| -> Vec<f64> {
            rounds.iter().map(|round| shape.bytes() as f64 / round.seconds_each() / 1e9).collect()
        };
        let each = |rounds: &[Round]| -> Vec<f64> {
            rates(rounds).into_iter().map(|rate| significant(rate, 5)).collect()
        };
        let rate = |rounds: &[Round]| median(rates(rounds));
        let best = |rounds: &[Round]| rates(rounds).into_iter().reduce(f64::max);
        let us = |values: &dyn Fn(&Round) -> Vec<f64>, part| {
            quantile(ours.iter().flat_map(values), part).map(|seconds| round(seconds * 1e6, 2))
        };
        let missing = || format!("no round of {point} was measured");
        let times: u64 = ours.iter().map(|round| round.times).sum();
        let by_rate = |a: &&(&str, Vec<Round>), b: &&(&str, Vec<Round>)| {
            f64::total_cmp(&rate(&a.1).unwrap_or_default(), &rate(&b.1).unwrap_or_default())
        };
        let limit = limits.iter().min_by(by_rate);
        let faster =
            limits.iter().filter(|(name, _)| limit.is_some_and(|(least, _)| least != name));
        let others = faster.chain(others).filter_map(|(name, rounds)| {
            Some(OtherLimit {
                name,
                gbps: round(rate(rounds)?, 3),
                ratio: round(Ratio::of(ours, rounds)?.median, 3),
            })
        });
        let ratio = limit.and_then(|(_, rounds)| Ratio::of(ours, rounds));
        let limit_p50 = limit.and_then(|(_, rounds)| {
            quantile(rounds.iter().flat_map(|round| round.each.iter().copied()), 0.5)
        });
        let beside = match beside {
            None => None,
            Some((name, rounds)) => {
                let ratio = Ratio::of(ours, rounds).ok_or_else(missing)?;
                Some(BesideFigures {
                    beside_name: name.clone(),
                    beside_gbps: round(rate(rounds).ok_or_else(missing)?, 3),
                    beside_ratio: round(ratio.median, 3),
                    beside_ratio_min: round(ratio.min, 3),
                    beside_ratio_max: round(ratio.max, 3),
                    beside_round_gbps: each(rounds),
                })
            }
        };
        Ok(Figures {
            backend: point.backend,
            op: point.op,
            block: shape.block,
            count: shape.count,
            pattern: shape.pattern,
            memory: point.memory,
            wait: point.wait,
            bytes: shape.bytes(),
            gbps: round(rate(ours).ok_or_else(missing)?, 3),
            p50_us: us(&|round| round.each.clone(), 0.5).ok_or_else(missing)?,
            p99_us: us(&|round| round.each.clone(), 0.99).ok_or_else(missing)?,
            post_p50_us: us(&|round| round.posts.clone(), 0.5).ok_or_else(missing)?,
            plan_us: round(median(plans.iter().copied()).ok_or_else(missing)? * 1e6, 2),
            cpu_s_per_gb: round(cpu_seconds / (times as f64 * shape.bytes() as f64 / 1e9), 3),
            limit_name: limit.map(|(name, _)| *name),
            limit_gbps: limit.and_then(|(_, rounds)| rate(rounds)).map(|rate| round(rate, 3)),
            ratio: ratio.map(|ratio| round(ratio.median, 3)),
            ratio_min: ratio.map(|ratio| round(ratio.min, 3)),
            ratio_max: ratio.map(|ratio| round(ratio.max, 3)),
            verified: *verified,
            rounds: ours.len(),
            limit_p50_us: limit_p50.map(|seconds| round(seconds * 1e6, 2)),
            lists: shape.lists,
            best_gbps: round(best(ours).ok_or_else(missing)?, 3),
            limit_best_gbps: limit.and_then(|(_, rounds)| best(rounds)).map(|rate| round(rate, 3)),
            round_gbps: each(ours),
            round_p50_us: ours
                .iter()
                .filter_map(|round| quantile(round.each.iter().copied(), 0.5))
                .map(|seconds| significant(seconds * 1e6, 5))
                .collect(),
            limit_round_gbps: limit.map_or_else(Vec::new, |(_, rounds)| each(rounds)),
            unix_time: unix_time(),
            machine: Machine::here(),
            others: others.collect(),
            beside,
        })
    }

    /// Formats the figures as a line of the table.
    fn row(&self) -> String {
        let limit =
            match (self.limit_name, self.limit_gbps, self.ratio, self.ratio_min, self.ratio_max) {
                (Some(name), Some(gbps), Some(ratio), Some(min), Some(max)) => {
                    let of = if self.rounds < ENOUGH_ROUNDS {
                        format!(" of {}", self.rounds)
                    } else {
                        String::new()
                    };
                    format!("{gbps:>10.2} {name:<15} {ratio:>5.2} ({min:.2} to {max:.2}{of})")
                }
                _ => format!("{:>10} none", "-"),
            };
        let beside = self.beside.as_ref().map_or_else(String::new, |beside| {
            let BesideFigures { beside_name, beside_gbps, beside_ratio, beside_ratio_min, beside_ratio_max, .. } = beside;
            format!(
                "; {beside_name} {beside_gbps:.2}, {beside_ratio:.2} ({beside_ratio_min:.2} to {beside_ratio_max:.2})"
            )
        });
        let other = |other: &OtherLimit| format!("; {} {:.2}", other.name, other.gbps);
        let others: String = self.others.iter().map(other).collect();
        let verified = if self.verified { "" } else { "; WRONG BYTES" };
        format!(
            "{:<9} {:<5} {:>8} {:>6} {:<9} {:<11} {:<5} {:>7.2} {:>9} {:>9} {:>8} {:>8} {:>8.3} {limit}{others}{beside}{verified}",
            self.backend,
            name(self.op),
            bytes::show(self.block),
            self.count,
            name(self.pattern),
            name(self.memory),
            name(self.wait),
            self.gbps,
            self.p50_us,
            self.p99_us,
            self.post_p50_us,
            self.plan_us,
            self.cpu_s_per_gb
        )
    }
}

/// The output for figures.
pub(crate) struct Output<'a> {
    out: &'a mut dyn Write,
    json: bool,
    /// True once the table has its heading.
    head: bool,
}

impl<'a> Output<'a> {
    /// Creates an output of JSON lines, or of a table.
    pub(crate) fn new(out: &'a mut dyn Write, json: bool) -> Self {
        Output { out, json, head: false }
    }

    /// Returns true if the output is JSON lines.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Prints a line for people.
    pub(crate) fn line(&mut self, line: &str) -> Result<()> {
        Ok(writeln!(self.out, "{line}")?)
    }

    /// Prints the figures of one point.
    pub(crate) fn figures(&mut self, figures: &Figures) -> Result<()> {
        if self.json {
            return self.record(figures, "");
        }
        if !self.head {
            self.head = true;
            writeln!(
                self.out,
                "{:<9} {:<5} {:>8} {:>6} {:<9} {:<11} {:<5} {:>7} {:>9} {:>9} {:>8} {:>8} {:>8} {:>10} {:<15} RATIO",
                "BACKEND",
                "OP",
                "BLOCK",
                "COUNT",
                "PATTERN",
                "MEMORY",
                "WAIT",
                "GB/s",
                "p50 us",
                "p99 us",
                "post us",
                "plan us",
                "CPU s/GB",
                "LIMIT GB/s",
                ""
            )?;
        }
        writeln!(self.out, "{}", figures.row())?;
        Ok(self.out.flush()?)
    }

    /// Explains the table that was printed, if one was.
    pub(crate) fn explain(&mut self) -> Result<()> {
        if self.head {
            writeln!(self.out, "\n{EXPLANATION}")?;
        }
        Ok(self.out.flush()?)
    }

    /// Prints a line of another form: the record as JSON, or the sentence for people.
    pub(crate) fn record(&mut self, record: &impl Serialize, sentence: &str) -> Result<()> {
        if self.json {
            writeln!(self.out, "{}", serde_json::to_string(record)?)?;
        } else {
            writeln!(self.out, "{sentence}")?;
        }
        Ok(self.out.flush()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(seconds: f64) -> Vec<Round> {
        let round = Round { times: 2, seconds, each: vec![seconds / 2.0; 2], posts: vec![1e-6; 2] };
        vec![round; 3]
    }

    fn figures() -> Figures {
        let measured = Measurements {
            ours: rounds(0.002),
            limits: vec![("sockets", rounds(0.0005)), ("memcpy", rounds(0.001))],
            others: vec![("a call a block", rounds(0.008))],
            beside: Some(("other".into(), rounds(0.004))),
            plans: vec![1e-4],
            cpu_seconds: 0.006,
            verified: true,
        };
        Figures::of(&Point::of_the_document(), &measured).unwrap()
    }

    #[test]
    fn the_fields_are_in_the_documented_order() {
        let text = serde_json::to_string(&figures()).unwrap();
        let order = "backend op block count pattern memory wait bytes gbps p50_us p99_us post_p50_us plan_us \
                     cpu_s_per_gb limit_name limit_gbps ratio ratio_min ratio_max verified";
        let mut rest = text.as_str();
        for field in order.split(' ') {
            let key = format!("\"{field}\":");
            rest =
                &rest[rest.find(&key).unwrap_or_else(|| panic!("{field} in {text}")) + key.len()..];
        }
    }

    #[test]
    fn figures_are_computed_from_the_rounds() {
        let figures = figures();
        assert_eq!(
            (figures.gbps, figures.limit_gbps, figures.ratio),
            (4.194, Some(8.389), Some(0.5))
        );
        assert_eq!(
            (figures.p50_us, figures.limit_p50_us, figures.cpu_s_per_gb),
            (1000.0, Some(500.0), 0.238)
        );
        assert_eq!(figures.beside.as_ref().unwrap().beside_ratio, 2.0);
        let row = figures.row();
        let others: Vec<_> = figures.others.iter().map(|other| (other.name, other.ratio)).collect();
        assert_eq!(others, [("sockets", 0.25), ("a call a block", 4.0)]);
        assert!(
            row.contains("0.50 (0.50 to 0.50 of 3); sockets 16.78; a call a block 1.05; ")
                && row.contains("other 2.10, 2.00"),
            "{row}"
        );
    }
}
