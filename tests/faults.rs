//! What becomes of work when something fails beside it, over each backend: some of it here, all of it and the table of
//! docs/reliability.md by `cargo xtask faults`.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

use std::process::ExitCode;
use std::time::Duration;

use kvx_testkit::{Mode, Moment, Setup, Trouble, fault, serve_if_asked, skip};
use libtest_mimic::{Arguments, Failed, Trial};

/// Set: everything over all backends, and a row of the table for each.
const ALL: &str = "KVX_FAULTS_ALL";

fn is_all() -> bool {
    std::env::var_os(ALL).is_some()
}

fn registry(_: &str) -> kvx::Registry {
    kvx::registry()
}

fn row(backend: &'static str, trouble: Trouble, moment: Moment) -> Result<(), Failed> {
    let name = format!("{backend}, {trouble}, {moment}");
    let version = match kvx::registry().require(backend, &kvx::Options::default()) {
        Ok((_, found)) => found.version,
        Err(why) => {
            skip(&name, &why.to_string(), "see the reason");
            return Ok(());
        }
    };
    let mut setup = Setup::new(registry, "", backend, Mode::TwoProcesses);
    setup.peer_timeout = Duration::from_secs(3);
    // Where a deadline is what ends the work, a short one costs the tests less; elsewhere it must not.
    let waits = [Trouble::Stopped, Trouble::StoppedThenKilled, Trouble::NoFilesThere, Trouble::NoFilesHere];
    let deadline = match (is_all(), waits.contains(&trouble)) {
        (true, _) => 2000,
        (false, true) => 500,
        (false, false) => 8000,
    };
    let deadline = Duration::from_millis(deadline);
    let ended = fault(&setup, trouble, moment, deadline);
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
        Err(why) => format!("**{why}** | | |"),
    };
    // kvx's own have its version.
    let library = if matches!(backend, "SHM" | "TCP") { "" } else { &*version };
    println!("| {} | {trouble} | {moment} | {cells} |", format!("{backend} {library}").trim());
    ended.map(drop).map_err(Into::into)
}

fn main() -> ExitCode {
    serve_if_asked(registry);
    let backends: &[&'static str] =
        if is_all() { &["SHM", "TCP", "UCX", "LIBFABRIC"] } else { &["SHM", "TCP"] };
    let mut trials = Vec::new();
    for backend in backends {
        for trouble in Trouble::ALL {
            for moment in Moment::ALL.into_iter().filter(|moment| moment.has(trouble)) {
                let name = format!("{backend}::{trouble}, {moment}").replace(", ", "_").replace(' ', "-");
                trials.push(Trial::test(name, move || row(backend, trouble, moment)));
            }
        }
    }
    let mut arguments = Arguments::from_args();
    // One is about this process's descriptors, and all tell times.
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, trials).exit_code()
}
