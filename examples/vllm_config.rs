//! Backends chosen by the JSON that operators write for vLLM (`--kv-transfer-config`), with what kvx makes of it.

use std::time::Duration;

use kvx::config::{KvTransferConfig, Surroundings};
use kvx::{Agent, ErrorKind, Memory, Result};

const SOON: Duration = Duration::from_secs(10);

/// The agent that a configuration asks for.
fn agent(json: &str) -> Result<Agent> {
    let config = KvTransferConfig::from_json(json, &Surroundings::of_process())?;
    config.log_warnings_once(); // what is doubtful is told by `tracing`
    // Its `backends` restricts to the names in it, in order of preference; each backend has a table of options.
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

    // A list that names nothing usable is an error that says what to do: nothing else is taken silently.
    let misspelled = chosen.replace("\"tcp\"]", "\"UXC\"]");
    let error = agent(&misspelled).expect_err("there is no such backend");
    assert_eq!(error.kind(), ErrorKind::UnknownBackend);
    println!("{error}");
    decode.shutdown(SOON).join()?;
    prefill.shutdown(SOON).join()
}
