//! Mutual authentication of decode and prefill, in a fleet with a shared secret.
//!
//! 1. The decode asks in vLLM's form. A kvx prefill answers with what anybody may know, and adds a
//!    challenge, which vLLM ignores.
//! 2. The decode asks again on the same connection, with a [`KvxRequest`]: its own nonce, and
//!    HMAC-SHA-256 over both nonces and the worker that it asks for.
//! 3. The prefill answers with everything, and with HMAC-SHA-256 over the nonces, the worker and
//!    the answer.
//!
//! A challenge is good for one question on its connection, so a recorded question is useless later.
//! The messages are not encrypted: an eavesdropper learns where the memory is, but cannot prove the
//! secret to the memory's owner.

use hmac::{Hmac, KeyInit, Mac as _};
use kvx_core::{Error, ErrorKind, Result, Secret};
use sha2::Sha256;

use kvx_vllm::wire::{HandshakePayload, KvxChallenge, KvxRequest};

fn mac(secret: &Secret, label: &[u8], challenge: &[u8; 32], request: &KvxRequest) -> Hmac<Sha256> {
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(secret.bytes())
        .expect("HMAC takes keys of any length");
    let rank = request.request.rank();
    mac.update(label);
    mac.update(challenge);
    mac.update(&request.nonce);
    mac.update(&rank.pp.to_be_bytes());
    mac.update(&rank.tp.to_be_bytes());
    mac
}

fn of_decode(secret: &Secret, challenge: &[u8; 32], request: &KvxRequest) -> Hmac<Sha256> {
    mac(secret, b"kvx side channel 1: the decode asks", challenge, request)
}

fn of_prefill(
    secret: &Secret,
    challenge: &[u8; 32],
    request: &KvxRequest,
    answer: &HandshakePayload,
) -> Hmac<Sha256> {
    let mut mac = mac(secret, b"kvx side channel 1: the prefill answers", challenge, request);
    let refusal = answer.refusal.as_deref().unwrap_or_default();
    for said in [
        answer.compatibility_hash.as_str().as_bytes(),
        refusal.as_bytes(),
        &answer.agent_metadata_bytes,
    ] {
        mac.update(&(said.len() as u64).to_be_bytes());
        mac.update(said);
    }
    mac
}

/// Adds the decode's proof to its question, if it has a secret.
pub(super) fn prove_question(
    secret: Option<&Secret>,
    challenge: &KvxChallenge,
    mut request: KvxRequest,
) -> KvxRequest {
    request.proof = secret
        .map(|secret| of_decode(secret, &challenge.nonce, &request).finalize().into_bytes().into());
    request
}

/// Checks the decode's proof. Errors: `Authentication`: the decode is not authenticated;
/// `Malformed`.
pub(super) fn check_question(
    secret: Option<&Secret>,
    challenge: Option<[u8; 32]>,
    request: &KvxRequest,
) -> Result<()> {
    let Some(secret) = secret else {
        return match request.proof {
            None => Ok(()),
            Some(_) => Err(denied(
                "this decode has a shared secret and the prefill has none: give both the same \
                 secret, or neither",
            )),
        };
    };
    let Some(proof) = &request.proof else {
        return Err(denied(
            "this prefill has a shared secret and the decode has none: set KVX_SECRET_FILE there \
             to the same secret",
        ));
    };
    let challenge = challenge.ok_or_else(|| {
        ErrorKind::Malformed.because("malformed kvx handshake request: a proof before a challenge")
    })?;
    // Constant-time comparison.
    of_decode(secret, &challenge, request).verify_slice(proof).map_err(|_| differ())
}

/// Returns the proof of an answer for the decode.
pub(super) fn prove_answer(
    secret: &Secret,
    challenge: &[u8; 32],
    request: &KvxRequest,
    answer: &HandshakePayload,
) -> Vec<u8> {
    of_prefill(secret, challenge, request, answer).finalize().into_bytes().to_vec()
}

/// Checks the prefill's proof. Errors: `Authentication`: the peer does not have the secret.
pub(super) fn check_answer(
    secret: &Secret,
    challenge: &KvxChallenge,
    request: &KvxRequest,
    answer: &HandshakePayload,
) -> Result<()> {
    let proof = answer.kvx_proof.as_deref().unwrap_or_default();
    of_prefill(secret, &challenge.nonce, request, answer).verify_slice(proof).map_err(|_| differ())
}

pub(super) fn denied(why: &str) -> Error {
    ErrorKind::Authentication.because(why.to_owned())
}

fn differ() -> Error {
    denied(
        "the shared secrets of decode and prefill differ: set KVX_SECRET_FILE of both to the same \
         secret",
    )
}
