//! Tests that an agent's builder applies a vLLM configuration.

use kvx::ErrorKind;
use kvx::config::{KvTransferConfig, Surroundings};
use kvx_testkit::test;

#[test]
#[cfg(all(feature = "shm", feature = "tcp"))]
fn an_agent_uses_only_the_configured_backends() {
    let text = r#"{"kv_connector": "NixlConnector", "kv_role": "kv_both",
                   "kv_connector_extra_config": {"backends": ["shm"]}}"#;
    let config = KvTransferConfig::from_json(text, &Surroundings::default()).unwrap();
    let agent = |name| config.apply(kvx::agent(name)).build().unwrap();
    let (prefill, decode) = (agent("prefill"), agent("decode"));
    prefill.register("kv", kvx::Memory::pool(4096).build().unwrap()).unwrap();
    let peer = decode.connect(prefill.metadata().unwrap()).unwrap();
    let considered: Vec<_> =
        peer.route().candidates.iter().map(|considered| considered.backend).collect();
    assert_eq!(considered, ["SHM"], "the agent must use only listed backends");
}

#[test]
fn an_unknown_backend_is_an_error() {
    let text = r#"{"kv_connector": "NixlConnector", "kv_role": "kv_both",
                   "kv_connector_extra_config": {"backends": ["UXC"]}}"#;
    let config = KvTransferConfig::from_json(text, &Surroundings::default()).unwrap();
    let error = config.apply(kvx::agent("a")).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnknownBackend);
}
