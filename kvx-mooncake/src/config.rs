//! The options of Mooncake: the table `mooncake`, and the top-level keys of vLLM's
//! MooncakeConnector.
//!
//! | option | default | what it does |
//! |---|---|---|
//! | `mooncake_protocol` | `rdma` with an RDMA device, else `tcp` | the transport; an unavailable one is an error |
//! | `device_name` | all | RDMA devices, separated by commas |
//! | `num_workers` | 10 | threads for the engine's blocking calls, in addition to those that wait for a stopped peer |
//! | `host` | `127.0.0.1` | the name or address at which peers reach this host |
//! | `metadata` | `P2PHANDSHAKE` | or an `http://`, `https://` or `etcd://` server that the engine was built with |
//! | `location` | chosen by the engine | the node of registered host memory: `cpu:0`; devices use their numbers |
//! | `any_version` | false | accept a wheel that this release was not tested with |
//!
//! The first three may also be at the top level of `kv_connector_extra_config`, as in vLLM; the
//! table wins.

use std::ops::RangeInclusive;

use kvx_backend::devices::rdma_devices;
use kvx_core::{Error, ErrorKind, Options, Result};

use crate::ffi::EngineOptions;

const KEYS: &[&str] = &[
    "any_version",
    "device_name",
    "host",
    "location",
    "metadata",
    "mooncake_protocol",
    "num_workers",
];
const PEER_TO_PEER: &str = "P2PHANDSHAKE";
/// Schemes of metadata servers. The engine aborts the process for an unknown scheme.
const SERVERS: &[&str] = &["http://", "https://", "etcd://"];
const PROTOCOLS: &[&str] = &["rdma", "tcp"];
const WORKERS: RangeInclusive<u64> = 1..=256;

/// The parsed options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) engine_options: EngineOptions,
    pub(crate) workers: usize,
    pub(crate) any_version: bool,
    /// The node of host memory.
    pub(crate) node: Option<String>,
}

impl Config {
    /// Reads the options. Errors: `Invalid`, naming the option.
    pub(crate) fn read(options: &Options) -> Result<Self> {
        Config::on(options, &rdma_devices())
    }

    fn on(options: &Options, found: &[String]) -> Result<Self> {
        let (table, top) = (options.table("mooncake", KEYS)?, options.top());
        let text = |key| -> Result<_> { Ok(table.text(key)?.or(top.text(key)?)) };
        let protocol = match text("mooncake_protocol")? {
            None if found.is_empty() => "tcp".to_owned(),
            None => "rdma".to_owned(),
            Some(protocol) if PROTOCOLS.contains(&protocol) => protocol.to_owned(),
            Some(other) => {
                return Err(wrong("mooncake_protocol", other, "one of rdma, tcp"));
            }
        };
        let devices = text("device_name")?.unwrap_or_default();
        let devices: Vec<String> = devices
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty())
            .map(str::to_owned)
            .collect();
        let metadata = table.text("metadata")?.unwrap_or(PEER_TO_PEER).to_owned();
        if metadata != PEER_TO_PEER && !SERVERS.iter().any(|scheme| metadata.starts_with(scheme)) {
            return Err(wrong(
                "mooncake.metadata",
                &metadata,
                "P2PHANDSHAKE, or http://…, https://…, etcd://…",
            ));
        }
        let host = table.text("host")?.unwrap_or("127.0.0.1").to_owned();
        if host.is_empty() || host.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(wrong("mooncake.host", &host, "a name or address of this host"));
        }
        let node = table.text("location")?.map(str::to_owned);
        let is_node = |text: &str| {
            text.strip_prefix("cpu:")
                .is_some_and(|node| !node.is_empty() && node.bytes().all(|b| b.is_ascii_digit()))
        };
        if let Some(bad) = node.as_deref().filter(|text| !is_node(text)) {
            let wanted =
                "a node of host memory, such as cpu:0; device memory has the device's number";
            return Err(wrong("mooncake.location", bad, wanted));
        }
        let workers = table.number("num_workers", WORKERS)?.or(top.number("num_workers", WORKERS)?);
        Ok(Config {
            engine_options: EngineOptions { metadata, host, protocol, devices },
            workers: workers.unwrap_or(10) as usize,
            any_version: table.flag("any_version")?.unwrap_or(false),
            node,
        })
    }

    /// Returns whether the engine needs its etcd client.
    pub(crate) fn etcd(&self) -> bool {
        self.engine_options.metadata.starts_with("etcd://")
    }
}

fn wrong(key: &str, found: &str, wanted: &str) -> Error {
    ErrorKind::Invalid.because(format!("option \"{key}\" is {found:?}; write {wanted}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str, devices: &[&str]) -> Result<Config> {
        let devices: Vec<String> = devices.iter().map(|name| (*name).to_owned()).collect();
        Config::on(&Options::parse(json).expect("JSON"), &devices)
    }

    #[test]
    fn the_default_protocol_depends_on_the_machines_devices() {
        assert_eq!(read("{}", &[]).expect("defaults").engine_options.protocol, "tcp");
        let config = read("{}", &["mlx5_0"]).expect("defaults");
        assert_eq!((config.engine_options.protocol.as_str(), config.workers), ("rdma", 10));
        assert_eq!(config.engine_options.host, "127.0.0.1");
    }

    #[test]
    fn vllms_keys_are_read_and_the_table_wins() {
        let top =
            r#"{"mooncake_protocol": "rdma", "device_name": "mlx5_0, mlx5_1", "num_workers": 3}"#;
        let config = read(top, &[]).expect("vLLM's keys");
        assert_eq!((config.engine_options.protocol.as_str(), config.workers), ("rdma", 3));
        assert_eq!(config.engine_options.devices, ["mlx5_0", "mlx5_1"]);
        for key in [r#"{"num_workers": 257}"#, r#"{"mooncake": {"num_workers": 257}}"#] {
            let error = read(key, &[]).unwrap_err();
            assert!(
                error.sentence().contains("num_workers") && error.sentence().contains("256"),
                "{error}"
            );
        }
        let both = r#"{"mooncake_protocol": "rdma", "mooncake": {"mooncake_protocol": "tcp", "num_workers": 2}}"#;
        let config = read(both, &[]).expect("both");
        assert_eq!((config.engine_options.protocol.as_str(), config.workers), ("tcp", 2));
    }

    #[test]
    fn options_that_would_abort_the_engine_are_rejected() {
        for bad in ["redis://127.0.0.1", "nonsense", "", "file:///x"] {
            let error =
                read(&format!(r#"{{"mooncake": {{"metadata": "{bad}"}}}}"#), &[]).unwrap_err();
            assert!(error.sentence().contains("mooncake.metadata"), "{error}");
        }
        for good in ["http://10.0.0.1:8080/metadata", "etcd://10.0.0.1:2379"] {
            let config = read(&format!(r#"{{"mooncake": {{"metadata": "{good}"}}}}"#), &[])
                .expect("a server");
            assert_eq!(config.etcd(), good.starts_with("etcd"));
        }
        assert!(read(r#"{"mooncake_protocol": "carrier-pigeon"}"#, &[]).is_err());
        for (said, fits) in [("cpu:1", true), ("cuda:0", false), ("cpu:", false), ("1", false)] {
            let json = format!(r#"{{"mooncake": {{"location": "{said}"}}}}"#);
            assert_eq!(read(&json, &[]).is_ok(), fits, "{said}");
        }
        assert!(
            read(r#"{"mooncake": {"hots": "x"}}"#, &[])
                .unwrap_err()
                .sentence()
                .contains("mooncake.host")
        );
    }
}
