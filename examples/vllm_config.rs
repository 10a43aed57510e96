//! Chooses backends with the JSON that operators write for vLLM (`--kv-transfer-config`), and
//! prints the route that kvx takes.

use std::time::Duration;

use kvx::config::{KvTransferConfig, Surroundings};
use kvx::{Agent, ErrorKind, Memory, Result};

const SOON: Duration = Duration::from_secs(10);

/// Builds the agent that a configuration describes.
fn agent(json: &str) -> Result<Agent> {
    let config = KvTransferConfig::from_json(json, &Surroundings::of_process())?;
    config.log_warnings_once(); // doubtful settings are logged with `tracing`
    // `backends` lists the only backends to use, in order of preference. Each backend may have a
    // table of options, as `tcp` has here.
    config.apply(kvx::agent(config.engine_id())).build()
}

fn main() -> Result<()> {
    let chosen = r#"{
        "kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": "decode-0",
        "kv_connector_extra_config": {"backends": ["tcp"], "tcp": {"bind": "127.0.0.1"}}
    }"#;
    let (prefill, decode) = (agent(&chosen.replace("decode", "prefill"))?, agent(chosen)?);
    assert_eq!(decode.backends(), ["TCP"]);
    let _pool = prefill.register("kv", Memory::pool(1 << 20).build()?)?;
    let peer = decode.connect(&prefill.metadata()?)?;
    peer.ready(SOON).join()?;
    println!("{}", peer.route());
    assert_eq!(peer.route().chosen(), Some("TCP"));

    // A list without a usable backend is an error that says what to do. kvx never falls back to
    // another backend silently.
    let misspelled = chosen.replace("\"tcp\"]", "\"UXC\"]");
    let error = agent(&misspelled).expect_err("there is no such backend");
    assert_eq!(error.kind(), ErrorKind::UnknownBackend);
    println!("{error}");
    decode.shutdown(SOON).join()?;
    prefill.shutdown(SOON).join()
}
