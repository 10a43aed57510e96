//! The values of `kv_connector`.

use serde_json::{Map, Value};

use super::surroundings::Surroundings;
use kvx_core::backend::nearest;
use kvx_core::{ErrorKind, Result};

/// The connector that `kv_connector` names.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectorKind {
    /// `NixlConnector`, `NixlPullConnector`, and kvx's own `KvxConnector`: the decode side reads.
    NixlPull,
    /// `NixlPushConnector`: the prefill side writes.
    NixlPush,
    /// `MooncakeConnector`: the prefill side writes, over Mooncake.
    Mooncake,
    /// `MultiConnector`: several connectors, listed under `connectors`.
    Multi,
    /// A connector that the program registered.
    Own(String),
}

/// vLLM's connectors that kvx supports.
const SPOKEN: &[(&str, ConnectorKind)] = &[
    ("NixlConnector", ConnectorKind::NixlPull),
    ("NixlPullConnector", ConnectorKind::NixlPull),
    ("NixlPushConnector", ConnectorKind::NixlPush),
    ("MooncakeConnector", ConnectorKind::Mooncake),
    ("MultiConnector", ConnectorKind::Multi),
];

/// kvx's own connector for vLLM, and the Python module that vLLM loads it from.
const KVX: (&str, &str) = ("KvxConnector", "kvx.vllm");

/// vLLM's other connectors, of all versions: they get a more specific error.
const NOT_SPOKEN: &[&str] = &[
    "DecodeBenchConnector",
    "ExampleConnector",
    "ExampleHiddenStatesConnector",
    "FlexKVConnectorV1",
    "HF3FSKVConnector",
    "LMCacheConnector",
    "LMCacheConnectorV1",
    "LMCacheMPConnector",
    "MoRIIOConnector",
    "MooncakeStoreConnector",
    "OffloadingConnector",
    "P2pNcclConnector",
    "PyNcclConnector",
    "SharedStorageConnector",
    "SimpleCPUOffloadConnector",
];

pub(super) fn find(
    name: &str,
    module_path: Option<&str>,
    surroundings: &Surroundings,
) -> Result<ConnectorKind> {
    let invalid = |sentence: String| ErrorKind::Invalid.because(sentence);
    let own = surroundings.connectors.contains(name);
    if name == KVX.0 && !own {
        // It speaks the protocol of the NixlConnector, and has its keys.
        return match module_path {
            Some(path) if path == KVX.1 => Ok(ConnectorKind::NixlPull),
            _ => Err(invalid(format!(
                "KvxConnector needs \"kv_connector_module_path\": {:?}; add it, since vLLM finds the \
                 connector by it",
                KVX.1
            ))),
        };
    }
    match module_path {
        Some("") => {
            return Err(invalid(
                "kv_connector_module_path is empty; remove it, or name a connector that the program registered".into(),
            ));
        }
        Some(path) if !own => {
            return Err(invalid(format!(
                "kv_connector_module_path is {path:?}, but kvx loads no Python modules and this program has not \
                 registered a connector under the name {name:?}; remove kv_connector_module_path, or register it"
            )));
        }
        _ if own => return Ok(ConnectorKind::Own(name.to_owned())),
        _ => {}
    }
    if let Some((_, connector)) = SPOKEN.iter().find(|(known, _)| *known == name) {
        return Ok(connector.clone());
    }
    let spoken = SPOKEN.iter().map(|(known, _)| *known);
    let list = spoken.clone().collect::<Vec<_>>().join(", ");
    if NOT_SPOKEN.contains(&name) {
        return Err(ErrorKind::Unsupported.because(format!(
            "Unsupported connector type: kvx does not support vLLM's {name}; use one of {list}"
        )));
    }
    let hint = nearest(name, spoken.chain(surroundings.connectors.iter().map(String::as_str)))
        .map_or_else(String::new, |near| format!("; did you mean {near}?"));
    Err(invalid(format!("Unsupported connector type: {name}; supported: {list}{hint}")))
}

/// Returns the children of a MultiConnector, as written.
pub(super) fn children(extra: &Map<String, Value>) -> Result<Vec<&Map<String, Value>>> {
    let error = || {
        ErrorKind::Invalid.because(
            "kv_connector_extra_config.connectors must list the children of MultiConnector; write \
             [{\"kv_connector\": …, \
             \"kv_role\": …}, …]",
        )
    };
    let items = extra.get("connectors").and_then(Value::as_array).filter(|items| !items.is_empty());
    items.ok_or_else(error)?.iter().map(|item| item.as_object().ok_or_else(error)).collect()
}
