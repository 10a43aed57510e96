//! Runs the clauses as a test program, once per backend and mode.

use std::process::ExitCode;
use std::sync::mpsc::channel;
use std::time::Duration;

use kvx_core::{Options, Registry};
use libtest_mimic::{Arguments, Failed, Trial};

use crate::check::Check;
use crate::clauses::{CLAUSES, Clause, Runs};
use crate::executor::run;
use crate::far;
use crate::hosts::{CURE, Hosts, UNSHARE, refused_behind};
use crate::process::answers_apart;
use crate::setup::{Backing, CUT_OFF, DeviceSource, Mode, Setup};
use crate::skip::skip;
use crate::tier::Tier;

/// A clause that a backend cannot keep, as data.
#[derive(Clone, Copy, Debug)]
pub struct Gap {
    /// The clause's id.
    pub clause: &'static str,
    /// The measured reason.
    pub reason: &'static str,
    /// Whether it breaks the clause in some runs only, by chance: that it holds in one says nothing then.
    pub sometimes: bool,
}

/// How often a clause is looked at once more that is listed as a gap and holds.
const LOOKS: u32 = 4;

/// The suite over one backend.
#[derive(Clone)]
pub struct Suite {
    /// The backend's name.
    pub backend: &'static str,
    /// Shown in test names; differs when one backend is run in several ways.
    pub label: &'static str,
    /// The registry's variant.
    pub variant: &'static str,
    /// Options of both agents, as JSON, with `{address}` for that of the host of either.
    pub options: &'static str,
    /// What the regions of the process that runs the clauses lie on.
    pub near: Backing,
    /// What the regions of the far end lie on.
    pub far: Backing,
    /// The device of both ends, for [`Backing::Device`]. When it cannot be had, or the backend does not reach its
    /// memory here, the suite is skipped with the reason.
    pub device: Option<DeviceSource>,
    /// Where the far end's process is, in clauses that have one.
    pub apart: Apart,
    /// The ids of the clauses that run; none: all of them.
    pub only: &'static [&'static str],
    /// What the backend cannot keep.
    pub gaps: &'static [Gap],
    /// The least tier that runs it; the fast one runs what needs one process.
    pub tier: Tier,
}

/// How far the processes of a pair are from each other.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Apart {
    /// As this process starts it, or in this process.
    Beside,
    /// Behind a program and its words: in namespaces of its own, or as another user.
    Behind(&'static [&'static str]),
    /// Either is on a host of its own.
    OnHosts,
}

/// How long a clause may take.
const LIMIT: Duration = Duration::from_secs(90);

impl Suite {
    /// The suite over a backend as it comes.
    pub const fn over(backend: &'static str) -> Self {
        Suite {
            backend,
            label: backend,
            variant: "",
            options: "{}",
            near: Backing::Pool,
            far: Backing::Pool,
            device: None,
            apart: Apart::Beside,
            only: &[],
            gaps: &[],
            tier: Tier::Usual,
        }
    }

    /// The clauses that depend on seeing the far end's process end, with that process in another namespace of processes
    /// as in another container: its number says nothing there.
    pub const fn in_another_namespace(self) -> Self {
        self.apart(Apart::Behind(&["unshare", "--pid", "--fork", "--kill-child"]))
    }

    /// The same clauses, with the far end as a user without privileges, who may lock little memory and open few files.
    pub const fn as_another_user(self) -> Self {
        const USER: [&str; 9] = [
            // Libraries look there for settings.
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
        self.apart(Apart::Behind(&USER))
    }

    /// The same clauses, with either end on a host of its own, as namespaces of the network are.
    pub const fn on_two_hosts(self) -> Self {
        self.apart(Apart::OnHosts)
    }

    const fn apart(self, apart: Apart) -> Self {
        Suite { apart, only: &["P3", "P4", "O6"], ..self }
    }

    fn setup(&self, registry: fn(&str) -> Registry, mode: Mode) -> Setup {
        let mut setup = Setup::new(registry, self.variant, self.backend, mode);
        setup.options = self.options.to_owned();
        (setup.near, setup.far) = (self.near, self.far);
        setup.device = self.device.map(|source| (self.label, source));
        setup.through = match self.apart {
            Apart::Beside => Vec::new(),
            Apart::Behind(words) => words.iter().map(|word| (*word).to_owned()).collect(),
            Apart::OnHosts => Hosts::way_to_far().unwrap_or_default(),
        };
        setup
    }
}

/// Serves as a far end and ends the process, if that is what this process was started for. Call it first in `main`. A
/// far end with a device is served by [`conformance_main`].
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

/// The `main` of a conformance test (`harness = false`): every clause, in one process and in two.
pub fn conformance_main(registry: fn(&str) -> Registry, suites: &[Suite]) -> ExitCode {
    let asked = std::env::var(far::SUITE).ok();
    let suite = asked.and_then(|label| suites.iter().find(|suite| suite.label == label));
    serve(registry, suite.and_then(|suite| suite.device));
    let mut trials = Vec::new();
    let on_a_host = Hosts::way_to_far().is_some();
    for suite in suites.iter().filter(|suite| !on_a_host || suite.apart == Apart::OnHosts) {
        if !suite.tier.runs_or_says(suite.label) {
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
            let here = |mode: &&Mode| suite.apart == Apart::Beside || **mode == Mode::TwoProcesses;
            for mode in modes(clause.runs).iter().filter(here).filter(|mode| tier_of(**mode).runs()) {
                let (suite, setup) = (suite.clone(), suite.setup(registry, *mode));
                let place = if *mode == Mode::OneProcess { "one" } else { "two" };
                let name = format!("{}::{place}::{}_{}", suite.label, clause.id, clause.name);
                let title = name.clone();
                let to_hosts = suite.apart == Apart::OnHosts && !on_a_host;
                trials.push(Trial::test(name, move || match to_hosts {
                    true => Ok(Hosts::run_test(&title, LIMIT + CUT_OFF).map(drop)?),
                    false => judge(&title, &suite, clause, setup),
                }));
            }
        }
    }
    let mut arguments = Arguments::from_args();
    // Clauses measure time and CPU, and start processes: two at once are enough for a small machine.
    arguments.test_threads.get_or_insert(2);
    libtest_mimic::run(&arguments, trials).exit_code()
}

pub(crate) fn modes(runs: Runs) -> &'static [Mode] {
    match runs {
        Runs::OneProcess => &[Mode::OneProcess],
        Runs::TwoProcesses => &[Mode::TwoProcesses],
        Runs::Both => &[Mode::OneProcess, Mode::TwoProcesses],
        Runs::Compiler => &[],
    }
}

/// The least tier that runs clauses in this way.
fn tier_of(mode: Mode) -> Tier {
    if mode == Mode::OneProcess { Tier::Fast } else { Tier::Usual }
}

/// Why the device of a suite cannot be had, or is of no use to its backend.
fn without_its_device(suite: &Suite, registry: fn(&str) -> Registry) -> Option<String> {
    let kind = match suite.device?() {
        Ok(device) => device.access().kind(),
        Err(error) => return Some(error.sentence().to_owned()),
    };
    // A backend that is not there is each trial's to say.
    let options = Options::parse(suite.options).ok()?;
    let registry = registry(suite.variant);
    let (_, available) = registry.require(suite.backend, &options).ok()?;
    let reached = available.capabilities.local.contains(kind);
    (!reached).then(|| format!("{} does not reach {kind} memory here", suite.backend))
}

/// Why this program cannot be started as the suite wants.
fn does_not_go_through(suite: &Suite) -> Option<String> {
    let words = match &suite.apart {
        Apart::Beside => return None,
        Apart::Behind(words) => words,
        Apart::OnHosts => &UNSHARE[..],
    };
    let itself = std::env::current_exe().ok()?;
    refused_behind(words, &["test", "-x", &itself.to_string_lossy()])
}

fn judge(title: &str, suite: &Suite, clause: &'static Clause, setup: Setup) -> Result<(), Failed> {
    if let Err(error) = setup.registry().require(suite.backend, &setup.options_here()?) {
        skip(title, &error.to_string(), "see the reason");
        return Ok(());
    }
    let gap = suite.gaps.iter().find(|gap| gap.clause == clause.id);
    let check = || within(clause, setup.clone(), LIMIT);
    match (check(), gap) {
        (Ok(()), None) => Ok(()),
        (Err(failure), None) => Err(failure.to_string().into()),
        (Err(_), Some(_)) | (Ok(()), Some(Gap { sometimes: true, .. })) => Ok(()),
        // A library may break it most of the time only.
        (Ok(()), Some(_)) if (0..LOOKS).any(|_| check().is_err()) => Ok(()),
        (Ok(()), Some(gap)) => Err(format!(
            "clause {} is listed as a gap ({}) but holds: remove the row",
            gap.clause, gap.reason
        )
        .into()),
    }
}

/// Runs a clause on a thread of its own, so that a hang is a failure and not the end of the run.
pub(crate) fn within(clause: &'static Clause, setup: Setup, patience: Duration) -> Check {
    let (sender, answer) = channel();
    let thread = std::thread::Builder::new().name(clause.name.into()).spawn(move || {
        sender.send(run((clause.test)(&setup))).ok();
    })?;
    match answer.recv_timeout(patience) {
        Ok(check) => {
            thread.join().ok();
            check
        }
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
            Err(crate::Failure::new(format!("it did not end within {patience:?}")))
        }
        Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => Err(crate::Failure::new("it panicked")),
    }
}
