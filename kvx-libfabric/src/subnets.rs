//! Pairs local rails with those of a peer: a card reaches the cards of its own subnet.
//!
//! Servers often have a subnet for each card, and two servers need not number their cards alike.
//! Where no rail of the peer is in the subnet of a local one, the network may still route between
//! them, and all pairs are tried.

use std::net::{IpAddr, SocketAddr};
use std::ptr;

use crate::config::MAX_RAILS;
use crate::peer_probe::socket_address;

/// A set of a peer's rails, a bit for each.
pub(crate) type RailSet = u32;

const _: () = assert!(MAX_RAILS <= RailSet::BITS as usize);
/// All rails of a peer.
pub(crate) const ALL: RailSet = RailSet::MAX;
/// The kernel's number of InfiniBand's address family.
const AF_IB: u16 = 27;

/// A subnet: the first bits of the addresses in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Subnet {
    family: Family,
    first: u128,
    bits: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    V4,
    V6,
    InfiniBand,
}

/// An address within its family, in the most significant bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FamilyAddress(Family, u128);

impl FamilyAddress {
    /// Reads a socket address.
    fn read(bytes: &[u8]) -> Option<Self> {
        if u16::from_ne_bytes(*bytes.first_chunk()?) == AF_IB {
            let global: [u8; 16] = *bytes.get(8..)?.first_chunk()?;
            return Some(FamilyAddress(Family::InfiniBand, u128::from_be_bytes(global)));
        }
        Some(FamilyAddress::of(socket_address(bytes)?.ip()))
    }

    fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => FamilyAddress(Family::V4, u128::from(address.to_bits()) << 96),
            IpAddr::V6(address) => FamilyAddress(Family::V6, address.to_bits()),
        }
    }
}

impl Subnet {
    /// Returns the subnet of an endpoint's socket address; `None` if it is unknown.
    pub(crate) fn of_endpoint(address: &[u8]) -> Option<Self> {
        Subnet::among(FamilyAddress::read(address)?, &interfaces())
    }

    fn among(address: FamilyAddress, interfaces: &[(IpAddr, IpAddr)]) -> Option<Self> {
        let FamilyAddress(family, first) = address;
        if family == Family::InfiniBand {
            return Some(Subnet { family, first, bits: 64 });
        }
        let own = interfaces.iter().find(|(own, _)| FamilyAddress::of(*own) == address);
        let FamilyAddress(_, mask) = FamilyAddress::of(own?.1);
        Some(Subnet { family, first, bits: mask.leading_ones() })
    }

    fn contains(&self, FamilyAddress(family, other): FamilyAddress) -> bool {
        let apart = (self.first ^ other).leading_zeros();
        self.family == family && apart >= self.bits
    }
}

/// Returns the peer's rails that each local rail uses, given the local subnets and the addresses of
/// the peer's rails.
pub(crate) fn pairs(
    ours: impl Iterator<Item = Option<Subnet>>,
    theirs: &[Box<[u8]>],
) -> Box<[RailSet]> {
    let within = |subnet: Option<Subnet>| {
        let Some(subnet) = subnet else { return ALL };
        let is_within = |address: &[u8]| {
            FamilyAddress::read(address).is_some_and(|address| subnet.contains(address))
        };
        let rails = theirs.iter().enumerate().filter(|(_, address)| is_within(address));
        rails.fold(0, |set, (rail, _)| set | 1 << rail)
    };
    let pairs: Box<[RailSet]> = ours.map(within).collect();
    if pairs.iter().all(|set| *set == 0) { vec![ALL; pairs.len()].into() } else { pairs }
}

/// Chooses the rails of the `turn`th piece: indexes in lists of local and remote rails. Rails of
/// one subnet come first; if the lists have none in common, any two.
#[inline]
pub(crate) fn choose(
    turn: usize,
    pairs: &[RailSet],
    ours: impl ExactSizeIterator<Item = usize> + Clone,
    theirs: impl ExactSizeIterator<Item = usize> + Clone,
) -> (usize, usize) {
    let (near, far) = (turn % ours.len(), turn % theirs.len());
    for (at, rail) in ours.clone().enumerate().cycle().skip(near).take(ours.len()) {
        let set = pairs.get(rail).copied().unwrap_or(ALL);
        let mut turns = theirs.clone().enumerate().cycle().skip(far).take(theirs.len());
        if let Some((there, _)) = turns.find(|(_, rail)| set >> rail & 1 == 1) {
            return (at, there);
        }
    }
    (near, far)
}

/// Returns the addresses of this host's interfaces, with their netmasks.
fn interfaces() -> Vec<(IpAddr, IpAddr)> {
    let mut list: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: the call writes the list, which is freed below.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Vec::new();
    }
    let (mut found, mut next) = (Vec::new(), list);
    // SAFETY: each entry is null or valid until the list is freed.
    while let Some(entry) = unsafe { next.as_ref() } {
        // SAFETY: both are null or socket addresses of the size of their family.
        let (address, mask) = unsafe { (ip(entry.ifa_addr), ip(entry.ifa_netmask)) };
        found.extend(address.zip(mask));
        next = entry.ifa_next;
    }
    // SAFETY: the call above returned it, and nobody uses it afterwards.
    unsafe { libc::freeifaddrs(list) };
    found
}

/// # Safety
/// `address` is null or a socket address of the size of its family.
unsafe fn ip(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: guaranteed by the caller.
    let len = match i32::from(unsafe { address.as_ref() }?.sa_family) {
        libc::AF_INET => size_of::<libc::sockaddr_in>(),
        libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
        _ => return None,
    };
    // SAFETY: guaranteed by the caller.
    let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), len) };
    socket_address(bytes).as_ref().map(SocketAddr::ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(text: &str) -> Box<[u8]> {
        let IpAddr::V4(address) = text.parse().unwrap() else { panic!("{text}") };
        let family = (libc::AF_INET as u16).to_ne_bytes();
        [&family[..], &[0x1f, 0x90], &address.octets(), &[0; 8]].concat().into()
    }

    fn infiniband(subnet: u8, card: u8) -> Box<[u8]> {
        let mut bytes = vec![0; 48];
        bytes[..2].copy_from_slice(&AF_IB.to_ne_bytes());
        (bytes[8], bytes[15], bytes[23]) = (0xfe, subnet, card);
        bytes.into()
    }

    /// Returns the rails of the first four pieces between two agents.
    fn rails(ours: &[Box<[u8]>], mask: &str, theirs: &[Box<[u8]>]) -> Vec<(usize, usize)> {
        let mask = mask.parse().unwrap();
        let own = |address: &[u8]| {
            let interfaces: Vec<_> =
                socket_address(address).iter().map(|address| (address.ip(), mask)).collect();
            Subnet::among(FamilyAddress::read(address)?, &interfaces)
        };
        let pairs = pairs(ours.iter().map(|address| own(address)), theirs);
        (0..4).map(|turn| choose(turn, &pairs, 0..ours.len(), 0..theirs.len())).collect()
    }

    #[test]
    fn rails_of_one_subnet_are_paired_in_whatever_order_each_side_has_them() {
        let ours = [v4("10.0.1.5"), v4("10.0.2.5")];
        let mask = "255.255.255.0";
        let alike = [v4("10.0.1.6"), v4("10.0.2.6")];
        assert_eq!(rails(&ours, mask, &alike), [(0, 0), (1, 1), (0, 0), (1, 1)]);
        let reversed = [v4("10.0.2.6"), v4("10.0.1.6")];
        assert_eq!(rails(&ours, mask, &reversed), [(0, 1), (1, 0), (0, 1), (1, 0)]);
        let one = [v4("10.0.2.6")];
        assert_eq!(rails(&ours, mask, &one), [(1, 0); 4], "only one rail reaches the peer");
        let [ours, theirs] = [[1, 2], [2, 1]].map(|nets| nets.map(|net| infiniband(net, 7)));
        assert_eq!(rails(&ours, mask, &theirs), [(0, 1), (1, 0), (0, 1), (1, 0)]);
    }

    #[test]
    fn all_rails_are_used_in_one_subnet_and_between_subnets_without_a_common_one() {
        let ours = [v4("10.0.1.5"), v4("10.0.2.5")];
        let theirs = [v4("10.0.3.6"), v4("10.0.4.6")];
        let all = [(0, 0), (1, 1), (0, 0), (1, 1)];
        assert_eq!(rails(&ours, "255.255.0.0", &theirs), all, "one subnet");
        assert_eq!(rails(&ours, "255.255.255.0", &theirs), all, "the network may route");
        assert_eq!(
            rails(&ours, "255.255.255.0", &[(*b"fi_shm://7\0").into()]),
            [(0, 0), (1, 0), (0, 0), (1, 0)]
        );
    }

    #[test]
    fn rails_that_a_region_does_not_use_are_not_chosen() {
        let pairs = [0b10, 0b01];
        let choose = |turn, ours: &[usize], theirs: &[usize]| {
            choose(turn, &pairs, ours.iter().copied(), theirs.iter().copied())
        };
        assert_eq!(choose(0, &[1], &[1, 0]), (0, 1));
        assert_eq!(choose(5, &[1], &[1]), (0, 0), "none in common");
    }

    #[test]
    fn the_loopback_interface_has_a_subnet() {
        assert!(Subnet::of_endpoint(&v4("127.0.0.1")).is_some_and(|subnet| subnet.bits >= 8));
        assert_eq!(Subnet::of_endpoint(&v4("198.51.100.7")), None, "no address of this host");
        assert_eq!(Subnet::of_endpoint(b"fi_shm://7\0"), None);
    }
}
