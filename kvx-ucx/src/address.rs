//! An agent's UCX address: UCX's section of the metadata.

use kvx_backend::checksum;
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{ErrorKind, Result};

use crate::error::NAME;
use crate::ffi::Version;

/// The maximum length of a worker address from a peer.
const MAX_WORKER: usize = 64 << 10;

/// The first version that packs no key for tcp. From it on, UCX rejects keys of older versions
/// (-22); older ones accept its keys, so that one side could read and the other could not.
const WITHOUT_TCP_KEYS: Version = Version::new(1, 19, 0);

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

    /// Checks that UCX of the version `ours` and the peer's accept each other's keys. Errors:
    /// `Incompatible`.
    pub(crate) fn check_keys(&self, ours: Version) -> Result<()> {
        let theirs = self.version;
        if (ours < WITHOUT_TCP_KEYS) == (theirs < WITHOUT_TCP_KEYS) {
            return Ok(());
        }
        let why = format!(
            "the peer has UCX {theirs} and this agent {ours}: UCX from {WITHOUT_TCP_KEYS} on \
             rejects memory keys of older versions; install one version on both hosts, or use \
             another backend"
        );
        Err(ErrorKind::Incompatible.because(why).with_backend(NAME))
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
    fn versions_that_reject_each_others_keys_are_refused_both_ways() {
        let version = |(minor, patch)| Version::new(1, minor, patch);
        let check = |ours, theirs| {
            Address { version: version(theirs), worker: [1].into() }.check_keys(version(ours))
        };
        for (ours, theirs) in [((13, 1), (22, 0)), ((18, 1), (19, 0)), ((17, 0), (23, 0))] {
            for why in [check(ours, theirs), check(theirs, ours)].map(Result::unwrap_err) {
                assert_eq!(why.kind(), ErrorKind::Incompatible);
                let told = why.sentence();
                for named in [ours, theirs].map(|named| version(named).to_string()) {
                    assert!(told.contains(&named), "{told}");
                }
            }
        }
        for (ours, theirs) in [((13, 1), (18, 0)), ((19, 0), (23, 0)), ((22, 0), (22, 0))] {
            assert!(check(ours, theirs).is_ok() && check(theirs, ours).is_ok());
        }
    }

    #[test]
    fn no_bytes_make_the_decoder_panic() {
        checksum::check_decoder(Address::decode);
    }
}
