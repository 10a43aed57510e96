//! Proofs of a fleet's secret to bootstrap servers.
//!
//! A kvx prefill with a secret answers the first request on a connection with status 401 and a
//! nonce. The client repeats the request on that connection, with HMAC-SHA-256 over the kind of the
//! request, the nonce and the body. A nonce is good for one request.

use hmac::{Hmac, KeyInit, Mac as _};
use sha2::Sha256;

/// A request to a Mooncake bootstrap server, for which a kvx prefill with a secret demands a proof.
///
/// ```
/// use kvx_vllm::params::BootstrapRequest;
///
/// // The server has answered `GET /query` with 401 and `X-Kvx-Nonce: 6e6f6e6365`.
/// let proof = BootstrapRequest::Query.prove(&[7; 32], "6e6f6e6365", b"");
/// let header = format!("{}: {proof}", BootstrapRequest::PROOF);
/// assert!(BootstrapRequest::Query.is_proven(&[7; 32], "6e6f6e6365", b"", &proof));
/// # assert_eq!(header.len(), "X-Kvx-Proof: ".len() + 64);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BootstrapRequest {
    /// `POST /register`, by a worker of a prefill.
    Register,
    /// `GET /query`, by a decode or a router.
    Query,
}

impl BootstrapRequest {
    /// The header of an answer that demands a proof, with the nonce.
    pub const NONCE: &str = "X-Kvx-Nonce";
    /// The header of a request with a proof.
    pub const PROOF: &str = "X-Kvx-Proof";

    /// Returns the proof of a fleet's secret, as the value of the header [`PROOF`](Self::PROOF).
    pub fn prove(self, secret: &[u8; 32], nonce: &str, body: &[u8]) -> String {
        let proof = self.mac(secret, nonce, body).finalize().into_bytes();
        proof.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Returns whether a client has the secret. Compares in constant time.
    pub fn is_proven(self, secret: &[u8; 32], nonce: &str, body: &[u8], proof: &str) -> bool {
        let byte = |at: usize| {
            proof.get(at..at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok())
        };
        let is_hex = proof.len() == 64 && proof.bytes().all(|digit| digit.is_ascii_hexdigit());
        let bytes: Option<Vec<u8>> =
            (0..64).step_by(2).map(byte).collect::<Option<_>>().filter(|_| is_hex);
        bytes.is_some_and(|bytes| self.mac(secret, nonce, body).verify_slice(&bytes).is_ok())
    }

    fn mac(self, secret: &[u8; 32], nonce: &str, body: &[u8]) -> Hmac<Sha256> {
        let label = match self {
            BootstrapRequest::Register => "kvx bootstrap server 1: a worker registers",
            BootstrapRequest::Query => "kvx bootstrap server 1: a decode or a router queries",
        };
        let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(secret)
            .expect("HMAC takes keys of any length");
        for part in [label, nonce] {
            mac.update(&(part.len() as u64).to_be_bytes());
            mac.update(part.as_bytes());
        }
        mac.update(body);
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_of_one_secret_one_request_one_nonce_and_one_body() {
        use BootstrapRequest::{Query, Register};
        let proof = Register.prove(&[1; 32], "n", b"body");
        assert!(Register.is_proven(&[1; 32], "n", b"body", &proof));
        let accepted = [
            Register.is_proven(&[2; 32], "n", b"body", &proof),
            Query.is_proven(&[1; 32], "n", b"body", &proof),
            Register.is_proven(&[1; 32], "m", b"body", &proof),
            Register.is_proven(&[1; 32], "n", b"bodi", &proof),
            Register.is_proven(&[1; 32], "n", b"body", ""),
            Register.is_proven(&[1; 32], "n", b"body", &proof[..62]),
            Register.is_proven(&[1; 32], "n", b"body", "ä%"),
        ];
        assert_eq!(accepted, [false; 7]);
    }
}
