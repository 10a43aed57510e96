//! Shows that every clause of the suite can fail. Each of its breakers must make it fail, and
//! without the breaker it must hold on the same ground. It must also hold under the faults that
//! break no promise.
//!
//! Each run is a separate process, so that a hang, a panic or a crash ends only that run.

use std::collections::HashMap;
use std::fmt;
use std::io::Read as _;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvx_core::Registry;
use kvx_core::fault_injection::{BREAKS, break_only};
use kvx_testkit::{
    Breaker, CLAUSES, Chaos, Clause, Execution, Fault, HungPage, Mode, Setup, Tier, run, skip,
    trial_within,
};
use libtest_mimic::Trial;

/// The variable that tells a process its run: clause, backend, mode, variant.
const VARIABLE: &str = "KVX_TESTKIT_CATCH";
/// A broken clause that takes longer hangs, which counts as detected: unbroken, it takes at most a
/// quarter of this.
const BROKEN: Duration = Duration::from_secs(24);
/// An unbroken clause that takes longer fails.
const UNBROKEN: Duration = Duration::from_secs(60);
/// A test that takes longer hangs: it runs a broken clause on up to four grounds, and the unbroken
/// one on one.
const LIMIT: Duration = Duration::from_secs(4 * 60);

/// The backends to break, the cheapest first.
const BACKENDS: [&str; 2] = ["TCP", "SHM"];

/// Returns a registry variant: nothing broken, a switch of core, or a fault in every backend.
pub(crate) fn registry(variant: &str) -> Registry {
    let mut registry = Registry::new();
    registry
        .add(kvx_native::Shm)
        .and_then(|registry| registry.add(kvx_native::Tcp))
        .expect("two names");
    let switch = variant.strip_prefix("core switch ").map(|switch| {
        *BREAKS
            .iter()
            .find(|known| **known == switch)
            .unwrap_or_else(|| panic!("core has no switch {switch:?}"))
    });
    break_only(&Vec::from_iter(switch));
    match variant.strip_prefix("chaos ") {
        None => registry,
        Some(name) => Chaos::registry(
            registry,
            Fault::named(name).unwrap_or_else(|| panic!("no fault {name:?}")),
        ),
    }
}

/// Runs the clause that this process was started for, and ends the process. Returns if it was not
/// started for a clause.
pub(crate) fn run_if_asked() {
    if let Ok(asked) = std::env::var(VARIABLE) {
        answer(&asked);
    }
}

/// Returns a test for each clause with each change.
pub(crate) fn trials() -> impl Iterator<Item = Trial> {
    let done = Arc::new(Done::default());
    jobs().map(move |job| {
        let (title, done) = (format!("catches::{}", job.title()), Arc::clone(&done));
        trial_within(LIMIT, title.clone(), move || {
            if job.clause.id == "P12"
                && let Some(why) = HungPage::refused()
            {
                skip(&title, &why, "run the tests as root");
                return Ok(());
            }
            job.judge(&done)
        })
    })
}

/// A clause and a change to its ground.
struct Job {
    clause: &'static Clause,
    change: Change,
}

/// A change to the ground that a clause runs on.
enum Change {
    /// Broken: the clause must fail.
    Broken(&'static Breaker),
    /// A harmless fault: the clause must hold.
    Harmless(Fault),
    /// No breaker exists, so the test fails.
    Unbroken,
}

fn jobs() -> impl Iterator<Item = Job> {
    let clauses = || CLAUSES.iter().copied().flatten();
    let broken = clauses().flat_map(|clause| {
        let none = clause.breakers.is_empty().then_some(Job { clause, change: Change::Unbroken });
        let broken = |breaker| Job { clause, change: Change::Broken(breaker) };
        clause.breakers.iter().map(broken).chain(none)
    });
    let with_harmless = Tier::Whole.runs_or_says("clauses under faults that break no promise");
    let harmless = Fault::HARMLESS.iter().filter(move |_| with_harmless).flat_map(move |fault| {
        let run = clauses().filter(|clause| clause.runs != Execution::Compiler);
        run.map(|clause| Job { clause, change: Change::Harmless(*fault) })
    });
    broken.chain(harmless)
}

/// The results of the runs so far.
#[derive(Default)]
struct Done {
    /// The unbroken runs: clause and ground, and how long it took, or why it did not hold.
    unbroken: Mutex<HashMap<(&'static str, String), Result<Duration, String>>>,
}

impl Done {
    /// Checks that the unbroken clause holds. Returns how long that takes.
    fn holds(&self, clause: &'static Clause, ground: Ground) -> Result<Duration, String> {
        let key = (clause.id, ground.to_string());
        if let Some(known) = self.unbroken.lock().expect("no thread panicked").get(&key) {
            return known.clone();
        }
        let begun = Instant::now();
        let held = match Outcome::of(clause, ground, "", UNBROKEN).failure() {
            None => Ok(begun.elapsed()),
            Some(why) => Err(format!("it does not hold unbroken: {why}")),
        };
        self.unbroken.lock().expect("no thread panicked").insert(key, held.clone());
        held
    }
}

impl Job {
    fn title(&self) -> String {
        let Clause { id, name, .. } = self.clause;
        match self.change {
            Change::Unbroken => format!("clause {id} {name} broken by nothing"),
            Change::Broken(Breaker::CompileFail(file)) => {
                format!("clause {id} {name} broken by what must not compile, a doc test of {file}")
            }
            Change::Broken(breaker) => format!("clause {id} {name} broken by {}", variant(breaker)),
            Change::Harmless(fault) => format!("clause {id} {name} under chaos {}", fault.name()),
        }
    }

    /// Checks the outcome; the error says what is wrong.
    fn judge(&self, done: &Done) -> Result<(), String> {
        match self.change {
            Change::Unbroken => {
                Err("the clause has no breaker: nothing shows that it can fail".to_owned())
            }
            Change::Broken(Breaker::CompileFail(file)) => {
                let path = format!("{}/../{file}", env!("CARGO_MANIFEST_DIR"));
                let text =
                    std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
                let found = text.contains("```compile_fail");
                if found { Ok(()) } else { Err(format!("{file} has no compile_fail doc test")) }
            }
            Change::Broken(breaker) => self.fails(&variant(breaker), done),
            Change::Harmless(fault) => {
                let ground = self.grounds().next().ok_or("there is nothing to run it on")?;
                let outcome =
                    Outcome::of(self.clause, ground, &format!("chaos {}", fault.name()), UNBROKEN);
                outcome.failure().map_or(Ok(()), Err)
            }
        }
    }

    /// Checks that the clause fails when it is broken, and holds on the same ground when it is not.
    fn fails(&self, variant: &str, done: &Done) -> Result<(), String> {
        for ground in self.grounds() {
            let outcome = Outcome::of(self.clause, ground, variant, BROKEN);
            let hangs = matches!(outcome, Outcome::Hangs(_));
            if let Some(why) = outcome.failure() {
                let unbroken = done.holds(self.clause, ground)?;
                if hangs && unbroken > BROKEN / 2 {
                    return Err(format!(
                        "{why}, but unbroken it takes {unbroken:?}: that may not be a hang"
                    ));
                }
                if std::env::args().any(|argument| argument == "--nocapture") {
                    println!("{}{ground}: {why}; unbroken it takes {unbroken:?}", self.title());
                }
                return Ok(());
            }
        }
        Err("the clause holds although it is broken".to_owned())
    }

    /// Returns the grounds that it can run on, the cheapest first.
    fn grounds(&self) -> impl Iterator<Item = Ground> + use<> {
        let modes = self.clause.runs.modes();
        BACKENDS
            .into_iter()
            .flat_map(move |backend| modes.iter().map(move |mode| Ground { backend, mode: *mode }))
    }
}

/// The ground of a run: the backend and the mode.
#[derive(Clone, Copy)]
struct Ground {
    backend: &'static str,
    mode: Mode,
}

impl fmt::Display for Ground {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.mode == Mode::OneProcess { "one process" } else { "two processes" };
        write!(f, " over {} in {place}", self.backend)
    }
}

fn variant(breaker: &Breaker) -> String {
    match breaker {
        Breaker::Core(switch) => format!("core switch {switch}"),
        Breaker::Chaos(fault) => format!("chaos {}", fault.name()),
        Breaker::CompileFail(file) => (*file).to_owned(),
    }
}

/// The outcome of a run.
enum Outcome {
    Holds,
    Fails(String),
    /// The run did not end within this time.
    Hangs(Duration),
}

impl Outcome {
    /// Runs a clause in a separate process.
    fn of(clause: &Clause, ground: Ground, variant: &str, patience: Duration) -> Self {
        let (backend, place) =
            (ground.backend, if ground.mode == Mode::OneProcess { "one" } else { "two" });
        let asked = format!("{}/{backend}/{place}/{variant}", clause.id);
        let mut command = Command::new(std::env::current_exe().expect("a program knows its file"));
        command
            .env(VARIABLE, asked)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = command.spawn().expect("this program can be started again");
        let end = Instant::now() + patience;
        let status = loop {
            match child.try_wait().expect("a child can be waited for") {
                Some(status) => break status,
                None if Instant::now() >= end => {
                    child.kill().ok();
                    child.wait().ok();
                    return Outcome::Hangs(patience);
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let mut said = String::new();
        child.stdout.take().expect("it is piped").read_to_string(&mut said).ok();
        match said.lines().find_map(|line| line.strip_prefix("clause fails: ")) {
            Some(why) => Outcome::Fails(why.to_owned()),
            None if status.success() => Outcome::Holds,
            None => Outcome::Fails(format!("its process ended with {status}")),
        }
    }

    /// Returns why the clause did not hold, or `None` if it did.
    fn failure(self) -> Option<String> {
        match self {
            Outcome::Holds => None,
            Outcome::Fails(why) => Some(why),
            Outcome::Hangs(patience) => Some(format!("it did not end within {patience:?}")),
        }
    }
}

fn answer(asked: &str) -> ! {
    let mut parts = asked.splitn(4, '/');
    let [Some(id), Some(backend), Some(place), Some(variant)] = [(); 4].map(|()| parts.next())
    else {
        panic!("{VARIABLE} is clause/backend/mode/variant, not {asked:?}");
    };
    let clause = CLAUSES
        .iter()
        .copied()
        .flatten()
        .find(|clause| clause.id == id)
        .expect("the clause is known");
    let mode = if place == "one" { Mode::OneProcess } else { Mode::TwoProcesses };
    let mut setup = Setup::new(registry, variant, backend, mode);
    setup.quick = true;
    let check = run((clause.test)(&setup));
    if let Err(failure) = &check {
        println!("clause fails: {}", failure.to_string().replace('\n', " "));
    }
    // The process exits without cleaning up after a broken clause.
    std::process::exit(i32::from(check.is_err()));
}
