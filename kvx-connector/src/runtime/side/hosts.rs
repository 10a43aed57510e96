//! Finds out which hosts are this machine, and which address TCP uses for data accordingly.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::time::Duration;

use kvx_vllm::config::KvTransferConfig;

use super::super::zmtp::resolve;

/// The time limit for the resolution of a name.
const TO_RESOLVE: Duration = Duration::from_secs(5);

/// Returns the address that a host names, if it is one of this machine and its network.
async fn own_address(host: &str) -> Option<IpAddr> {
    let found = resolve(host, 0, TO_RESOLVE).await.ok()?;
    let reachable = |ip: &IpAddr| !ip.is_loopback() && !ip.is_unspecified();
    // Only an address of this machine can be bound.
    found
        .into_iter()
        .map(|address| address.ip())
        .filter(reachable)
        .find(|ip| TcpListener::bind(SocketAddr::new(*ip, 0)).is_ok())
}

/// Returns the `tcp.bind` of a configuration, if it has one.
pub(super) fn written_tcp_bind(config: &KvTransferConfig) -> Option<&str> {
    config.extra().get("tcp")?.get("bind")?.as_str()
}

/// Returns the address that TCP binds and advertises, on an engine of several hosts without
/// `tcp.bind`: the host that peers connect to, if it is an address of this machine. `None`: TCP
/// uses its own default.
pub(crate) async fn tcp_bind(config: &KvTransferConfig, told: &str) -> Option<IpAddr> {
    match written_tcp_bind(config) {
        Some(_) => None,
        None => own_address(told).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvx_vllm::config::Surroundings;

    fn config(host: &str, json: &str) -> KvTransferConfig {
        let surroundings = Surroundings::default().variable("VLLM_NIXL_SIDE_CHANNEL_HOST", host);
        KvTransferConfig::from_json(json, &surroundings).unwrap()
    }

    fn bound(config: &KvTransferConfig) -> Option<IpAddr> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(tcp_bind(config, &config.environment().side_channel_host))
    }

    #[test]
    fn a_host_that_only_this_machine_reaches_is_not_bound_for_data() {
        for host in [
            "localhost",
            "127.0.0.1",
            "::1",
            "0.0.0.0",
            "[::1]",
            "192.0.2.1",
            "no.such.host.invalid",
        ] {
            assert_eq!(bound(&config(host, "{}")), None, "{host}");
        }
    }

    #[test]
    fn a_configured_tcp_bind_takes_precedence() {
        let json = r#"{"kv_connector_extra_config": {"tcp": {"bind": "127.0.0.1"}}}"#;
        let config = config("localhost", json);
        assert_eq!((written_tcp_bind(&config), bound(&config)), (Some("127.0.0.1"), None));
    }
}
