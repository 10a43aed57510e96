//! L1: another user takes the path of the socket where ranks join, and the server does not start.

use std::path::Path;
use std::process::Command;

use kvx_testkit::test;
use serde_json::json;

use crate::serve::server::{Server, greedy, model, prompt};

#[test]
fn other_users_cannot_take_the_path_of_the_ranks_socket() {
    let model = model(&["--arch", "llama", "--kv-heads", "2"]);
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("ranks-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let config = json!({"kv_connector": "NixlConnector", "kv_role": "kv_both",
                        "kv_connector_extra_config": {"backends": ["SHM"]}});
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
    command.arg("serve").arg(&model).args([
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--served-model-name",
        "m",
    ]);
    command.args([
        "--kv-cache-memory-bytes",
        "16M",
        "-tp",
        "2",
        "--kv-transfer-config",
        &config.to_string(),
    ]);
    command.env("TMPDIR", &folder).env("VLLM_NIXL_SIDE_CHANNEL_PORT", "0");
    let server = Server::spawn(command);
    // The server has not read its model yet.
    std::fs::create_dir(folder.join(format!("kvx-serve-{}-0", server.pid()))).unwrap();
    let server = server.listening();
    assert_eq!(server.ranks().len(), 1);
    assert_eq!(server.post("/v1/completions", &greedy(&prompt(1, 20), 2)).0, 200);
    let left: Vec<_> =
        std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 1, "the folder of the socket stays: {left:?}");
    drop(server);
    std::fs::remove_dir_all(folder).unwrap();
}
