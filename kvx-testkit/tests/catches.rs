//! Every clause of the suite must be seen to fail: broken on purpose, by each of its breakers, it must not hold; and
//! unbroken, on the same ground, it must. It must also hold under the faults that break no promise.
//!
//! Each run is a process of its own, so that a hang, a panic or a crash ends that run alone. Arguments that do not
//! begin with a dash choose: what is printed of a clause and its breaker must contain one of them, or with `--exact` be
//! one of them.

use std::collections::HashMap;
use std::fmt;
use std::io::Read as _;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvx_core::Registry;
use kvx_core::breaks::{BREAKS, break_only};
use kvx_testkit::{
    Breaker, CLAUSES, Chaos, Clause, Fault, HungPage, Mode, Runs, Setup, run, serve_if_asked, skip,
};

/// Tells a process which run it is: clause, backend, mode, variant.
const VARIABLE: &str = "KVX_TESTKIT_CATCH";
/// A broken clause that takes longer hangs, and so is caught: if unbroken it takes a quarter of that at most.
const BROKEN: Duration = Duration::from_secs(24);
/// An unbroken one that takes longer fails.
const UNBROKEN: Duration = Duration::from_secs(60);
/// Runs at a time: broken clauses mostly wait, but unbroken ones measure time.
const AT_ONCE: usize = 3;

/// Backends to break, the cheapest to break first.
const BACKENDS: [&str; 2] = ["TCP", "SHM"];

/// The variants: nothing broken, a switch of core, or a fault in every backend.
fn registry(variant: &str) -> Registry {
    let mut registry = Registry::new();
    registry.add(kvx_native::Shm).and_then(|registry| registry.add(kvx_native::Tcp)).expect("two names");
    let switch = variant.strip_prefix("core switch ").map(|switch| {
        *BREAKS
            .iter()
            .find(|known| **known == switch)
            .unwrap_or_else(|| panic!("core has no switch {switch:?}"))
    });
    break_only(&Vec::from_iter(switch));
    match variant.strip_prefix("chaos ") {
        None => registry,
        Some(name) => {
            Chaos::registry(registry, Fault::named(name).unwrap_or_else(|| panic!("no fault {name:?}")))
        }
    }
}

fn main() -> ExitCode {
    serve_if_asked(registry);
    if let Ok(asked) = std::env::var(VARIABLE) {
        return answer(&asked);
    }
    let (dashed, chosen): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|argument| argument.starts_with('-'));
    let jobs = jobs(&chosen, dashed.iter().any(|argument| argument == "--exact"));
    let (begun, done) = (Instant::now(), Done::default());
    let next = AtomicUsize::new(0);
    println!("\nrunning {} tests", jobs.len());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    done.note(job, job.judge(&done));
                }
            });
        }
    });
    let failed = done.failures.into_inner().expect("no thread panicked");
    for (title, why) in &failed {
        println!("\n---- {title} ----\n{why}");
    }
    println!(
        "\ntest result: {}. {} passed; {} failed; 0 ignored; 0 measured; 0 filtered out; finished in {:.2}s\n",
        if failed.is_empty() { "ok" } else { "FAILED" },
        jobs.len() - failed.len(),
        failed.len(),
        begun.elapsed().as_secs_f64()
    );
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(101) }
}

/// One clause, and what is done to it.
struct Job {
    clause: &'static Clause,
    trial: Trial,
}

enum Trial {
    /// It must fail.
    Broken(&'static Breaker),
    /// It must hold.
    Harmless(Fault),
    /// It has no breaker, and fails for that.
    Unbroken,
}

fn jobs(chosen: &[String], exact: bool) -> Vec<Job> {
    let hung = HungPage::refused();
    if let Some(why) = &hung {
        skip("catches of P12", why, "run the tests as root");
    }
    let clauses = || CLAUSES.iter().copied().flatten().filter(|clause| hung.is_none() || clause.id != "P12");
    let broken = clauses().flat_map(|clause| {
        let none = clause.breakers.is_empty().then_some(Job { clause, trial: Trial::Unbroken });
        clause.breakers.iter().map(move |breaker| Job { clause, trial: Trial::Broken(breaker) }).chain(none)
    });
    let harmless = Fault::HARMLESS.iter().flat_map(|fault| {
        let run = clauses().filter(|clause| clause.runs != Runs::Compiler);
        run.map(|clause| Job { clause, trial: Trial::Harmless(*fault) })
    });
    let all = broken.chain(harmless);
    let is = |title: &str, word: &str| if exact { title == word } else { title.contains(word) };
    all.filter(|job| chosen.is_empty() || chosen.iter().any(|word| is(&job.title(), word))).collect()
}

/// What the runs have shown so far.
#[derive(Default)]
struct Done {
    /// Titles, and why they failed.
    failures: Mutex<Vec<(String, String)>>,
    /// Unbroken runs: clause and ground, and how long it took, or why it did not hold.
    unbroken: Mutex<HashMap<(&'static str, String), Result<Duration, String>>>,
}

impl Done {
    fn note(&self, job: &Job, verdict: Result<String, String>) {
        let mut failures = self.failures.lock().expect("no thread panicked");
        let (good, bad) = match job.trial {
            Trial::Broken(_) | Trial::Unbroken => ("caught", "NOT CAUGHT"),
            Trial::Harmless(_) => ("holds", "DOES NOT HOLD"),
        };
        match verdict {
            Ok(place) => println!("{}{place} … {good}", job.title()),
            Err(why) => {
                println!("{} … {bad}", job.title());
                failures.push((job.title(), why));
            }
        }
    }

    /// Requires that the clause holds when nothing is broken. Gives how long that takes.
    fn holds(&self, clause: &'static Clause, ground: Ground) -> Result<Duration, String> {
        let key = (clause.id, ground.to_string());
        if let Some(known) = self.unbroken.lock().expect("no thread panicked").get(&key) {
            return known.clone();
        }
        let begun = Instant::now();
        let held = match Outcome::of(clause, ground, "", UNBROKEN).failure() {
            None => Ok(begun.elapsed()),
            Some(why) => Err(format!("it does not hold when nothing is broken: {why}")),
        };
        self.unbroken.lock().expect("no thread panicked").insert(key, held.clone());
        held
    }
}

impl Job {
    fn title(&self) -> String {
        let Clause { id, name, .. } = self.clause;
        match self.trial {
            Trial::Unbroken => format!("clause {id} {name} broken by nothing"),
            Trial::Broken(Breaker::CompileFail(file)) => {
                format!("clause {id} {name} broken by what must not compile, a doc test of {file}")
            }
            Trial::Broken(breaker) => format!("clause {id} {name} broken by {}", variant(breaker)),
            Trial::Harmless(fault) => format!("clause {id} {name} under chaos {}", fault.name()),
        }
    }

    /// Where it went as it must; or why it did not.
    fn judge(&self, done: &Done) -> Result<String, String> {
        match self.trial {
            Trial::Unbroken => Err("the clause has no breaker: nothing shows that it can fail".to_owned()),
            Trial::Broken(Breaker::CompileFail(file)) => {
                let path = format!("{}/../{file}", env!("CARGO_MANIFEST_DIR"));
                let text = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
                let found = text.contains("```compile_fail");
                if found { Ok(String::new()) } else { Err(format!("{file} has no compile_fail doc test")) }
            }
            Trial::Broken(breaker) => self.fails(&variant(breaker), done),
            Trial::Harmless(fault) => {
                let ground = self.grounds().next().ok_or("there is nothing to run it on")?;
                let outcome = Outcome::of(self.clause, ground, &format!("chaos {}", fault.name()), UNBROKEN);
                outcome.failure().map_or_else(|| Ok(ground.to_string()), Err)
            }
        }
    }

    /// Whether the clause fails when it is broken, and holds on the same ground when it is not.
    fn fails(&self, variant: &str, done: &Done) -> Result<String, String> {
        for ground in self.grounds() {
            let outcome = Outcome::of(self.clause, ground, variant, BROKEN);
            let hangs = matches!(outcome, Outcome::Hangs(_));
            if let Some(why) = outcome.failure() {
                let unbroken = done.holds(self.clause, ground)?;
                if hangs && unbroken > BROKEN / 2 {
                    return Err(format!(
                        "{why}, and it takes {unbroken:?} when nothing is broken: is that a hang?"
                    ));
                }
                if std::env::args().any(|argument| argument == "--nocapture") {
                    println!("  {}: {why}; unbroken it takes {unbroken:?}", self.title());
                }
                return Ok(ground.to_string());
            }
        }
        Err("the clause holds although it is broken".to_owned())
    }

    /// What it can run on, the cheapest first.
    fn grounds(&self) -> impl Iterator<Item = Ground> + use<> {
        let modes: &[Mode] = match self.clause.runs {
            Runs::OneProcess => &[Mode::OneProcess],
            Runs::TwoProcesses => &[Mode::TwoProcesses],
            Runs::Both => &[Mode::OneProcess, Mode::TwoProcesses],
            Runs::Compiler => &[],
        };
        BACKENDS
            .into_iter()
            .flat_map(move |backend| modes.iter().map(move |mode| Ground { backend, mode: *mode }))
    }
}

/// What a clause runs on.
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

/// What one run showed.
enum Outcome {
    Holds,
    Fails(String),
    /// It did not end within this time.
    Hangs(Duration),
}

impl Outcome {
    /// Runs a clause in a process of its own.
    fn of(clause: &Clause, ground: Ground, variant: &str, patience: Duration) -> Self {
        let (backend, place) = (ground.backend, if ground.mode == Mode::OneProcess { "one" } else { "two" });
        let asked = format!("{}/{backend}/{place}/{variant}", clause.id);
        let mut command = Command::new(std::env::current_exe().expect("a program knows its file"));
        command.env(VARIABLE, asked).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
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

    /// Why the clause did not hold, unless it did.
    fn failure(self) -> Option<String> {
        match self {
            Outcome::Holds => None,
            Outcome::Fails(why) => Some(why),
            Outcome::Hangs(patience) => Some(format!("it did not end within {patience:?}")),
        }
    }
}

/// Runs the clause that this process was started for.
fn answer(asked: &str) -> ExitCode {
    let mut parts = asked.splitn(4, '/');
    let [Some(id), Some(backend), Some(place), Some(variant)] = [(); 4].map(|()| parts.next()) else {
        panic!("{VARIABLE} is clause/backend/mode/variant, not {asked:?}");
    };
    let clause =
        CLAUSES.iter().copied().flatten().find(|clause| clause.id == id).expect("the clause is known");
    let mode = if place == "one" { Mode::OneProcess } else { Mode::TwoProcesses };
    let mut setup = Setup::new(registry, variant, backend, mode);
    setup.quick = true;
    let check = run((clause.test)(&setup));
    if let Err(failure) = &check {
        println!("clause fails: {}", failure.to_string().replace('\n', " "));
    }
    // What a broken clause leaves behind is nobody's business.
    std::process::exit(i32::from(check.is_err()));
}
