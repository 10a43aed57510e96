//! Tests folders without a model, or with inconsistent files: each error says what to do.

use std::os::unix::net::UnixStream;

use kvx_paged_llama::model::{
    Architecture, Chunk, Config, Dtype, LogitsScope, Model, Pool, PoolLayout, Shard,
};
use kvx_random_model::{ModelSpec, make_model};
use kvx_testkit::test;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::folder::Folder;

fn error_of(folder: &Folder) -> String {
    Model::open(folder.path(), Shard::alone()).err().unwrap().to_string()
}

fn small() -> ModelSpec {
    ModelSpec { layers: 1, ..ModelSpec::default() }
}

#[test]
fn an_empty_folder_and_missing_weights_are_errors() {
    let folder = Folder::new();
    assert!(error_of(&folder).contains("kvx make-model"), "{}", error_of(&folder));
    let folder = Folder::with(&small());
    let weights = folder.path().join("model.safetensors");
    let whole = std::fs::read(&weights).unwrap();
    for (bytes, words) in [
        (&whole[..0], "is empty"),
        (&whole[..5], "shorter than 8 bytes"),
        (&whole[..100], "claims a header of"),
        (&whole[..whole.len() - 1], "is described as"),
    ] {
        std::fs::write(&weights, bytes).unwrap();
        assert!(error_of(&folder).contains(words), "{}", error_of(&folder));
    }
    std::fs::remove_file(&weights).unwrap();
    assert!(error_of(&folder).contains("model.safetensors"), "{}", error_of(&folder));
}

#[test]
fn weights_of_another_shape_are_errors() {
    let folder = Folder::with(&small());
    let path = folder.path().join("config.json");
    let written: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let changed = |name: &str, value: Value| {
        let mut config = written.clone();
        config[name] = value;
        std::fs::write(&path, config.to_string()).unwrap();
        error_of(&folder)
    };
    for (name, value, words) in [
        ("num_hidden_layers", json!(2), "have no model.layers.1"),
        ("intermediate_size", json!(1024), "of different models"),
        ("architectures", json!(["MambaForCausalLM"]), "this server computes LlamaForCausalLM"),
        ("hidden_act", json!("gelu"), "hidden_act is gelu"),
        ("num_key_value_heads", json!(3), "cannot share 3"),
        ("hidden_size", json!(-1), "a number from 1"),
        ("vocab_size", Value::Null, "vocab_size is missing"),
        ("torch_dtype", json!("float16"), "float32 or bfloat16"),
        ("quantization_config", json!({"bits": 4}), "quantized"),
        ("use_sliding_window", json!(true), "sliding-window"),
        ("rope_scaling", json!({"rope_type": "dynamic", "factor": 2.0}), "rope_type"),
        ("rope_scaling", json!({"rope_type": "linear"}), "factor"),
    ] {
        let error = changed(name, value);
        assert!(error.contains(words), "{name}: {error}");
    }
}

#[test]
fn heads_that_cannot_be_divided_among_ranks_are_an_error() {
    let folder = Folder::with(&ModelSpec { heads: 4, kv_heads: 4, ..small() });
    let fourth = Shard::member(3, 8, UnixStream::pair().unwrap().0);
    let error = Model::open(folder.path(), fourth).err().unwrap().to_string();
    assert!(error.contains("--tensor-parallel-size"), "{error}");
}

#[test]
fn a_step_beyond_pool_or_vocabulary_is_refused() {
    let folder = Folder::with(&small());
    let model = Model::open(folder.path(), Shard::alone()).unwrap();
    let shape = model.pool_shape(4, 16, Dtype::F32, PoolLayout::Hnd);
    let mut pool = Pool::allocate(shape).unwrap();
    let mut step = |tokens: &[u32], start, blocks: &[u32]| {
        model
            .forward(&mut pool, &[Chunk { tokens, start, blocks, logits: LogitsScope::Last }])
            .map(|_| ())
            .map_err(|e| e.to_string())
    };
    assert_eq!(step(&[1; 17], 0, &[3, 0]), Ok(()));
    assert!(step(&[1; 17], 0, &[3]).unwrap_err().contains("need 2"));
    assert!(step(&[1], 16, &[3, 4]).unwrap_err().contains("4 blocks"));
    assert!(step(&[259], 0, &[0]).unwrap_err().contains("tokenizer"));
    assert!(step(&[], 0, &[0]).is_err());
    let mut other =
        Pool::allocate(kvx_paged_llama::model::PoolShape { kv_heads: 1, ..shape }).unwrap();
    let chunk = Chunk { tokens: &[1], start: 0, blocks: &[0], logits: LogitsScope::Last };
    assert!(
        model.forward(&mut other, &[chunk]).unwrap_err().to_string().contains("this model's is")
    );
}

#[test]
fn a_model_is_made_once_and_the_same_each_time() {
    let (first, second) = (Folder::with(&small()), Folder::with(&small()));
    let weights = |folder: &Folder| std::fs::read(folder.path().join("model.safetensors")).unwrap();
    assert!(weights(&first) == weights(&second));
    assert!(weights(&first) != weights(&Folder::with(&ModelSpec { seed: 2, ..small() })));
    assert!(weights(&first) != weights(&Folder::with(&ModelSpec { init: Some(0.02), ..small() })));
    let error = make_model(first.path(), &small()).unwrap_err().to_string();
    assert!(error.contains("holds a model already"), "{error}");
    let error =
        make_model(first.path(), &ModelSpec { vocab: 100, ..small() }).unwrap_err().to_string();
    assert!(error.contains("259"), "{error}");
}

/// Checks the two models of vLLM's guides, with their published configurations.
#[test]
fn the_guides_models_are_supported() {
    let qwen3: Value = serde_json::from_str(include_str!("../shapes/qwen3-0.6b.json")).unwrap();
    let config = Config::parse(&qwen3, json!({"eos_token_id": [151645, 151643]})).unwrap();
    assert_eq!(
        (config.architecture, config.heads, config.kv_heads, config.head_dim),
        (Architecture::Qwen3, 16, 8, 128)
    );
    assert_eq!((config.qkv_bias, config.tied, config.dtype), (false, true, Dtype::Bf16));
    assert_eq!(config.eos, [151645, 151643]);
    let qwen2: Value =
        serde_json::from_str(include_str!("../shapes/qwen2.5-7b-instruct.json")).unwrap();
    let config = Config::parse(&qwen2, Value::Null).unwrap();
    assert_eq!(
        (config.architecture, config.heads, config.kv_heads, config.head_dim),
        (Architecture::Qwen2, 28, 4, 128)
    );
    assert_eq!((config.qkv_bias, config.output_bias, config.tied), (true, false, false));
    assert_eq!(config.eos, [151645]);
}

#[test]
fn no_header_of_weights_causes_a_panic() {
    let folder = Folder::with(&small());
    let path = folder.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let change = (0..header, any::<u8>());
    let config = ProptestConfig { cases: 300, ..ProptestConfig::default() };
    let strategy = prop::collection::vec(change, 1..4);
    let changed = |changes: Vec<(usize, u8)>| {
        let mut bytes = whole.clone();
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        // Writes a new file each time, because a mapped file must not change.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
        let _ = Model::open(folder.path(), Shard::alone());
        Ok(())
    };
    proptest::test_runner::TestRunner::new(config).run(&strategy, changed).unwrap();
}
