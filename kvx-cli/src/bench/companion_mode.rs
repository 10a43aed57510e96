//! `kvx bench-beside`: kvx as the companion program of another bench. Measures another build, other
//! options, or another shape with the same number of bytes, in the same minute.

use std::io::{BufRead, Write};
use std::time::Duration;

use clap::{Args, ValueEnum};
use kvx::{Options, Registry};

use super::deadlines::DEADLINE;
use super::initiator::Plans;
use super::measure;
use super::points::{self, Pattern, Point, Shape};
use super::rounds::Round;
use super::session::Session;
use crate::{Result, bytes};

/// The arguments of `kvx bench-beside`, which override the announced point.
#[derive(Args)]
pub(crate) struct CompanionArguments {
    /// Use another backend.
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Use blocks of another size; `--count` must then give the same number of bytes.
    #[arg(long, value_name = "SIZE", value_parser = bytes::parse)]
    block: Option<u64>,
    /// Use another number of blocks per transfer.
    #[arg(long, value_name = "N")]
    count: Option<u32>,
    /// Use another order of blocks.
    #[arg(long)]
    pattern: Option<Pattern>,
    /// Options of both agents: the JSON object kv_connector_extra_config.
    #[arg(long, value_name = "JSON", default_value = "{}")]
    options: String,
}

/// An announced point, ready to run.
struct AnnouncedPoint {
    session: Session,
    point: Point,
    plans: Plans,
}

/// Answers the lines of BESIDE.md until standard input ends.
pub(crate) fn run(
    arguments: &CompanionArguments,
    registry: &Registry,
    out: &mut dyn Write,
) -> Result<()> {
    Options::parse(&arguments.options)?;
    let mut ready: Option<AnnouncedPoint> = None;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let answer = match (line.split_once(' '), &mut ready) {
            (Some(("point", words)), _) => {
                if let Some(AnnouncedPoint { session, .. }) = ready.take() {
                    session.end()?;
                }
                match AnnouncedPoint::of(words, arguments, registry) {
                    Ok(new) => {
                        let answer = format!("ready kvx {}", new.point);
                        ready = Some(new);
                        answer
                    }
                    Err(why) => format!("skip {}", why.to_string().replace('\n', " ")),
                }
            }
            (Some(("go", seconds)), Some(ready)) => {
                let Round { times, seconds, .. } =
                    ready.round(Duration::try_from_secs_f64(seconds.parse()?)?)?;
                format!("moved {times} {seconds:.9}")
            }
            _ => {
                return Err(format!(
                    "{line:?} is not a line of BESIDE.md, or no point was announced before it"
                )
                .into());
            }
        };
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    ready.map_or(Ok(()), |ready| ready.session.end())
}

impl AnnouncedPoint {
    fn of(words: &str, arguments: &CompanionArguments, registry: &Registry) -> Result<Self> {
        let announced = Announcement(words);
        let named = match &arguments.backend {
            Some(named) => named,
            None => announced.word("backend")?,
        };
        let backend = registry.require(named, &Options::parse(&arguments.options)?)?.0.name();
        let shape = Shape {
            block: announced.number("block")?,
            count: announced.number("count")?,
            lists: announced.number("lists")?,
            pattern: announced.one_of("pattern")?,
            seed: announced.number("seed")?,
        };
        let ours = Shape {
            block: arguments.block.unwrap_or(shape.block),
            count: arguments.count.unwrap_or(shape.count),
            pattern: arguments.pattern.unwrap_or(shape.pattern),
            ..shape
        };
        if ours.bytes() != shape.bytes() {
            let (ours, theirs) = (bytes::show(ours.bytes()), bytes::show(shape.bytes()));
            return Err(format!(
                "{ours} per transfer instead of {theirs}: --block times --count must give the same number of bytes"
            )
            .into());
        }
        let (op, memory, wait) =
            (announced.one_of("op")?, announced.one_of("memory")?, announced.one_of("wait")?);
        let point = Point { backend, op, shape: ours, memory, wait };
        let sizes = points::memory(&[point]);
        let mut session =
            Session::start(&[backend], registry, &arguments.options, sizes, DEADLINE)?;
        measure::fill_source(&mut session, &point)?;
        let plans = session.initiator(backend)?.plans(op, ours, memory)?;
        Ok(AnnouncedPoint { session, point, plans })
    }

    fn round(&mut self, budget: Duration) -> Result<Round> {
        self.session.initiator(self.point.backend)?.round(
            &mut self.plans,
            self.point.wait,
            budget,
            1,
        )
    }
}

/// The text after `point` in an announcement.
struct Announcement<'a>(&'a str);

impl<'a> Announcement<'a> {
    fn word(&self, key: &str) -> Result<&'a str> {
        let mut words = self.0.split_whitespace().filter_map(|word| word.split_once('='));
        let (_, value) = words
            .find(|(name, _)| *name == key)
            .ok_or_else(|| format!("no {key} was announced"))?;
        Ok(value)
    }

    fn number<T: std::str::FromStr<Err = std::num::ParseIntError>>(&self, key: &str) -> Result<T> {
        let word = self.word(key)?;
        Ok(word.parse().map_err(|why| format!("{key}={word}: {why}"))?)
    }

    fn one_of<T: ValueEnum>(&self, key: &str) -> Result<T> {
        let word = self.word(key)?;
        Ok(T::from_str(word, false).map_err(|why| format!("{key}={word}: {why}"))?)
    }
}

#[cfg(test)]
mod tests {
    use super::super::points::{BenchOp, Wait};
    use super::*;

    #[test]
    fn the_documented_announcement_is_understood() {
        let line = include_str!("../../BESIDE.md")
            .lines()
            .find_map(|line| line.strip_prefix("    point "))
            .unwrap();
        let announced = Announcement(line);
        assert_eq!(announced.word("backend").unwrap(), "SHM");
        assert_eq!(announced.number::<u64>("block").unwrap(), 4096);
        assert_eq!(announced.one_of::<BenchOp>("op").unwrap(), BenchOp::Read);
        assert_eq!(announced.one_of::<Wait>("wait").unwrap(), Wait::Block);
        assert!(announced.word("colour").is_err());
        assert!(Announcement("count=many").number::<u32>("count").is_err());
        assert!(Announcement("op=both").one_of::<BenchOp>("op").is_err());
    }
}
