//! The messages with which a host of further data-parallel ranks joins the head.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::noise::Connection;
use crate::kv::Secret;
use crate::model::{ModelError, Result};

/// The time that either end may take to answer.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// The time after which an idle connection is pinged, and the time to wait for the answer.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// The time that a head waits for its hosts, and a host for its head.
pub(crate) const JOIN_TIMEOUT: Duration = Duration::from_secs(300);
/// The pause between two attempts to reach the other end.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// The longest message, in bytes.
const LONGEST_MESSAGE: u32 = 64 << 10;

/// The configuration that all ranks must share.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SharedConfig {
    pub(crate) model: String,
    pub(crate) data_parallel_size: usize,
    pub(crate) model_len: usize,
    pub(crate) block_size: usize,
}

impl SharedConfig {
    /// Describes how a host's configuration differs, if it does.
    pub(super) fn difference(&self, host: &SharedConfig) -> Option<String> {
        let (here, host) = (json!(self), json!(host));
        let fields =
            here.as_object()?.iter().filter(|(name, value)| host[name.as_str()] != **value);
        let told = |(name, value): (&String, &Value)| {
            format!("{name} is {value} at the head and {} at this host", host[name.as_str()])
        };
        let told: Vec<_> = fields.map(told).collect();
        (!told.is_empty()).then(|| told.join(", "))
    }
}

/// A host's request to join the head.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct JoinRequest {
    pub(crate) ranks: Range<usize>,
    #[serde(rename = "alike")]
    pub(crate) config: SharedConfig,
}

/// Checks that the head and its hosts may use an address.
///
/// # Errors
///
/// Fails if the address is beyond loopback and there is no secret to prove.
pub(crate) fn check_reach(address: SocketAddr, secret: Option<&Secret>) -> Result<()> {
    if address.ip().to_canonical().is_loopback() || secret.is_some() {
        return Ok(());
    }
    Err(ModelError::new(format!(
        "a head and its hosts at {address}, beyond this machine, authenticate each other with the \
         fleet's secret, but there is none here: create one with `kvx secret FILE`, and set \
         KVX_SECRET_FILE to the same secret on all of them"
    )))
}

pub(super) async fn write_message(
    stream: &mut impl Connection,
    message: &impl Serialize,
) -> Result<()> {
    let message = serde_json::to_vec(message).map_err(ModelError::of)?;
    let framed = [&(message.len() as u32).to_be_bytes()[..], &message].concat();
    stream.write_all(&framed).await.map_err(ModelError::of)
}

pub(super) async fn read_message<T: DeserializeOwned>(stream: &mut impl Connection) -> Result<T> {
    let len = stream.read_u32().await.map_err(ModelError::of)?;
    if len > LONGEST_MESSAGE {
        return Err(ModelError::new(format!(
            "a message of {len} bytes is longer than a host or its head sends: does another \
             program use this port?"
        )));
    }
    let mut message = vec![0; len as usize];
    stream.read_exact(&mut message).await.map_err(ModelError::of)?;
    serde_json::from_slice(&message).map_err(ModelError::of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_secret_hosts_join_only_on_this_machine() {
        let secret = Secret::from_bytes([1; Secret::LEN]);
        for (address, is_near) in [
            ("127.0.0.1:1", true),
            ("[::1]:1", true),
            ("[::ffff:127.0.0.1]:1", true),
            ("10.0.0.1:1", false),
            ("0.0.0.0:1", false),
        ] {
            let address = address.parse().unwrap();
            assert_eq!(check_reach(address, None).is_ok(), is_near, "{address}");
            assert!(check_reach(address, Some(&secret)).is_ok());
        }
    }
}
