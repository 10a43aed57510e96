//! The parts of an agent's metadata that its peers pass to the native library: addresses and
//! exports of regions.
//!
//! Libraries trust such bytes; UCX aborts the process when it unpacks some altered addresses. So
//! each part ends in a signature, an HMAC-SHA-256 under the fleet's secret, as a hello does. The
//! library gets no byte of a part whose signature does not match. Without a secret everybody can
//! make a signature, which then detects accidental changes only.

use kvx_core::backend::wire::Writer;
use kvx_core::{ErrorKind, Identity, Result, Secret};

use super::lanes;
use crate::control::proof::{Claim, PROOF, of_fleet};

/// A part of the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// The addresses of a transport's lanes.
    Addresses,
    /// The export of a region.
    Export,
}

impl Part {
    fn label(self) -> &'static str {
        match self {
            Part::Addresses => "kvx metadata 1: the addresses of a backend",
            Part::Export => "kvx metadata 1: the export of a region",
        }
    }
}

/// Signs the parts of a backend and verifies those of its peers.
#[derive(Clone)]
pub(super) struct PartSigner {
    backend: &'static str,
    secret: Option<Secret>,
}

impl PartSigner {
    pub(super) fn new(backend: &'static str, secret: Option<Secret>) -> Self {
        PartSigner { backend, secret }
    }

    /// Appends the signature.
    pub(super) fn sign(&self, part: Part, owner: &Identity, mut bytes: Vec<u8>) -> Vec<u8> {
        let signature = self.claim(part, owner, &bytes).proof();
        bytes.put(&signature);
        bytes
    }

    /// Verifies and removes the signature. Returns `Authentication` if it does not match.
    pub(super) fn verify<'a>(
        &self,
        part: Part,
        owner: &Identity,
        signed: &'a [u8],
    ) -> Result<&'a [u8]> {
        let (bytes, signature) = signed.split_at(signed.len().saturating_sub(PROOF));
        if self.claim(part, owner, bytes).holds(signature) {
            return Ok(bytes);
        }
        let what = match part {
            Part::Addresses => "address",
            Part::Export => "key of a region",
        };
        let why = format!(
            "the {} {what} in the peer's metadata is not authentic: the metadata was altered, or \
             the two agents have different secrets (KVX_SECRET_FILE) or releases of kvx",
            self.backend
        );
        Err(ErrorKind::Authentication.because(why).with_backend(self.backend))
    }

    /// Returns the addresses in a peer's section of the metadata. Returns `Authentication` for an
    /// altered section, `Malformed` for an invalid one.
    pub(super) fn addresses<'a>(
        &self,
        owner: &Identity,
        section: &'a [u8],
    ) -> Result<Vec<&'a [u8]>> {
        let addresses = self.verify(Part::Addresses, owner, section)?;
        lanes::decode(addresses).map_err(|error| error.with_backend(self.backend))
    }

    fn claim(&self, part: Part, owner: &Identity, bytes: &[u8]) -> Claim {
        let said: [&[u8]; 4] =
            [self.backend.as_bytes(), owner.name.as_bytes(), &owner.incarnation.0, bytes];
        of_fleet(self.secret.as_ref(), part.label(), &said)
    }
}

#[cfg(test)]
mod tests {
    use kvx_core::Incarnation;

    use super::*;

    fn owner(name: &str, incarnation: u8) -> Identity {
        Identity { name: name.into(), incarnation: Incarnation([incarnation; 16]) }
    }

    fn signer(backend: &'static str, secret: Option<u8>) -> PartSigner {
        PartSigner::new(backend, secret.map(|byte| Secret::from_bytes([byte; 32])))
    }

    #[test]
    fn every_altered_bit_of_a_part_is_noticed() {
        let me = owner("owner", 1);
        for secret in [None, Some(3)] {
            let ours = signer("UCX", secret);
            let signed = ours.sign(Part::Addresses, &me, b"a worker's address".to_vec());
            let verified = ours.verify(Part::Addresses, &me, &signed).unwrap();
            assert_eq!(verified, b"a worker's address");
            for bit in 0..8 * signed.len() {
                let mut altered = signed.clone();
                altered[bit / 8] ^= 1 << (bit % 8);
                let why = ours.verify(Part::Addresses, &me, &altered).unwrap_err();
                assert_eq!(why.kind(), ErrorKind::Authentication, "bit {bit}");
            }
            for len in 0..signed.len() {
                ours.verify(Part::Addresses, &me, &signed[..len]).unwrap_err();
            }
        }
    }

    #[test]
    fn a_signature_holds_for_one_secret_one_backend_one_owner_and_one_part() {
        let (ours, me) = (signer("UCX", Some(3)), owner("owner", 1));
        let signed = ours.sign(Part::Export, &me, b"a key".to_vec());
        assert_eq!(ours.verify(Part::Export, &me, &signed).unwrap(), b"a key");
        for (other, part, owner) in [
            (signer("UCX", Some(4)), Part::Export, me.clone()),
            (signer("UCX", None), Part::Export, me.clone()),
            (signer("RIXL", Some(3)), Part::Export, me.clone()),
            (ours.clone(), Part::Addresses, me.clone()),
            (ours.clone(), Part::Export, owner("other", 1)),
            (ours.clone(), Part::Export, owner("owner", 2)),
        ] {
            let why = other.verify(part, &owner, &signed).unwrap_err();
            assert_eq!(why.kind(), ErrorKind::Authentication, "{why}");
        }
    }
}
