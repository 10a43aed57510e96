//! The addresses of a side channel: where it listens, and where peers connect.

use std::sync::Arc;

use kvx_core::{Result, Secret};
use kvx_vllm::config::{KvTransferConfig, RankNumbers};

use super::hosts;
use kvx_vllm::engine::SideChannels;
use kvx_vllm::ids::{bare, is_loopback};

/// The settings of a side channel.
#[derive(Clone, Debug)]
pub(crate) struct SideSettings {
    /// The host that peers connect to: `VLLM_NIXL_SIDE_CHANNEL_HOST`.
    pub(crate) advertise: Arc<str>,
    /// The host to listen at: `kv_connector_extra_config.side_channel_bind`, or else `advertise`.
    pub(crate) bind: Arc<str>,
    /// The ports: one, or one for each tensor-parallel rank. 0 is any free port.
    pub(crate) ports: Vec<u16>,
    /// The secret that decodes have to prove before they get metadata of kvx's agents.
    pub(crate) secret: Option<Secret>,
    /// Warnings for the operator about these settings.
    pub(crate) warnings: Vec<String>,
}

impl SideSettings {
    /// Reads the settings of the engine with data-parallel rank `dp` and `tp_size` workers side by
    /// side.
    ///
    /// Errors: `Invalid`: a port above 65535.
    pub(crate) fn from_config(
        config: &KvTransferConfig,
        (dp, tp_size): (u32, u32),
        channels: SideChannels,
        secret: Option<Secret>,
    ) -> Result<Self> {
        let workers = match channels {
            SideChannels::OfEngine => 1,
            SideChannels::OfWorkers => tp_size,
        };
        let ports =
            (0..workers).map(|tp| config.side_channel_port(RankNumbers { dp, tp, tp_size }));
        let advertise = bare(&config.environment().side_channel_host);
        let bind = config.nixl().side_channel_bind.as_deref().unwrap_or(advertise);
        Ok(SideSettings {
            ports: ports.collect::<Result<_>>()?,
            secret,
            warnings: warnings(config, advertise),
            bind: bare(bind).into(),
            advertise: advertise.into(),
        })
    }
}

fn warnings(config: &KvTransferConfig, advertise: &str) -> Vec<String> {
    let mut warnings = Vec::new();
    let data = hosts::written_tcp_bind(config).filter(|bind| !is_loopback(bind));
    if let Some(bind) = data.filter(|_| is_loopback(advertise)) {
        warnings.push(format!(
            "the side channel is advertised at {advertise}, which on another machine means \
             that machine itself, but kv_connector_extra_config.tcp.bind is {bind}: set \
             VLLM_NIXL_SIDE_CHANNEL_HOST to an address of this machine that peers can reach"
        ));
    }
    if matches!(advertise, "0.0.0.0" | "::") {
        warnings.push(format!(
            "the side channel is advertised at {advertise}, which other machines cannot connect \
             to: set VLLM_NIXL_SIDE_CHANNEL_HOST to an address that they can reach, and \
             kv_connector_extra_config.side_channel_bind to {advertise}"
        ));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvx_vllm::config::Surroundings;

    fn settings(host: &str, json: &str, channels: SideChannels) -> Result<SideSettings> {
        let surroundings = Surroundings::default()
            .variable("VLLM_NIXL_SIDE_CHANNEL_HOST", host)
            .variable("VLLM_NIXL_SIDE_CHANNEL_PORT", "5700");
        let config = KvTransferConfig::from_json(json, &surroundings)?;
        SideSettings::from_config(&config, (2, 4), channels, None)
    }

    #[test]
    fn both_port_rules_and_both_hosts_come_from_the_configuration() {
        let json = r#"{"kv_connector_extra_config": {"side_channel_bind": "0.0.0.0"}}"#;
        let one = settings("10.0.0.1", json, SideChannels::OfEngine).unwrap();
        assert_eq!((&*one.advertise, &*one.bind, one.ports), ("10.0.0.1", "0.0.0.0", vec![5702]));
        assert_eq!(one.warnings, [""; 0]);
        let json = r#"{"kv_connector_extra_config": {"kv_compat": "0.9"}}"#;
        let all = settings("[fd00::1]", json, SideChannels::OfWorkers).unwrap();
        assert_eq!((&*all.advertise, &*all.bind), ("fd00::1", "fd00::1"));
        assert_eq!(all.ports, [5708, 5709, 5710, 5711]);
    }

    #[test]
    fn unreachable_hosts_are_warned_of() {
        let json = r#"{"kv_connector_extra_config": {"tcp": {"bind": "10.0.0.1"}}}"#;
        for (host, json, word) in [
            ("localhost", json, "tcp.bind is 10.0.0.1"),
            ("0.0.0.0", "{}", "side_channel_bind to 0.0.0.0"),
        ] {
            let warnings = settings(host, json, SideChannels::OfEngine).unwrap().warnings;
            assert!(warnings.len() == 1 && warnings[0].contains(word), "{warnings:?}");
            assert!(warnings[0].contains("VLLM_NIXL_SIDE_CHANNEL_HOST"), "{warnings:?}");
        }
        assert!(settings("10.0.0.1", json, SideChannels::OfEngine).unwrap().warnings.is_empty());
        assert!(settings("localhost", "{}", SideChannels::OfEngine).unwrap().warnings.is_empty());
    }
}
