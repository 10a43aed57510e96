//! Names and addresses of instances.

use std::net::IpAddr;

use kvx_proxy::InstanceReport;

/// Returns role and address of an instance.
pub(super) fn name(one: &InstanceReport) -> String {
    format!("{} {}", one.role.as_str(), one.name)
}

/// Returns the host of `HOST:PORT` or `[HOST]:PORT`.
pub(super) fn host(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.trim_start_matches('[').trim_end_matches(']')
}

/// Returns whether a host leads each machine to itself.
pub(super) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}
