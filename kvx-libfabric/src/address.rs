//! An agent's libfabric address: LIBFABRIC's section of the metadata.

use kvx_backend::checksum;
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{ErrorKind, Result};

use crate::config::MAX_RAILS;
use crate::error::NAME;
use crate::wake_socket;

/// The maximum length of an endpoint's address and of a provider's name from a peer.
const MAX_ADDRESS: usize = 256;
const MAX_PROVIDER: usize = 64;

/// The addresses of an agent's endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// The provider's name, and the number and version of its protocol.
    pub(crate) provider: String,
    pub(crate) protocol: (u32, u32),
    /// The address of the endpoint on each rail; the first one receives messages.
    pub(crate) rails: Vec<Box<[u8]>>,
    /// Set if the provider is shared memory.
    pub(crate) host: Option<HostProcess>,
}

/// A process on this host, for a provider that accesses its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostProcess {
    /// The process id; `probe` is the address of a known value in its memory.
    pub(crate) process: u32,
    pub(crate) probe: u64,
    /// The name of the socket that wakes the process.
    pub(crate) wake_name: Box<[u8]>,
}

impl Address {
    const FORM: u8 = 1;

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![Self::FORM];
        out.put_block(self.provider.as_bytes());
        out.put_u32(self.protocol.0);
        out.put_u32(self.protocol.1);
        out.put_u8(self.rails.len() as u8);
        for rail in &self.rails {
            out.put_block(rail);
        }
        out.put_u8(u8::from(self.host.is_some()));
        if let Some(host) = &self.host {
            out.put_u32(host.process);
            out.put_u64(host.probe);
            out.put_block(&host.wake_name);
        }
        checksum::append(out)
    }

    /// Decodes an address. Errors: `Malformed`, `Incompatible`.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Address> {
        let mut reader =
            Reader::new("LIBFABRIC address", checksum::strip("LIBFABRIC address", bytes)?);
        checksum::check_form(NAME, "address", reader.u8()?, Self::FORM)?;
        let provider = String::from_utf8_lossy(reader.block(MAX_PROVIDER)?).into_owned();
        let protocol = (reader.u32()?, reader.u32()?);
        let count = usize::from(reader.u8()?);
        if !(1..=MAX_RAILS).contains(&count) {
            return Err(reader.malformed("its number of rails is 0 or too large"));
        }
        let mut rails = Vec::with_capacity(count);
        for _ in 0..count {
            rails.push(reader.block(MAX_ADDRESS)?.into());
        }
        let host = match reader.u8()? {
            0 => None,
            _ => Some(HostProcess {
                process: reader.u32()?,
                probe: reader.u64()?,
                wake_name: reader.block(wake_socket::MAX_NAME)?.into(),
            }),
        };
        reader.end()?;
        Ok(Address { provider, protocol, rails, host })
    }

    /// Checks that local endpoints can reach this address. Errors: `Incompatible`, `Malformed`.
    pub(crate) fn check(&self, ours: &Address, texts: bool) -> Result<()> {
        if (&self.provider, self.protocol) != (&ours.provider, ours.protocol) {
            let why = format!(
                "the peer uses provider {} (protocol {}.{}), this agent {} ({}.{}): set the same \"libfabric.provider\" on both",
                self.provider,
                self.protocol.0,
                self.protocol.1,
                ours.provider,
                ours.protocol.0,
                ours.protocol.1
            );
            return Err(ErrorKind::Incompatible.because(why).with_backend(NAME));
        }
        let own = ours.rails.first().map(|rail| &**rail).unwrap_or_default();
        if !self.rails.iter().all(|rail| has_form_of(own, rail, texts))
            || self.host.is_some() != ours.host.is_some()
        {
            let why = "malformed LIBFABRIC address: it does not have the form of the provider's addresses";
            return Err(ErrorKind::Malformed.because(why).with_backend(NAME));
        }
        Ok(())
    }
}

/// Returns whether a provider that reads `own` as an address reads all of `other` and nothing after
/// it.
fn has_form_of(own: &[u8], other: &[u8], texts: bool) -> bool {
    if texts {
        return other.last() == Some(&0)
            && !other[..other.len() - 1].contains(&0)
            && other.len() > 1;
    }
    // Socket addresses begin with their family, which determines their length.
    other.len() == own.len() && other.get(..2) == own.get(..2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn somewhere() -> Address {
        Address {
            provider: "shm".into(),
            protocol: (14, 1),
            rails: vec![(*b"fi_shm://7:0\0").into(), (*b"fi_shm://7:0:1\0").into()],
            host: Some(HostProcess { process: 7, probe: 4096, wake_name: (*b"kvx-7").into() }),
        }
    }

    #[test]
    fn addresses_travel_as_they_are_and_nothing_else_passes() {
        let address = somewhere();
        let bytes = address.encode();
        assert_eq!(Address::decode(&bytes).unwrap(), address);
        let remote = Address { host: None, ..address };
        assert_eq!(Address::decode(&remote.encode()).unwrap(), remote);
        assert_eq!(Address::decode(&bytes[1..]).unwrap_err().kind(), ErrorKind::Malformed);
        assert_eq!(
            Address::decode(&checksum::append(vec![9])).unwrap_err().kind(),
            ErrorKind::Incompatible
        );
        let nowhere = Address { rails: Vec::new(), ..somewhere() }.encode();
        assert_eq!(Address::decode(&nowhere).unwrap_err().kind(), ErrorKind::Malformed);
    }

    #[test]
    fn no_bytes_make_the_decoder_panic() {
        checksum::check_decoder(Address::decode);
    }

    #[test]
    fn a_provider_gets_only_addresses_of_its_own_form() {
        let ours = somewhere();
        let with = |rail: &[u8]| Address { rails: vec![rail.into()], ..somewhere() };
        assert!(with(b"fi_shm://8:0\0").check(&ours, true).is_ok());
        for rail in [&b"fi_shm://8:0"[..], b"fi_shm\0://8:0\0", b"\0", b""] {
            assert_eq!(
                with(rail).check(&ours, true).unwrap_err().kind(),
                ErrorKind::Malformed,
                "{rail:?}"
            );
        }
        let socket = Address { rails: vec![[2, 0, 31, 64].into()], host: None, ..somewhere() };
        let to = |rail: &[u8]| {
            Address { rails: vec![rail.into()], ..socket.clone() }.check(&socket, false)
        };
        assert!(to(&[2, 0, 1, 1]).is_ok());
        assert!(
            to(&[10, 0, 1, 1]).is_err() && to(&[2, 0, 1]).is_err() && to(&[2, 0, 1, 1, 1]).is_err()
        );
        let other = Address { provider: "tcp;ofi_rxm".into(), ..somewhere() };
        assert_eq!(other.check(&ours, true).unwrap_err().kind(), ErrorKind::Incompatible);
        let newer = Address { protocol: (14, 2), ..somewhere() };
        assert_eq!(newer.check(&ours, true).unwrap_err().kind(), ErrorKind::Incompatible);
    }
}
