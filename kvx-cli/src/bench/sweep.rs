//! `kvx bench sweep`: what the KV cache of real models costs.

use std::io::Write;

use clap::Args;
use clap::builder::PossibleValuesParser;
use kvx::{Options, Registry};
use serde::Serialize;

use super::figures::{self, Figures, Output};
use super::models::{DTYPE, MODELS, Model};
use super::points::{Backing, BenchOp, Pattern, Point, Shape, Wait, name};
use super::rounds::{Effort, round, significant};
use super::run::{Run, names};
use crate::{Result, bytes};

/// The prompt whose time is printed.
const PROMPT: u64 = 32_768;
/// The number of transfers until the same blocks are moved again.
const LISTS: u32 = 2;

/// The arguments of `kvx bench sweep`.
#[derive(Args)]
pub(crate) struct SweepArguments {
    /// The models whose KV cache is moved [default: all].
    #[arg(long, value_name = "LIST", value_delimiter = ',', ignore_case = true, value_parser = PossibleValuesParser::new(MODELS.map(|model| model.name)))]
    model: Vec<String>,
    /// The backends to measure.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "SHM,TCP")]
    backend: Vec<String>,
    /// Read from the target, as a decode that pulls, or write to it.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "read")]
    op: Vec<BenchOp>,
    /// The memory of both sides; see `kvx bench --help`.
    #[arg(long, value_name = "MEMORY", default_value = "kvx")]
    memory: Backing,
    /// Rounds per model.
    #[arg(long, value_name = "N", default_value_t = figures::ENOUGH_ROUNDS)]
    rounds: usize,
    /// The approximate time per model, over all rounds and parties.
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    seconds: f64,
    /// The most memory per side. A transfer moves half of it: as many whole blocks of a prompt as
    /// fit.
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse, default_value = "512M")]
    pool: u64,
    /// Options of both agents, as the JSON object kv_connector_extra_config.
    #[arg(long, value_name = "JSON", default_value = "{}")]
    options: String,
    /// Print JSON lines, also on a terminal.
    #[arg(long)]
    json: bool,
}

/// A line of output.
#[derive(Serialize)]
struct SweepRecord<'a> {
    mode: &'static str,
    model: &'static str,
    source: &'static str,
    layers: u32,
    dtype: &'static str,
    block_tokens: u32,
    bytes_per_token: u64,
    tokens_per_s: f64,
    seconds_per_32k: f64,
    limit_seconds_per_32k: Option<f64>,
    #[serde(flatten)]
    figures: &'a Figures,
}

impl<'a> SweepRecord<'a> {
    fn of(model: &Model, figures: &'a Figures) -> Self {
        let bytes_per_token = model.bytes_per_token();
        let tokens = |gbps: f64| gbps * 1e9 / bytes_per_token as f64;
        let seconds = |gbps: f64| significant(PROMPT as f64 / tokens(gbps), 4);
        SweepRecord {
            mode: "sweep",
            model: model.name,
            source: model.source,
            layers: model.layers,
            dtype: DTYPE,
            block_tokens: model.block_tokens,
            bytes_per_token,
            tokens_per_s: round(tokens(figures.gbps), 0),
            seconds_per_32k: seconds(figures.gbps),
            limit_seconds_per_32k: figures.limit_gbps.map(seconds),
            figures,
        }
    }

    fn row(&self) -> String {
        let Figures { backend, op, block, gbps, limit_name, limit_gbps, ratio, .. } = self.figures;
        let limit = match (limit_name, limit_gbps, self.limit_seconds_per_32k, ratio) {
            (Some(name), Some(gbps), Some(seconds), Some(ratio)) => {
                format!("{gbps:>10.2} {seconds:>8.3} {ratio:>5.2} {name}")
            }
            _ => format!("{:>10} {:>8} {:>5} none", "-", "-", "-"),
        };
        let wrong = if self.figures.verified { "" } else { "; WRONG BYTES" };
        format!(
            "{:<14} {backend:<9} {:<5} {:>8} {:>9.1} {gbps:>7.2} {:>9} {:>8.3} {limit}{wrong}",
            self.model,
            name(*op),
            bytes::show(*block),
            self.bytes_per_token as f64 / 1024.0,
            self.tokens_per_s,
            self.seconds_per_32k,
        )
    }
}

/// The meaning of the table's columns.
const EXPLANATION: &str = "\
PIECE      The bytes that lie together: one layer of a block of 16 tokens (DeepSeek: 64). Pieces
           are scattered on both sides. bfloat16; all KV heads, as without tensor parallelism.
TOKENS/S   Tokens of a prompt whose KV cache arrives per second: GB/s (1e9 bytes per second) divided
           by the bytes of a token.
s PER 32k  Seconds for a prompt of 32,768 tokens, computed from GB/s: transfers here are smaller.
LIMIT      The same pieces moved without kvx. RATIO: kvx's GB/s divided by the limit's.";

/// Runs the sweep. With `for_people`, it prints a table unless JSON is requested.
pub(crate) fn run(
    arguments: &SweepArguments,
    registry: &Registry,
    out: &mut dyn Write,
    for_people: bool,
) -> Result<()> {
    let effort = Effort::new(arguments.rounds, arguments.seconds)?;
    let options = Options::parse(&arguments.options)?;
    let (backends, _) = names(&arguments.backend, registry, &options)?;
    let named = |model: &&Model| {
        let wanted = arguments.model.iter().any(|name| name.eq_ignore_ascii_case(model.name));
        wanted || arguments.model.is_empty()
    };
    let mut models = Vec::new();
    let mut points = Vec::new();
    for backend in backends.iter().copied() {
        for op in arguments.op.iter().copied() {
            for model in MODELS.iter().filter(named) {
                models.push(model);
                points.push(Point {
                    backend,
                    op,
                    shape: shape(model, arguments.pool)?,
                    memory: arguments.memory,
                    wait: Wait::Block,
                });
            }
        }
    }
    let mut output = Output::new(out, arguments.json || !for_people);
    let mut head = false;
    let run =
        Run { backends: &backends, registry, options: &arguments.options, effort, beside: None };
    let label =
        |at: usize| format!("{} {} {}", models[at].name, points[at].backend, name(points[at].op));
    run.measure(&points, "measurements", label, |at, figures| {
        let record = SweepRecord::of(models[at], &figures);
        if !std::mem::replace(&mut head, true) && !output.is_json() {
            output.line(&format!(
                "{:<14} {:<9} {:<5} {:>8} {:>9} {:>7} {:>9} {:>8} {:>10} {:>8} {:>5}",
                "MODEL",
                "BACKEND",
                "OP",
                "PIECE",
                "KiB/TOKEN",
                "GB/s",
                "TOKENS/S",
                "s PER 32k",
                "LIMIT GB/s",
                "s PER 32k",
                "RATIO"
            ))?;
        }
        output.record(&record, &record.row())
    })?;
    if !output.is_json() {
        output.line(&format!("\n{EXPLANATION}"))?;
    }
    Ok(())
}

/// Returns the shape of a transfer of as many whole blocks as half of the memory holds, but at most
/// a whole prompt.
fn shape(model: &Model, pool: u64) -> Result<Shape> {
    let prompt = PROMPT.div_ceil(model.block_tokens.into());
    let blocks = (pool / u64::from(LISTS) / model.block()).min(prompt);
    if blocks == 0 {
        let least = bytes::show((u64::from(LISTS) * model.block()).div_ceil(1 << 20) << 20);
        let (pool, name) = (bytes::show(pool), model.name);
        return Err(format!("--pool {pool} is too small for {name}: write at least {least}").into());
    }
    let count = blocks * u64::from(model.layers);
    let count = u32::try_from(count).map_err(|_| "--pool: write a smaller size")?;
    Ok(Shape { block: model.piece(), count, lists: LISTS, pattern: Pattern::Scattered, seed: 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_are_whole_blocks_within_the_memory() {
        for model in &MODELS {
            let shape = shape(model, 512 << 20).unwrap();
            assert_eq!(shape.bytes() % model.block(), 0, "{}", model.name);
            assert!(shape.memory() <= 512 << 20 && shape.memory() > 500 << 20, "{}", model.name);
            // A whole prompt is the most, however much memory there is.
            let most = super::shape(model, 64 << 30).unwrap().bytes();
            assert_eq!(most, PROMPT * model.bytes_per_token(), "{}", model.name);
        }
        let why = shape(&MODELS[1], 4 << 20).unwrap_err().to_string();
        assert_eq!(why, "--pool 4 MiB is too small for Llama-3.1-70B: write at least 10 MiB");
    }
}
