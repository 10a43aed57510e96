//! The setup of a rank in a process of its own, read from the JSON that its engine sends.

use std::net::IpAddr;

use kvx_core::{Error, ErrorKind, Registry, Result, Secret};
use kvx_vllm::config::{KvTransferConfig, Surroundings};
use serde_json::{Map, Value};

use super::super::builder::{ConnectorBuilder, Group};
use super::super::setup::Setup;
use kvx_vllm::engine::Address;
use kvx_vllm::wire::{CompatibilityFactors, CompatibilityHash};

/// The variable for the host of the side channel and of TCP.
const HOST: &str = "VLLM_NIXL_SIDE_CHANNEL_HOST";

fn unreadable(what: &str) -> Error {
    ErrorKind::Malformed.because(format!("the setup that the engine sent lacks {what}"))
}

/// Reads the setup of a rank. Returns it with the secret of this process. `own_address` is the
/// address by which this host reaches the engine, if the engine may be on another host.
pub(super) fn from_welcome(
    welcome: &str,
    own_address: Option<IpAddr>,
    registry: Registry,
) -> Result<(Setup, Option<Secret>)> {
    let told: Map<String, Value> = serde_json::from_str(welcome).map_err(|_| unreadable("JSON"))?;
    let field = |name: &str| told.get(name).ok_or_else(|| unreadable(name));
    let text = |name: &str| field(name)?.as_str().ok_or_else(|| unreadable(name));
    let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
    let size = |name: &str| number(field(name)?).ok_or_else(|| unreadable(name));
    let list = |name: &str| field(name)?.as_array().ok_or_else(|| unreadable(name));
    let address = list("address")?;
    let (host, port) = (address.first().and_then(Value::as_str), address.get(1).and_then(number));
    let port =
        port.and_then(|port| u16::try_from(port).ok()).ok_or_else(|| unreadable("address"))?;
    let host = host.ok_or_else(|| unreadable("address"))?;
    let gpu = field("gpu")?.as_bool().ok_or_else(|| unreadable("gpu"))?;
    let mut surroundings = Surroundings::of_process().gpu(gpu);
    // On the engine's host, TCP binds the same address as in the engine's process. On another host
    // it binds the one in this process's environment, or the one by which the engine is reached.
    match own_address {
        None => surroundings = surroundings.variable(HOST, host),
        Some(own) if std::env::var_os(HOST).is_none() => {
            surroundings = surroundings.variable(HOST, own.to_string());
        }
        Some(_) => {}
    }
    let config = KvTransferConfig::from_json(&field("config")?.to_string(), &surroundings)?;
    let mut factors = CompatibilityFactors::from_config(&config, text("model")?);
    text("attn_backend_name")?.clone_into(&mut factors.attn_backend_name);
    // The named factors override those that the fields set.
    factors.further = field("factors")?.as_object().ok_or_else(|| unreadable("factors"))?.clone();
    let groups = list("groups")?.iter().map(|group| match group {
        Value::Null => Ok(Group::Whole),
        tokens => number(tokens)
            .map(|tokens| Group::Window { tokens })
            .ok_or_else(|| unreadable("groups")),
    });
    let sizes = list("sizes")?.iter().map(number).collect::<Option<Vec<_>>>();
    let &[tp, pp, dcp] = sizes.as_deref().unwrap_or_default() else {
        return Err(unreadable("sizes"));
    };
    let builder = ConnectorBuilder::new(&config, registry, factors)
        .groups(groups.collect::<Result<Vec<_>>>()?)
        .data_parallel_rank(size("data_parallel")?)
        .workers(tp, pp)
        .decode_context_parallel(dcp)
        .block_size(size("block_size")?)
        .prefill_backoff(size("prefill_backoff")?)
        .any_port();
    let builder = match field("hash")?.as_str() {
        Some(hash) => builder.compatibility_hash(CompatibilityHash::foreign(hash)),
        None => builder,
    };
    let (mut setup, side) = builder.setup()?;
    setup.settings.address = Address { host: host.into(), port };
    Ok((setup, side.secret))
}
