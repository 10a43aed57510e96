//! The addresses at which an agent listens, as encoded in its metadata.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{ErrorKind, Result};

/// The version of the section. Later versions may append fields after the addresses.
const VERSION: u8 = 1;
/// The limit for addresses of one agent.
pub(crate) const MAX_ADDRESSES: usize = 16;

/// Encodes the section of the metadata.
pub(crate) fn encode(addresses: &[SocketAddr]) -> Vec<u8> {
    let mut out = Vec::new();
    out.put_u8(VERSION);
    out.put_u8(addresses.len() as u8);
    for address in addresses {
        match address.ip() {
            IpAddr::V4(ip) => {
                out.put_u8(4);
                out.put(&ip.octets());
            }
            IpAddr::V6(ip) => {
                out.put_u8(6);
                out.put(&ip.octets());
            }
        }
        out.put_u16(address.port());
    }
    out
}

/// Decodes the addresses to try, in order: 1 to 16.
pub(crate) fn decode(section: &[u8]) -> Result<Vec<SocketAddr>> {
    let mut reader = Reader::new("TCP address", section);
    let version = reader.u8()?;
    if version == 0 {
        return Err(reader.malformed("version 0"));
    }
    let count = usize::from(reader.u8()?);
    if count == 0 || count > MAX_ADDRESSES {
        return Err(reader
            .malformed(format_args!("{count} addresses, but 1 to {MAX_ADDRESSES} are allowed")));
    }
    let addresses = (0..count)
        .map(|_| {
            let ip = match reader.u8()? {
                4 => IpAddr::V4(Ipv4Addr::from(reader.array::<4>()?)),
                6 => IpAddr::V6(Ipv6Addr::from(reader.array::<16>()?)),
                other => {
                    return Err(reader.malformed(format_args!("unknown address family {other}")));
                }
            };
            Ok(SocketAddr::new(ip, reader.u16()?))
        })
        .collect::<Result<Vec<_>>>()?;
    if let Some(bad) =
        addresses.iter().find(|address| address.port() == 0 || address.ip().is_unspecified())
    {
        return Err(ErrorKind::Malformed
            .because(format!("malformed TCP address: peers cannot connect to {bad}")));
    }
    if version == VERSION {
        reader.end()?;
    }
    Ok(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<SocketAddr> {
        ["127.0.0.1:7000", "[fd00::1]:65535"].iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn addresses_of_both_families_round_trip() {
        assert_eq!(decode(&encode(&sample())).unwrap(), sample());
    }

    #[test]
    fn truncated_oversized_and_unusable_sections_are_malformed() {
        let good = encode(&sample());
        for len in 0..good.len() {
            assert_eq!(decode(&good[..len]).unwrap_err().kind(), ErrorKind::Malformed);
        }
        let mut longer = good.clone();
        longer.push(0);
        assert!(decode(&longer).is_err());
        longer[0] = 2; // a later version may append fields
        assert_eq!(decode(&longer).unwrap(), sample());
        assert!(decode(&encode(&["0.0.0.0:1".parse().unwrap()])).is_err());
        assert!(decode(&encode(&["127.0.0.1:0".parse().unwrap()])).is_err());
        assert!(decode(&encode(&vec!["127.0.0.1:1".parse().unwrap(); 17])).is_err());
    }
}
