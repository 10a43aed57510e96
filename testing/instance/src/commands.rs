//! The process of an instance: executes the test's commands from standard input.

use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::serve::{bind, serve};
use crate::settings::{Command, Connector, Line, Settings};
use crate::state::{State, say};

/// The environment variable with an instance's settings, which makes a process an instance.
pub(crate) const VARIABLE: &str = "KVX_INSTANCE";

/// Runs an instance forever if this process was started as one. The `main` of a test program must
/// call this first.
///
/// # Panics
///
/// Panics if the instance cannot serve.
#[expect(clippy::expect_used, reason = "a panic ends the process, which the test notices")]
pub fn run_if_asked() {
    let Some(settings) = std::env::var_os(VARIABLE) else { return };
    // End with the test's process, even while stopped.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .expect("the signal exists");
    let settings = serde_json::from_str(&settings.to_string_lossy()).expect("settings are JSON");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime starts");
    runtime.block_on(run(settings)).expect("the instance serves");
    std::process::exit(0);
}

async fn run(settings: Settings) -> std::io::Result<()> {
    let listener = bind(settings.port)?;
    let port = listener.local_addr()?.port();
    let bootstrap = (settings.connector == Connector::Mooncake).then(|| bind(0)).transpose()?;
    let bootstrap_port = match &bootstrap {
        Some(bound) => bound.local_addr()?.port(),
        None => 0,
    };
    let state = State::new(settings, port);
    say(&Line::Listening { port, bootstrap: bootstrap_port });
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    let service = serve(state.clone(), listener, false);
    let queries = async {
        match bootstrap {
            Some(bound) => serve(state.clone(), bound, true).await,
            None => std::future::pending().await,
        }
    };
    let commands = async {
        while let Some(line) = lines.next_line().await? {
            obey(&state, serde_json::from_str(&line)?);
        }
        Ok(())
    };
    tokio::select! {
        ended = service => ended,
        ended = queries => ended,
        ended = commands => ended,
    }
}

fn obey(state: &State, command: Command) {
    match command {
        Command::Script(script) => state.lock().scripts.push(script),
        Command::ClearScripts => state.lock().scripts.clear(),
        Command::Delays(delays) => state.lock().delays = delays,
        Command::Health(health) => state.lock().health = health,
        Command::Listen(listens) => drop(state.listens.send_replace(listens)),
        Command::Report => return say(&Line::Report(Box::new(state.report()))),
    }
    say(&Line::Done);
}
