//! Prefill and decode that differ, over each backend: the tokens are those of one server.

use std::path::{Path, PathBuf};

use kvx_testkit::{Tier, skip};
use serde_json::{Value, json};

use crate::server::{Server, Told, model};
use crate::transfers::{apart, published};
use crate::{assert_same, ids};

pub(crate) const BACKENDS: [&str; 5] = ["SHM", "TCP", "UCX", "LIBFABRIC", "RIXL"];

const HND: (&str, &str) = ("VLLM_KV_CACHE_LAYOUT", "HND");
const NHD: (&str, &str) = ("VLLM_KV_CACHE_LAYOUT", "NHD");

/// One side of a transfer.
#[derive(Clone, Copy, Default)]
struct Side<'a> {
    arguments: &'a [&'a str],
    layout: Option<(&'a str, &'a str)>,
    /// Fields of `--kv-transfer-config`.
    fields: Option<(&'a str, &'a str)>,
}

impl Side<'_> {
    /// With these further variables.
    fn start(&self, model: &Path, backend: &str, more: &[(&str, String)]) -> Server {
        let mut variables: Vec<(&str, &str)> = self.layout.into_iter().collect();
        variables.extend(more.iter().map(|(name, value)| (*name, &**value)));
        let mut fields = json!({"kv_load_failure_policy": "fail"});
        if let Some((key, value)) = self.fields {
            fields[key] = value.into();
        }
        Server::configured(model, backend, &fields, Told { arguments: self.arguments, variables: &variables })
    }
}

/// NIXL's library, as `cargo xtask test --install` leaves it.
fn nixl() -> Option<PathBuf> {
    let environment = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/peers/nixl/venv/lib");
    let file = "site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so";
    let mut pythons = std::fs::read_dir(environment).ok()?.flatten();
    pythons.find_map(|python| Some(python.path().join(file)).filter(|file| file.exists()))
}

/// The variables that this backend needs; none, said to be skipped, where it is not here.
pub(crate) fn here(test: &str, backend: &str) -> Option<Vec<(&'static str, String)>> {
    let variables = match backend {
        "RIXL" => nixl().map(|library| vec![("KVX_RIXL_LIB", library.to_string_lossy().into_owned())]),
        _ => kvx::registry().require(backend, &kvx::Options::new()).is_ok().then(Vec::new),
    };
    if variables.is_none() {
        skip(test, &format!("{backend} is not here"), "cargo xtask test --install");
    }
    variables
}

/// Lengths around the borders of blocks of 16 and 64 tokens, two that begin alike, and one beyond a step.
fn prompts() -> Vec<Value> {
    let of =
        |seed: u64, len: u64| json!((0..len).map(|at| 32 + (seed * 31 + at * 17) % 90).collect::<Vec<_>>());
    let lengths = [1, 15, 16, 17, 48, 49, 63, 64, 65, 129];
    let several = lengths.into_iter().map(|len| of(len, len));
    several.chain([of(7, 100), of(7, 180), of(8, 700)]).collect()
}

/// Over one backend in the usual run, over each in the whole one.
fn tokens_are_those_of_one_server(
    name: &str,
    usual: &str,
    shape: &[&str],
    prefill: Side<'_>,
    decode: Side<'_>,
) {
    let model = model(shape);
    let single = Server::start(&model, Told::default());
    let right: Vec<(Value, Value)> =
        prompts().into_iter().map(|prompt| (single.tokens(&prompt, 10, None), prompt)).collect();
    for backend in BACKENDS {
        if backend != usual && !Tier::Whole.runs_or_says(&format!("kvx serve: {name} over {backend}")) {
            continue;
        }
        let Some(variables) = here(&format!("matrix::{name}"), backend) else { continue };
        let prefill = prefill.start(&model, backend, &variables);
        let decode = decode.start(&model, backend, &variables);
        for (right, prompt) in &right {
            let len = prompt.as_array().unwrap().len();
            let answer = apart(&prefill, &decode, prompt, 10);
            assert_same(&answer, right, format_args!("{name} over {backend}: {len} tokens"));
            // Nothing of the prompt was computed at the decode, but for the last token.
            assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], len, "{answer}");
        }
        // A beginning that the decode has computed itself, and more that it loads.
        let all: Vec<u64> = (0..150).map(|at| 40 + at * 11 % 70).collect();
        decode.tokens(&json!(all[..90]), 3, None);
        let answer = apart(&prefill, &decode, &json!(all), 10);
        let what = format!("{name} over {backend}: a prefix of its own");
        assert_same(&answer, &single.tokens(&json!(all), 10, None), what);
    }
}

const LLAMA: [&str; 4] = ["--arch", "llama", "--kv-heads", "4"];
const QWEN: [&str; 6] = ["--arch", "qwen3", "--dtype", "bfloat16", "--kv-heads", "4"];
const BLOCKS_OF_64: &[&str] = &["--block-size", "64"];
const BLOCKS_OF_64_IN_16: &[&str] = &["--block-size", "64", "--kernel-block-size", "16"];

#[test]
fn alike() {
    tokens_are_those_of_one_server("alike", "UCX", &QWEN, Side::default(), Side::default());
}

#[test]
fn larger_blocks_at_the_decode() {
    let decode = Side { arguments: BLOCKS_OF_64, ..Side::default() };
    tokens_are_those_of_one_server("larger_blocks_at_the_decode", "TCP", &LLAMA, Side::default(), decode);
}

#[test]
fn larger_blocks_at_the_prefill() {
    let prefill = Side { arguments: BLOCKS_OF_64_IN_16, ..Side::default() };
    tokens_are_those_of_one_server("larger_blocks_at_the_prefill", "SHM", &LLAMA, prefill, Side::default());
}

#[test]
fn larger_blocks_with_tokens_first() {
    let prefill = Side { layout: Some(NHD), ..Side::default() };
    let decode = Side { arguments: BLOCKS_OF_64, ..prefill };
    tokens_are_those_of_one_server("larger_blocks_with_tokens_first", "SHM", &QWEN, prefill, decode);
}

#[test]
fn heads_first_into_tokens_first() {
    let prefill = Side { layout: Some(HND), ..Side::default() };
    let decode =
        Side { layout: Some(NHD), fields: Some(("enable_permute_local_kv", "True")), ..Side::default() };
    tokens_are_those_of_one_server("heads_first_into_tokens_first", "SHM", &LLAMA, prefill, decode);
}

#[test]
fn heads_first_into_larger_blocks_with_tokens_first() {
    let decode = Side {
        layout: Some(NHD),
        fields: Some(("enable_permute_local_kv", "True")),
        arguments: BLOCKS_OF_64,
    };
    let name = "heads_first_into_larger_blocks_with_tokens_first";
    tokens_are_those_of_one_server(name, "TCP", &QWEN, Side::default(), decode);
}

#[test]
fn host_buffers() {
    let side = Side { fields: Some(("kv_buffer_device", "cpu")), ..Side::default() };
    tokens_are_those_of_one_server("host_buffers", "TCP", &LLAMA, side, side);
}

#[test]
fn more_ranks_at_the_decode() {
    let ranks = Side { arguments: &["--tensor-parallel-size", "2"], ..Side::default() };
    tokens_are_those_of_one_server("more_ranks_at_the_decode", "SHM", &LLAMA, Side::default(), ranks);
}

#[test]
fn more_ranks_at_the_prefill() {
    let ranks = Side { arguments: &["--tensor-parallel-size", "4"], ..Side::default() };
    let two = Side { arguments: &["--tensor-parallel-size", "2"], ..Side::default() };
    tokens_are_those_of_one_server("more_ranks_at_the_prefill", "TCP", &QWEN, ranks, two);
}

/// Blocks of the prefill that are whole do not fit into smaller ones, as in vLLM.
#[test]
fn smaller_blocks_at_the_decode_are_refused_or_computed() {
    let model = model(&LLAMA);
    let prefill = Side { arguments: BLOCKS_OF_64, ..Side::default() }.start(&model, "TCP", &[]);
    let prompt = json!((0..100).map(|at| 40 + at % 50).collect::<Vec<_>>());
    let right = ids(&prefill.tokens(&prompt, 6, None));
    for policy in ["fail", "recompute"] {
        let decode = Server::with_peers(&model, "TCP", policy, &[]);
        let params = published(&prefill, &prompt);
        if policy == "recompute" {
            assert_eq!(ids(&decode.tokens(&prompt, 6, Some(&params))), right);
        } else {
            let body = json!({"prompt": prompt, "max_tokens": 4, "kv_transfer_params": params});
            assert_eq!(decode.post("/v1/completions", &body).0, 500);
        }
        assert_eq!(ids(&decode.tokens(&prompt, 6, None)), right, "the next request is served");
    }
}
