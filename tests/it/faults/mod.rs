//! Tests what happens to transfers when something fails, over each backend. A part of it runs here;
//! `cargo xtask faults` runs all of it and prints the table of docs/project/reliability.md.

mod panics;

use std::process::Command;
use std::time::Duration;

use kvx_testkit::{
    Failure, Hosts, Limit, Mode, Moment, Setup, Trouble, fault, gap_held, is_own_process,
    refused_behind, run_in_own_process, run_one_test, skip, trial, trial_within,
};
use libtest_mimic::Trial;

use crate::registry_of_facade;

/// The environment variable that runs all tests over all backends, and prints a row of the table
/// for each.
const ALL: &str = "KVX_FAULTS_ALL";
/// The environment variable of a process that runs a single test.
const ALONE: &str = "KVX_FAULTS_ALONE";
/// The time limit of one test in a separate process.
const LIMIT: Duration = Duration::from_secs(120);
/// The time limit of the test in which one turn after the other panics.
const PANICS_LIMIT: Duration = Duration::from_secs(900);
/// The remedy where namespaces and other users are not permitted.
const CURE: &str = "run the tests as root, with util-linux and iproute2";
/// The command that runs the far end as the first process of a PID namespace.
const NAMESPACE: [&str; 4] = ["unshare", "--pid", "--fork", "--kill-child"];

/// The surroundings of the two processes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Both run directly on this machine.
    Here,
    /// The far end runs in a separate PID namespace.
    Namespace,
    /// Both belong to an unprivileged user without other processes.
    User,
    /// Each runs on a separate host.
    Hosts,
}

impl Place {
    /// Returns where this fault can happen, and the text that the table has for each place.
    fn of(trouble: Trouble) -> &'static [(Place, &'static str)] {
        match trouble {
            Trouble::CutOff => &[(Place::Hosts, "")],
            Trouble::Lacks(Limit::Threads) | Trouble::LacksHere(Limit::Threads) => {
                &[(Place::User, "")]
            }
            Trouble::Killed => &[
                (Place::Here, ""),
                (Place::Namespace, " in its namespace of processes"),
                (Place::User, " by the user of both"),
                (Place::Hosts, " on its own host"),
            ],
            _ => &[(Place::Here, "")],
        }
    }

    /// Returns whether this backend connects these processes.
    fn is_reached_by(self, backend: &str) -> bool {
        self != Place::Hosts || backend != "SHM"
    }
}

/// Known violations by libraries, with the reason. The row shows the reason, and the run does not
/// fail.
const KNOWN: [(&str, Trouble, Moment, &str); 1] = [(
    "UCX",
    Trouble::Lacks(Limit::Mappings),
    Moment::Unlinked,
    "1.13 ends its process, as it has no memory for a new peer",
)];

fn is_all() -> bool {
    std::env::var_os(ALL).is_some()
}

/// Returns whether the tests include this case. Deaths in other surroundings or after the work has
/// ended, and missing threads or mappings, differ little between moments, so SHM tests them at
/// every second moment and TCP at the others.
fn is_tried(backend: &str, trouble: Trouble, place: Place, moment: Moment) -> bool {
    let alike = match trouble {
        Trouble::Lacks(what) | Trouble::LacksHere(what) => what != Limit::Files,
        Trouble::StoppedThenKilled => true,
        _ => place != Place::Here,
    };
    let odd = matches!(moment, Moment::Idle | Moment::Writing);
    is_all() || !alike || odd == (backend == "TCP")
}

/// Returns the backend's options for two processes on separate hosts.
fn options_between_hosts(backend: &str) -> &'static str {
    match backend {
        "UCX" => r#"{"ucx": {"tls": "tcp"}}"#,
        "LIBFABRIC" => r#"{"libfabric": {"provider": "tcp;ofi_rxm", "domain": "eth0"}}"#,
        _ => r#"{"tcp": {"bind": "{address}"}}"#,
    }
}

/// Runs one case in a separate process, as it may limit the resources of that process.
fn run(
    title: &str,
    backend: &'static str,
    run: (Trouble, Moment),
    place: (Place, &str),
) -> Result<(), Failure> {
    let itself = std::env::current_exe()?;
    let is_alone = std::env::var_os(ALONE).is_some();
    let test = ["test", "-x", &itself.to_string_lossy()].map(str::to_owned);
    // An unused user id: the kernel counts a user's resources over all processes of that user.
    let user = (200_000 + std::process::id() % 100_000).to_string();
    let user = ["env", "HOME=/", "setpriv", "--reuid", &user, "--regid", &user, "--clear-groups"];
    let behind: &[&str] = match place.0 {
        Place::Here => &[],
        Place::Namespace => &NAMESPACE,
        Place::User if is_alone => &[],
        Place::Hosts if Hosts::way_to_far().is_some() => &[],
        Place::User => &user,
        Place::Hosts => &["unshare", "--net", "--mount"],
    };
    if let Some(why) = refused_behind(behind, &test.each_ref().map(String::as_str)) {
        skip(title, &why, CURE);
        return Ok(());
    }
    let said = match place.0 {
        Place::User if !behind.is_empty() => {
            let mut test = Command::new(behind[0]);
            run_one_test(
                title,
                test.args(&behind[1..]).arg(itself).args(["--exact", title]).env(ALONE, "1"),
                LIMIT,
            )
        }
        Place::Hosts if !behind.is_empty() => Hosts::run_test(title, LIMIT),
        Place::Here | Place::Namespace if !is_alone => {
            let mut test = Command::new(itself);
            if run.0 == Trouble::LacksHere(Limit::Mappings) {
                // One heap for all threads, so that the reserve that the test allocates serves all
                // of them.
                test.env("MALLOC_ARENA_MAX", "1");
            }
            run_one_test(title, test.args(["--exact", title]).env(ALONE, "1"), LIMIT)
        }
        _ => return row(title, backend, run, place),
    };
    let text = said.as_ref().map_or_else(ToString::to_string, String::clone);
    text.lines()
        .filter_map(|line| line.find("| ").map(|at| &line[at..]))
        .for_each(|row| println!("{row}"));
    said.map(drop)
}

fn row(
    title: &str,
    backend: &'static str,
    (trouble, moment): (Trouble, Moment),
    (place, at): (Place, &str),
) -> Result<(), Failure> {
    let mut setup = Setup::new(registry_of_facade, "", backend, Mode::TwoProcesses);
    // The time to wait for an unresolved page fault.
    let patience = if !is_all() && trouble == Trouble::HungPage { 2 } else { 3 };
    setup.peer_timeout = Duration::from_secs(patience);
    match place {
        Place::Here | Place::User => {}
        Place::Namespace => setup.through = NAMESPACE.map(str::to_owned).to_vec(),
        Place::Hosts => {
            setup.through = Hosts::way_to_far().unwrap_or_default();
            setup.options = options_between_hosts(backend).to_owned();
        }
    }
    let version = match kvx::registry().require(backend, &kvx::Options::default()) {
        Ok((_, found)) => found.version,
        Err(why) => {
            skip(title, &why.to_string(), "see the reason");
            return Ok(());
        }
    };
    // If a deadline ends the work, a short one makes the test fast. Otherwise the deadline must not
    // interfere.
    let waits = match trouble {
        Trouble::Stopped | Trouble::StoppedThenKilled | Trouble::CutOff | Trouble::HungPage => true,
        Trouble::Lacks(_) | Trouble::LacksHere(_) => true,
        Trouble::Killed => place == Place::Hosts,
        _ => false,
    };
    let deadline = match (is_all(), waits) {
        // A process that cannot be observed is lost when it stays silent.
        (true, _) if place == Place::Namespace => 5000,
        (true, _) => 2000,
        (false, true) => 500,
        (false, false) => 8000,
    };
    let deadline = Duration::from_millis(deadline);
    let ended = fault(&setup, trouble, moment, deadline);
    let known = KNOWN
        .iter()
        .find(|(name, what, when, _)| (*name, *what, *when) == (backend, trouble, moment));
    let known = known.map(|(.., why)| *why);
    let ms = |time: Duration| format!("{:.0}", time.as_secs_f64() * 1e3);
    let cells = match &ended {
        Ok(ended) => {
            let settled = match ended.settled {
                Some(time) => ms(time),
                None if ended.held => "held".to_owned(),
                None => "then".to_owned(),
            };
            format!("{} | {} | {settled} | {}", ended.results, ms(ended.after), ms(ended.works))
        }
        Err(why) => format!("**{}** | | |", known.map_or_else(|| why.to_string(), str::to_owned)),
    };
    // kvx's own backends have kvx's version.
    let library = if matches!(backend, "SHM" | "TCP") { "" } else { &*version };
    println!("| {} | {trouble}{at} | {moment} | {cells} |", format!("{backend} {library}").trim());
    match (ended, known) {
        (Err(why), None) => Err(why),
        (Err(_), Some(known)) => {
            gap_held(title, known);
            Ok(())
        }
        (Ok(_), _) => Ok(()),
    }
}

/// Returns the trials of `cargo xtask faults`, if it has started this program.
pub(crate) fn asked_for() -> Option<Vec<Trial>> {
    is_all().then(trials)
}

pub(crate) fn trials() -> Vec<Trial> {
    let backends: &[&'static str] =
        if is_all() { &["SHM", "TCP", "UCX", "LIBFABRIC"] } else { &["SHM", "TCP"] };
    let mut trials = Vec::new();
    for backend in backends {
        for trouble in Trouble::ALL {
            let places =
                Place::of(trouble).iter().filter(|(place, _)| place.is_reached_by(backend));
            for (place, at) in places {
                let moments = Moment::ALL.into_iter().filter(|moment| moment.has(trouble));
                for moment in moments.filter(|moment| is_tried(backend, trouble, *place, *moment)) {
                    let name = format!("faults::{backend}::{trouble}{at}, {moment}")
                        .replace(", ", "_")
                        .replace(' ', "-");
                    let title = name.clone();
                    let test = move || run(&title, backend, (trouble, moment), (*place, at));
                    trials.push(trial(name, test));
                }
            }
        }
    }
    for backend in backends {
        for (way, op) in [("reading", kvx::Op::Read), ("writing", kvx::Op::Write)] {
            let title = format!("faults::{backend}::a-turn-panics_{way}");
            let step = if is_all() { 1 } else { 16 };
            // The panics count the turns of all threads of the process.
            trials.push(trial_within(PANICS_LIMIT, title.clone(), move || {
                match is_own_process() || is_all() {
                    true => panics::row(&title, backend, op, step),
                    false => run_in_own_process(&title, |_| {}),
                }
            }));
        }
    }
    trials
}
