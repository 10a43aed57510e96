//! `kvx probe HOST:PORT`: shows the handshake of a prefill's side channel, and checks whether a
//! decode engine is compatible.

use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use kvx::Secret;
use kvx::config::{KvTransferConfig, Surroundings};
use kvx::connector::{
    Address, CompatibilityFactors, NixlAgentMetadata, Probe, Version, WorkerRank, probe,
};
use kvx_vllm::wire::explain;
use serde_json::{Value, json};

use super::Result;

/// The exit status if there is no answer.
const NO_ANSWER: u8 = 2;

/// Exit status: 0 if the peer fits, 1 if it does not, 2 if there is no answer or the arguments are
/// invalid.
#[derive(Args)]
pub(crate) struct Arguments {
    /// The address of the side channel: VLLM_NIXL_SIDE_CHANNEL_HOST and VLLM_NIXL_SIDE_CHANNEL_PORT
    /// of the prefill
    #[arg(value_name = "HOST:PORT")]
    address: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The arguments of `vllm serve` of the decode engine, which is checked against the prefill.
    /// Set `kv_compat` in the KV transfer config to probe another version: a vLLM crashes on a
    /// version that it does not support
    #[arg(last = true, value_name = "VLLM ARGUMENTS")]
    serve: Vec<String>,
}

/// Runs the command, and returns the exit status.
pub(crate) fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<ExitCode> {
    let engine = Engine::read(&arguments.serve)?;
    let address = address(&arguments.address)?;
    let secret = Secret::from_environment()?;
    let rank = WorkerRank { pp: 0, tp: 0 };
    let looked = match probe(&address, rank, engine.version, secret, Duration::from_secs(5)) {
        Ok(looked) => looked,
        Err(error) => {
            // The peer has answered, to refuse this secret.
            let answered = error.kind() == kvx::ErrorKind::Authentication;
            if arguments.json {
                let failure = match answered {
                    true => {
                        json!({"answered": true, "fits": false, "misfits": [error.to_string()]})
                    }
                    false => json!({"answered": false, "error": error.to_string()}),
                };
                writeln!(out, "{failure:#}")?;
            }
            let what = if answered { "does not fit" } else { "no answer" };
            eprintln!("kvx: {what}: {}: {error}", arguments.address);
            return Ok(if answered { ExitCode::FAILURE } else { ExitCode::from(NO_ANSWER) });
        }
    };
    let verdict = ProbeVerdict::of(&looked, &engine)?;
    if arguments.json {
        writeln!(out, "{:#}", as_json(&looked, &verdict))?;
    } else {
        write!(out, "{}", in_words(arguments, &looked, &verdict))?;
    }
    Ok(if verdict.misfits.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn address(text: &str) -> Result<Address> {
    let parts =
        text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
    let (host, port) =
        parts.filter(|(host, port)| !host.is_empty() && *port > 0).ok_or_else(|| {
            format!(
                "{text:?} is not HOST:PORT; write, for example, 10.0.0.1:5600 or [fd00::1]:5600"
            )
        })?;
    Ok(Address { host: host.trim_start_matches('[').trim_end_matches(']').into(), port })
}

/// The decode engine, as far as its arguments describe it.
struct Engine {
    version: Version,
    /// `None` if no arguments were given.
    config: Option<KvTransferConfig>,
    factors: CompatibilityFactors,
    /// The reason that the hash cannot be computed.
    unknown: Option<String>,
    /// True if the model's weights are float32 and no argument names the served type.
    is_float32: bool,
    block_size: Option<u64>,
}

impl Engine {
    fn read(serve: &[String]) -> Result<Self> {
        let (config, rest) =
            KvTransferConfig::from_arguments(serve.to_vec(), &Surroundings::of_process())?;
        let option = |names: &[&str]| option(&rest, names);
        let model = option(&["--model"])
            .or_else(|| rest.first().filter(|first| !first.starts_with('-')).cloned());
        let model = model.unwrap_or_default();
        let mut factors = CompatibilityFactors::from_config(&config, &model);
        let mut dtype = None;
        if let Some(text) = model_config(&model)? {
            let whole = text.get("text_config").unwrap_or(&text);
            let number =
                |key: &str| whole[key].as_u64().and_then(|number| u32::try_from(number).ok());
            let heads = number("num_attention_heads");
            factors.num_kv_heads = number("num_key_value_heads").or(heads).unwrap_or(0);
            let divided = || Some(number("hidden_size")? / heads.filter(|heads| *heads > 0)?);
            factors.head_size = number("head_dim").or_else(divided).unwrap_or(0);
            factors.num_hidden_layers = number("num_hidden_layers").unwrap_or(0);
            let written = ["dtype", "torch_dtype"]
                .iter()
                .find_map(|key| whole[key].as_str().or(text[key].as_str()));
            dtype = written.map(str::to_owned);
        }
        // Choose as vLLM does: `auto` is the type of the model, but never float32.
        let chosen = option(&["--dtype"]).filter(|dtype| dtype != "auto");
        let is_float32 = chosen.is_none() && dtype.as_deref() == Some("float32");
        let chosen = chosen.or(dtype.filter(|dtype| dtype != "float32"));
        match chosen.as_deref() {
            Some("half") => factors.dtype = "torch.float16".to_owned(),
            Some("float") => factors.dtype = "torch.float32".to_owned(),
            Some(dtype) => factors.dtype = format!("torch.{}", dtype.trim_start_matches("torch.")),
            None => {}
        }
        if let Some(cache) = option(&["--kv-cache-dtype"]) {
            factors.cache_dtype = cache;
        }
        if let Some(backend) = option(&["--attention-backend"]) {
            factors.attn_backend_name = backend;
        }
        factors.is_hma_enabled =
            !rest.iter().any(|word| dashes(word) == "--disable-hybrid-kv-cache-manager");
        let block_size = option(&["--block-size"]).and_then(|size| size.parse().ok());
        let written = |key: &str| factors.further.contains_key(key);
        let sized =
            factors.num_kv_heads > 0 && factors.head_size > 0 && factors.num_hidden_layers > 0;
        let unknown = if model.is_empty() && !written("model") {
            Some("no model is named: name it as for `vllm serve`".to_owned())
        } else if !sized
            && !["num_kv_heads", "head_size", "num_hidden_layers"].iter().all(|key| written(key))
        {
            Some(format!(
                "there is no {model}/config.json with its heads, head size and layers: run this where \
                the folder is, or \
                 write num_kv_heads, head_size and num_hidden_layers in kv_connector_extra_config.factors"
            ))
        } else {
            None
        };
        let config = (!serve.is_empty()).then_some(config);
        Ok(Engine { version: factors.version, config, factors, unknown, is_float32, block_size })
    }
}

/// Reads `config.json` of a model whose folder is on this machine.
fn model_config(model: &str) -> Result<Option<Value>> {
    let path = Path::new(model).join("config.json");
    match std::fs::read_to_string(&path) {
        _ if model.is_empty() => Ok(None),
        Ok(text) => {
            let config = serde_json::from_str(&text);
            Ok(Some(config.map_err(|error| format!("{} is not JSON: {error}", path.display()))?))
        }
        // The name of a model whose folder is not on this machine.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(format!("{}: {error}", path.display()).into()),
    }
}

fn dashes(word: &str) -> String {
    word.split('=').next().unwrap_or_default().replace('_', "-")
}

/// Returns the value of an option, separate or after `=`; the last one counts.
fn option(rest: &[String], names: &[&str]) -> Option<String> {
    let position = rest
        .iter()
        .rposition(|word| word.starts_with("--") && names.contains(&dashes(word).as_str()))?;
    match rest[position].split_once('=') {
        Some((_, value)) => Some(value.to_owned()),
        None => rest.get(position + 1).cloned(),
    }
}

/// The incompatibilities, and other notes.
#[derive(Default)]
struct ProbeVerdict {
    misfits: Vec<String>,
    notes: Vec<String>,
}

impl ProbeVerdict {
    fn of(looked: &Probe, engine: &Engine) -> Result<Self> {
        let mut verdict = ProbeVerdict::default();
        if let Err(error) = &looked.kvx {
            verdict.misfits.push(error.sentence().to_owned());
        }
        if let Some(why) = &looked.refusal {
            // Without the secret, a kvx answers this engine as it answers a vLLM.
            if looked.kvx.is_ok() {
                verdict.misfits.push(format!("it rejects this engine: {why}"));
            }
            return Ok(verdict);
        }
        let metadata = match &looked.metadata {
            Ok(metadata) => metadata,
            Err(error) => {
                let version = engine.version;
                verdict.misfits.push(format!(
                    "its metadata does not have the format of {version} ({}): set its version with kv_compat in \
                    --kv-transfer-config",
                    error.sentence()
                ));
                return Ok(verdict);
            }
        };
        if let Err(error) = metadata.check_regions() {
            verdict.misfits.push(error.sentence().to_owned());
        }
        if let Some(config) = &engine.config {
            verdict.compare_hashes(looked, engine, config)?;
            verdict.compare_memory(metadata, engine, config);
        }
        Ok(verdict)
    }

    fn compare_hashes(
        &mut self,
        looked: &Probe,
        engine: &Engine,
        config: &KvTransferConfig,
    ) -> Result<()> {
        if let Some(why) = &engine.unknown {
            self.notes.push(format!("the compatibility hashes were not compared: {why}"));
            return Ok(());
        }
        let ours = engine.factors.hash()?;
        if ours == looked.hash {
            self.notes.push("the compatibility hashes are the same".to_owned());
            return Ok(());
        }
        let why = match explain(&engine.factors, &looked.hash)? {
            Some(differences) => {
                let all: Vec<_> = differences.iter().map(ToString::to_string).collect();
                format!("{}: use the same value on both sides, or set it in kv_connector_extra_config.factors", all.join(", and "))
            }
            None => "no known value of one or two factors explains it: compare model names as given to `vllm serve`, \
                     versions with their suffixes, and vLLM's log line of its factors"
                .to_owned(),
        };
        let mut said = format!("compatibility hash {ours} here, {} there; {why}", looked.hash);
        if engine.is_float32 {
            said += "; config.json says float32, which vLLM serves as bfloat16 and `kvx serve` as it is: if this is the \
                     latter, give --dtype float32 here";
        }
        match config.nixl().enforce_handshake_compat {
            true => self.misfits.push(said),
            false => self.notes.push(format!("not enforced: {said}")),
        }
        Ok(())
    }

    fn compare_memory(
        &mut self,
        theirs: &NixlAgentMetadata,
        engine: &Engine,
        config: &KvTransferConfig,
    ) {
        if let Some(ours) = engine.block_size
            && (theirs.block_size == 0 || ours % theirs.block_size != 0)
        {
            self.misfits.push(format!(
                "blocks of {ours} tokens here and {} there: give a --block-size that is a multiple of the prefill's",
                theirs.block_size
            ));
        }
        let layout = config.environment().kv_cache_layout.map(|layout| layout.to_string());
        if let Some(ours) =
            layout.filter(|ours| newer_name(ours) != newer_name(&theirs.kv_cache_layout))
        {
            let said = format!("KV cache layout {ours} here, {} there", theirs.kv_cache_layout);
            if config.enable_permute_local_kv() {
                self.notes.push(format!(
                    "{said}: enable_permute_local_kv reorders, where layouts allow it"
                ));
            } else {
                self.misfits.push(format!(
                    "{said}: set VLLM_KV_CACHE_LAYOUT the same, or enable_permute_local_kv"
                ));
            }
        }
        if theirs.agent_metadata.is_empty() && theirs.kvx_metadata.is_none() {
            self.misfits.push(
                "it publishes neither a NIXL agent nor a kvx agent, so no engine can read from it; see \
                its log"
                    .to_owned(),
            );
        }
    }
}

fn newer_name(layout: &str) -> &str {
    match layout {
        "NHD" => "LBNHC",
        "HND" => "LBHNC",
        other => other,
    }
}

fn in_words(arguments: &Arguments, looked: &Probe, verdict: &ProbeVerdict) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| text.push_str(&format!("{name:<22}{value}\n"));
    line("side channel", format!("{} answers in {:?}", arguments.address, looked.round_trip));
    line("protocol", speaks(looked).to_owned());
    if looked.refusal.is_none() {
        line("compatibility hash", looked.hash.to_string());
    }
    if let Some(metadata) = told(looked) {
        line("engine id", metadata.engine_id.clone());
        line(
            "regions",
            format!(
                "{} of {} blocks, {} tokens a block",
                metadata.regions(),
                metadata.num_blocks,
                metadata.block_size
            ),
        );
        line("block bytes", each(&metadata.block_lens));
        line(
            "layout",
            format!("{}, {}", metadata.kv_cache_layout, or_none(&metadata.attn_backend_name)),
        );
        if metadata.dcp_size > 1 || metadata.pcp_size > 1 {
            line(
                "context parallel",
                format!("decode {}, prefill {}", metadata.dcp_size, metadata.pcp_size),
            );
        }
        line("NIXL agent", bytes(Some(&metadata.agent_metadata)));
        line("kvx agent", bytes(metadata.kvx_metadata.as_ref()));
    }
    for note in &verdict.notes {
        line("note", note.clone());
    }
    for misfit in &verdict.misfits {
        line("does not fit", misfit.clone());
    }
    if verdict.misfits.is_empty() && !arguments.serve.is_empty() {
        line("fits", "no compared value differs".to_owned());
    }
    text
}

/// Returns the metadata, if the peer sent it.
fn told(looked: &Probe) -> Option<&NixlAgentMetadata> {
    looked.metadata.as_ref().ok().filter(|_| looked.refusal.is_none())
}

fn speaks(looked: &Probe) -> &'static str {
    match &looked.kvx {
        Ok(true) => "kvx, and vLLM's handshake",
        Ok(false) => "vLLM's handshake",
        Err(_) => "kvx, without its own metadata: the secrets differ",
    }
}

fn each(numbers: &[u64]) -> String {
    match numbers {
        [first, rest @ ..] if rest.iter().all(|number| number == first) => {
            format!("{first} in each region")
        }
        _ => format!("{numbers:?}"),
    }
}

fn or_none(text: &str) -> &str {
    if text.is_empty() { "no attention backend named" } else { text }
}

fn bytes(blob: Option<&Vec<u8>>) -> String {
    match blob.filter(|blob| !blob.is_empty()) {
        Some(blob) => format!("{} bytes", blob.len()),
        None => "none".to_owned(),
    }
}

fn as_json(looked: &Probe, verdict: &ProbeVerdict) -> Value {
    let metadata = told(looked);
    json!({
        "answered": true,
        "fits": verdict.misfits.is_empty(),
        "misfits": verdict.misfits,
        "notes": verdict.notes,
        "kvx": *looked.kvx.as_ref().unwrap_or(&true),
        "compatibility_hash": looked.hash.as_str(),
        "round_trip_us": u64::try_from(looked.round_trip.as_micros()).unwrap_or(u64::MAX),
        "engine": metadata.map(|metadata| json!({
            "engine_id": metadata.engine_id,
            "num_blocks": metadata.num_blocks,
            "block_size": metadata.block_size,
            "block_lens": metadata.block_lens,
            "kv_cache_layout": metadata.kv_cache_layout,
            "attn_backend_name": metadata.attn_backend_name,
            "dcp_size": metadata.dcp_size,
            "pcp_size": metadata.pcp_size,
            "nixl_agent_bytes": metadata.agent_metadata.len(),
            "kvx_agent_bytes": metadata.kvx_metadata.as_ref().map_or(0, Vec::len),
        })),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(serve: &[&str]) -> Engine {
        Engine::read(&serve.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn addresses_have_a_host_and_a_port() {
        let read = |text| address(text).map(|address| (address.host.to_string(), address.port));
        assert_eq!(read("10.0.0.1:5600").unwrap(), ("10.0.0.1".to_owned(), 5600));
        assert_eq!(read("[fd00::1]:5600").unwrap(), ("fd00::1".to_owned(), 5600));
        for wrong in ["10.0.0.1", ":5600", "h:0", "h:port", "h:70000"] {
            assert!(read(wrong).unwrap_err().to_string().contains("10.0.0.1:5600"), "{wrong}");
        }
    }

    #[test]
    fn factors_come_from_the_arguments_and_from_the_models_folder() {
        let folder = std::env::temp_dir().join(format!("kvx-probe-model-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let config = json!({"num_attention_heads": 16, "hidden_size": 1024, "num_key_value_heads": 8,
            "num_hidden_layers": 28, "torch_dtype": "float16"});
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let path = folder.to_str().unwrap();
        let read = engine(&[
            path,
            "--kv_cache_dtype=fp8",
            "--block-size",
            "32",
            "--disable-hybrid-kv-cache-manager",
        ]);
        std::fs::remove_dir_all(&folder).unwrap();
        let factors = &read.factors;
        assert_eq!(
            (factors.num_kv_heads, factors.head_size, factors.num_hidden_layers),
            (8, 64, 28)
        );
        assert_eq!(
            (&*factors.dtype, &*factors.cache_dtype, &*factors.model),
            ("torch.float16", "fp8", path)
        );
        assert_eq!(
            (factors.is_hma_enabled, read.block_size, read.unknown),
            (false, Some(32), None)
        );

        let unknown = engine(&["--model", "Qwen/Qwen3-0.6B", "--dtype", "half"]);
        assert_eq!(unknown.factors.dtype, "torch.float16");
        assert!(unknown.unknown.unwrap().contains("kv_connector_extra_config.factors"));
        assert!(engine(&[]).config.is_none());
    }
}
