//! An agent's UCX address: UCX's section of the metadata.

use kvx_backend::checksum;
use kvx_core::Result;
use kvx_core::backend::wire::{Reader, Writer};

use crate::error::NAME;
use crate::ffi::Version;

/// The maximum length of a worker address from a peer.
const MAX_WORKER: usize = 64 << 10;

/// The address of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// The version of UCX that made the address.
    pub(crate) version: Version,
    /// UCX's own address.
    pub(crate) worker: Box<[u8]>,
}

impl Address {
    const FORM: u8 = 1;

    /// Returns a number that identifies the worker, equal at both ends.
    pub(crate) fn number(&self) -> u64 {
        checksum::fnv1a(&self.worker)
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![Self::FORM];
        for number in [self.version.major, self.version.minor, self.version.patch] {
            out.put_u32(number);
        }
        out.put(&self.worker);
        checksum::append(out)
    }

    /// Decodes an address. Errors: `Malformed`, `Incompatible`.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Address> {
        let mut reader = Reader::new("UCX address", checksum::strip("UCX address", bytes)?);
        checksum::check_form(NAME, "address", reader.u8()?, Self::FORM)?;
        let version = Version::new(reader.u32()?, reader.u32()?, reader.u32()?);
        if reader.left() == 0 || reader.left() > MAX_WORKER {
            return Err(reader.malformed("its worker address is empty or too long"));
        }
        Ok(Address { version, worker: reader.bytes(reader.left())?.into() })
    }
}

#[cfg(test)]
mod tests {
    use kvx_core::ErrorKind;

    use super::*;

    #[test]
    fn addresses_travel_as_they_are_and_nothing_else_passes() {
        let version = Version::new(1, 22, 0);
        let address = Address { version, worker: (*b"somewhere").into() };
        let bytes = address.encode();
        assert_eq!(Address::decode(&bytes).unwrap(), address);
        assert_eq!(Address::decode(&bytes[1..]).unwrap_err().kind(), ErrorKind::Malformed);
        let other = checksum::append(vec![9]);
        assert_eq!(Address::decode(&other).unwrap_err().kind(), ErrorKind::Incompatible);
        for none in [0, MAX_WORKER + 1] {
            let nobody = Address { worker: vec![1; none].into(), version }.encode();
            assert_eq!(Address::decode(&nobody).unwrap_err().kind(), ErrorKind::Malformed);
        }
    }

    #[test]
    fn no_bytes_make_the_decoder_panic() {
        checksum::check_decoder(Address::decode);
    }
}
