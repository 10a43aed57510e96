//! Tests of `kvx probe` with the side channel of a connector in this process, with another server,
//! and with no server.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use kvx::Memory;
use kvx::config::{KvTransferConfig, Surroundings};
use kvx::connector::{
    Caches, CompatibilityFactors, Connector, Heads, KvLayout, KvTensors, LayerCache, MemoryType,
    Rank, WorkerRank,
};
use kvx_testkit::test;
use serde_json::{Value, json};

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
    prefill_with(model, dtype, json!({"backends": ["TCP"]}))
}

fn prefill_with(model: &str, dtype: &str, extra: Value) -> Prefill {
    let json = json!({"kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": "prefill-0",
                      "kv_connector_extra_config": extra});
    let surroundings = Surroundings::default().variable("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1");
    let config = KvTransferConfig::from_json(&json.to_string(), &surroundings).unwrap();
    let mut factors = CompatibilityFactors::from_config(&config, model);
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

/// Starts an HTTP API whose `/version` is this release, and returns its URL.
pub(crate) fn api(release: &str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let body = json!({"version": release}).to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut asked = [0; 1024];
            let len = stream.read(&mut asked).unwrap();
            assert!(asked[..len].starts_with(b"GET /version "), "only the version is asked for");
            let len = body.len();
            write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {len}\r\n\r\n{body}").unwrap();
        }
    });
    url
}

/// Names the version of a side channel whose engine has no API here.
const NAMED: &str = "--kv-transfer-config.kv_connector_extra_config.kv_compat=0.33";

const SIZES: &str = "--kv-transfer-config.kv_connector_extra_config.factors={\"num_kv_heads\": 2, \"head_size\": 4, \
                     \"num_hidden_layers\": 1}";

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

#[test]
fn a_handshake_is_printed_as_text_and_as_json() {
    let prefill = prefill();
    let address = prefill.address();
    let api = api("0.33.0");
    let words = kvx(&["probe", &address, "--api", &api]);
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
    let output = kvx(&["probe", &address, "--api", &api, "--json"]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["vllm_release"], "0.33.0");
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
fn backends_inside_a_nixl_agent_are_named() {
    let prefill = prefill_with("a-model", "torch.bfloat16", json!({"backends": ["TCP", "KVX"]}));
    let (address, api) = (prefill.address(), api("0.33.0"));
    let probe = |further: &[&str]| {
        let output = kvx(&[&["probe", &address, "--api", &api], further].concat());
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
        output
    };
    let text = said(&probe(&[]));
    assert!(text.contains("NIXL agent            backend KVX, "), "{text}");
    let json: Value = serde_json::from_slice(&probe(&["--json"]).stdout).unwrap();
    assert_eq!(json["engine"]["nixl_backends"], json!(["KVX"]));
    let decode = [
        "--",
        "--kv-transfer-config.kv_connector=NixlConnector",
        "--kv-transfer-config.kv_role=kv_consumer",
    ];
    let text = said(&probe(&decode));
    assert!(text.contains("no backend is in common with KVX"), "{text}");
    let with_kvx =
        [&decode[..], &["--kv-transfer-config.kv_connector_extra_config.backends+", "KVX"]]
            .concat();
    let text = said(&probe(&with_kvx));
    assert!(!text.contains("in common"), "{text}");
}

#[test]
fn a_side_channel_of_unknown_version_is_not_asked() {
    let side_channel = TcpListener::bind("127.0.0.1:0").unwrap();
    side_channel.set_nonblocking(true).unwrap();
    let address = side_channel.local_addr().unwrap().to_string();
    let (between, closed) = (api("0.25.1.dev3+g1234567"), "http://127.0.0.1:1".to_owned());
    for (api, why) in [
        (None, "--api http://127.0.0.1:8000\n"),
        (Some(&between), "does not know the handshake of vLLM 0.25.1.dev3+g1234567"),
        (Some(&closed), "http://127.0.0.1:1/version: Connection refused"),
    ] {
        let given: Vec<_> = api.iter().flat_map(|api| ["--api", api]).collect();
        let output = kvx(&[&["probe", &address, "--json"], &given[..]].concat());
        let text = said(&output);
        assert!(output.status.code() == Some(2) && text.contains(why), "{text}");
        assert!(text.contains(&format!("kvx probe {address} -- {NAMED}")), "{text}");
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(json["answered"], false);
    }
    let old = "--kv-transfer-config.kv_connector_extra_config.kv_compat=0.11";
    let text = said(&kvx(&["probe", &address, "--", old]));
    assert!(text.contains("does not speak the handshake of vLLM 0.11"), "{text}");
    let error = side_channel.accept().unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "nobody has connected");
    // What the error says to type is accepted, also if the API does not answer.
    let prefill = prefill();
    let output = kvx(&["probe", &prefill.address(), "--api", &closed, "--", NAMED]);
    let text = said(&output);
    assert!(output.status.success() && text.contains("the version is that of kv_compat"), "{text}");
}

#[test]
fn the_release_of_the_api_chooses_the_handshake_and_explains_the_hash() {
    let of = |compat: &str, release: &str| {
        let extra = json!({"backends": ["TCP"], "kv_compat": compat,
                           "factors": {"vllm_version": release}});
        (prefill_with("a-model", "torch.bfloat16", extra), api(release))
    };
    for (compat, release, cure) in [
        (
            "0.22",
            "0.24.1",
            "set kv_compat to \"0.22\" and factors to {\"vllm_version\": \"0.24.1\"}",
        ),
        ("0.30", "0.30.0", "set kv_compat to \"0.30\" in kv_connector_extra_config"),
        ("0.33", "0.33.0+cpu", "set factors to {\"vllm_version\": \"0.33.0+cpu\"}"),
    ] {
        let (prefill, api) = of(compat, release);
        let address = prefill.address();
        let probe = |further: &[&str]| {
            let decode = ["probe", &address, "--api", &api, "--", "--model", "a-model", SIZES];
            let output = kvx(&[&decode[..], further].concat());
            (output.status.code(), said(&output))
        };
        let (status, text) = probe(&[]);
        assert!(status == Some(1) && text.contains(cure), "{text}");
        assert!(text.contains("8 blocks, 16 tokens a block"), "{text}");
        assert!(!text.contains("no known value"), "{text}");
        let (status, text) = probe(&["--dtype", "half"]);
        assert!(status == Some(1) && text.contains(cure), "{text}");
        assert!(text.contains("dtype is \"torch.float16\" here"), "{text}");
    }
}

#[test]
fn incompatibilities_are_explained_and_set_the_exit_status() {
    let prefill = prefill();
    let address = prefill.address();
    let probe =
        |further: &[&str]| {
            let output =
                kvx(&[&["probe", &address, "--", "--model", "a-model", SIZES, NAMED], further]
                    .concat());
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
        let output = kvx(&[&["probe", &prefill.address(), "--", model, NAMED], further].concat());
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
        command.args(["probe", &format!("127.0.0.1:{port}"), "--api"]);
        command.arg(format!("http://127.0.0.1:{}", prefill.port));
        command.env_remove("KVX_SECRET_FILE");
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
        for stream in http.incoming() {
            let _ = stream.unwrap().write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    for (address, word) in
        [(&closed, "nobody listens at"), (&other, "no ZeroMQ socket is at the other end")]
    {
        let output = kvx(&["probe", address, "--", NAMED]);
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains(word), "{}", said(&output));
        let output = kvx(&["probe", address, "--json", "--", NAMED]);
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
