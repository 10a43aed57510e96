//! The output of `kvx probe`: text or JSON.

use kvx::connector::nixl::{BACKEND, NixlPeer};
use kvx::connector::{NixlAgentMetadata, Probe};
use kvx_vllm::wire::nixl::NixlBlob;
use serde_json::{Value, json};

use super::release::Release;
use super::{Arguments, ProbeVerdict, QuestionForm};
use crate::printable::printable;

/// The most backends of a NIXL agent that are named.
const MAX_BACKENDS: usize = 16;

/// Returns the backends of a NIXL agent, each once, or an error if its metadata is malformed.
pub(super) fn nixl_backends(agent: &[u8]) -> kvx::Result<Vec<String>> {
    let blob = NixlBlob::decode(agent)?;
    let mut names = Vec::new();
    for (name, _) in blob.connections {
        // A peer chooses the names: no control characters for the terminal.
        let name = name.escape_debug().to_string();
        if !names.contains(&name) && names.len() < MAX_BACKENDS {
            names.push(name);
        }
    }
    Ok(names)
}

pub(super) fn in_words(
    arguments: &Arguments,
    looked: &Probe,
    form: &QuestionForm,
    verdict: &ProbeVerdict,
) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        // The peer wrote much of it.
        text.push_str(&format!("{name:<22}{}\n", printable(&value)));
    };
    line("side channel", format!("{} answers in {:?}", arguments.address, looked.round_trip));
    line("protocol", speaks(looked).to_owned());
    if let Some(Release::Vllm(release, _)) = &form.release {
        line("release", format!("vLLM {release}"));
    }
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
        line("NIXL agent", nixl_agent(&metadata.agent_metadata));
        line("kvx agent", kvx_agent(metadata));
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

fn nixl_agent(agent: &[u8]) -> String {
    let len = agent.len();
    match nixl_backends(agent) {
        _ if agent.is_empty() => "none".to_owned(),
        Ok(names) => match &names[..] {
            [] => format!("{len} bytes, without a backend"),
            [name] => format!("backend {name}, {len} bytes"),
            names => format!("backends {}, {len} bytes", names.join(", ")),
        },
        Err(error) => format!("{len} bytes that kvx cannot read: {}", error.sentence()),
    }
}

fn kvx_agent(metadata: &NixlAgentMetadata) -> String {
    match metadata.kvx_metadata.as_ref().filter(|blob| !blob.is_empty()) {
        Some(blob) => format!("{} bytes", blob.len()),
        None if NixlPeer::is_offered(&metadata.agent_metadata) => {
            format!("inside NIXL, as its backend {BACKEND}")
        }
        None => "none".to_owned(),
    }
}

pub(super) fn as_json(looked: &Probe, form: &QuestionForm, verdict: &ProbeVerdict) -> Value {
    let release = match &form.release {
        Some(Release::Vllm(release, _)) => Some(release),
        _ => None,
    };
    let metadata = told(looked);
    json!({
        "answered": true,
        "fits": verdict.misfits.is_empty(),
        "misfits": verdict.misfits,
        "notes": verdict.notes,
        "kvx": *looked.kvx.as_ref().unwrap_or(&true),
        "vllm_release": release,
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
            "nixl_backends": nixl_backends(&metadata.agent_metadata).unwrap_or_default(),
            "kvx_agent_bytes": metadata.kvx_metadata.as_ref().map_or(0, Vec::len),
        })),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_backends_of_a_nixl_agent_are_named_once_and_without_control_characters() {
        let agent = |names: &[&str]| {
            let connections = names.iter().map(|name| ((*name).to_owned(), b"at".to_vec()));
            let connections = connections.collect();
            NixlBlob { agent: "a".into(), connections, sections: Vec::new() }.encode().unwrap()
        };
        let one = nixl_agent(&agent(&["KVX"]));
        assert!(one.starts_with("backend KVX, ") && one.ends_with(" bytes"), "{one}");
        let several = nixl_agent(&agent(&["UCX", "KVX", "UCX", "\u{1b}[2J"]));
        assert!(several.starts_with("backends UCX, KVX, \\u{1b}[2J, "), "{several}");
        assert!(nixl_agent(&agent(&[])).ends_with(" bytes, without a backend"));
        assert_eq!(nixl_agent(&[]), "none");
        let broken = nixl_agent(b"nixlSerDes|?");
        assert!(broken.starts_with("12 bytes that kvx cannot read: "), "{broken}");
    }
}
