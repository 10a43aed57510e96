//! Authentication in a fleet with a shared secret.
//!
//! **Registrations.** A bootstrap server answers the first registration with a nonce. The worker
//! repeats it on the same connection, with HMAC-SHA-256 over the nonce and the body. A nonce is
//! good for one registration.
//!
//! **Questions and answers.** A kvx decode that asks a kvx prefill adds a frame to its question: a
//! nonce, and HMAC-SHA-256 over both. Each answer has a frame with HMAC-SHA-256 over that nonce and
//! the answer. So a recorded answer fits no other question. A replayed question gains nothing: it
//! asks for blocks that were written already, and its grants have ended.

use hmac::{Hmac, KeyInit, Mac as _};
use kvx_core::{Error, ErrorKind, Result, Secret};
use sha2::Sha256;

/// The header of an answer that demands a proof.
pub(super) const NONCE: &str = "X-Kvx-Nonce";
/// The header of a registration with a proof.
pub(super) const PROOF: &str = "X-Kvx-Proof";

/// The nonce of a question, which its answers cover.
pub(super) type Nonce = [u8; 32];

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
const ASKS: &str = "kvx MooncakeConnector 1: a decode asks";
const ANSWERS: &str = "kvx MooncakeConnector 1: a prefill answers";

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

/// Returns the extra frame of a question, and the nonce that its answers cover.
pub(super) fn seal_question(secret: &Secret, question: &[u8]) -> Result<(Nonce, Vec<u8>)> {
    let nonce = kvx_core::backend::random_key()?;
    let proof = mac(secret, ASKS, &nonce, question).finalize().into_bytes();
    Ok((nonce, [&nonce[..], &proof].concat()))
}

/// Checks a question's frame, and returns the nonce for its answers. Errors: `Authentication`: the
/// decode does not have the secret.
pub(super) fn open_question(secret: &Secret, question: &[u8], seal: &[u8]) -> Result<Nonce> {
    let differ = || differ("the decode and this prefill");
    let (nonce, proof) = seal.split_first_chunk().ok_or_else(differ)?;
    mac(secret, ASKS, nonce, question).verify_slice(proof).map_err(|_| differ())?;
    Ok(*nonce)
}

/// Returns the extra frame of an answer.
pub(super) fn seal_answer(secret: &Secret, nonce: &Nonce, answer: &[u8]) -> Vec<u8> {
    mac(secret, ANSWERS, nonce, answer).finalize().into_bytes().to_vec()
}

/// Checks an answer's frame. Errors: `Authentication`: the peer does not have the secret.
pub(super) fn check_answer(
    secret: &Secret,
    nonce: &Nonce,
    answer: &[u8],
    seal: &[u8],
) -> Result<()> {
    let differ = || differ("this decode and the peer that answered");
    mac(secret, ANSWERS, nonce, answer).verify_slice(seal).map_err(|_| differ())
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

    #[test]
    fn questions_and_answers_are_bound_to_each_other() {
        let secrets = [1, 2].map(|byte| Secret::from_bytes([byte; 32]));
        let (nonce, seal) = seal_question(&secrets[0], b"question").unwrap();
        assert_eq!(open_question(&secrets[0], b"question", &seal).unwrap(), nonce);
        let answer = seal_answer(&secrets[0], &nonce, b"answer");
        assert!(check_answer(&secrets[0], &nonce, b"answer", &answer).is_ok());
        let other = seal_question(&secrets[0], b"question").unwrap().0;
        let refused = [
            open_question(&secrets[1], b"question", &seal).map(drop),
            open_question(&secrets[0], b"questiom", &seal).map(drop),
            open_question(&secrets[0], b"question", &seal[..63]).map(drop),
            open_question(&secrets[0], b"question", b"").map(drop),
            check_answer(&secrets[1], &nonce, b"answer", &answer),
            check_answer(&secrets[0], &other, b"answer", &answer),
            check_answer(&secrets[0], &nonce, b"answfr", &answer),
            check_answer(&secrets[0], &nonce, b"answer", b""),
            check_answer(&secrets[0], &nonce, b"question", &seal[32..]),
        ];
        for refused in refused {
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::Authentication);
        }
    }
}
