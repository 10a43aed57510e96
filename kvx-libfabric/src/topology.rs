//! Finds out which cards are near which memory, from `/sys` and `/proc`.

use std::path::{Path, PathBuf};

use kvx_core::{DeviceId, Memory, MemoryKind};

use crate::ffi::PciAddress;

/// A location in this machine: a NUMA node, and the bridges down to it from the root of its PCI
/// bus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BusPlace {
    node: Option<u32>,
    /// Empty for locations that are not on a PCI bus, such as host memory.
    bridges: Vec<String>,
}

/// Larger than any distance below one PCI root.
const SAME_NODE: usize = 64;
const UNKNOWN_NODE: usize = 96;
const OTHER_NODE: usize = 128;

impl BusPlace {
    /// Returns the number of bridges between two locations below the same PCI root: traffic between
    /// them does not use the memory bus. Otherwise the distance depends on the NUMA nodes.
    fn distance(&self, other: &BusPlace) -> usize {
        let common = self.bridges.iter().zip(&other.bridges).take_while(|(a, b)| a == b).count();
        if common > 0 {
            return (self.bridges.len() + other.bridges.len() - 2 * common).min(SAME_NODE - 1);
        }
        match (self.node, other.node) {
            (Some(a), Some(b)) if a == b => SAME_NODE,
            (Some(_), Some(_)) => OTHER_NODE,
            _ => UNKNOWN_NODE,
        }
    }
}

/// The kernel's description of a machine.
pub(crate) struct Topology {
    sys: PathBuf,
    proc: PathBuf,
}

impl Topology {
    pub(crate) fn of_this_machine() -> Self {
        Topology::below(Path::new("/"))
    }

    fn below(root: &Path) -> Self {
        Topology { sys: root.join("sys"), proc: root.join("proc") }
    }

    /// Returns the location of a card, by its PCI address if the provider reports it, otherwise by
    /// its name.
    pub(crate) fn of_card(&self, pci: Option<PciAddress>, name: &str) -> Option<BusPlace> {
        match pci {
            Some(pci) => self.of_pci(&pci.to_string()),
            None => ["infiniband", "net"].iter().find_map(|class| {
                self.of_folder(&self.sys.join("class").join(class).join(name).join("device"))
            }),
        }
    }

    /// Returns the location of memory.
    pub(crate) fn of_memory(&self, memory: &Memory) -> Option<BusPlace> {
        match memory.kind() {
            MemoryKind::Host | MemoryKind::Pinned => {
                Some(BusPlace { node: Some(node_of(memory.as_ptr())?), bridges: Vec::new() })
            }
            MemoryKind::Cuda => self.of_cuda(memory.device()),
            MemoryKind::Rocm => self.of_rocm(memory.device()),
        }
    }

    fn of_pci(&self, address: &str) -> Option<BusPlace> {
        self.of_folder(&self.sys.join("bus/pci/devices").join(address))
    }

    /// Returns the location of a device, after resolving symbolic links to its folder.
    fn of_folder(&self, folder: &Path) -> Option<BusPlace> {
        let folder = folder.canonicalize().ok()?;
        let below = folder.strip_prefix(self.sys.join("devices").canonicalize().ok()?).ok()?;
        let bridges = below.iter().map(|name| name.to_string_lossy().into_owned()).collect();
        let node = std::fs::read_to_string(folder.join("numa_node")).ok();
        // The kernel reports -1 if there is only one node, or if the firmware does not report it.
        Some(BusPlace { node: node.and_then(|node| node.trim().parse().ok()), bridges })
    }

    /// Finds the GPU whose UUID the driver reports.
    fn of_cuda(&self, device: DeviceId) -> Option<BusPlace> {
        let cards = std::fs::read_dir(self.proc.join("driver/nvidia/gpus")).ok()?;
        let wanted: String = device.0.iter().map(|byte| format!("{byte:02x}")).collect();
        let found = cards.flatten().find(|card| {
            let text = std::fs::read_to_string(card.path().join("information")).unwrap_or_default();
            let uuid =
                text.lines().find_map(|line| line.strip_prefix("GPU UUID:")).unwrap_or_default();
            uuid.trim().trim_start_matches("GPU-").replace('-', "") == wanted
        });
        self.of_pci(&found?.file_name().to_string_lossy())
    }

    /// Finds the GPU by the number that the driver reports, or by its PCI address if it has no
    /// number.
    fn of_rocm(&self, device: DeviceId) -> Option<BusPlace> {
        let text = std::str::from_utf8(&device.0).unwrap_or_default().trim_end_matches('\0');
        if text.contains(':') {
            return self.of_pci(text);
        }
        let nodes = std::fs::read_dir(self.sys.join("class/kfd/kfd/topology/nodes")).ok()?;
        nodes.flatten().find_map(|node| {
            let properties = std::fs::read_to_string(node.path().join("properties")).ok()?;
            let property = |name: &str| {
                let value = properties
                    .lines()
                    .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
                value.trim().parse::<u64>().ok()
            };
            if format!("{:016x}", property("unique_id")?) != text {
                return None;
            }
            let (place, domain) = (property("location_id")?, property("domain").unwrap_or(0));
            let (bus, slot, function) = (place >> 8 & 0xff, place >> 3 & 0x1f, place & 7);
            self.of_pci(&format!("{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"))
        })
    }
}

/// Returns the rails nearest to a location, at most `most`; the first ones if the location is
/// unknown.
pub(crate) fn nearest(
    to: Option<&BusPlace>,
    rails: &[Option<&BusPlace>],
    most: usize,
) -> Vec<usize> {
    let far = |rail: &Option<&BusPlace>| match (to, rail) {
        (Some(to), Some(rail)) => to.distance(rail),
        _ => UNKNOWN_NODE,
    };
    let least = rails.iter().map(far).min();
    let mut near: Vec<usize> =
        (0..rails.len()).filter(|at| Some(far(&rails[*at])) == least).collect();
    near.truncate(most);
    near
}

/// Returns the NUMA node of a page; `None` if the kernel does not know it.
fn node_of(address: *mut u8) -> Option<u32> {
    const NODE_OF_ADDRESS: libc::c_long = 1 | 2; // MPOL_F_NODE, MPOL_F_ADDR
    let mut node: libc::c_int = -1;
    // SAFETY: the kernel writes one integer, and does not read memory at the address.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut node,
            0_usize,
            0_usize,
            address,
            NODE_OF_ADDRESS,
        )
    };
    if answer == 0 { u32::try_from(node).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files and links created from a record with lines `file PATH CONTENT` and `link PATH TARGET`.
    struct RecordedTree(PathBuf);

    impl RecordedTree {
        fn new(name: &str, record: &str) -> Self {
            let root =
                std::env::temp_dir().join(format!("kvx-libfabric-{name}-{}", std::process::id()));
            for line in record.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
                let mut words = line.splitn(3, ' ');
                let [kind, path, rest] =
                    std::array::from_fn(|_| words.next().expect("three words"));
                let path = root.join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                match kind {
                    "file" => {
                        std::fs::write(&path, format!("{}\n", rest.replace("\\n", "\n"))).unwrap()
                    }
                    "link" => std::os::unix::fs::symlink(rest, &path).unwrap(),
                    other => panic!("{other} is neither a file nor a link"),
                }
            }
            RecordedTree(root)
        }

        fn topology(&self) -> Topology {
            Topology::below(&self.0)
        }
    }

    impl Drop for RecordedTree {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).ok();
        }
    }

    const EIGHT: &str = include_str!("../tests/data/eight-gpus-eight-cards.txt");

    fn cards(topology: &Topology) -> Vec<BusPlace> {
        (0..8).map(|at| topology.of_card(None, &format!("mlx5_{at}")).expect("a card")).collect()
    }

    /// Returns the location of a GPU. Its id has the form that kvx-cuda creates: the bytes of the
    /// UUID that the driver reports in hexadecimal.
    fn gpu(topology: &Topology, number: u8) -> Option<BusPlace> {
        topology.of_cuda(DeviceId([0xa0 + number; 16]))
    }

    #[test]
    fn each_gpu_of_an_eight_gpu_server_has_the_card_of_its_own_switch() {
        let recorded = RecordedTree::new("each", EIGHT);
        let topology = recorded.topology();
        let places = cards(&topology);
        let rails: Vec<Option<&BusPlace>> = places.iter().map(Some).collect();
        for number in 0..8 {
            let place = gpu(&topology, number).expect("a GPU");
            assert_eq!(nearest(Some(&place), &rails, 4), [usize::from(number)]);
        }
        assert_eq!(gpu(&topology, 9), None);
    }

    #[test]
    fn host_memory_has_the_cards_of_its_node_and_unknown_memory_the_first() {
        let recorded = RecordedTree::new("host", EIGHT);
        let topology = recorded.topology();
        let places = cards(&topology);
        let rails: Vec<Option<&BusPlace>> = places.iter().map(Some).collect();
        let host = |node| BusPlace { node: Some(node), bridges: Vec::new() };
        assert_eq!(nearest(Some(&host(0)), &rails, 8), [0, 1, 2, 3]);
        assert_eq!(nearest(Some(&host(1)), &rails, 2), [4, 5]);
        assert_eq!(nearest(None, &rails, 3), [0, 1, 2]);
        assert_eq!(
            nearest(Some(&host(0)), &[None, None], 8),
            [0, 1],
            "rails whose location is unknown"
        );
        assert!(nearest(Some(&host(0)), &[], 8).is_empty());
    }

    #[test]
    fn a_gpu_whose_own_card_is_not_used_takes_those_of_its_node() {
        let recorded = RecordedTree::new("other", EIGHT);
        let topology = recorded.topology();
        let places = cards(&topology);
        let rails: Vec<Option<&BusPlace>> = places[1..].iter().map(Some).collect();
        let place = gpu(&topology, 0).expect("a GPU");
        assert_eq!(nearest(Some(&place), &rails, 4), [0, 1, 2], "cards 1 to 3");
    }

    #[test]
    fn a_card_is_found_by_address_and_by_name_alike() {
        let recorded = RecordedTree::new("names", EIGHT);
        let topology = recorded.topology();
        let pci = PciAddress { domain: 0, bus: 0x18, device: 0, function: 0 };
        let place = topology.of_card(Some(pci), "another").expect("a card");
        assert_eq!(Some(&place), cards(&topology).first());
        assert_eq!(Some(place.clone()), topology.of_card(None, "ib0"), "by its network interface");
        assert_eq!(place.node, Some(0));
        assert_eq!(topology.of_card(None, "lo"), None);
    }

    #[test]
    fn an_amd_gpu_is_found_by_what_its_driver_shows() {
        let record = "\
            link sys/bus/pci/devices/0000:c1:00.0 ../../../devices/pci0000:c0/0000:c0:01.1/0000:c1:00.0\n\
            file sys/devices/pci0000:c0/0000:c0:01.1/0000:c1:00.0/numa_node 1\n\
            file sys/class/kfd/kfd/topology/nodes/0/properties cpu_cores_count 64\\nunique_id 0\\nlocation_id 0\n\
            file sys/class/kfd/kfd/topology/nodes/1/properties simd_count 304\\nlocation_id 49408\\ndomain 0\\nunique_id 1311768467463790320";
        let recorded = RecordedTree::new("amd", record);
        // The ids have the form that kvx-rocm creates: HIP's UUID is the driver's number in
        // hexadecimal, and a GPU without one has its PCI address.
        let device = DeviceId(*b"123456789abcdef0");
        let place = recorded.topology().of_rocm(device).expect("a GPU");
        assert_eq!((place.node, place.bridges.len()), (Some(1), 3));
        assert_eq!(recorded.topology().of_rocm(DeviceId(*b"0000:c1:00.0\0\0\0\0")), Some(place));
        for nobody in [[0; 16], *b"0000:c2:00.0\0\0\0\0", *b"../../../devices"] {
            assert_eq!(recorded.topology().of_rocm(DeviceId(nobody)), None);
        }
    }
}
