//! Tests of prefills and decodes that differ, over each backend: the tokens equal those of a single
//! server.

use std::path::Path;

use kvx_testkit::test;
use serde_json::{Value, json};

use crate::serve::backends::{Backend, backends};
use crate::serve::server::{Server, ServerArgs, model};
use crate::serve::transfers::{apart, published};
use crate::serve::{assert_same, ids};

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
    fn start(&self, model: &Path, backend: &Backend) -> Server {
        let variables: Vec<(&str, &str)> = self.layout.into_iter().collect();
        let mut fields = json!({"kv_load_failure_policy": "fail"});
        if let Some((key, value)) = self.fields {
            fields[key] = value.into();
        }
        backend.server(
            model,
            &fields,
            ServerArgs { arguments: self.arguments, variables: &variables },
        )
    }
}

/// Returns prompts with lengths around the boundaries of blocks of 16 and 64 tokens, two that begin
/// alike, and one beyond several steps.
fn prompts() -> Vec<Value> {
    let of = |seed: u64, len: u64| {
        json!((0..len).map(|at| 32 + (seed * 31 + at * 17) % 90).collect::<Vec<_>>())
    };
    let lengths = [1, 15, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65, 129];
    let several = lengths.into_iter().map(|len| of(len, len));
    several.chain([of(7, 100), of(7, 180), of(8, 2000)]).collect()
}

const LLAMA: &[&str] = &["--arch", "llama", "--kv-heads", "4"];
const QWEN: &[&str] = &["--arch", "qwen3", "--dtype", "bfloat16", "--kv-heads", "4"];

/// Tests float32 and bfloat16, over one backend in the usual run and over each in the whole one.
fn tokens_are_those_of_one_server(name: &str, usual: &str, prefill: Side<'_>, decode: Side<'_>) {
    for shape in [LLAMA, QWEN] {
        let model = model(shape);
        let single = Server::start(&model, ServerArgs::default());
        let right: Vec<(Value, Value)> = prompts()
            .into_iter()
            .map(|prompt| (single.tokens(&prompt, 10, None), prompt))
            .collect();
        for backend in backends(&format!("matrix::{name}"), usual) {
            let name = format!("{name} over {}, {}", backend.name, shape[1]);
            let prefill = prefill.start(&model, &backend);
            let decode = decode.start(&model, &backend);
            for (right, prompt) in &right {
                let len = prompt.as_array().unwrap().len();
                let answer = apart(&prefill, &decode, prompt, 10);
                assert_same(&answer, right, format_args!("{name}: {len} tokens"));
                // The decode computed no part of the prompt, except for the last token.
                assert_eq!(
                    answer["usage"]["prompt_tokens_details"]["cached_tokens"], len,
                    "{answer}"
                );
            }
            // Two prompts begin alike: the prefill has the beginning of the second in its cache.
            assert!(prefill.metric("vllm:prefix_cache_hits_total") >= 64.0, "{name}");
            // The second time, the decode has the prompt in its own cache.
            let (right, prompt) = &right[9];
            let answer = apart(&prefill, &decode, prompt, 10);
            assert_same(&answer, right, format_args!("{name}: a second time"));
            // A prefix that the decode has computed itself, followed by blocks that it loads.
            let all: Vec<u64> = (0..150).map(|at| 40 + at * 11 % 70).collect();
            decode.tokens(&json!(all[..90]), 3, None);
            let answer = apart(&prefill, &decode, &json!(all), 10);
            let right = single.tokens(&json!(all), 10, None);
            assert_same(&answer, &right, format_args!("{name}: a prefix of its own"));
        }
    }
}

const BLOCKS_OF_64: &[&str] = &["--block-size", "64"];
const BLOCKS_OF_64_IN_16: &[&str] = &["--block-size", "64", "--kernel-block-size", "16"];

#[test]
fn alike() {
    tokens_are_those_of_one_server("alike", "UCX", Side::default(), Side::default());
}

#[test]
fn larger_blocks_at_the_decode() {
    let decode = Side { arguments: BLOCKS_OF_64, ..Side::default() };
    tokens_are_those_of_one_server("larger_blocks_at_the_decode", "TCP", Side::default(), decode);
}

#[test]
fn larger_blocks_at_the_prefill() {
    let prefill = Side { arguments: BLOCKS_OF_64_IN_16, ..Side::default() };
    tokens_are_those_of_one_server("larger_blocks_at_the_prefill", "SHM", prefill, Side::default());
}

#[test]
fn larger_blocks_with_tokens_first() {
    let prefill = Side { layout: Some(NHD), ..Side::default() };
    let decode = Side { arguments: BLOCKS_OF_64, ..prefill };
    tokens_are_those_of_one_server("larger_blocks_with_tokens_first", "SHM", prefill, decode);
}

#[test]
fn heads_first_into_tokens_first() {
    let prefill = Side { layout: Some(HND), ..Side::default() };
    let decode = Side {
        layout: Some(NHD),
        fields: Some(("enable_permute_local_kv", "True")),
        ..Side::default()
    };
    tokens_are_those_of_one_server("heads_first_into_tokens_first", "SHM", prefill, decode);
}

// vLLM guide R12: a decode with tokens first loads from a prefill with heads first into larger
//     blocks (`heads_first_into_tokens_first` holds blocks of equal size)
#[test]
fn heads_first_into_larger_blocks_with_tokens_first() {
    let decode = Side {
        layout: Some(NHD),
        fields: Some(("enable_permute_local_kv", "True")),
        arguments: BLOCKS_OF_64,
    };
    let name = "heads_first_into_larger_blocks_with_tokens_first";
    tokens_are_those_of_one_server(name, "TCP", Side::default(), decode);
}

/// The pool is host memory: as in a vLLM on the CPU, it is also the host buffer, and no copy is
/// made.
#[test]
fn host_buffers() {
    let side = Side { fields: Some(("kv_buffer_device", "cpu")), ..Side::default() };
    tokens_are_those_of_one_server("host_buffers", "TCP", side, side);
}

#[test]
fn more_ranks_at_the_decode() {
    let ranks = Side { arguments: &["--tensor-parallel-size", "2"], ..Side::default() };
    tokens_are_those_of_one_server("more_ranks_at_the_decode", "SHM", Side::default(), ranks);
}

#[test]
fn two_ranks_at_the_prefill_and_one_at_the_decode() {
    let two = Side { arguments: &["--tensor-parallel-size", "2"], ..Side::default() };
    let name = "two_ranks_at_the_prefill_and_one_at_the_decode";
    tokens_are_those_of_one_server(name, "SHM", two, Side::default());
}

#[test]
fn more_ranks_at_the_prefill() {
    let ranks = Side { arguments: &["--tensor-parallel-size", "4"], ..Side::default() };
    let two = Side { arguments: &["--tensor-parallel-size", "2"], ..Side::default() };
    tokens_are_those_of_one_server("more_ranks_at_the_prefill", "TCP", ranks, two);
}

/// Whole blocks of the prefill do not fit into smaller ones, as in vLLM.
#[test]
fn smaller_blocks_at_the_decode_are_rejected_or_computed() {
    let model = model(LLAMA);
    let prefill = Server::with_peers(&model, "TCP", "fail", BLOCKS_OF_64);
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
