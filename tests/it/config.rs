//! A vLLM configuration given to an agent's builder.

use kvx::ErrorKind;
use kvx::config::{KvTransferConfig, Surroundings};
use kvx_testkit::test;

#[test]
#[cfg(all(feature = "shm", feature = "tcp"))]
fn backends_of_the_configuration_are_those_of_the_agent() {
    let text = r#"{"kv_connector": "NixlConnector", "kv_role": "kv_both",
                   "kv_connector_extra_config": {"backends": ["shm"]}}"#;
    let config = KvTransferConfig::from_json(text, &Surroundings::default()).unwrap();
    let agent = |name| config.apply(kvx::agent(name)).build().unwrap();
    let (prefill, decode) = (agent("prefill"), agent("decode"));
    prefill.register("kv", kvx::Memory::pool(4096).build().unwrap()).unwrap();
    let peer = decode.connect(prefill.metadata().unwrap()).unwrap();
    let considered: Vec<_> =
        peer.route().candidates.iter().map(|considered| considered.backend).collect();
    assert_eq!(considered, ["SHM"], "a list restricts");
}

#[test]
fn a_backend_that_is_none_is_named() {
    let text = r#"{"kv_connector": "NixlConnector", "kv_role": "kv_both",
                   "kv_connector_extra_config": {"backends": ["UXC"]}}"#;
    let config = KvTransferConfig::from_json(text, &Surroundings::default()).unwrap();
    let error = config.apply(kvx::agent("a")).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnknownBackend);
}
