//! Examines a fleet, pair by pair.

mod address;
mod comparisons;
mod cures;
mod judge;
mod matrix;

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use kvx::Secret;
use kvx_proxy::registration::FleetAddress;
use kvx_proxy::{FleetSecret, FleetTrial, PairOutcome, Pool, Setup, parse_duration, try_fleet};
use serde_json::{Value, json};

use super::finding::{Finding, Tally, show};
use crate::Result;
use crate::progress::Progress;

/// About the time that a pair takes.
const PAIR: Duration = Duration::from_secs(1);

/// The fleet to examine.
#[derive(clap::Args)]
pub(super) struct FleetArguments {
    /// Examine a fleet too: a file of `kvx proxy --config`, or `etcd://HOST:PORT/FLEET`. Each pair
    /// of a prefill and a decode instance gets one request of 512 random tokens
    #[arg(long, value_name = "FILE|etcd://...")]
    fleet: Option<String>,
    /// A prefill instance of the fleet, without a file
    #[arg(long, value_name = "URL", requires = "decode", conflicts_with = "fleet")]
    prefill: Vec<String>,
    /// A decode instance of the fleet
    #[arg(long, value_name = "URL", requires = "prefill")]
    decode: Vec<String>,
    /// The most time for all requests; pairs that are left are not tried
    #[arg(long, value_name = "TIME", default_value = "5m")]
    within: String,
    /// Do not examine this host
    #[arg(long)]
    skip_host: bool,
}

impl FleetArguments {
    pub(super) fn skips_host(&self) -> bool {
        self.skip_host
    }

    /// Examines the fleet, if there is one.
    pub(super) fn examine(&self) -> Result<Option<FleetReport>> {
        let Some(setup) = self.setup()? else {
            return match self.skip_host {
                true => Err("--skip-host leaves nothing to examine without --fleet, or --prefill \
                     and --decode"
                    .into()),
                false => Ok(None),
            };
        };
        let limit = parse_duration(&self.within)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut shown: Option<Progress> = None;
        let progress = |tried: usize, of: usize| {
            let shown = shown.get_or_insert_with(|| Progress::new(of, PAIR * of as u32));
            match tried {
                0 => shown.show("the first pair"),
                _ => shown.step(&format!("{tried} of {of} pairs")),
            }
            if tried == of {
                shown.clear();
            }
        };
        let trial = runtime.block_on(try_fleet(setup, limit, progress));
        // A name lookup may still be in progress.
        runtime.shutdown_background();
        Ok(Some(FleetReport::new(trial?)))
    }

    fn setup(&self) -> Result<Option<Setup>> {
        let mut setup = match &self.fleet {
            None if self.prefill.is_empty() => return Ok(None),
            Some(fleet) if !fleet.starts_with("etcd") => Setup::from_file(Path::new(fleet))?,
            _ => Setup::default(),
        };
        if let Some(fleet) = self.fleet.as_ref().filter(|fleet| fleet.starts_with("etcd")) {
            setup.discovery.etcd = Some(FleetAddress::new(fleet)?);
        }
        if !self.prefill.is_empty() {
            setup.pools = vec![Pool::from_urls(&self.prefill, &self.decode)?];
        }
        let mut setup = setup.with_environment();
        let secret = Secret::from_environment()?;
        setup.fleet_secret = secret.as_ref().map(|secret| FleetSecret::new(*secret.bytes()));
        Ok(Some(setup))
    }
}

/// The trial of a fleet, and the conclusions.
pub(super) struct FleetReport {
    trial: FleetTrial,
    verdict: String,
    findings: Vec<Finding>,
}

impl FleetReport {
    fn new(trial: FleetTrial) -> Self {
        FleetReport { verdict: verdict(&trial), findings: judge::findings(&trial), trial }
    }

    pub(super) fn findings(&self) -> &[Finding] {
        &self.findings
    }

    pub(super) fn show(&self, out: &mut dyn Write) -> std::io::Result<()> {
        writeln!(out, "{}", self.verdict)?;
        writeln!(out)?;
        if !self.trial.pairs.is_empty() {
            writeln!(out, "{}", matrix::text(&self.trial))?;
        }
        writeln!(out, "This fleet: {}", Tally::of(&self.findings).in_words())?;
        show(&self.findings, out)?;
        writeln!(out)
    }

    pub(super) fn to_json(&self) -> Value {
        let instances = self.trial.instances.iter().map(|one| {
            json!({
                "pool": one.pool, "role": one.role.as_str(), "name": one.name,
                "fault": one.fault, "version": one.version, "models": one.models,
                "block_size": one.block_size, "cache_type": one.cache_type,
                "clock_offset_s": one.clock_offset,
            })
        });
        let pairs = self.trial.pairs.iter().map(|pair| {
            let transfer = pair.transfer.as_ref().map(|moved| {
                json!({
                    "bytes": moved.bytes, "tokens": moved.tokens, "seconds": moved.seconds,
                    "backends": moved.backends,
                })
            });
            json!({
                "pool": pair.pool, "prefill": pair.prefill, "decode": pair.decode,
                "outcome": outcome(pair.outcome), "why": pair.why, "refused": pair.refused,
                "failures": pair.failures,
                "side_channel": pair.side_channel, "side_channel_fault": pair.side_channel_fault,
                "prompt_tokens": pair.prompt_tokens, "transfer": transfer,
                "prefill_s": pair.prefill_time.map(|time| time.as_secs_f64()),
                "answer_s": (!pair.time.is_zero()).then_some(pair.time.as_secs_f64()),
            })
        });
        json!({
            "verdict": self.verdict,
            "instances": instances.collect::<Vec<_>>(),
            "pairs": pairs.collect::<Vec<_>>(),
            "findings": self.findings,
        })
    }
}

fn outcome(outcome: PairOutcome) -> &'static str {
    match outcome {
        PairOutcome::Moved => "moved",
        PairOutcome::Computed => "computed",
        PairOutcome::Unknown => "unknown",
        PairOutcome::Failed => "failed",
        _ => "untried",
    }
}

/// Answers in one line whether prefill and decode are disaggregated.
fn verdict(trial: &FleetTrial) -> String {
    let count = |outcome| trial.pairs.iter().filter(|pair| pair.outcome == outcome).count();
    let of = trial.pairs.len();
    let (moved, computed) = (count(PairOutcome::Moved), count(PairOutcome::Computed));
    let (failed, unknown) = (count(PairOutcome::Failed), count(PairOutcome::Unknown));
    let pairs = if of == 1 { "the pair".to_owned() } else { format!("all {of} pairs") };
    if of == 0 {
        return "P/D cannot work: there is no pair of a prefill and a decode instance.".to_owned();
    }
    if moved == of {
        return format!("P/D works: blocks move through {pairs}.");
    }
    if moved > 0 {
        return format!("P/D works in part: blocks move through {moved} of {of} pairs.");
    }
    if computed > 0 {
        return "This deployment is quietly not P/D: answers come, and no block moves. The decode \
                instances compute every prompt again."
            .to_owned();
    }
    if failed > 0 {
        return "P/D does not work: requests fail.".to_owned();
    }
    match unknown > 0 {
        true => {
            "It is unknown whether P/D works: answers come, and no instance says whether blocks \
                 move."
                .to_owned()
        }
        false => "P/D was not tried: see why below.".to_owned(),
    }
}
