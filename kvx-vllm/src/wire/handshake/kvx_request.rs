//! The handshake request between kvx decode and kvx prefill engines only.

use kvx_core::{ErrorKind, Result};

use super::HandshakeRequest;
use crate::msgpack::MsgpackReader;

const TAG: &[u8] = b"kvx_meta_msg";
const NONCE: usize = 32;
const PROOF: usize = 32;

/// The kvx extension of a listener's answers: it identifies a kvx listener and contains the input
/// of the decode side's proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvxChallenge {
    /// True if the listener has a shared secret and gives unauthenticated peers no kvx metadata.
    pub secret: bool,
    /// A nonce that is never reused.
    pub nonce: [u8; NONCE],
}

impl KvxChallenge {
    /// The only version of this exchange.
    const VERSION: u8 = 1;

    /// Encodes the challenge for [`kvx_challenge`](super::HandshakePayload::kvx_challenge).
    pub fn encode(&self) -> Vec<u8> {
        [&[Self::VERSION, self.secret.into()], &self.nonce[..]].concat()
    }

    /// Decodes a challenge.
    ///
    /// # Errors
    ///
    /// A wrong length; `Incompatible`: another version.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        match bytes {
            [Self::VERSION, secret @ (0 | 1), nonce @ ..] if nonce.len() == NONCE => {
                Ok(KvxChallenge {
                    secret: *secret == 1,
                    nonce: nonce.try_into().expect("its length was checked"),
                })
            }
            [version, ..] if *version != Self::VERSION => {
                Err(ErrorKind::Incompatible.because(format!(
                    "the peer's kvx speaks version {version} of kvx's handshake extension, this \
                     one version 1: use compatible releases of kvx on both sides"
                )))
            }
            _ => Err(ErrorKind::Malformed.because("malformed kvx_challenge")),
        }
    }
}

/// A request with a proof, sent only after an answer with a [`KvxChallenge`]. It has the form of a
/// [`HandshakeRequest`] with another tag, which vLLM's listener survives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvxRequest {
    /// The request.
    pub request: HandshakeRequest,
    /// A nonce that is never reused.
    pub nonce: [u8; NONCE],
    /// The proof that the decode side has the fleet's secret, if there is one.
    pub proof: Option<[u8; PROOF]>,
}

impl KvxRequest {
    /// The longest request that is read, in bytes.
    pub const MAX_LEN: usize = 128;

    /// Returns whether this is a kvx request, well-formed or not.
    pub fn is_one(bytes: &[u8]) -> bool {
        // An array of two or three items whose first item is bytes that begin with the tag.
        matches!(bytes, [0x92 | 0x93, 0xc4, _, tag @ ..] if tag.starts_with(TAG))
    }

    /// Encodes the request.
    pub fn encode(&self) -> Vec<u8> {
        let proof = self.proof.as_ref().map_or(&[][..], |proof| proof);
        self.request.encode_after(&[TAG, &self.nonce, proof].concat())
    }

    /// Decodes a request.
    ///
    /// # Errors
    ///
    /// Any other bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let split = |reader: &MsgpackReader<'_>, first: &[u8]| {
            let parts = first.strip_prefix(TAG).and_then(|rest| rest.split_first_chunk::<NONCE>());
            let proof = match parts {
                Some((_, [])) => Some(None),
                Some((_, proof)) => proof.try_into().ok().map(Some),
                None => None,
            };
            match (parts, proof) {
                (Some((nonce, _)), Some(proof)) => Ok((*nonce, proof)),
                _ => Err(reader.malformed("its first item does not have kvx's form")),
            }
        };
        let (request, (nonce, proof)) =
            HandshakeRequest::decode_after("kvx handshake request", bytes, Self::MAX_LEN, split)?;
        Ok(KvxRequest { request, nonce, proof })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Version;
    use crate::ids::WorkerRank;

    #[test]
    fn a_request_is_read_as_it_was_written_in_both_forms() {
        for (version, proof) in [(Version::V0_33, Some([7; 32])), (Version::V0_20, None)] {
            let request = HandshakeRequest::new(WorkerRank { pp: 0, tp: 3 }, version).unwrap();
            let asked = KvxRequest { request, nonce: [9; 32], proof };
            let bytes = asked.encode();
            assert!(KvxRequest::is_one(&bytes) && !KvxRequest::is_one(&request.encode()));
            assert_eq!(KvxRequest::decode(&bytes).unwrap(), asked);
            assert!(
                HandshakeRequest::decode(&bytes).is_err(),
                "a listener without this exchange rejects it with an error"
            );
            for cut in 0..bytes.len() {
                assert!(KvxRequest::decode(&bytes[..cut]).is_err());
            }
        }
    }

    #[test]
    fn another_version_of_the_exchange_is_named() {
        let challenge = KvxChallenge { secret: true, nonce: [3; 32] };
        let mut bytes = challenge.encode();
        assert_eq!(KvxChallenge::decode(&bytes).unwrap(), challenge);
        bytes[0] = 2;
        assert_eq!(KvxChallenge::decode(&bytes).unwrap_err().kind(), ErrorKind::Incompatible);
        assert_eq!(KvxChallenge::decode(&[1, 0, 5]).unwrap_err().kind(), ErrorKind::Malformed);
        assert_eq!(KvxChallenge::decode(&[]).unwrap_err().kind(), ErrorKind::Malformed);
    }
}
