//! Authentication of registrations in a fleet with a shared secret.
//!
//! A bootstrap server answers the first registration with a nonce. The worker
//! repeats it on the same connection, with HMAC-SHA-256 over the nonce and the body. A nonce is
//! good for one registration.

use hmac::{Hmac, KeyInit, Mac as _};
use kvx_core::{Error, ErrorKind, Result, Secret};
use sha2::Sha256;

/// The header of an answer that demands a proof.
pub(super) const NONCE: &str = "X-Kvx-Nonce";
/// The header of a registration with a proof.
pub(super) const PROOF: &str = "X-Kvx-Proof";

fn mac(secret: &Secret, label: &str, nonce: &[u8], said: &[u8]) -> Hmac<Sha256> {
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(secret.bytes())
        .expect("HMAC takes keys of any length");
    for part in [label.as_bytes(), nonce] {
        mac.update(&(part.len() as u64).to_be_bytes());
        mac.update(part);
    }
    mac.update(said);
    mac
}

const REGISTERS: &str = "kvx bootstrap server 1: a worker registers";

fn differ(who: &str) -> Error {
    Error::new(
        ErrorKind::Authentication,
        format!(
            "the shared secrets of {who} differ: set KVX_SECRET_FILE of both to the same secret"
        ),
    )
}

pub(super) fn prove(secret: &Secret, nonce: &str, body: &[u8]) -> String {
    let proof = mac(secret, REGISTERS, nonce.as_bytes(), body).finalize().into_bytes();
    proof.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Checks the proof of a registration. Errors: `Authentication`: the worker does not have the
/// secret.
pub(super) fn check(secret: &Secret, nonce: Option<&str>, body: &[u8], proof: &str) -> Result<()> {
    let differ = || differ("this worker and the bootstrap server");
    let byte =
        |at: usize| proof.get(at..at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
    let is_hex = proof.len() == 64 && proof.bytes().all(|digit| digit.is_ascii_hexdigit());
    let bytes: Option<Vec<u8>> =
        (0..64).step_by(2).map(byte).collect::<Option<_>>().filter(|_| is_hex);
    let (Some(nonce), Some(bytes)) = (nonce, bytes) else { return Err(differ()) };
    // Constant-time comparison.
    mac(secret, REGISTERS, nonce.as_bytes(), body).verify_slice(&bytes).map_err(|_| differ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_of_one_secret_one_nonce_and_one_body() {
        let secrets = [1, 2].map(|byte| Secret::from_bytes([byte; 32]));
        let proof = prove(&secrets[0], "n", b"body");
        assert!(check(&secrets[0], Some("n"), b"body", &proof).is_ok());
        let refused = [
            check(&secrets[1], Some("n"), b"body", &proof),
            check(&secrets[0], Some("m"), b"body", &proof),
            check(&secrets[0], Some("n"), b"bodi", &proof),
            check(&secrets[0], None, b"body", &proof),
            check(&secrets[0], Some("n"), b"body", ""),
            check(&secrets[0], Some("n"), b"body", &proof[..62]),
            check(&secrets[0], Some("n"), b"body", "ä%"),
        ];
        for refused in refused {
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::Authentication);
        }
    }
}
