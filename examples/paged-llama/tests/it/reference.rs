//! Tests that logits and tokens equal those of Hugging Face's transformers, for each architecture
//! and each scaling of positions. `vectors/reference.json` records transformers' answers; `cargo
//! xtask interop transformers` computes them again.

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use kvx_paged_llama::model::{
    Architecture, Chunk, Config, Dtype, LogitsScope, Model, Pool, PoolLayout, Shard,
};
use kvx_paged_llama::tokenizer::Tokenizer;
use kvx_random_model::ModelSpec;
use kvx_testkit::Tier;
use serde_json::{Map, Value, json};

use crate::folder::Folder;

/// The environment variable with the Python that has torch and transformers; without it the tests
/// compare with the recorded answers.
const PYTHON: &str = "KVX_TRANSFORMERS_PYTHON";
/// The environment variable that records the answers.
const RECORD: &str = "KVX_TRANSFORMERS_RECORD";
/// The environment variables with a GGUF file, and the folder that `import_gguf.py` made of it as
/// float32.
const GGUF: &str = "KVX_TRANSFORMERS_GGUF";
const IMPORTED: &str = "KVX_TRANSFORMERS_IMPORTED";
const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/reference.json");
/// The largest difference from transformers' logits, which are summed in another order.
const NEAR: f32 = 1e-4;
/// The number of tokens after a prompt.
const COUNT: usize = 8;
const TEXT: &str = "Ein naïver Ärger: 12 × 3 = 36 ☕\n<|im_start|>\tend";

/// The time limit of transformers for all cases.
pub(crate) const PYTHON_LIMIT: Duration = Duration::from_secs(50 * 60);

/// A model and the lengths of its comparison.
pub(crate) struct Case {
    name: &'static str,
    made: ModelSpec,
    prompt: usize,
    tier: Tier,
}

impl Case {
    /// Returns the name of its test.
    pub(crate) fn title(&self) -> String {
        let words = self.name.split(|letter: char| !letter.is_alphanumeric());
        let words: Vec<_> = words.filter(|word| !word.is_empty()).collect();
        format!("reference::{}", words.join("_"))
    }
}

/// Returns the cases that this run compares with the recorded answers: none if it asks
/// transformers.
pub(crate) fn recorded_cases() -> Vec<Case> {
    if python().is_some() {
        return Vec::new();
    }
    cases().into_iter().filter(|case| case.tier.runs_or_says(case.name)).collect()
}

/// Returns the Python that has transformers, if this run asks it.
pub(crate) fn python() -> Option<OsString> {
    std::env::var_os(PYTHON)
}

fn cases() -> Vec<Case> {
    let case = |name, made| Case { name, made, prompt: 150, tier: Tier::Fast };
    let plain = ModelSpec {
        layers: 2,
        hidden: 128,
        intermediate: 256,
        heads: 4,
        kv_heads: 2,
        ..ModelSpec::default()
    };
    let of = |architecture| ModelSpec { architecture, ..plain.clone() };
    let like = |changes: Value| {
        let mut config = plain.config();
        for (name, value) in changes.as_object().unwrap() {
            config[name] = value.clone();
        }
        ModelSpec { like: Some(config), ..plain.clone() }
    };
    let scaled =
        |scaling: Value| like(json!({"rope_scaling": scaling, "max_position_embeddings": 256}));
    let guide = |text: &str, layers| ModelSpec {
        layers,
        like: Some(serde_json::from_str(text).unwrap()),
        ..ModelSpec::default()
    };
    vec![
        case("llama", plain.clone()),
        case("llama, one head of keys each", ModelSpec { kv_heads: 4, ..plain.clone() }),
        case("llama, tied", ModelSpec { tied: true, ..plain.clone() }),
        case("llama, biases everywhere", like(json!({"attention_bias": true, "mlp_bias": true}))),
        case("llama, bfloat16", ModelSpec { dtype: Dtype::Bf16, ..plain.clone() }),
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
            scaled(
                json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
            ),
        ),
        Case { prompt: 2000, ..case("llama, 2,000 tokens", plain.clone()) },
        Case {
            tier: Tier::Usual,
            ..case("Qwen3-0.6B, two layers", guide(include_str!("../shapes/qwen3-0.6b.json"), 2))
        },
        Case {
            tier: Tier::Whole,
            prompt: 20,
            ..case(
                "Qwen2.5-7B-Instruct, one layer",
                guide(include_str!("../shapes/qwen2.5-7b-instruct.json"), 1),
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

/// Returns the logits after the prompt, and the tokens that follow, each the likeliest.
fn ours(folder: &Path, mut tokens: Vec<u32>, count: usize) -> (Vec<f32>, Vec<u32>) {
    let model = Model::open(folder, Shard::alone()).unwrap();
    let blocks: Vec<u32> = (0..(tokens.len() + count).div_ceil(16) as u32).collect();
    let mut pool =
        Pool::allocate(model.pool_shape(blocks.len(), 16, Dtype::F32, PoolLayout::Hnd)).unwrap();
    let (mut first, mut greedy, mut start) = (Vec::new(), Vec::new(), 0);
    while greedy.len() < count {
        let chunk =
            Chunk { tokens: &tokens[start..], start, blocks: &blocks, logits: LogitsScope::Last };
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

/// Compares a case with the recorded answer.
pub(crate) fn compare_with_recorded(case: Case) {
    let recorded: Value = serde_json::from_str(&std::fs::read_to_string(FILE).unwrap()).unwrap();
    let folder = Folder::with(&case.made);
    let theirs = &recorded[case.name];
    compare(case.name, folder.path(), prompt(case.prompt), theirs);
}

/// Compares all cases with the answers of transformers, and records them if requested.
pub(crate) fn compare_with_transformers(python: OsString) {
    let mut python = Python::start(python);
    let mut answers = Map::new();
    for case in cases() {
        let folder = Folder::with(&case.made);
        let theirs = python.ask(folder.path(), None, &prompt(case.prompt), COUNT);
        let far = compare(case.name, folder.path(), prompt(case.prompt), &theirs);
        println!("{}: differences of at most {far:.1e}", case.name);
        answers.insert(case.name.into(), theirs);
    }
    if std::env::var_os(RECORD).is_some() {
        let line = |(name, answer): (&String, &Value)| format!("  {}: {answer}", json!(name));
        let lines: Vec<_> = answers.iter().map(line).collect();
        std::fs::write(FILE, format!("{{\n{}\n}}\n", lines.join(",\n"))).unwrap();
    }
}

/// Returns the GGUF file and the folder made of it, if this run has them.
pub(crate) fn imported() -> Option<(PathBuf, PathBuf)> {
    Some((std::env::var_os(GGUF)?.into(), std::env::var_os(IMPORTED)?.into()))
}

/// Compares the answer of a model that `import_gguf.py` converted with that of transformers, which
/// reads the GGUF file with its own code.
pub(crate) fn compare_imported(python: OsString, (gguf, folder): (PathBuf, PathBuf)) {
    let tokenizer = Tokenizer::open(&folder, &Config::read(&folder).unwrap()).unwrap();
    let prompt = tokenizer.encode("Gravity is the force that", true).unwrap();
    let theirs = Python::start(python).ask(&folder, Some(gguf.as_path()), &prompt, 24);
    let greedy: Vec<u32> = serde_json::from_value(theirs["greedy"].clone()).unwrap();
    println!("{:?}", tokenizer.decode(&greedy, true));
    let far = compare("imported", &folder, prompt, &theirs);
    println!("differences of at most {far:.1e}");
}

/// Returns the largest difference of the logits.
fn compare(name: &str, folder: &Path, prompt: Vec<u32>, theirs: &Value) -> f32 {
    let (logits, greedy) = ours(folder, prompt, theirs["greedy"].as_array().unwrap().len());
    let numbers =
        |name: &str| theirs[name].as_array().unwrap_or_else(|| panic!("no {name}")).iter();
    let far =
        logits.iter().zip(numbers("logits")).map(|(a, b)| (a - b.as_f64().unwrap() as f32).abs());
    assert_eq!(logits.len(), numbers("logits").len(), "{name}");
    let far = far.fold(0.0, f32::max);
    assert!(far <= NEAR, "{name}: {far} apart");
    assert_eq!(
        greedy,
        numbers("greedy").map(|token| token.as_u64().unwrap() as u32).collect::<Vec<_>>(),
        "{name}"
    );
    assert_eq!(theirs["back"], TEXT, "{name}: transformers must decode its own tokens");
    let tokenizer = Tokenizer::open(folder, &Config::read(folder).unwrap()).unwrap();
    assert_eq!(json!(tokenizer.encode(TEXT, true).unwrap()), theirs["ids"], "{name}");
    let chat = tokenizer
        .chat(&messages(), &Map::from_iter([("add_generation_prompt".into(), true.into())]))
        .unwrap();
    assert_eq!(theirs["chat"], chat, "{name}");
    far
}

/// The Python that runs transformers.
struct Python {
    child: std::process::Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Python {
    fn start(program: OsString) -> Python {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/interop/reference.py");
        let mut command = Command::new(program);
        command.arg(script).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.env("HF_HUB_OFFLINE", "1").spawn().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Python { child, answers }
    }

    fn ask(&mut self, folder: &Path, gguf: Option<&Path>, prompt: &[u32], count: usize) -> Value {
        let mut asked = json!({"folder": folder, "gguf": gguf, "prompt": prompt, "count": count});
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
