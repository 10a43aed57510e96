//! Examines the environment variables of engines.

use std::net::{IpAddr, ToSocketAddrs, UdpSocket};

use kvx::Secret;

use super::super::finding::Finding;
use super::system::{names, rdma_devices, variable};

pub(super) fn examine() -> Vec<Finding> {
    let mut found = Vec::new();
    for name in ["VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_HOST_IP", "KVX_TCP_BIND"] {
        found.extend(variable(name).map(|host| address(name, &host)));
    }
    found.push(secret(Secret::from_environment().map(|secret| secret.is_some())));
    found.extend(
        variable("UCX_NET_DEVICES")
            .map(|listed| ucx_devices(&listed, &names("/sys/class/net"), &rdma_devices())),
    );
    let set = |names: &[&'static str]| -> Vec<&'static str> {
        names.iter().copied().filter(|name| variable(name).is_some()).collect()
    };
    let proxies =
        ["http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"];
    let exceptions = ["no_proxy", "NO_PROXY"].iter().find_map(|name| variable(name));
    found.extend(proxy(&set(&proxies), exceptions.as_deref()));
    found
}

/// Returns whether an address belongs to this host, as far as binding it tells.
fn is_of_this_host(address: IpAddr) -> bool {
    UdpSocket::bind((address, 0)).is_ok()
}

/// Examines the address that an engine would tell its peers.
fn address(name: &'static str, host: &str) -> Finding {
    let resolved = (host.trim_matches(['[', ']']), 0).to_socket_addrs();
    let addresses: Vec<IpAddr> = match resolved {
        Ok(found) => found.map(|address| address.ip()).collect(),
        Err(error) => {
            return Finding::problem(name, format!("{host} has no address: {error}"))
                .because("an engine that is started with it fails, or its peers do not find it")
                .cure(format!(
                    "`export {name}=` and an address of this host: `ip address` lists them"
                ));
        }
    };
    let is_wildcard = addresses.iter().any(IpAddr::is_unspecified);
    if is_wildcard && name != "KVX_TCP_BIND" {
        return Finding::problem(name, format!("{host} is no address that peers can connect to"))
            .because("peers connect to what it says, so they would ask themselves")
            .cure(format!(
                "`export {name}=` and an address of this host: `ip address` lists them"
            ));
    }
    if let Some(foreign) = addresses.iter().find(|address| !is_of_this_host(**address)) {
        return Finding::problem(name, format!("{foreign} is not an address of this host"))
            .because(
                "an engine that is started with it cannot listen there, or sends its peers \
                 elsewhere",
            )
            .cure(format!(
                "`export {name}=` and an address of this host: `ip address` lists them"
            ));
    }
    if addresses.iter().all(IpAddr::is_loopback) {
        return Finding::warning(name, format!("{host} is loopback"))
            .because("peers on other hosts would connect to themselves; on one host it is right")
            .cure(format!("for several hosts `export {name}=` and this host's address"));
    }
    Finding::ok(name, host)
}

fn secret(found: Result<bool, kvx::Error>) -> Finding {
    let topic = "secret";
    match found {
        Ok(true) => Finding::ok(topic, "KVX_SECRET_FILE names one"),
        Ok(false) => Finding::note(topic, "KVX_SECRET_FILE is not set").because(
            "an engine without the fleet's secret is refused by those that have it; without any \
             secret, whoever reaches an engine's ports can read its blocks",
        ),
        Err(error) => Finding::problem(topic, error.to_string())
            .because("engines that are started with it end at once"),
    }
}

/// Examines UCX's list of devices: `mlx5_0:1,eth0`, `all`, or `^eth0` for all but one.
fn ucx_devices(listed: &str, interfaces: &[String], rdma: &[String]) -> Finding {
    let topic = "UCX_NET_DEVICES";
    let known = |name: &&str| {
        let device = name.split(':').next().unwrap_or_default();
        device.contains('*')
            || device == "all"
            || interfaces.iter().chain(rdma).any(|one| one == device)
    };
    let names =
        listed.trim_start_matches('^').split(',').map(str::trim).filter(|name| !name.is_empty());
    let unknown: Vec<_> = names.filter(|name| !known(name)).collect();
    let there = || {
        let all: Vec<_> =
            rdma.iter().map(|name| format!("{name}:1")).chain(interfaces.iter().cloned()).collect();
        all.join(", ")
    };
    if !unknown.is_empty() {
        return Finding::problem(topic, format!("{} does not exist here", unknown.join(", ")))
            .because("UCX finds no device, so that connections fail or take another route")
            .cure(format!("this host has {}", there()));
    }
    let selects_some = !listed.starts_with('^') && !listed.contains('*') && listed != "all";
    let is_named = |name: &String| listed.split(',').any(|one| one.split(':').next() == Some(name));
    if selects_some && !rdma.is_empty() && !rdma.iter().any(is_named) {
        return Finding::warning(topic, format!("{listed} leaves out {}", rdma.join(", ")))
            .because("UCX then sends blocks over TCP, although the host has RDMA")
            .cure(format!("`export UCX_NET_DEVICES={}:1`, or unset it", rdma[0]));
    }
    Finding::ok(topic, listed)
}

fn proxy(set: &[&str], exceptions: Option<&str>) -> Option<Finding> {
    if set.is_empty() {
        return None;
    }
    if exceptions.is_some_and(|hosts| hosts.trim() == "*") {
        return Some(Finding::ok("HTTP proxy", "no_proxy excepts all hosts"));
    }
    let what = match exceptions {
        Some(hosts) => format!("{} is set, except for {hosts}", set.join(", ")),
        None => format!("{} is set, without no_proxy", set.join(", ")),
    };
    Some(
        Finding::warning("HTTP proxy", what)
            .because(
                "kvx ignores it, but curl, Python's clients and vLLM's scripts send requests \
                 between engines through it, unless no_proxy names their hosts",
            )
            .cure(
                "add the engines' hosts to no_proxy: `export \
                 no_proxy=localhost,127.0.0.1,10.0.0.0/8`",
            ),
    )
}

#[cfg(test)]
mod tests {
    use super::super::super::finding::Level;
    use super::*;

    #[test]
    fn an_address_must_be_this_hosts() {
        const NAME: &str = "VLLM_NIXL_SIDE_CHANNEL_HOST";
        let foreign = address(NAME, "192.0.2.1");
        assert_eq!(
            (foreign.level, &*foreign.what),
            (Level::Problem, "192.0.2.1 is not an address of this host")
        );
        assert_eq!(address(NAME, "127.0.0.1").level, Level::Warning);
        assert_eq!(address(NAME, "0.0.0.0").level, Level::Problem);
        assert_eq!(address("KVX_TCP_BIND", "0.0.0.0").level, Level::Ok);
        let unknown = address(NAME, "no-such-host.invalid");
        assert!(unknown.what.contains("has no address"), "{unknown:?}");
    }

    #[test]
    fn devices_of_ucx_must_exist_and_include_rdma() {
        let (net, rdma) = (["lo", "eth0"].map(str::to_owned), ["mlx5_0".to_owned()]);
        assert_eq!(ucx_devices("mlx5_0:1", &net, &rdma).level, Level::Ok);
        let wrong = ucx_devices("mlx5_1:1,eth0", &net, &rdma);
        assert_eq!((wrong.level, &*wrong.what), (Level::Problem, "mlx5_1:1 does not exist here"));
        assert_eq!(wrong.cure.as_deref(), Some("this host has mlx5_0:1, lo, eth0"));
        assert_eq!(ucx_devices("eth0", &net, &rdma).level, Level::Warning);
        assert_eq!(ucx_devices("eth0", &net, &[]).level, Level::Ok);
        for all in ["all", "^eth0", "mlx5_*"] {
            assert_eq!(ucx_devices(all, &net, &rdma).level, Level::Ok, "{all}");
        }
    }

    #[test]
    fn proxies_and_secrets_are_named() {
        assert_eq!(proxy(&[], None), None);
        assert!(proxy(&["http_proxy"], None).unwrap().what.contains("without no_proxy"));
        assert_eq!(proxy(&["http_proxy"], Some("*")).unwrap().level, Level::Ok);
        assert_eq!(secret(Ok(true)).level, Level::Ok);
        assert_eq!(secret(Ok(false)).level, Level::Note);
    }
}
