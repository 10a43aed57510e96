//! A companion program, which moves the same bytes in its own rounds, alternating with those of
//! kvx. `BESIDE.md` documents the protocol.

use std::process::Command;
use std::time::{Duration, Instant};

use super::deadlines::{ANSWER_DEADLINE, DEADLINE};
use super::points::{Point, Shape, name};
use super::rounds::Round;
use crate::Result;
use crate::child::Child;

/// A running companion program.
pub(crate) struct Companion {
    child: Child,
}

/// A companion's answer to a point.
pub(crate) enum PointAnswer {
    /// The program measures the point, under this name.
    Ready(String),
    /// The program does not support the point, for this reason.
    Skips(String),
}

impl Companion {
    /// Starts the program in a shell.
    pub(crate) fn start(program: &str) -> Result<Self> {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("exec {program}")]);
        // If the program uses UCX, UCX logs to standard output by default, among the program's
        // answers.
        if std::env::var_os("UCX_LOG_FILE").is_none() {
            command.env("UCX_LOG_FILE", "stderr");
        }
        Ok(Companion { child: Child::start("the companion program", command)? })
    }

    /// Announces a point.
    pub(crate) fn announce(&mut self, point: &Point) -> Result<PointAnswer> {
        self.child.send_line(&announcement(point))?;
        let answer = self.child.receive_line(DEADLINE)?;
        match answer.split_once(' ').unwrap_or((&answer, "")) {
            ("ready", name) if !name.trim().is_empty() => {
                Ok(PointAnswer::Ready(name.trim().to_owned()))
            }
            ("skip", why) => Ok(PointAnswer::Skips(why.trim().to_owned())),
            _ => Err(format!(
                "the companion program answered {answer:?} to a point instead of `ready NAME` or \
                 `skip REASON`"
            )
            .into()),
        }
    }

    /// Runs one round of the announced point.
    pub(crate) fn round(&mut self, bytes: u64, budget: Duration) -> Result<Round> {
        let start = Instant::now();
        self.child.send_line(&format!("go {:.6}", budget.as_secs_f64()))?;
        let answer = self.child.receive_line(ANSWER_DEADLINE + budget)?;
        let round = result(&answer, bytes).ok_or_else(|| {
            format!(
                "the companion program answered {answer:?} to a round instead of \
                 `moved TIMES SECONDS` or `gbps RATE`"
            )
        })?;
        // The reported time may be less than the measured one, but never more.
        let most = start.elapsed().as_secs_f64();
        if answer.starts_with("moved") && round.seconds > most {
            return Err(format!(
                "the companion program reports {} s for a round that took only {most} s",
                round.seconds
            )
            .into());
        }
        Ok(round)
    }

    /// Ends the program.
    pub(crate) fn end(self) {
        self.child.end();
    }
}

fn announcement(point: &Point) -> String {
    let Shape { block, count, lists, pattern, seed } = point.shape;
    format!(
        "point backend={} op={} block={block} count={count} lists={lists} pattern={} seed={seed} memory={} wait={}",
        point.backend,
        name(point.op),
        name(pattern),
        name(point.memory),
        name(point.wait)
    )
}

fn result(answer: &str, bytes: u64) -> Option<Round> {
    let words: Vec<_> = answer.split_whitespace().collect();
    let number =
        |word: &str| word.parse::<f64>().ok().filter(|number| number.is_finite() && *number > 0.0);
    match words[..] {
        ["moved", times, seconds] => {
            let times = times.parse().ok().filter(|times| *times > 0)?;
            Some(Round { times, seconds: number(seconds)?, ..Round::default() })
        }
        ["gbps", rate] => Some(Round {
            times: 1,
            seconds: bytes as f64 / 1e9 / number(rate)?,
            ..Round::default()
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_announcement_is_the_documented_one() {
        let line = announcement(&Point::of_the_document());
        assert!(include_str!("../../BESIDE.md").contains(&line), "{line}");
    }

    #[test]
    fn results_are_times_and_seconds_or_a_rate() {
        let round = result("moved 3 0.5", 1000).unwrap();
        assert_eq!((round.times, round.seconds), (3, 0.5));
        assert_eq!(result("gbps 2", 4_000_000_000).unwrap().seconds_each(), 2.0);
        for wrong in [
            "",
            "moved",
            "moved 0 1",
            "moved 1 0",
            "moved 1 -2",
            "moved 1 inf",
            "gbps 0",
            "fast 1 1",
        ] {
            assert!(result(wrong, 1).is_none(), "{wrong}");
        }
    }
}
