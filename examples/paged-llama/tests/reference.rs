//! Logits and tokens equal those of Hugging Face's transformers, for each architecture and each way of stretching
//! positions. Its answers are recorded in `vectors/reference.json`; `cargo xtask interop transformers` asks it again.
#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod folder;

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};

use folder::Folder;
use kvx_paged_llama::model::{Architecture, Chunk, Config, Dtype, Model, Pool, PoolLayout, Shard, Wanted};
use kvx_paged_llama::tokenizer::Tokenizer;
use kvx_random_model::Made;
use kvx_testkit::Tier;
use serde_json::{Map, Value, json};

/// The Python that has torch and transformers; without it the recorded answers are compared.
const PYTHON: &str = "KVX_TRANSFORMERS_PYTHON";
/// Set to write down what it answers.
const RECORD: &str = "KVX_TRANSFORMERS_RECORD";
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/reference.json");
/// How far a score may be from transformers', whose sums have another order.
const NEAR: f32 = 1e-4;
const TEXT: &str = "Ein naïver Ärger: 12 × 3 = 36 ☕\n<|im_start|>\tend";

struct Case {
    name: &'static str,
    made: Made,
    prompt: usize,
    tier: Tier,
}

fn cases() -> Vec<Case> {
    let case = |name, made| Case { name, made, prompt: 150, tier: Tier::Fast };
    let plain = Made { layers: 2, hidden: 128, intermediate: 256, heads: 4, kv_heads: 2, ..Made::default() };
    let of = |architecture| Made { architecture, ..plain.clone() };
    let like = |changes: Value| {
        let mut config = plain.config();
        for (name, value) in changes.as_object().unwrap() {
            config[name] = value.clone();
        }
        Made { like: Some(config), ..plain.clone() }
    };
    let scaled = |scaling: Value| like(json!({"rope_scaling": scaling, "max_position_embeddings": 256}));
    let guide = |text: &str, layers| Made {
        layers,
        like: Some(serde_json::from_str(text).unwrap()),
        ..Made::default()
    };
    vec![
        case("llama", plain.clone()),
        case("llama, one head of keys each", Made { kv_heads: 4, ..plain.clone() }),
        case("llama, tied", Made { tied: true, ..plain.clone() }),
        case("llama, biases everywhere", like(json!({"attention_bias": true, "mlp_bias": true}))),
        case("llama, bfloat16", Made { dtype: Dtype::Bf16, ..plain.clone() }),
        case("qwen2", of(Architecture::Qwen2)),
        case("qwen3", of(Architecture::Qwen3)),
        case("linear", scaled(json!({"rope_type": "linear", "factor": 4.0}))),
        case(
            "llama3",
            scaled(
                json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64}),
            ),
        ),
        case(
            "yarn",
            scaled(json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})),
        ),
        Case { prompt: 2000, ..case("llama, 2,000 tokens", plain.clone()) },
        Case {
            tier: Tier::Usual,
            ..case("Qwen3-0.6B, two layers", guide(include_str!("shapes/qwen3-0.6b.json"), 2))
        },
        Case {
            tier: Tier::Whole,
            prompt: 20,
            ..case(
                "Qwen2.5-7B-Instruct, one layer",
                guide(include_str!("shapes/qwen2.5-7b-instruct.json"), 1),
            )
        },
    ]
}

fn messages() -> Value {
    json!([{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi ☕"}])
}

fn prompt(len: usize) -> Vec<u32> {
    (0..len as u32).map(|at| (at * 89 + at * at * 7) % 256).collect()
}

/// The scores after the prompt, and the tokens that follow, each the likeliest.
fn ours(folder: &Folder, mut tokens: Vec<u32>, count: usize) -> (Vec<f32>, Vec<u32>) {
    let model = Model::open(folder.path(), Shard::alone()).unwrap();
    let blocks: Vec<u32> = (0..(tokens.len() + count).div_ceil(16) as u32).collect();
    let mut pool = Pool::allocate(model.pool_shape(blocks.len(), 16, Dtype::F32, PoolLayout::Hnd)).unwrap();
    let (mut first, mut greedy, mut start) = (Vec::new(), Vec::new(), 0);
    while greedy.len() < count {
        let chunk = Chunk { tokens: &tokens[start..], start, blocks: &blocks, wanted: Wanted::Last };
        let logits = model.forward(&mut pool, &[chunk]).unwrap();
        let last = logits.of(0).next().unwrap();
        if start == 0 {
            first = last.to_vec();
        }
        start = tokens.len();
        let best = (0..last.len()).max_by(|a, b| last[*a].total_cmp(&last[*b])).unwrap() as u32;
        greedy.push(best);
        tokens.push(best);
    }
    (first, greedy)
}

#[test]
fn logits_and_tokens_are_those_of_transformers() {
    let recorded: Value =
        std::fs::read_to_string(FILE).map_or(json!({}), |text| serde_json::from_str(&text).unwrap());
    let mut python = std::env::var_os(PYTHON).map(Python::start);
    let mut answers = Map::new();
    for Case { name, made, prompt: len, tier } in cases() {
        if python.is_none() && !tier.runs_or_says(name) {
            continue;
        }
        let folder = Folder::with(&made);
        let (prompt, count) = (prompt(len), 8);
        let theirs = match &mut python {
            Some(python) => python.ask(&folder, &prompt, count),
            None => recorded[name].clone(),
        };
        let (logits, greedy) = ours(&folder, prompt, count);
        let numbers = |name: &str| theirs[name].as_array().unwrap_or_else(|| panic!("no {name}")).iter();
        let far = logits.iter().zip(numbers("logits")).map(|(a, b)| (a - b.as_f64().unwrap() as f32).abs());
        assert_eq!(logits.len(), numbers("logits").len(), "{name}");
        let far = far.fold(0.0, f32::max);
        println!("{name}: at most {far:.1e} apart");
        assert!(far <= NEAR, "{name}: {far} apart");
        assert_eq!(
            greedy,
            numbers("greedy").map(|token| token.as_u64().unwrap() as u32).collect::<Vec<_>>(),
            "{name}"
        );
        assert_eq!(theirs["back"], TEXT, "{name}: its tokenizer reads what it wrote");
        let tokenizer = Tokenizer::open(folder.path(), &Config::read(folder.path()).unwrap()).unwrap();
        assert_eq!(json!(tokenizer.encode(TEXT, true).unwrap()), theirs["ids"], "{name}");
        let chat = tokenizer
            .chat(&messages(), &Map::from_iter([("add_generation_prompt".into(), true.into())]))
            .unwrap();
        assert_eq!(theirs["chat"], chat, "{name}");
        answers.insert(name.into(), theirs);
    }
    if python.is_some() && std::env::var_os(RECORD).is_some() {
        let line = |(name, answer): (&String, &Value)| format!("  {}: {answer}", json!(name));
        let lines: Vec<_> = answers.iter().map(line).collect();
        std::fs::write(FILE, format!("{{\n{}\n}}\n", lines.join(",\n"))).unwrap();
    }
}

/// The other side.
struct Python {
    child: std::process::Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Python {
    fn start(program: std::ffi::OsString) -> Python {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/interop/reference.py");
        let mut command = Command::new(program);
        command.arg(script).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.env("HF_HUB_OFFLINE", "1").spawn().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Python { child, answers }
    }

    fn ask(&mut self, folder: &Folder, prompt: &[u32], count: usize) -> Value {
        let mut asked = json!({"folder": folder.path(), "prompt": prompt, "count": count});
        (asked["text"], asked["messages"]) = (TEXT.into(), messages());
        writeln!(self.child.stdin.as_mut().unwrap(), "{asked}").unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        let mut answer: Value = serde_json::from_str(&line).unwrap();
        for number in answer["logits"].as_array_mut().unwrap() {
            *number = ((number.as_f64().unwrap() * 1e6).round() / 1e6).into();
        }
        answer
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}
