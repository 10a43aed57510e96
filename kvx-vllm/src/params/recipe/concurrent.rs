//! MooncakeConnector and NixlPushConnector: both legs at once, with a common id.
//!
//! ```
//! use kvx_vllm::params::MooncakeTransferId;
//! use kvx_vllm::params::recipe::concurrent::{self, MooncakeTarget};
//! # fn main() -> Result<(), kvx_vllm::params::ParamsError> {
//! // GET http://10.0.0.1:8998/query, once for each prefill instance.
//! let query = serde_json::json!({"0": {"engine_id": "e0", "worker_addr": {"0": {"0": "tcp://10.0.0.1:4711"}}}});
//! let targets = MooncakeTarget::from_query("http://10.0.0.1:8998", &query)?;
//!
//! let request = serde_json::json!({"model": "m", "prompt": "Once", "max_tokens": 24});
//! let legs = concurrent::mooncake_legs(&request, &MooncakeTransferId::from_random([7; 16]), &targets[0])?;
//! assert_eq!(legs.prefill_headers, [("X-data-parallel-rank", "0".to_owned())]);
//! assert_eq!(legs.decode["kv_transfer_params"]["remote_engine_id"], "e0");
//! # Ok(())
//! # }
//! ```

use serde_json::Value;

use super::bodies;
use crate::Version;
use crate::params::{
    MooncakeLeg, MooncakeParams, MooncakeTransferId, ParamsError, RemoteBlocks, TransferMode,
    TransferParams,
};
use crate::params::{XRequestId, fields};

/// The header that picks a data parallel rank of an instance.
pub const X_DATA_PARALLEL_RANK: &str = "X-data-parallel-rank";

/// The two legs of a request, to be sent at once. Return the decode leg's answer to the client, and
/// check the prefill leg's answer for errors.
#[derive(Clone, Debug, PartialEq)]
pub struct Legs {
    /// The body for the prefill instance.
    pub prefill: Value,
    /// Headers for the prefill leg only.
    pub prefill_headers: Vec<(&'static str, String)>,
    /// The body for the decode instance.
    pub decode: Value,
}

/// A data-parallel rank of a prefill instance with the MooncakeConnector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MooncakeTarget {
    /// The data-parallel rank.
    pub dp_rank: u32,
    /// The rank's engine id.
    pub engine_id: String,
    /// The instance's bootstrap server, with scheme.
    pub bootstrap_addr: String,
}

impl MooncakeTarget {
    /// Reads the ranks from a bootstrap server's answer to `GET /query`, in ascending order.
    ///
    /// # Errors
    ///
    /// An answer that is not an object keyed by data-parallel rank, or an entry without an engine
    /// id.
    pub fn from_query(bootstrap_addr: &str, answer: &Value) -> Result<Vec<Self>, ParamsError> {
        let mut targets = Vec::new();
        for (rank, entry) in fields::object("query", answer)? {
            let dp_rank = rank.parse().map_err(|_| {
                ParamsError::new(
                    "query",
                    format!("the bootstrap server lists a data parallel rank {rank:?}, which is not a number"),
                )
            })?;
            let engine_id = entry.get("engine_id").and_then(Value::as_str).ok_or_else(|| {
                ParamsError::new(
                    "engine_id",
                    format!("the bootstrap server lists rank {rank} without an engine_id"),
                )
            })?;
            targets.push(MooncakeTarget {
                dp_rank,
                engine_id: engine_id.to_owned(),
                bootstrap_addr: bootstrap_addr.to_owned(),
            });
        }
        targets.sort_by_key(|target| target.dp_rank);
        Ok(targets)
    }
}

/// Returns the two legs for instances with the MooncakeConnector.
///
/// # Errors
///
/// A request that is not an object, or that asks for several answers (`n`, `best_of`,
/// `use_beam_search`); a target with an empty engine id or address.
pub fn mooncake_legs(
    request: &Value,
    transfer_id: &MooncakeTransferId,
    target: &MooncakeTarget,
) -> Result<Legs, ParamsError> {
    let params = |leg| MooncakeParams::new(transfer_id.clone(), leg).to_value();
    let decode = MooncakeLeg::Decode {
        remote_engine_id: target.engine_id.clone(),
        remote_bootstrap_addr: target.bootstrap_addr.clone(),
    };
    Ok(Legs {
        prefill: bodies::prefill(request, params(MooncakeLeg::Prefill)?)?,
        prefill_headers: vec![(X_DATA_PARALLEL_RANK, target.dp_rank.to_string())],
        decode: bodies::decode(request, Some(params(decode)?))?,
    })
}

/// A prefill instance with the NixlPushConnector. The router must know these values because decode
/// starts before the prefill instance answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushTarget {
    /// The instance's `engine_id`, as configured.
    pub engine_id: String,
    /// The host of the instance's side channel.
    pub host: String,
    /// The port of the instance's side channel.
    pub port: u16,
    /// The instance's tensor-parallel size.
    pub tp_size: u32,
    /// The instance's pipeline-parallel size.
    pub pp_size: u32,
}

/// Returns the two legs for instances with the NixlPushConnector. Send `id` as `X-Request-Id` with
/// both: the prefill side finds the decode side's blocks by the part that their request ids share.
///
/// # Errors
///
/// A request that is not an object, or that asks for several answers (`n`, `best_of`,
/// `use_beam_search`); an incomplete target.
pub fn push_legs(
    request: &Value,
    id: &XRequestId,
    target: &PushTarget,
) -> Result<Legs, ParamsError> {
    let remote = RemoteBlocks {
        tp_size: target.tp_size,
        pp_size: target.pp_size,
        mode: TransferMode::Push,
        ..RemoteBlocks::new(
            target.engine_id.as_str(),
            id.as_str(),
            target.host.as_str(),
            target.port,
            Vec::new(),
        )
    };
    let mut params = TransferParams::prefilled(remote, Version::V0_33);
    // The decode side registers its own blocks with the prefill side; the prompt's length gives the
    // number of tokens.
    params.remote_block_ids = None;
    params.remote_num_tokens = None;
    Ok(Legs {
        prefill: bodies::prefill(request, TransferParams::ask_prefill().to_value(Version::V0_33)?)?,
        prefill_headers: Vec::new(),
        decode: bodies::decode(request, Some(params.to_value(Version::V0_33)?))?,
    })
}
