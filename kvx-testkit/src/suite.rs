//! Runs the clauses as a test program, once per backend and mode.

use std::process::ExitCode;
use std::time::Duration;

use kvx_core::{Options, Registry};
use libtest_mimic::Trial;

use crate::backing::{Backing, DeviceSource};
use crate::check::{CUT_OFF, Check, Failure};
use crate::clauses::{CLAUSES, Clause};
use crate::executor::run;
use crate::far;
use crate::harness::{harness_main, is_own_process, trial_within, within};
use crate::hosts::{CURE, Hosts, UNSHARE, refused_behind};
use crate::process::answers_apart;
use crate::setup::{Mode, Setup};
use crate::skip::{gap_held, skip};
use crate::tier::Tier;

/// A clause that a backend cannot keep, as data. It counts as a known gap, never as passed.
#[derive(Clone, Copy, Debug)]
pub struct Gap {
    /// The clause's id.
    pub clause: &'static str,
    /// The measured reason.
    pub reason: &'static str,
    /// The rate at which the backend breaks the clause.
    pub rate: GapRate,
}

/// The rate at which a backend breaks a clause that it lists as a [`Gap`].
#[derive(Clone, Copy, Debug)]
pub enum GapRate {
    /// In most runs: the suite fails when the clause holds in five runs in a row.
    Mostly,
    /// By chance, in `broken` of `runs` when it was measured. The whole tier runs the clause until
    /// it breaks.
    Sometimes {
        /// The number of runs that broke the clause.
        broken: u32,
        /// The number of all runs.
        runs: u32,
    },
}

/// The number of runs in a row that show that a backend keeps a clause which it lists as a gap.
const LOOKS: u32 = 5;

/// The accepted probability that the whole tier misses a gap which shows at its measured rate.
const MISSED: f64 = 1e-3;

/// Clauses that no backend may list as a gap, in addition to the security clauses (S1, S2, …):
/// memory that is touched or freed too early, and notifications that arrive twice.
const NEVER_A_GAP: &[&str] = &["O2", "O3", "O4", "O5", "O6", "O7", "O8", "N3"];

impl Gap {
    /// Returns whether a backend may list this clause.
    fn is_allowed(&self) -> bool {
        !NEVER_A_GAP.contains(&self.clause) && !self.clause.starts_with('S')
    }
}

impl GapRate {
    /// Returns in how many runs at most the gap has to show.
    fn most_runs(self, tier: Tier) -> u32 {
        match self {
            GapRate::Mostly => LOOKS,
            // One run proves little either way, so only the whole tier repeats it.
            GapRate::Sometimes { .. } if tier < Tier::Whole => 1,
            GapRate::Sometimes { broken, runs } => {
                let holds = 1.0 - f64::from(broken) / f64::from(runs);
                (MISSED.ln() / holds.ln()).ceil().clamp(1.0, 200.0) as u32
            }
        }
    }
}

/// The suite over one backend.
#[derive(Clone)]
pub struct Suite {
    /// The backend's name.
    pub backend: &'static str,
    /// The label in test names; unique if one backend runs in several ways.
    pub label: &'static str,
    /// The variant of the registry.
    pub variant: &'static str,
    /// The options of both agents, as JSON. `{address}` stands for the address of each agent's
    /// host.
    pub options: &'static str,
    /// The memory of regions in the process that runs the clauses.
    pub near: Backing,
    /// The memory of regions at the far end.
    pub far: Backing,
    /// The device of both ends, for [`Backing::Device`]. If it is not available, or the backend
    /// does not reach its memory here, the suite is skipped with the reason.
    pub device: Option<DeviceSource>,
    /// How the far end's process is separated, in clauses that have one.
    pub separation: Separation,
    /// The ids of the clauses to run; all of them if empty.
    pub only: &'static [&'static str],
    /// The clauses that the backend cannot keep.
    pub gaps: &'static [Gap],
    /// The lowest tier that runs the suite; the fast tier runs the clauses that need one process.
    pub tier: Tier,
}

/// The separation of the two processes of a pair.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Separation {
    /// The far end is in this process, or in one that this process starts.
    None,
    /// Started by a program with these arguments: in separate namespaces, or as another user.
    Behind(&'static [&'static str]),
    /// Each end is on a separate host.
    OnHosts,
}

/// The time limit of a clause.
const LIMIT: Duration = Duration::from_secs(90);

/// The time limit of all runs of a clause.
const WHOLE_LIMIT: Duration = Duration::from_secs(900);

impl Suite {
    /// Creates the suite over a backend with default settings.
    pub const fn over(backend: &'static str) -> Self {
        Suite {
            backend,
            label: backend,
            variant: "",
            options: "{}",
            near: Backing::Pool,
            far: Backing::Pool,
            device: None,
            separation: Separation::None,
            only: &[],
            gaps: &[],
            tier: Tier::Usual,
        }
    }

    /// Restricts the suite to the clauses that must notice the end of the far end's process, and
    /// runs that process in another PID namespace, as in another container, where its process id
    /// means nothing to this process.
    pub const fn in_another_namespace(self) -> Self {
        self.separated(Separation::Behind(&["unshare", "--pid", "--fork", "--kill-child"]))
    }

    /// Runs the same clauses with a far end whose user has no privileges, and may lock little
    /// memory and open few files.
    pub const fn as_another_user(self) -> Self {
        const USER: [&str; 9] = [
            // Libraries look for settings there.
            "env",
            "HOME=/",
            "prlimit",
            "--memlock=65536",
            "--nofile=1024",
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
        ];
        self.separated(Separation::Behind(&USER))
    }

    /// Runs the same clauses with each end on a separate host, made of a network namespace.
    pub const fn on_two_hosts(self) -> Self {
        self.separated(Separation::OnHosts)
    }

    const fn separated(self, separation: Separation) -> Self {
        Suite { separation, only: &["P3", "P4", "O6"], ..self }
    }

    fn setup(&self, registry: fn(&str) -> Registry, mode: Mode) -> Setup {
        let mut setup = Setup::new(registry, self.variant, self.backend, mode);
        setup.options = self.options.to_owned();
        (setup.near, setup.far) = (self.near, self.far);
        setup.device = self.device.map(|source| (self.label, source));
        setup.through = match self.separation {
            Separation::None => Vec::new(),
            Separation::Behind(words) => words.iter().map(|word| (*word).to_owned()).collect(),
            Separation::OnHosts => Hosts::way_to_far().unwrap_or_default(),
        };
        setup
    }
}

/// Serves as a far end and ends the process, if this process was started for that. Call it first in
/// `main`. [`conformance_main`] serves far ends with a device.
pub fn serve_if_asked(registry: fn(&str) -> Registry) {
    if std::env::var(far::SUITE).is_err() {
        serve(registry, None);
    }
}

fn serve(registry: fn(&str) -> Registry, device: Option<DeviceSource>) {
    if let Ok(variant) = std::env::var(far::VARIABLE) {
        let answers = answers_apart().expect("a child has standard output and standard error");
        let device = device.map(|source| source().expect("the near end has this device too"));
        far::serve(registry(&variant), device, answers);
        std::process::exit(0);
    }
}

/// Runs a conformance test as `main` (`harness = false`): every clause, in one process and in two.
pub fn conformance_main(registry: fn(&str) -> Registry, suites: &[Suite]) -> ExitCode {
    harness_main(conformance_trials(registry, suites))
}

/// Returns the trials of a conformance test: every clause, in one process and in two. Serves as a
/// far end and ends the process, if this process was started for that.
///
/// # Panics
/// If a suite lists a clause as a gap that no backend may break.
pub fn conformance_trials(registry: fn(&str) -> Registry, suites: &[Suite]) -> Vec<Trial> {
    for gap in suites.iter().flat_map(|suite| suite.gaps) {
        assert!(gap.is_allowed(), "{}: no backend may list this clause as a gap", gap.clause);
    }
    let asked = std::env::var(far::SUITE).ok();
    let suite = asked.and_then(|label| suites.iter().find(|suite| suite.label == label));
    serve(registry, suite.and_then(|suite| suite.device));
    let mut trials = Vec::new();
    if is_own_process() {
        return trials; // this process belongs to another test, which loads its own libraries
    }
    let on_a_host = Hosts::way_to_far().is_some();
    for suite in suites.iter().filter(|suite| !on_a_host || suite.separation == Separation::OnHosts)
    {
        if !suite.tier.runs_or_says(suite.label) {
            continue;
        }
        // The network devices that a suite of two hosts names exist only on those hosts.
        if suite.separation != Separation::OnHosts
            && let Some(reason) = unavailable(suite, registry)
        {
            skip(suite.label, &reason, "see the reason");
            continue;
        }
        if let Some(reason) = without_its_device(suite, registry) {
            skip(
                suite.label,
                &format!("{reason} [cannot run here]"),
                "run it on a machine with such a device",
            );
            continue;
        }
        if let Some(reason) = does_not_go_through(suite) {
            skip(suite.label, &reason, CURE);
            continue;
        }
        let wanted = |clause: &&Clause| suite.only.is_empty() || suite.only.contains(&clause.id);
        for clause in CLAUSES.iter().flat_map(|room| room.iter()).filter(wanted) {
            let here =
                |mode: &&Mode| suite.separation == Separation::None || **mode == Mode::TwoProcesses;
            for mode in
                clause.runs.modes().iter().filter(here).filter(|mode| tier_of(**mode).runs())
            {
                let (suite, setup) = (suite.clone(), suite.setup(registry, *mode));
                let place = if *mode == Mode::OneProcess { "one" } else { "two" };
                let name = format!("{}::{place}::{}_{}", suite.label, clause.id, clause.name);
                let title = name.clone();
                let to_hosts = suite.separation == Separation::OnHosts && !on_a_host;
                // Each run of a clause has its own limit, and a gap runs several times.
                trials.push(trial_within(WHOLE_LIMIT, name, move || match to_hosts {
                    true => Hosts::run_test(&title, LIMIT + CUT_OFF).map(drop),
                    false => judge(&title, &suite, clause, setup),
                }));
            }
        }
    }
    trials
}

/// Returns the lowest tier that runs clauses in this mode.
fn tier_of(mode: Mode) -> Tier {
    if mode == Mode::OneProcess { Tier::Fast } else { Tier::Usual }
}

/// Returns why the backend of a suite cannot be used here.
fn unavailable(suite: &Suite, registry: fn(&str) -> Registry) -> Option<String> {
    let options = Options::parse(suite.options).ok()?;
    registry(suite.variant).require(suite.backend, &options).err().map(|error| error.to_string())
}

/// Returns why the device of a suite is not available, or not reached by its backend.
fn without_its_device(suite: &Suite, registry: fn(&str) -> Registry) -> Option<String> {
    let kind = match suite.device?() {
        Ok(device) => device.access().kind(),
        Err(error) => return Some(error.sentence().to_owned()),
    };
    // Each trial reports a backend that is not available.
    let options = Options::parse(suite.options).ok()?;
    let registry = registry(suite.variant);
    let (_, available) = registry.require(suite.backend, &options).ok()?;
    let reached = available.capabilities.local.contains(kind);
    (!reached).then(|| format!("{} does not reach {kind} memory here", suite.backend))
}

/// Returns why this program cannot be started with the suite's separation.
fn does_not_go_through(suite: &Suite) -> Option<String> {
    let words = match &suite.separation {
        Separation::None => return None,
        Separation::Behind(words) => words,
        Separation::OnHosts => &UNSHARE[..],
    };
    let itself = std::env::current_exe().ok()?;
    refused_behind(words, &["test", "-x", &itself.to_string_lossy()])
}

fn judge(title: &str, suite: &Suite, clause: &'static Clause, setup: Setup) -> Check {
    if let Err(error) = setup.registry().require(suite.backend, &setup.options_here()?) {
        skip(title, &error.to_string(), "see the reason");
        return Ok(());
    }
    let check = || check_within(clause, setup.clone(), LIMIT);
    let Some(gap) = suite.gaps.iter().find(|gap| gap.clause == clause.id) else { return check() };
    let tier = Tier::of_this_run();
    let most = gap.rate.most_runs(tier);
    let shown = (0..most).any(|_| check().is_err());
    let reason = match (shown, gap.rate) {
        (true, _) => gap.reason.to_owned(),
        (false, GapRate::Sometimes { .. }) if tier < Tier::Whole => {
            format!("{} (it did not show in this run)", gap.reason)
        }
        (false, _) => {
            return Err(Failure::new(format!(
                "clause {} is listed as a gap ({}) but holds in {most} runs: remove the row or \
                 measure its rate again",
                gap.clause, gap.reason
            )));
        }
    };
    gap_held(title, &reason);
    Ok(())
}

/// Runs a clause on a separate thread, so that a hang is a failure and does not block the run.
pub(crate) fn check_within(clause: &'static Clause, setup: Setup, patience: Duration) -> Check {
    within(patience, clause.name, move || run((clause.test)(&setup)))?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gap(clause: &'static str, rate: GapRate) -> Gap {
        Gap { clause, reason: "measured", rate }
    }

    #[test]
    fn no_backend_may_list_memory_safety_duplicates_and_security_as_gaps() {
        let known: Vec<_> =
            CLAUSES.iter().flat_map(|room| room.iter()).map(|clause| clause.id).collect();
        for clause in NEVER_A_GAP.iter().chain(&["S1"]) {
            assert!(known.contains(clause), "{clause} is no clause");
            assert!(!gap(clause, GapRate::Mostly).is_allowed(), "{clause}");
        }
        assert!(gap("P9", GapRate::Mostly).is_allowed());
        let suites = [Suite {
            gaps: &[Gap { clause: "O3", reason: "", rate: GapRate::Mostly }],
            ..Suite::over("x")
        }];
        let refused = std::panic::catch_unwind(|| conformance_trials(|_| Registry::new(), &suites));
        assert!(refused.is_err());
    }

    #[test]
    fn a_gap_is_run_as_often_as_its_rate_requires() {
        let half = GapRate::Sometimes { broken: 1, runs: 2 };
        assert_eq!((half.most_runs(Tier::Usual), half.most_runs(Tier::Whole)), (1, 10));
        assert_eq!(GapRate::Mostly.most_runs(Tier::Usual), LOOKS);
    }
}
