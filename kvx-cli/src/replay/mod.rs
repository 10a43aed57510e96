//! `kvx replay`: plays a recording of requests against a fleet, and measures its answers.

mod report;
mod statistics;
mod table;

use std::fs::File;
use std::io::{IsTerminal as _, LineWriter, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvx_proxy::ApiKey;
use kvx_proxy::replay::{PlayedEndpoint, ReplayOptions, Trace, play};
use serde_json::json;

use self::statistics::{ServiceLevel, Summary};
use crate::Result;
use crate::report::ReportFile;

/// The arguments of `kvx replay`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// A recording of `kvx proxy --record`, or a trace in the form of Mooncake's public ones.
    file: PathBuf,
    /// The endpoint to measure: `http://HOST:PORT`, or `http://HOST:PORT/BASE` for one that
    /// answers at `BASE/v1`; https if TLS is built in. It gets OPENAI_API_KEY as its key.
    #[arg(long, value_name = "URL")]
    url: String,
    /// Another endpoint that gets the same requests at the same time, with prompts of its own of
    /// the same lengths.
    #[arg(long, value_name = "URL")]
    beside: Option<String>,
    /// Let the two endpoints take turns of this length instead, such as 20s: for two routers of
    /// one fleet.
    #[arg(long, value_name = "TIME", requires = "beside", value_parser = time)]
    in_turn: Option<Duration>,
    /// The speed of the arrivals, times the recorded one.
    #[arg(long, value_name = "TIMES", default_value_t = 1.0)]
    speed: f64,
    /// Determines the tokens of the prompts: the same seed makes the same requests.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// The number of requests to play, the first ones [default: all].
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Send no request after this time, such as 10m; those that were due and had to wait until then
    /// are counted as not sent [default: until the last one].
    #[arg(long = "for", value_name = "TIME", value_parser = time)]
    length: Option<Duration>,
    /// The most requests in progress at an endpoint; further ones are sent late, and their times
    /// count from when they were due.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536))]
    concurrency: u32,
    /// The time that an answer may take after its request was sent.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = time)]
    timeout: Duration,
    /// The model [default: the first one that the endpoint lists].
    #[arg(long)]
    model: Option<String>,
    /// Divide all lengths by this, and keep what prompts share: for small models.
    #[arg(long, value_name = "N", default_value_t = 1)]
    shrink: usize,
    /// Cut prompts to this many tokens.
    #[arg(long, value_name = "TOKENS")]
    max_prompt: Option<usize>,
    /// Cut answers to this many tokens.
    #[arg(long, value_name = "TOKENS")]
    max_answer: Option<usize>,
    /// The longest time until the first token that counts as good.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = time)]
    slo_ttft: Duration,
    /// The longest mean time between two tokens that counts as good.
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = time)]
    slo_token: Duration,
    /// Servers, such as the prefill instances: report which part of prompts their prefix caches
    /// had, by their metrics.
    #[arg(long, num_args = 1.., value_name = "URL")]
    caches: Vec<String>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Write a page with the table and plots, which needs no network.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

fn time(text: &str) -> std::result::Result<Duration, String> {
    kvx_proxy::parse_duration(text).map_err(|error| error.to_string())
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments, out: &mut LineWriter<File>) -> Result<()> {
    let (trace, mut notes) = trace(arguments)?;
    // Fail before the replay, not after it.
    let report = arguments.report.as_ref().map(|path| ReportFile::new(path, Some(&arguments.file)));
    let report = report.transpose()?;
    let mut options = ReplayOptions::default();
    options.model.clone_from(&arguments.model);
    let key = std::env::var("OPENAI_API_KEY").ok().filter(|key| !key.is_empty());
    options.key = key.map(ApiKey::new);
    options.seed = arguments.seed;
    options.speed = arguments.speed;
    options.length = arguments.length;
    options.concurrency = arguments.concurrency as usize;
    options.timeout = arguments.timeout;
    options.in_turn = arguments.in_turn;
    options.caches.clone_from(&arguments.caches);
    let urls: Vec<&str> =
        std::iter::once(&*arguments.url).chain(arguments.beside.as_deref()).collect();
    let requests = trace.requests.len() * urls.len();
    let shown = std::io::stderr().is_terminal();
    let mut done = 0;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let played = runtime.block_on(play(&Arc::new(trace), &urls, &options, |_| {
        done += 1;
        if shown {
            eprint!("\r\x1b[K{done} of {requests} answers");
        }
    }));
    if shown {
        eprint!("\r\x1b[K");
    }
    let played = played?;
    // An interrupted name lookup may still be in progress.
    runtime.shutdown_timeout(Duration::from_secs(1));
    for endpoint in &played {
        if let Some(Err(why)) = &endpoint.caches {
            let url = &endpoint.url;
            notes.push(format!("the cached prompts of {url} by metrics are unknown: {why}"));
        }
    }
    print(arguments, &notes, &played, report, out)?;
    for endpoint in &played {
        let errors = endpoint.requests.iter().filter_map(|request| request.error.as_ref());
        let errors: Vec<_> = errors.collect();
        if let [first, ..] = errors[..]
            && errors.len() == endpoint.requests.len()
        {
            let why = format!("every request to {} failed", endpoint.url);
            return Err(format!("{why}; the first with {}: {}", first.kind, first.message).into());
        }
    }
    Ok(())
}

/// Reads the trace and changes its lengths. Returns it with what people should know about it.
fn trace(arguments: &Arguments) -> Result<(Trace, Vec<String>)> {
    let mut trace = Trace::from_file(&arguments.file)?;
    let mut notes = Vec::new();
    if trace.over_limit > 0 {
        notes.push(format!("{} requests outside a limit are left out", trace.over_limit));
    }
    if trace.is_torn {
        notes.push("the last line is only a part of one and is left out".to_owned());
    }
    trace.first(arguments.limit.unwrap_or(usize::MAX));
    trace.shrink(arguments.shrink)?;
    let most = |limit: Option<usize>| limit.unwrap_or(usize::MAX);
    let cut = trace.cut(most(arguments.max_prompt), most(arguments.max_answer));
    if cut > 0 {
        notes.push(format!("{cut} requests are cut"));
    }
    if trace.requests.is_empty() {
        return Err("--limit 0 leaves no request to play".into());
    }
    Ok((trace, notes))
}

fn print(
    arguments: &Arguments,
    notes: &[String],
    played: &[PlayedEndpoint],
    report: Option<ReportFile>,
    out: &mut LineWriter<File>,
) -> Result<()> {
    let level = ServiceLevel { first_token: arguments.slo_ttft, per_token: arguments.slo_token };
    let summaries: Vec<Summary> = played.iter().map(|one| Summary::of(one, &level)).collect();
    let rows = table::rows(&summaries, &level);
    let mut what = vec![format!(
        "{} at {} times its speed, seed {}",
        arguments.file.display(),
        arguments.speed,
        arguments.seed
    )];
    if arguments.shrink > 1 {
        what.push(format!("lengths divided by {}", arguments.shrink));
    }
    what.extend(notes.iter().cloned());
    let what = what.join("; ");
    if arguments.json {
        let object = json!({
            "file": arguments.file,
            "seed": arguments.seed,
            "speed": arguments.speed,
            "shrink": arguments.shrink,
            "slo": {
                "ttft_ms": level.first_token.as_secs_f64() * 1e3,
                "per_token_ms": level.per_token.as_secs_f64() * 1e3,
            },
            "notes": notes,
            "endpoints": summaries,
        });
        writeln!(out, "{object}")?;
    } else {
        writeln!(out, "{what}\n")?;
        table::print(&rows, out)?;
    }
    // Last: a full disk loses no figures.
    match report {
        Some(file) => file.write(&report::page(&what, &rows, played)),
        None => Ok(()),
    }
}
