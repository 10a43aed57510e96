//! The registration that the flags of `kvx serve` ask for.

use kvx::Secret;
use kvx::config::{self, ConnectorKind, KvTransferConfig, RankNumbers};
use kvx_paged_llama::registration::{FleetAddress, FleetSecret, Role, ServerRegistration};
use serde_json::{Map, Value};

use super::flags::Flags;
use crate::Result;

/// Returns the registration that the flags ask for, if they do.
pub(super) fn registration(
    flags: &Flags,
    transfer: &KvTransferConfig,
    secret: Option<&Secret>,
) -> Result<Option<ServerRegistration>> {
    let Some(address) = &flags.register else { return Ok(None) };
    if flags.headless {
        return Err("--register is for servers with clients: the head registers, and its \
                    --headless hosts do not"
            .into());
    }
    let fleet = FleetAddress::new(address)?.with_environment();
    let role = role(flags, transfer)?;
    let mut instance = Map::from_iter([("role".to_owned(), role.as_str().into())]);
    // Each engine publishes its own events, and an instance has one endpoint.
    let events = flags.kv_events_config.as_ref();
    if let Some(events) = events.filter(|events| events.is_on() && flags.data_parallel_size == 1) {
        instance.insert("events".to_owned(), events.endpoint.clone().into());
        if let Some(replay) = &events.replay_endpoint {
            instance.insert("events_replay".to_owned(), replay.clone().into());
        }
    }
    if transfer.connector() == Some(&ConnectorKind::Mooncake) && role == Role::Prefill {
        let port = transfer.mooncake_port(RankNumbers::default())?;
        instance.insert("bootstrap_port".to_owned(), Value::from(port));
    }
    let secret = secret.map(|secret| FleetSecret::new(*secret.bytes()));
    Ok(Some(ServerRegistration { fleet, secret, url: flags.register_url.clone(), instance }))
}

fn role(flags: &Flags, transfer: &KvTransferConfig) -> Result<Role> {
    if let Some(name) = &flags.register_role {
        return Ok(Role::from_name(name)?);
    }
    match transfer.kv_role() {
        Some(config::Role::Producer) => Ok(Role::Prefill),
        Some(config::Role::Consumer) | None => Ok(Role::Decode),
        Some(config::Role::Both) => {
            Err("kv_role is kv_both: name the role with --register-role prefill or decode".into())
        }
    }
}
