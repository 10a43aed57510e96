//! `kvx probe HOST:PORT`: shows the handshake of a prefill's side channel, and checks whether a
//! decode engine is compatible.

mod engine;
mod release;
mod report;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use kvx::Secret;
use kvx::config::KvTransferConfig;
use kvx::connector::nixl::BACKEND;
use kvx::connector::{
    Address, CompatibilityFactors, NixlAgentMetadata, Probe, Version, WorkerRank, probe,
};
use kvx_vllm::wire::explain;
use serde_json::json;

use self::engine::Engine;
use self::release::Release;
use self::report::{as_json, in_words, nixl_backends};
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
    /// The HTTP API of the same engine, which is first asked for its version (`/version`, which
    /// needs no key): a vLLM crashes on the handshake of another version. Without it, and for an
    /// API that cannot be reached from here, set `kv_compat` in the arguments of `vllm serve`
    #[arg(long, value_name = "http://HOST:PORT")]
    api: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The arguments of `vllm serve` of the decode engine, which is checked against the prefill.
    /// `kv_compat` in their KV transfer config is the version of a vLLM
    #[arg(last = true, value_name = "VLLM ARGUMENTS")]
    serve: Vec<String>,
}

/// Runs the command, and returns the exit status.
pub(crate) fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<ExitCode> {
    let engine = Engine::read(&arguments.serve)?;
    let address = address(&arguments.address)?;
    let secret = Secret::from_environment()?;
    let form = match QuestionForm::choose(arguments, &engine) {
        Ok(form) => form,
        Err(why) => {
            eprintln!("kvx: {why}");
            return unanswered(arguments, &why, out);
        }
    };
    let rank = WorkerRank { pp: 0, tp: 0 };
    let looked = match probe(&address, rank, form.version, secret, Duration::from_secs(5)) {
        Ok(looked) => looked,
        // The peer has answered, to refuse this secret.
        Err(error) if error.kind() == kvx::ErrorKind::Authentication => {
            if arguments.json {
                let misfits = [error.to_string()];
                let failure = json!({"answered": true, "fits": false, "misfits": misfits});
                writeln!(out, "{failure:#}")?;
            }
            eprintln!("kvx: does not fit: {}: {error}", arguments.address);
            return Ok(ExitCode::FAILURE);
        }
        Err(error) => {
            eprintln!("kvx: no answer: {}: {error}", arguments.address);
            return unanswered(arguments, &error.to_string(), out);
        }
    };
    let verdict = ProbeVerdict::of(&looked, &engine, &form)?;
    if arguments.json {
        writeln!(out, "{:#}", as_json(&looked, &form, &verdict))?;
    } else {
        write!(out, "{}", in_words(arguments, &looked, &form, &verdict))?;
    }
    Ok(if verdict.misfits.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn unanswered(arguments: &Arguments, error: &str, out: &mut dyn Write) -> Result<ExitCode> {
    if arguments.json {
        writeln!(out, "{:#}", json!({"answered": false, "error": error}))?;
    }
    Ok(ExitCode::from(NO_ANSWER))
}

/// The form of the question to the side channel.
struct QuestionForm {
    version: Version,
    /// The answer of the engine's API.
    release: Option<Release>,
    /// The reason why the API did not decide.
    note: Option<String>,
}

impl QuestionForm {
    /// Chooses the form that does not harm the listener, or explains why it is not known.
    fn choose(arguments: &Arguments, engine: &Engine) -> std::result::Result<Self, String> {
        let release = arguments.api.as_deref().map(Release::of).transpose();
        let note = match release {
            Ok(Some(release)) => {
                let version = match &release {
                    Release::Kvx => engine.version,
                    Release::Vllm(_, version) => *version,
                };
                return Ok(QuestionForm { version, release: Some(release), note: None });
            }
            Ok(None) => None,
            Err(why) => Some(why.to_string()),
        };
        match engine.kv_compat {
            Some(version) if version == version.spoken() => {
                Ok(QuestionForm { version, release: None, note })
            }
            Some(version) => Err(format!(
                "{} was not asked: kvx does not speak the handshake of {version}",
                arguments.address
            )),
            None => Err(version_needed(arguments, note)),
        }
    }
}

fn version_needed(arguments: &Arguments, why: Option<String>) -> String {
    let address = &arguments.address;
    let host = address.rsplit_once(':').map_or("HOST", |(host, _)| host);
    let (why, api) = match why {
        Some(why) => (format!(": {why}"), "HOST:PORT".to_owned()),
        None => (String::new(), format!("{host}:8000")),
    };
    let (after, serve) = match arguments.serve.is_empty() {
        true => ("", ""),
        false => (" -- …", "… "),
    };
    format!(
        "{address} was not asked: a vLLM crashes on the handshake of another version, and its version is not known{why}\n\
         Give the HTTP API of the same engine, or its version (of `kvx serve`: any):\n  \
         kvx probe {address} --api http://{api}{after}\n  \
         kvx probe {address} -- {serve}--kv-transfer-config.kv_connector_extra_config.kv_compat={}",
        Version::default().as_str()
    )
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

/// The incompatibilities, and other notes.
#[derive(Default)]
struct ProbeVerdict {
    misfits: Vec<String>,
    notes: Vec<String>,
}

impl ProbeVerdict {
    fn of(looked: &Probe, engine: &Engine, form: &QuestionForm) -> Result<Self> {
        let mut verdict = ProbeVerdict::default();
        if let Some(note) = &form.note {
            verdict.notes.push(format!("the version is that of kv_compat: {note}"));
        }
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
                let version = form.version;
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
            verdict.compare_hashes(looked, engine, config, form.release.as_ref())?;
            verdict.compare_memory(metadata, engine, config);
            verdict.compare_backends(metadata, config)?;
        }
        Ok(verdict)
    }

    fn compare_hashes(
        &mut self,
        looked: &Probe,
        engine: &Engine,
        config: &KvTransferConfig,
        release: Option<&Release>,
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
        let mut said = format!("compatibility hash {ours} here, {} there; ", looked.hash);
        // Find differences other than the release, which is known.
        let mut factors = engine.factors.clone();
        if let Some(Release::Vllm(release, version)) = release
            && let Some(cure) = adopt(&mut factors, release, *version)
        {
            said += &cure;
        }
        if factors.hash()? != looked.hash {
            said += &match explain(&factors, &looked.hash)? {
                Some(differences) => {
                    let all: Vec<_> = differences.iter().map(ToString::to_string).collect();
                    format!(
                        "{}: use the same value on both sides, or set it in kv_connector_extra_config.factors",
                        all.join(", and ")
                    )
                }
                None => "no known value of one or two factors explains it: compare model names as given to `vllm serve`, \
                         versions with their suffixes, and vLLM's log line of its factors"
                    .to_owned(),
            };
        }
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

    /// Checks whether the engine can reach the prefill's NIXL agent.
    fn compare_backends(
        &mut self,
        theirs: &NixlAgentMetadata,
        config: &KvTransferConfig,
    ) -> Result<()> {
        let names = nixl_backends(&theirs.agent_metadata).unwrap_or_default();
        if names.is_empty() || config.kv_connector_module_path().is_some() {
            return Ok(());
        }
        let written = config.backends()?;
        let ours = written.clone().unwrap_or_else(|| vec!["UCX".to_owned()]);
        let has = |list: &[String], name: &str| list.iter().any(|it| it.eq_ignore_ascii_case(name));
        if ours.iter().any(|own| has(&names, own)) {
            return Ok(());
        }
        let (here, there) = (ours.join(", "), names.join(", "));
        // Servers on kvx need no common backend for these.
        let reached_by_kvx =
            theirs.kvx_metadata.is_some() || has(&names, BACKEND) || has(&ours, "RIXL");
        if !reached_by_kvx && written.is_some() {
            self.misfits.push(format!(
                "backends {here} here, and {there} in the prefill's NIXL: give both one backend in common; a \
                 server on kvx reaches {there} by RIXL"
            ));
        } else if !["SHM", "TCP", "RIXL"].iter().any(|name| has(&ours, name)) {
            self.notes.push(format!(
                "for a vLLM, which has {here} in NIXL with these arguments, no backend is in common with {there}; \
                 a server on kvx needs none"
            ));
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

/// Gives the factors this release of vLLM, and returns what to set so that an engine has it.
/// `None` if the factors have it.
fn adopt(factors: &mut CompatibilityFactors, release: &str, version: Version) -> Option<String> {
    let map = factors.map();
    let here = map["vllm_version"].as_str().unwrap_or_default().to_owned();
    if here == release && factors.version == version {
        return None;
    }
    let mut cure = format!("it runs vLLM {release}, and this engine has {here}: ");
    if factors.version != version {
        cure += &format!("set kv_compat to {:?} ", version.as_str());
    }
    if release != version.vllm_version() {
        let and = if factors.version != version { "and " } else { "set " };
        cure += &format!("{and}factors to {{\"vllm_version\": {release:?}}} ");
    }
    cure += "in kv_connector_extra_config of a server on kvx; ";
    factors.further.remove("vllm_version");
    factors.further.remove("nixl_connector_version");
    factors.version = version;
    factors.vllm_version = release.to_owned();
    factors.connector_version = version.connector_version();
    Some(cure)
}

fn newer_name(layout: &str) -> &str {
    match layout {
        "NHD" => "LBNHC",
        "HND" => "LBHNC",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use kvx::config::Surroundings;
    use kvx_vllm::wire::nixl::NixlBlob;

    use super::*;

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
    fn engines_without_a_backend_in_common_do_not_fit() {
        let blob = |names: &[&str]| NixlBlob {
            agent: "prefill".into(),
            connections: names.iter().map(|name| ((*name).to_owned(), Vec::new())).collect(),
            sections: Vec::new(),
        };
        let compared = |names: &[&str], extra: &str| {
            let mut theirs = NixlAgentMetadata::new("prefill-0", Version::default());
            theirs.agent_metadata = blob(names).encode().unwrap();
            let json = format!(
                "{{\"kv_connector\": \"NixlConnector\", \"kv_role\": \"kv_consumer\", \
                 \"kv_connector_extra_config\": {{{extra}}}}}"
            );
            let config = KvTransferConfig::from_json(&json, &Surroundings::default()).unwrap();
            let mut verdict = ProbeVerdict::default();
            verdict.compare_backends(&theirs, &config).unwrap();
            (verdict.misfits.join(""), verdict.notes.join(""))
        };
        let fits = (String::new(), String::new());
        assert_eq!(compared(&["UCX"], ""), fits, "vLLM's default");
        assert_eq!(compared(&["KVX", "UCX"], r#""backends": ["KVX"]"#), fits);
        assert_eq!(compared(&["UCX"], r#""backends": ["RIXL"]"#), fits, "a server on kvx");
        assert_eq!(compared(&["KVX"], r#""backends": ["TCP"]"#), fits, "a server on kvx");
        assert_eq!(compared(&[], r#""backends": ["KVX"]"#), fits, "nothing is known");
        for backends in ["KVX", "TCP"] {
            let (misfit, note) =
                compared(&["UCX", "GDS"], &format!("\"backends\": [{backends:?}]"));
            assert!(misfit.starts_with(&format!("backends {backends} here, and UCX, GDS in")));
            assert!(note.is_empty(), "{note}");
        }
        let (misfit, note) = compared(&["KVX"], "");
        assert!(misfit.is_empty() && note.contains("no backend is in common with KVX"), "{note}");
    }
}
