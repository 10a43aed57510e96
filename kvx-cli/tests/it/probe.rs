//! Tests of `kvx probe` with the side channel of a connector in this process, with another server,
//! and with no server.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use kvx::Memory;
use kvx::config::{KvTransferConfig, Surroundings};
use kvx::connector::{
    Caches, CompatibilityFactors, Connector, Heads, KvLayout, KvTensors, LayerCache, MemoryType,
    Rank, Version, WorkerRank,
};
use kvx_testkit::test;
use serde_json::Value;

#[cfg(all(feature = "serve", feature = "proxy"))]
use crate::serve::{
    hosts::secret,
    server::{Server, ServerArgs, model, prompt},
    transfers::published,
};

const LIMIT: Duration = Duration::from_secs(60);

fn kvx(arguments: &[&str]) -> Output {
    kvx_testkit::output(
        Command::new(env!("CARGO_BIN_EXE_kvx")).args(arguments).env_remove("KVX_SECRET_FILE"),
        LIMIT,
    )
}

/// A prefill of one worker, one layer, and 8 blocks of 16 tokens.
pub(crate) struct Prefill {
    connector: Connector,
    _rank: Rank,
}

fn prefill() -> Prefill {
    prefill_of("a-model", "torch.bfloat16")
}

pub(crate) fn prefill_of(model: &str, dtype: &str) -> Prefill {
    let json = r#"{"kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": "prefill-0",
                   "kv_connector_extra_config": {"backends": ["TCP"]}}"#;
    let surroundings = Surroundings::default().variable("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1");
    let config = KvTransferConfig::from_json(json, &surroundings).unwrap();
    let mut factors = CompatibilityFactors::new(Version::default(), model);
    factors.dtype = dtype.to_owned();
    (factors.num_kv_heads, factors.head_size, factors.num_hidden_layers) = (2, 4, 1);
    let built = Connector::builder(&config, kvx::registry(), factors).block_size(16).any_port();
    let connector = built.build_blocking().unwrap();
    let pool = Arc::new(Memory::pool(8 * 256).build().unwrap());
    let layer = LayerCache {
        name: "layers.0.attn".into(),
        tensors: KvTensors::Together(pool.address()),
        blocks: 8,
        block_len: 256,
        block_stride: 256,
        group: 0,
        heads: Heads::Sharded(2),
        memory: MemoryType::Dram,
    };
    let caches = Caches::of_layers(vec![layer], KvLayout::Lbhnc, 16, 1, 0).unwrap();
    let rank = connector.rank(WorkerRank { pp: 0, tp: 0 }).unwrap();
    Prefill { _rank: rank.register(caches, [pool]).unwrap(), connector }
}

impl Prefill {
    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.connector.address().port)
    }
}

const SIZES: &str = "--kv-transfer-config.kv_connector_extra_config.factors={\"num_kv_heads\": 2, \"head_size\": 4, \
                     \"num_hidden_layers\": 1}";

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

#[test]
fn a_handshake_is_printed_as_text_and_as_json() {
    let prefill = prefill();
    let address = prefill.address();
    let words = kvx(&["probe", &address]);
    let text = said(&words);
    assert_eq!(words.status.code(), Some(0), "{text}");
    for part in [
        "prefill-0",
        "kvx, and vLLM's handshake",
        "1 of 8 blocks, 16 tokens a block",
        "256 in each region",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let output = kvx(&["probe", &address, "--json"]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&json["answered"], &json["fits"], &json["kvx"]),
        (&true.into(), &true.into(), &true.into())
    );
    assert_eq!(
        (&json["engine"]["engine_id"], &json["engine"]["num_blocks"]),
        (&"prefill-0_dp0".into(), &8.into())
    );
    assert!(json["engine"]["kvx_agent_bytes"].as_u64().unwrap() > 0);
}

#[test]
fn incompatibilities_are_explained_and_set_the_exit_status() {
    let prefill = prefill();
    let address = prefill.address();
    let probe = |further: &[&str]| {
        let output =
            kvx(&[&["probe", &address, "--", "--model", "a-model", SIZES], further].concat());
        (output.status.code(), said(&output))
    };
    let (status, text) = probe(&["--block-size", "32"]);
    assert_eq!(status, Some(0), "{text}");
    assert!(
        text.contains("the compatibility hashes are the same") && text.contains("\nfits "),
        "{text}"
    );
    let (status, text) = probe(&["--dtype", "half"]);
    assert_eq!(status, Some(1), "{text}");
    assert!(
        text.contains("dtype is \"torch.float16\" here and \"torch.bfloat16\" there"),
        "{text}"
    );
    let (status, text) = probe(&["--dtype", "half", "--kv-cache-dtype", "fp8"]);
    assert!(
        status == Some(1) && text.contains(" there, and cache_dtype is \"fp8\" here"),
        "{text}"
    );
    let (status, text) =
        probe(&["--dtype", "half", "--kv-cache-dtype", "fp8", "--model", "another"]);
    assert!(status == Some(1) && text.contains("no known value of one or two factors"), "{text}");
    let (status, text) = probe(&["--block-size", "24"]);
    assert!(status == Some(1) && text.contains("--block-size that is a multiple"), "{text}");
    let free = "--kv-transfer-config.kv_connector_extra_config.enforce_handshake_compat=false";
    let (status, text) = probe(&["--dtype", "half", free]);
    assert!(status == Some(0) && text.contains("not enforced: "), "{text}");
}

#[test]
fn weights_of_float32_and_a_broken_file_are_explained() {
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("probe-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let config = r#"{"num_attention_heads": 2, "head_dim": 4, "num_hidden_layers": 1, "torch_dtype": "float32"}"#;
    std::fs::write(folder.join("config.json"), config).unwrap();
    let model = folder.to_str().unwrap();
    let prefill = prefill_of(model, "torch.float32");
    let probe = |further: &[&str]| {
        let output = kvx(&[&["probe", &prefill.address(), "--", model], further].concat());
        (output.status.code(), said(&output))
    };
    let (status, text) = probe(&[]);
    assert!(status == Some(1) && text.contains("give --dtype float32 here"), "{text}");
    let (status, text) = probe(&["--dtype", "float32"]);
    assert!(status == Some(0) && text.contains("the compatibility hashes are the same"), "{text}");
    std::fs::write(folder.join("config.json"), "{\"num").unwrap();
    let (status, text) = probe(&[]);
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(
        status == Some(1) && text.contains(&format!("{model}/config.json is not JSON")),
        "{text}"
    );
}

#[cfg(all(feature = "serve", feature = "proxy"))]
#[test]
fn secrets_that_differ_are_the_only_misfit() {
    let others =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("probe-{}.secret", std::process::id()));
    kvx::Secret::create(&others).unwrap();
    let (fleets, others) = (secret().to_str().unwrap(), others.to_str().unwrap());
    let model = model(&["--arch", "llama"]);
    let serve = |variables: &[(&str, &str)]| {
        let told = ServerArgs { arguments: &[], variables };
        Server::configured(&model, "TCP", &serde_json::json!({}), told)
    };
    let (with, without) = (serve(&[("KVX_SECRET_FILE", fleets)]), serve(&[]));
    for (prefill, secret, why) in [
        (&with, None, "the prefill has a shared secret and this engine has none"),
        (&with, Some(others), "the shared secrets of decode and prefill differ"),
        (&without, Some(others), "this engine has a shared secret and the prefill has none"),
    ] {
        let port = published(prefill, &prompt(1, 20))["remote_port"].to_string();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvx"));
        command.args(["probe", &format!("127.0.0.1:{port}")]).env_remove("KVX_SECRET_FILE");
        command.envs(secret.map(|file| ("KVX_SECRET_FILE", file)));
        let output = kvx_testkit::output(&mut command, LIMIT);
        let text = said(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains(why) && text.matches("does not fit").count() == 1, "{text}");
        assert!(!text.contains("no NIXL agent that"), "the answer to a vLLM: {text}");
    }
    std::fs::remove_file(others).unwrap();
}

#[test]
fn no_answer_and_incompatibility_have_different_exit_statuses() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let http = TcpListener::bind("127.0.0.1:0").unwrap();
    let other = http.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        use std::io::Write as _;
        for stream in http.incoming() {
            let _ = stream.unwrap().write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    for (address, word) in
        [(&closed, "nobody listens at"), (&other, "no ZeroMQ socket is at the other end")]
    {
        let output = kvx(&["probe", address]);
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains(word), "{}", said(&output));
        let output = kvx(&["probe", address, "--json"]);
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((output.status.code(), &json["answered"]), (Some(2), &false.into()));
    }
    let output = kvx(&["probe", "10.0.0.1"]);
    assert!(
        output.status.code() == Some(1) && said(&output).contains("HOST:PORT"),
        "{}",
        said(&output)
    );
}
