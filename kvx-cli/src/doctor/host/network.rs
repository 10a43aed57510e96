//! Network interfaces, RDMA devices, and their distance to GPUs.

use super::super::finding::Finding;
use super::system::{names, rdma_devices, read};

/// The least MTU of IPv6. Tunnels and clouds have some less than 1,500.
const SMALL_MTU: u32 = 1280;
/// From this speed in Mb/s on, packets of 1,500 bytes cost much of a CPU.
const FAST: u64 = 25_000;

pub(super) fn examine() -> Vec<Finding> {
    let interfaces: Vec<_> =
        names("/sys/class/net").iter().map(|name| Interface::of(name)).collect();
    let mut found = vec![links(&interfaces)];
    found.extend(interfaces.iter().filter_map(Interface::mtu_finding));
    found.extend(rdma_devices().iter().map(|name| RdmaDevice::of(name).finding()));
    found.push(numa(&numa_nodes(), &gpu_nodes()));
    found
}

/// A network interface.
#[derive(Debug, Default)]
struct Interface {
    name: String,
    is_up: bool,
    mtu: Option<u32>,
    /// Mb/s.
    speed: Option<u64>,
}

impl Interface {
    fn of(name: &str) -> Self {
        let value = |file: &str| read(format!("/sys/class/net/{name}/{file}"));
        Interface {
            name: name.to_owned(),
            is_up: value("carrier").as_deref() == Some("1"),
            mtu: value("mtu").and_then(|mtu| mtu.parse().ok()),
            // Virtual interfaces say -1, or nothing.
            speed: value("speed").and_then(|speed| speed.parse().ok()),
        }
    }

    fn is_loopback(&self) -> bool {
        self.name == "lo"
    }

    fn in_words(&self) -> String {
        let speed = self.speed.map(|speed| match speed >= 1000 {
            true => format!(", {} Gb/s", speed / 1000),
            false => format!(", {speed} Mb/s"),
        });
        let mtu = self.mtu.map(|mtu| format!(", MTU {mtu}"));
        [Some(self.name.clone()), speed, mtu].into_iter().flatten().collect()
    }

    fn mtu_finding(&self) -> Option<Finding> {
        let mtu = self.mtu.filter(|_| self.is_up && !self.is_loopback())?;
        if mtu < SMALL_MTU {
            return Some(
                Finding::warning("MTU", format!("{} has {mtu}", self.name))
                    .because(
                        "a tunnel or a wrong setting: large transfers lose speed, and \
                         packets that are too long for a path may vanish",
                    )
                    .cure(format!(
                        "`ip link set {} mtu 1500`, or more if all of the path allows \
                         it",
                        self.name
                    )),
            );
        }
        (mtu < 9000 && self.speed.is_some_and(|speed| speed >= FAST)).then(|| {
            Finding::note("MTU", format!("{} has {mtu}", self.name)).because(
                "TCP at this speed costs less of a CPU with packets of 9,000 bytes, if \
                     all of the path allows them",
            )
        })
    }
}

fn links(interfaces: &[Interface]) -> Finding {
    let up: Vec<_> = interfaces
        .iter()
        .filter(|one| one.is_up && !one.is_loopback())
        .map(Interface::in_words)
        .collect();
    match up.is_empty() {
        true => Finding::note("network", "no interface but loopback is up")
            .because("engines on other hosts cannot be reached from here"),
        false => Finding::ok("network", up.join("; ")),
    }
}

/// An RDMA device's first port.
#[derive(Debug)]
struct RdmaDevice {
    name: String,
    /// Such as `ACTIVE` or `DOWN`.
    state: Option<String>,
    /// Such as `Ethernet` or `InfiniBand`.
    link: Option<String>,
    rate: Option<String>,
    node: Option<String>,
}

impl RdmaDevice {
    fn of(name: &str) -> Self {
        let at = format!("/sys/class/infiniband/{name}");
        let port = |file: &str| read(format!("{at}/ports/1/{file}"));
        let state = port("state");
        RdmaDevice {
            name: name.to_owned(),
            state: state.map(|state| state.rsplit(": ").next().unwrap_or_default().to_owned()),
            link: port("link_layer"),
            rate: port("rate"),
            node: read(format!("{at}/device/numa_node")),
        }
    }

    fn finding(&self) -> Finding {
        let parts = [
            self.link.clone(),
            self.rate.clone(),
            self.node.as_ref().filter(|node| *node != "-1").map(|node| format!("NUMA node {node}")),
        ];
        let parts: Vec<_> = parts.into_iter().flatten().collect();
        let what = format!("{}: {}", self.name, parts.join(", "));
        match self.state.as_deref() {
            Some("ACTIVE") => Finding::ok("RDMA", what),
            state => Finding::problem(
                "RDMA",
                format!("{} is {}", self.name, state.unwrap_or("without a port").to_lowercase()),
            )
            .because("blocks that it should carry take TCP, or fail")
            .cure(
                "`rdma link` and `ibstat` say more: check the cable, the subnet manager \
                     (InfiniBand) or the interface (RoCE)",
            ),
        }
    }
}

fn numa_nodes() -> Vec<String> {
    let all = names("/sys/devices/system/node");
    all.into_iter().filter(|name| name.strip_prefix("node").is_some_and(is_number)).collect()
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns the NUMA nodes of the GPUs of NVIDIA and AMD, as `0000:17:00.0 on 0`.
fn gpu_nodes() -> Vec<String> {
    let gpus = names("/sys/bus/pci/devices").into_iter().filter_map(|bus| {
        let value = |file: &str| read(format!("/sys/bus/pci/devices/{bus}/{file}"));
        let is_gpu = matches!(value("vendor")?.as_str(), "0x10de" | "0x1002")
            // Display controllers, and accelerators.
            && value("class").is_some_and(|of| of.starts_with("0x03") || of.starts_with("0x12"));
        is_gpu.then(|| format!("{bus} on {}", value("numa_node").as_deref().unwrap_or("-1")))
    });
    gpus.collect()
}

fn numa(nodes: &[String], gpus: &[String]) -> Finding {
    let gpus = match gpus.is_empty() {
        true => String::new(),
        false => format!("; GPUs: {}", gpus.join(", ")),
    };
    match nodes.len() {
        0 | 1 => Finding::ok("NUMA", format!("one node{gpus}")),
        count => Finding::note("NUMA", format!("{count} nodes{gpus}")).because(
            "memory on another node than the card that sends it costs up to half of the speed: \
             bind each engine to the node of its GPU and NIC (`numactl --cpunodebind=0 --membind=0`)",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::finding::Level;
    use super::*;

    fn interface(name: &str, mtu: u32, speed: Option<u64>) -> Interface {
        Interface { name: name.to_owned(), is_up: true, mtu: Some(mtu), speed }
    }

    #[test]
    fn a_small_mtu_is_named_with_its_interface() {
        let small = interface("eth0", 576, None).mtu_finding().unwrap();
        assert_eq!((small.level, &*small.what), (Level::Warning, "eth0 has 576"));
        assert_eq!(interface("eth0", 1500, Some(1000)).mtu_finding(), None);
        assert_eq!(interface("lo", 1000, None).mtu_finding(), None);
        assert_eq!(
            interface("eth0", 1500, Some(100_000)).mtu_finding().unwrap().level,
            Level::Note
        );
        let down = Interface { is_up: false, ..interface("eth1", 1000, None) };
        assert_eq!(down.mtu_finding(), None);
    }

    #[test]
    fn interfaces_are_listed_and_loopback_is_not_enough() {
        let all = [interface("lo", 65536, None), interface("eth0", 1500, Some(25_000))];
        assert_eq!(links(&all).what, "eth0, 25 Gb/s, MTU 1500");
        assert_eq!(links(&all[..1]).level, Level::Note);
    }

    #[test]
    fn a_card_that_is_down_is_a_problem() {
        let card = |state: &str| RdmaDevice {
            name: "mlx5_0".to_owned(),
            state: Some(state.to_owned()),
            link: Some("InfiniBand".to_owned()),
            rate: Some("400 Gb/sec (4X NDR)".to_owned()),
            node: Some("1".to_owned()),
        };
        let up = card("ACTIVE").finding();
        assert_eq!(up.level, Level::Ok);
        assert_eq!(up.what, "mlx5_0: InfiniBand, 400 Gb/sec (4X NDR), NUMA node 1");
        assert_eq!(card("DOWN").finding().what, "mlx5_0 is down");
    }

    #[test]
    fn several_nodes_are_a_note() {
        let nodes = ["node0".to_owned(), "node1".to_owned()];
        let finding = numa(&nodes, &["0000:17:00.0 on 0".to_owned()]);
        assert_eq!(finding.what, "2 nodes; GPUs: 0000:17:00.0 on 0");
        assert_eq!(numa(&nodes[..1], &[]).level, Level::Ok);
        assert!(is_number("0") && !is_number("") && !is_number("x1"));
    }
}
