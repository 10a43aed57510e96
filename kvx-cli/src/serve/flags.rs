//! The flags of `vllm serve`: what each means here, or that it means nothing.

use kvx::nearest;
use kvx_paged_llama::model::Dtype;

use crate::Result;

/// What the flags say.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Flags {
    pub(super) model: Option<String>,
    pub(super) names: Vec<String>,
    pub(super) host: Option<String>,
    pub(super) port: Option<u16>,
    pub(super) block_size: Option<usize>,
    pub(super) kernel_block_size: Option<usize>,
    pub(super) ranks: Option<usize>,
    pub(super) engines: Option<usize>,
    /// The engine that is served here, of those.
    pub(super) engine: Option<usize>,
    /// So many of them are here, from this one on.
    pub(super) engines_here: Option<usize>,
    pub(super) first_engine: Option<usize>,
    /// Where hosts join the head.
    pub(super) head_address: Option<String>,
    pub(super) head_port: Option<u16>,
    /// This is such a host.
    pub(super) headless: bool,
    pub(super) model_len: Option<usize>,
    pub(super) requests: Option<usize>,
    pub(super) step_tokens: Option<usize>,
    pub(super) blocks: Option<usize>,
    pub(super) pool_bytes: Option<usize>,
    pub(super) dtype: Option<Dtype>,
    /// vLLM's attention on the CPU: its layout of blocks.
    pub(super) cpu_attention: bool,
    pub(super) no_prefix_cache: bool,
    pub(super) prompt_details: bool,
    /// Probabilities that a request may have of each token.
    pub(super) most_logprobs: Option<usize>,
    pub(super) raw_logits: bool,
    /// For `kvx demo --corrupt`: not in the help.
    pub(super) spoil: bool,
    /// What was said of flags that mean nothing.
    pub(super) notes: Vec<String>,
}

/// How many words stand behind a flag.
#[derive(Clone, Copy, PartialEq)]
enum Takes {
    Nothing,
    Value,
    Values,
}

use Takes::{Nothing, Value, Values};

/// The flags that mean something.
const MEANT: &[(&str, Takes)] = &[
    ("--model", Value),
    ("--served-model-name", Values),
    ("--host", Value),
    ("--port", Value),
    ("--block-size", Value),
    ("--kernel-block-size", Value),
    ("--max-model-len", Value),
    ("--max-num-seqs", Value),
    ("--max-num-batched-tokens", Value),
    ("--num-gpu-blocks-override", Value),
    ("--kv-cache-memory-bytes", Value),
    ("--kv-cache-dtype", Value),
    ("--dtype", Value),
    ("--attention-backend", Value),
    ("--tensor-parallel-size", Value),
    ("--pipeline-parallel-size", Value),
    ("--data-parallel-size", Value),
    ("--data-parallel-rank", Value),
    ("--data-parallel-size-local", Value),
    ("--data-parallel-start-rank", Value),
    ("--data-parallel-address", Value),
    ("--data-parallel-rpc-port", Value),
    ("--headless", Nothing),
    ("--enable-prefix-caching", Nothing),
    ("--no-enable-prefix-caching", Nothing),
    ("--enable-prompt-tokens-details", Nothing),
    ("--max-logprobs", Value),
    ("--logprobs-mode", Value),
    ("--spoil-a-moved-block", Nothing),
];

/// The flags of vLLM that mean nothing here, and why.
const MEANINGLESS: &[(&str, Takes, &str)] = &[
    ("--enforce-eager", Nothing, "nothing is compiled or captured"),
    ("--gpu-memory-utilization", Value, "there is no GPU; --kv-cache-memory-bytes sizes the pool"),
    ("--cpu-offload-gb", Value, "everything is in host memory"),
    ("--swap-space", Value, "nothing is swapped: a preempted request is computed again"),
    ("--trust-remote-code", Nothing, "no code of a model is run"),
    ("--enable-chunked-prefill", Nothing, "prompts are always computed in chunks"),
    ("--disable-log-requests", Nothing, "requests are not logged"),
    ("--no-enable-log-requests", Nothing, "requests are not logged"),
    ("--disable-log-stats", Nothing, "/metrics has them"),
    ("--disable-uvicorn-access-log", Nothing, "there is no such log"),
    ("--uvicorn-log-level", Value, "there is no such log"),
    ("--seed", Value, "weights are read, not drawn; requests have seeds of their own"),
    ("--load-format", Value, "weights are safetensors"),
    ("--download-dir", Value, "nothing is downloaded"),
    ("--disable-hybrid-kv-cache-manager", Nothing, "there is one KV cache group"),
    ("--async-scheduling", Nothing, "a step follows the other"),
];

/// What the environment has that means nothing here.
pub(super) const MEANINGLESS_VARIABLES: &[(&str, &str)] = &[
    ("CUDA_VISIBLE_DEVICES", "this server computes on the CPU"),
    ("HIP_VISIBLE_DEVICES", "this server computes on the CPU"),
];

/// vLLM's name of its attention on the CPU.
const CPU_ATTENTION: &str = "CPU_ATTN";

/// What vLLM's short flags stand for.
fn short(written: &str) -> Option<&'static str> {
    match written {
        "-tp" => Some("--tensor-parallel-size"),
        "-dp" => Some("--data-parallel-size"),
        "-dpn" => Some("--data-parallel-rank"),
        "-dpl" => Some("--data-parallel-size-local"),
        "-dpr" => Some("--data-parallel-start-rank"),
        "-dpa" => Some("--data-parallel-address"),
        "-dpp" => Some("--data-parallel-rpc-port"),
        "-pp" => Some("--pipeline-parallel-size"),
        _ => None,
    }
}

impl Flags {
    /// Reads what is not `--kv-transfer-config`.
    pub(super) fn read(arguments: Vec<String>) -> Result<Self> {
        let mut flags = Flags::default();
        let mut arguments = arguments.into_iter().peekable();
        while let Some(argument) = arguments.next() {
            if !argument.starts_with('-') {
                if let Some(model) = flags.model.replace(argument.clone()) {
                    return Err(format!(
                        "two models are given, {model} and {argument}: serve them apart"
                    )
                    .into());
                }
                continue;
            }
            let (written, inline) = match argument.split_once('=') {
                Some((written, value)) => (written, Some(value.to_owned())),
                None => (argument.as_str(), None),
            };
            let name = short(written).map_or_else(|| written.replace('_', "-"), str::to_owned);
            let known =
                MEANT.iter().find(|(known, _)| *known == name).map(|(_, takes)| (*takes, None));
            let nothing = || MEANINGLESS.iter().find(|(known, ..)| *known == name);
            let Some((takes, why)) =
                known.or_else(|| nothing().map(|(_, takes, why)| (*takes, Some(*why))))
            else {
                return Err(unknown(written).into());
            };
            let mut values: Vec<String> = inline.into_iter().collect();
            match takes {
                Nothing if !values.is_empty() => {
                    return Err(format!("{written} takes no value").into());
                }
                Nothing => {}
                Value | Values => {
                    while values.is_empty() || takes == Values {
                        match arguments
                            .next_if(|next| !next.starts_with("--") && short(next).is_none())
                        {
                            Some(value) => values.push(value),
                            None => break,
                        }
                    }
                    if values.is_empty() {
                        return Err(format!("{written} has no value: write {written} VALUE").into());
                    }
                }
            }
            match why {
                Some(why) => flags.notes.push(format!("{written} means nothing here: {why}")),
                None => flags.set(&name, values)?,
            }
        }
        Ok(flags)
    }

    fn set(&mut self, name: &str, mut values: Vec<String>) -> Result<()> {
        let value = values.first().cloned().unwrap_or_default();
        let count = || -> Result<usize> {
            count(&value).ok_or_else(|| {
                format!("{name} is {value:?}: it takes a count, such as 512, 2k or 1G").into()
            })
        };
        match name {
            "--model" => self.model = Some(value),
            "--served-model-name" => self.names.append(&mut values),
            "--host" => self.host = Some(value),
            "--port" | "--data-parallel-rpc-port" => {
                let port = value
                    .parse()
                    .map_err(|_| format!("{name} is {value:?}: it takes 0 to 65535"))?;
                *(if name == "--port" { &mut self.port } else { &mut self.head_port }) = Some(port);
            }
            "--block-size" => self.block_size = Some(count()?),
            "--kernel-block-size" => self.kernel_block_size = Some(count()?),
            "--max-model-len" => self.model_len = Some(count()?),
            "--max-num-seqs" => self.requests = Some(count()?),
            "--max-num-batched-tokens" => self.step_tokens = Some(count()?),
            "--num-gpu-blocks-override" => self.blocks = Some(count()?),
            "--kv-cache-memory-bytes" => self.pool_bytes = Some(count()?),
            "--kv-cache-dtype" => {
                self.dtype = match value.as_str() {
                    "auto" => None,
                    "float32" => Some(Dtype::F32),
                    "bfloat16" => Some(Dtype::Bf16),
                    _ => {
                        return Err(format!(
                            "--kv-cache-dtype is {value}: it takes auto, float32 or bfloat16"
                        )
                        .into());
                    }
                }
            }
            "--dtype" if value != "auto" => {
                let words = format!(
                    "--dtype {value}: weights are kept as the model has them, and sums are always made of float32; \
                     leave it out, or take --kv-cache-dtype for the KV cache"
                );
                return Err(words.into());
            }
            "--attention-backend" if value != CPU_ATTENTION => {
                let words =
                    "there is one; CPU_ATTN gives blocks the layout that a vLLM on the CPU has";
                self.notes.push(format!("--attention-backend {value} means nothing here: {words}"));
            }
            "--attention-backend" => self.cpu_attention = true,
            "--dtype" | "--enable-prefix-caching" => {}
            "--tensor-parallel-size" => match count()? {
                ranks @ (1 | 2 | 4 | 8) => self.ranks = Some(ranks),
                _ => return Err(format!("{name} {value}: this server takes 1, 2, 4 or 8").into()),
            },
            "--pipeline-parallel-size" if count()? > 1 => {
                return Err(format!(
                    "{name} {value}: this server's engines have one stage; take 1"
                )
                .into());
            }
            "--data-parallel-size" => match count()? {
                engines @ 1..=64 => self.engines = Some(engines),
                _ => return Err(format!("{name} {value}: this server takes at most 64").into()),
            },
            "--data-parallel-rank" | "--data-parallel-start-rank" => {
                let rank = value
                    .parse()
                    .map_err(|_| format!("{name} is {value:?}: it takes a rank, from 0"))?;
                *(if name == "--data-parallel-rank" {
                    &mut self.engine
                } else {
                    &mut self.first_engine
                }) = Some(rank);
            }
            "--data-parallel-size-local" => self.engines_here = Some(count()?),
            "--data-parallel-address" => self.head_address = Some(value),
            "--headless" => self.headless = true,
            "--no-enable-prefix-caching" => self.no_prefix_cache = true,
            "--enable-prompt-tokens-details" => self.prompt_details = true,
            "--max-logprobs" if value == "-1" => self.most_logprobs = Some(usize::MAX),
            "--max-logprobs" => self.most_logprobs = Some(if value == "0" { 0 } else { count()? }),
            "--logprobs-mode" => match value.as_str() {
                "raw_logprobs" => self.raw_logits = false,
                "raw_logits" => self.raw_logits = true,
                _ => {
                    return Err(format!(
                        "{name} {value}: this server has raw_logprobs and raw_logits"
                    )
                    .into());
                }
            },
            "--spoil-a-moved-block" => self.spoil = true,
            _ => {}
        }
        Ok(())
    }
}

/// A count, which may have a unit as vLLM means it: `2k` is 2000, and `2K` 2048.
fn count(value: &str) -> Option<usize> {
    let (digits, unit) = match value.char_indices().last() {
        Some((at, letter)) if letter.is_ascii_alphabetic() => (&value[..at], letter),
        _ => (value, ' '),
    };
    let power = match unit.to_ascii_lowercase() {
        ' ' => 0,
        'k' => 1,
        'm' => 2,
        'g' => 3,
        't' => 4,
        _ => return None,
    };
    let unit = if unit.is_ascii_lowercase() { 1000usize } else { 1024 }.checked_pow(power)?;
    digits.parse::<usize>().ok()?.checked_mul(unit).filter(|count| *count > 0)
}

fn unknown(written: &str) -> String {
    let known =
        MEANT.iter().map(|(name, _)| *name).chain(MEANINGLESS.iter().map(|(name, ..)| *name));
    let hint = match nearest(written, known.chain(["--kv-transfer-config"])) {
        Some(near) => format!("did you mean {near}?"),
        None => "`kvx serve --help` lists those that are".to_owned(),
    };
    format!("{written} is not known to this server; {hint}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Flags> {
        Flags::read(line.split_whitespace().map(str::to_owned).collect())
    }

    #[test]
    fn a_line_of_vllms_is_taken_as_it_is() {
        let flags = read(
            "Qwen/Qwen3-0.6B --port 8100 --enforce-eager --max_model_len=2k --served-model-name a b --tensor-parallel-size 1",
        );
        let flags = flags.unwrap();
        assert_eq!(
            (flags.model.as_deref(), flags.port, flags.model_len),
            (Some("Qwen/Qwen3-0.6B"), Some(8100), Some(2000))
        );
        assert_eq!(flags.names, ["a", "b"]);
        assert_eq!(
            flags.notes,
            ["--enforce-eager means nothing here: nothing is compiled or captured"]
        );
        let flags = read("m --served-model-name a -tp 2 -dp=3").unwrap();
        assert_eq!(
            (flags.names, flags.ranks, flags.engines),
            (vec!["a".to_owned()], Some(2), Some(3))
        );
        let all = read("m --max-logprobs -1 --logprobs-mode raw_logits").unwrap();
        assert_eq!((all.most_logprobs, all.raw_logits), (Some(usize::MAX), true));
        let backend = |name| read(&format!("m --attention-backend {name}")).unwrap();
        assert!(backend("CPU_ATTN").cpu_attention && backend("CPU_ATTN").notes.is_empty());
        assert!(!backend("FLASH_ATTN").cpu_attention && backend("FLASH_ATTN").notes.len() == 1);
    }

    #[test]
    fn what_is_not_known_is_refused_in_words() {
        for (line, words) in [
            ("m --prot 1", "--prot is not known to this server; did you mean --port?"),
            ("m --port many", "it takes 0 to 65535"),
            ("m --port", "--port has no value"),
            ("m n", "two models are given"),
            ("m --tensor-parallel-size 3", "takes 1, 2, 4 or 8"),
            ("m --pipeline-parallel-size 2", "one stage"),
            ("m --data-parallel-size 65", "at most 64"),
            ("m --data-parallel-rank -1", "from 0"),
            ("m --enforce-eager=1", "--enforce-eager takes no value"),
            ("m --dtype half", "--kv-cache-dtype"),
            ("m --logprobs-mode processed_logits", "raw_logprobs and raw_logits"),
            ("m --max-logprobs all", "it takes a count"),
        ] {
            let error = read(line).unwrap_err().to_string();
            assert!(error.contains(words), "{line}: {error}");
        }
    }
}
