//! Attacks on the program's listeners and on its configuration. Each of them worked once, and must
//! fail.

mod api_keys;
mod bodies;
mod clients;
mod configuration;
mod connections;
mod data_parallel;
mod forms;
mod http;
mod keys;
#[cfg(feature = "connector")]
mod listeners;
mod mooncake;
mod parameters;
mod ranks;
mod responses;
mod status;
mod turns;

use kvx_testkit::output;

use crate::serve::server::LIMIT;

/// Runs `kvx` with these arguments to its end. Returns true if it succeeded, and its output.
fn kvx(arguments: &[&str]) -> (bool, String) {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvx"));
    let output = output(command.args(arguments).env_remove("KVX_SECRET_FILE"), LIMIT);
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}
