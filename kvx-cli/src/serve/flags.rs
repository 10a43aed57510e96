//! The flags of `vllm serve`, as clap parses them once [`normalized`].

use clap::{Arg, ArgAction, CommandFactory as _, FromArgMatches as _, Parser, error, parser};
use kvx_core::backend::nearest;
use kvx_paged_llama::events::EventsConfig;

use super::security;

/// Serves a model as `vllm serve` does: OpenAI's HTTP API, and KV cache from and to other servers.
///
/// It is an example on the CPU, not an engine to tune.
#[derive(Debug, Parser)]
#[command(
    name = "kvx serve",
    no_binary_name = true,
    args_override_self = true,
    override_usage = "kvx serve MODEL [FLAGS...]",
    after_help = AFTER_HELP
)]
pub(super) struct Flags {
    /// A Hugging Face folder (config.json, safetensors, tokenizer.json) of a Llama, Qwen2 or Qwen3,
    /// or a name in the local Hugging Face cache.
    #[arg(value_name = "MODEL")]
    pub(super) models: Vec<String>,
    /// Another way to name MODEL.
    #[arg(long, value_name = "MODEL")]
    pub(super) model: Option<String>,
    /// The name that clients use for the model [default: MODEL].
    #[arg(long, value_name = "NAME", num_args = 1.., action = ArgAction::Append)]
    pub(super) served_model_name: Vec<String>,
    /// The address to listen on; 0.0.0.0 is all addresses of this host.
    #[arg(long, default_value = "127.0.0.1")]
    pub(super) host: String,
    /// The port to listen on; 0 takes any free port.
    #[arg(long, default_value_t = 8000)]
    pub(super) port: u16,
    /// Keys of clients: all paths but /health, /ping, /version and /metrics then need one, as
    /// `Authorization: Bearer KEY` [default: VLLM_API_KEY, which `ps` does not show].
    #[arg(long, value_name = "KEY", num_args = 1.., action = ArgAction::Set)]
    pub(super) api_key: Vec<String>,
    /// The most tokens of a prompt and its answer together.
    #[arg(long, value_name = "TOKENS", value_parser = count)]
    pub(super) max_model_len: Option<usize>,
    /// The most requests that run at once.
    #[arg(long, value_name = "N", default_value = "128", value_parser = count)]
    pub(super) max_num_seqs: usize,
    /// The most tokens of a step.
    #[arg(long, value_name = "N", default_value = "512", value_parser = count)]
    pub(super) max_num_batched_tokens: usize,
    /// Tokens of a block of the KV cache.
    #[arg(long, value_name = "TOKENS", default_value = "16", value_parser = count)]
    pub(super) block_size: usize,
    /// Tokens of the smaller blocks that make up a block, as peers see them [default:
    /// --block-size].
    #[arg(long, value_name = "TOKENS", value_parser = count)]
    pub(super) kernel_block_size: Option<usize>,
    /// Bytes of the KV cache.
    #[arg(long, value_name = "BYTES", value_parser = count)]
    pub(super) kv_cache_memory_bytes: Option<usize>,
    /// Blocks of the KV cache, instead of its bytes.
    #[arg(long, value_name = "BLOCKS", value_parser = count)]
    pub(super) num_gpu_blocks_override: Option<usize>,
    /// Ranks of the model, each a process with its own pool: 1, 2, 4 or 8.
    #[arg(long, value_name = "N", default_value = "1", value_parser = ranks)]
    pub(super) tensor_parallel_size: usize,
    /// Engines, each with its own pool; at most 64.
    #[arg(long, value_name = "N", default_value = "1", value_parser = engines)]
    pub(super) data_parallel_size: usize,
    /// Serve only this engine.
    #[arg(long, value_name = "RANK")]
    pub(super) data_parallel_rank: Option<usize>,
    /// Serve this many engines here; hosts that join serve the others.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(super) data_parallel_size_local: Option<usize>,
    /// The address where hosts join. Beyond loopback they must prove the secret that
    /// KVX_SECRET_FILE names [default: 127.0.0.1].
    #[arg(long, value_name = "HOST")]
    pub(super) data_parallel_address: Option<String>,
    /// The port where hosts join.
    #[arg(long, value_name = "PORT", default_value_t = 29550)]
    pub(super) data_parallel_rpc_port: u16,
    /// Join the head at that address and serve some of its engines.
    #[arg(long)]
    pub(super) headless: bool,
    /// The first engine that a headless host serves.
    #[arg(long, value_name = "RANK")]
    pub(super) data_parallel_start_rank: Option<usize>,
    /// The type of keys and values; auto is that of the weights.
    #[arg(long, value_name = "TYPE", default_value = "auto", value_parser = ["auto", "float32", "bfloat16"])]
    pub(super) kv_cache_dtype: String,
    /// CPU_ATTN lays blocks out as a vLLM on the CPU does, to exchange them with one.
    #[arg(long, value_name = "NAME")]
    attention_backend: Option<String>,
    /// Compute prefixes that requests have in common once for each request.
    #[arg(long)]
    pub(super) no_enable_prefix_caching: bool,
    /// Publish the events of the prefix cache, as vLLM does: JSON with enable_kv_cache_events,
    /// endpoint [default: tcp://127.0.0.1:5557], replay_endpoint, buffer_steps, hwm and topic. They
    /// carry prompts as token ids, to everyone who reaches the endpoint.
    #[arg(long, value_name = "JSON", value_parser = events)]
    pub(super) kv_events_config: Option<EventsConfig>,
    /// Register in this fleet in etcd, from which routers learn the server's address, and leave it
    /// before the last answers end. ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD name etcd's user.
    #[arg(long, value_name = "etcd://HOST:PORT/FLEET")]
    pub(super) register: Option<String>,
    /// The role in the fleet: prefill or decode [default: that of kv_role].
    #[arg(long, value_name = "ROLE", requires = "register")]
    pub(super) register_role: Option<String>,
    /// The URL for routers [default: http:// and the address that this server listens on].
    #[arg(long, value_name = "URL", requires = "register")]
    pub(super) register_url: Option<String>,
    /// Report in `usage` how many tokens of the prompt came from the cache.
    #[arg(long)]
    pub(super) enable_prompt_tokens_details: bool,
    /// The most tokens whose probabilities a request may have; -1: all.
    #[arg(long, value_name = "N", default_value = "20", value_parser = logprobs)]
    pub(super) max_logprobs: usize,
    /// Return log probabilities, or logits.
    #[arg(long, value_name = "MODE", default_value = "raw_logprobs", value_parser = ["raw_logprobs", "raw_logits"])]
    pub(super) logprobs_mode: String,
    /// For `kvx demo --corrupt`.
    #[arg(long, hide = true)]
    pub(super) spoil_a_moved_block: bool,
    /// Messages about flags without effect.
    #[arg(skip)]
    pub(super) notes: Vec<String>,
}

const AFTER_HELP: &str = "\
KV transfer, as in vLLM (`kvx config` explains the values):
      --kv-transfer-config <JSON>
      --kv-transfer-config.KEY <VALUE>
      --kv-transfer-config.KEY+ <ITEM>

vLLM's short forms (-tp, -pp, -dp, -dpn, -dpl, -dpr, -dpa, -dpp) work too. Counts take units: 2k is 2000, 2K 2048.
VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, VLLM_KV_CACHE_LAYOUT, UCX_* and the variables that `kvx config` lists
apply. Flags of vLLM without effect here are reported; unknown flags are errors. The first Ctrl-C waits for
requests to finish, the second one does not.";

/// Flags of vLLM without effect here, whether each takes a value, and why it has no effect.
const WITHOUT_EFFECT: &[(&str, bool, &str)] = &[
    ("enforce-eager", false, "nothing is compiled or captured"),
    ("gpu-memory-utilization", true, "there is no GPU; --kv-cache-memory-bytes sizes the pool"),
    ("cpu-offload-gb", true, "everything is in host memory"),
    ("swap-space", true, "a preempted request is computed again, not swapped"),
    ("trust-remote-code", false, "no code of a model is run"),
    ("enable-chunked-prefill", false, "prompts are always computed in chunks"),
    ("enable-prefix-caching", false, "it is the default"),
    ("disable-log-requests", false, "requests are not logged"),
    ("no-enable-log-requests", false, "requests are not logged"),
    ("disable-log-stats", false, "/metrics has them"),
    ("disable-uvicorn-access-log", false, "there is no such log"),
    ("uvicorn-log-level", true, "there is no such log"),
    ("seed", true, "weights are read, not drawn; requests have their own seeds"),
    ("load-format", true, "weights are safetensors"),
    ("download-dir", true, "nothing is downloaded"),
    ("disable-hybrid-kv-cache-manager", false, "there is one KV cache group"),
    ("async-scheduling", false, "steps run one after the other"),
];

/// vLLM's short flags of several letters, which clap does not support.
const SHORT_FORMS: &[(&str, &str)] = &[
    ("-tp", "--tensor-parallel-size"),
    ("-pp", "--pipeline-parallel-size"),
    ("-dp", "--data-parallel-size"),
    ("-dpn", "--data-parallel-rank"),
    ("-dpl", "--data-parallel-size-local"),
    ("-dpr", "--data-parallel-start-rank"),
    ("-dpa", "--data-parallel-address"),
    ("-dpp", "--data-parallel-rpc-port"),
];

/// vLLM's name of its attention on the CPU.
const CPU_ATTENTION: &str = "CPU_ATTN";

impl Flags {
    /// Parses a command line without its `--kv-transfer-config`.
    pub(super) fn parse_arguments(arguments: Vec<String>) -> crate::Result<Self> {
        let mut command = command();
        let parsed = command.try_get_matches_from_mut(arguments.into_iter().map(normalized));
        let matches = parsed.map_err(|error| message(&error))?;
        let mut flags = Flags::from_arg_matches(&matches).map_err(|error| message(&error))?;
        for (name, _, reason) in WITHOUT_EFFECT {
            if matches.value_source(name) == Some(parser::ValueSource::CommandLine) {
                flags.notes.push(format!("--{name} has no effect: {reason}"));
            }
        }
        if let Some(other) = flags.attention_backend.as_ref().filter(|_| !flags.cpu_attention()) {
            flags.notes.push(format!(
                "--attention-backend {other} has no effect: there is one backend; {CPU_ATTENTION} \
                 selects the layout of blocks that a vLLM on the CPU has"
            ));
        }
        flags.models.extend(flags.model.take());
        if let [first, second, ..] = &flags.models[..] {
            return Err(format!(
                "two models are given, {first} and {second}: start a server for each"
            )
            .into());
        }
        Ok(flags)
    }

    /// Returns true if blocks have the layout of vLLM's attention on the CPU.
    pub(super) fn cpu_attention(&self) -> bool {
        self.attention_backend.as_deref() == Some(CPU_ATTENTION)
    }
}

/// Returns the flags' help text.
pub(super) fn help() -> impl std::fmt::Display {
    command().render_help()
}

fn command() -> clap::Command {
    let without_effect = |(name, takes_value, _): &(&'static str, bool, _)| {
        let action = if *takes_value { ArgAction::Set } else { ArgAction::SetTrue };
        Arg::new(*name).long(*name).action(action).hide(true)
    };
    let checked = [
        Arg::new("pipeline-parallel-size").long("pipeline-parallel-size").value_parser(stages),
        Arg::new("dtype").long("dtype").value_parser(dtype),
    ];
    let others = WITHOUT_EFFECT.iter().map(without_effect).chain(checked.map(|arg| arg.hide(true)));
    // A negative number is a bad value, not an unknown flag.
    Flags::command().args(others).mut_args(|arg| {
        let takes_values = arg.get_action().takes_values();
        if takes_values { arg.allow_negative_numbers(true) } else { arg }
    })
}

/// Writes a flag as clap knows it: in its long form, with dashes for the underscores that vLLM
/// allows.
fn normalized(argument: String) -> String {
    if !argument.starts_with('-') {
        return argument;
    }
    let (name, value) = match argument.split_once('=') {
        Some((name, _)) => argument.split_at(name.len()),
        None => (argument.as_str(), ""),
    };
    match SHORT_FORMS.iter().find(|(short, _)| *short == name) {
        Some((_, long)) => format!("{long}{value}"),
        None => name.replace('_', "-") + value,
    }
}

/// Returns clap's error message without its usage lines.
fn message(error: &clap::Error) -> String {
    let unknown = (error.kind() == error::ErrorKind::UnknownArgument)
        .then(|| error.get(error::ContextKind::InvalidArg))
        .flatten();
    if let Some(unknown) = unknown {
        let unknown = unknown.to_string();
        if let Some(refused) = security::refused_flag(&unknown) {
            return refused;
        }
        let command = command();
        let known = command.get_arguments().filter_map(Arg::get_long).chain(["kv-transfer-config"]);
        let known: Vec<String> = known.map(|name| format!("--{name}")).collect();
        return match nearest(&unknown, known.iter().map(String::as_str)) {
            Some(near) => format!("unknown flag {unknown}; did you mean {near}?"),
            None => format!("unknown flag {unknown}; `kvx serve --help` lists the known ones"),
        };
    }
    let text = error.render().to_string();
    let sentence = text.split("\n\n").next().unwrap_or(&text);
    sentence.trim_start_matches("error: ").trim_end().to_owned()
}

/// Parses a count, which may have a unit as in vLLM: `2k` is 2000, and `2K` 2048.
fn count(value: &str) -> Result<usize, String> {
    let (digits, unit) = match value.char_indices().last() {
        Some((at, unit)) if unit.is_ascii_alphabetic() => (&value[..at], Some(unit)),
        _ => (value, None),
    };
    let scale = unit.map_or(Some(1), |unit| {
        let power = "kmgt".find(unit.to_ascii_lowercase())? as u32 + 1;
        if unit.is_ascii_lowercase() { 1000usize } else { 1024 }.checked_pow(power)
    });
    let count = digits.parse::<usize>().ok().zip(scale).and_then(|(n, scale)| n.checked_mul(scale));
    count
        .filter(|count| *count > 0)
        .ok_or_else(|| "write a count, such as 512, 2k or 1G".to_owned())
}

fn events(value: &str) -> Result<EventsConfig, String> {
    EventsConfig::from_json(value).map_err(|error| error.to_string())
}

fn ranks(value: &str) -> Result<usize, String> {
    let is_supported = |ranks: &usize| matches!(ranks, 1 | 2 | 4 | 8);
    count(value)
        .ok()
        .filter(is_supported)
        .ok_or_else(|| "this server takes 1, 2, 4 or 8".to_owned())
}

fn stages(value: &str) -> Result<usize, String> {
    let is_supported = |stages: &usize| *stages == 1;
    let stages = count(value).ok().filter(is_supported);
    stages.ok_or_else(|| "this server's engines have one stage; write 1".to_owned())
}

fn engines(value: &str) -> Result<usize, String> {
    let engines = count(value).ok().filter(|engines| *engines <= 64);
    engines.ok_or_else(|| "this server takes 1 to 64".to_owned())
}

fn logprobs(value: &str) -> Result<usize, String> {
    match value {
        "-1" => Ok(usize::MAX),
        "0" => Ok(0),
        _ => count(value),
    }
}

fn dtype(value: &str) -> Result<String, String> {
    match value {
        "auto" => Ok(value.to_owned()),
        _ => Err("weights keep the type that the model has, and sums are always float32; leave the flag out, \
                  or set the KV cache's type with --kv-cache-dtype"
            .to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> crate::Result<Flags> {
        Flags::parse_arguments(line.split_whitespace().map(str::to_owned).collect())
    }

    #[test]
    fn command_lines_of_vllm_are_accepted() {
        let flags = parse(
            "Qwen/Qwen3-0.6B --port 8100 --enforce-eager --max_model_len=2k --served-model-name a b --tensor-parallel-size 1",
        );
        let flags = flags.unwrap();
        assert_eq!(
            (&flags.models[..], flags.port, flags.max_model_len),
            (&["Qwen/Qwen3-0.6B".to_owned()][..], 8100, Some(2000))
        );
        assert_eq!(flags.served_model_name, ["a", "b"]);
        assert_eq!(flags.host, "127.0.0.1");
        assert_eq!(flags.notes, ["--enforce-eager has no effect: nothing is compiled or captured"]);
        let flags = parse("m --served-model-name a -tp 2 -dp=3").unwrap();
        assert_eq!(
            (flags.served_model_name, flags.tensor_parallel_size, flags.data_parallel_size),
            (vec!["a".to_owned()], 2, 3)
        );
        let all = parse("m --max-logprobs -1 --logprobs-mode raw_logits").unwrap();
        assert_eq!((all.max_logprobs, &*all.logprobs_mode), (usize::MAX, "raw_logits"));
        let backend = |name| parse(&format!("m --attention-backend {name}")).unwrap();
        let keys = parse("m --api-key a b --api_key=c").unwrap();
        assert_eq!(keys.api_key, ["c"]);
        assert_eq!(parse("m --api-key a b").unwrap().api_key, ["a", "b"]);
        assert!(backend("CPU_ATTN").cpu_attention() && backend("CPU_ATTN").notes.is_empty());
        assert!(!backend("FLASH_ATTN").cpu_attention() && backend("FLASH_ATTN").notes.len() == 1);
    }

    #[test]
    fn short_forms_underscores_and_repeated_flags_are_accepted() {
        let flags = parse(
            "--model m -dpn=1 -dpa 10.0.0.1 -dpp 9 -pp 1 --block_size 8 --block-size=32 --seed -1 \
             --dtype auto --max-num-seqs 2K --served-model-name a --served-model-name b",
        );
        let flags = flags.unwrap();
        assert_eq!(flags.data_parallel_rank, Some(1));
        assert_eq!(flags.data_parallel_address.as_deref(), Some("10.0.0.1"));
        assert_eq!(
            (flags.data_parallel_rpc_port, flags.block_size, flags.max_num_seqs),
            (9, 32, 2048)
        );
        assert_eq!(
            (flags.models, flags.served_model_name),
            (vec!["m".into()], vec!["a".into(), "b".into()])
        );
        let local = parse("m -dpl 2 -dpr 1 --headless").unwrap();
        assert_eq!(
            (local.data_parallel_size_local, local.data_parallel_start_rank),
            (Some(2), Some(1))
        );
    }

    /// The servers' commands of vLLM's guides, without their `--kv-transfer-config`.
    #[test]
    fn commands_of_the_guides_keep_their_meaning() {
        let guides: serde_json::Value =
            serde_json::from_str(include_str!("../../tests/it/serve/guides.json")).unwrap();
        let commands = guides["commands"].as_array().unwrap();
        let mut count = 0;
        for command in commands.iter().filter(|command| command["program"] == "serve") {
            let arguments: Vec<String> = serde_json::from_value(command["args"].clone()).unwrap();
            let after = |flag: &str| {
                let at = arguments.iter().position(|argument| argument == flag)?;
                Some(arguments[at + 1].parse().unwrap())
            };
            let (_, rest) = kvx::config::Given::from_arguments(arguments.clone()).unwrap();
            let flags = Flags::parse_arguments(rest).unwrap();
            assert_eq!(flags.models, arguments[..1]);
            assert_eq!(Some(usize::from(flags.port)), after("--port"));
            assert_eq!(flags.tensor_parallel_size, after("--tensor-parallel-size").unwrap_or(1));
            let eager = arguments.iter().any(|argument| argument == "--enforce-eager");
            assert_eq!(flags.notes.len(), usize::from(eager));
            count += 1;
        }
        assert!(count > 0);
    }

    #[test]
    fn invalid_command_lines_are_rejected_with_a_reason() {
        for (line, words) in [
            ("m --prot 1", "unknown flag --prot; did you mean --port?"),
            ("m --kv_transfer_confg {}", "did you mean --kv-transfer-config?"),
            ("m -x", "unknown flag -x"),
            (
                "m --ssl_keyfile=k --ssl-certfile c",
                "--ssl-keyfile is not supported: this server has no TLS",
            ),
            ("m --uds s", "--uds is not supported"),
            ("m --api-key", "a value is required for '--api-key <KEY>...'"),
            ("m --port many", "invalid value 'many' for '--port <PORT>'"),
            ("m --port 65536", "65536 is not in 0..=65535"),
            ("m --port", "a value is required for '--port <PORT>'"),
            ("m --port --headless", "a value is required for '--port <PORT>'"),
            ("m n", "two models are given, m and n"),
            ("m --model n", "two models are given, m and n"),
            ("m --tensor-parallel-size 3", "takes 1, 2, 4 or 8"),
            ("m --pipeline-parallel-size 2", "one stage"),
            ("m --data-parallel-size 65", "takes 1 to 64"),
            ("m --data-parallel-rank -1", "invalid value '-1' for '--data-parallel-rank <RANK>'"),
            ("m --enforce-eager=1", "unexpected value '1' for '--enforce-eager'"),
            ("m --dtype half", "--kv-cache-dtype"),
            ("m --kv-cache-dtype fp8", "[possible values: auto, float32, bfloat16]"),
            ("m --logprobs-mode processed_logits", "raw_logprobs, raw_logits"),
            ("m --max-logprobs all", "write a count"),
            ("m --kv-events-config {\"port\":1}", "unknown field `port`"),
            ("m --kv-events-config {\"endpoint\":\"ipc://a\"}", "tcp://HOST:PORT"),
            ("m --kv-events-config {\"publisher\":\"kafka\"}", "this server has \"zmq\""),
        ] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(words), "{line}: {error}");
        }
    }
}
