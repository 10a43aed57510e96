//! Proofs of one end of a link to the other: that it was invited, and that it has the fleet's
//! secret if there is one.
//!
//! Every proof is an HMAC-SHA-256 over the exchanged content, under a label that names the prover
//! and the claim. The usual key combines the invitation and the secret. If the invitations differ,
//! an end still proves the secret alone, which distinguishes a peer with old metadata from an
//! unauthenticated one.

use hmac::{Hmac, KeyInit, Mac as _};
use kvx_core::backend::Invitation;
use kvx_core::{Error, ErrorKind, Secret};
use sha2::Sha256;

/// The length of a proof in bytes.
pub const PROOF: usize = 32;
/// A proof, as its bytes in a message.
pub type Proof = [u8; PROOF];

/// The keys with which an end of a link makes its proofs.
#[derive(Clone)]
pub struct Keys {
    /// The key derived from the invitation and the secret.
    both: Proof,
    secret: Option<Secret>,
}

impl Keys {
    /// Derives the keys from the owner's invitation, and from the secret if there is one.
    pub fn new(invitation: &Invitation, secret: Option<&Secret>) -> Self {
        let mut mac = keyed(secret.map_or(&[], |secret| secret.bytes()));
        mac.update(b"kvx: invitation and secret");
        mac.update(invitation.bytes());
        Keys { both: mac.finalize().into_bytes().into(), secret: secret.cloned() }
    }

    /// Returns true if there is a secret.
    pub fn have_secret(&self) -> bool {
        self.secret.is_some()
    }

    /// Returns a claim under the combined key, to prove or to check.
    pub fn both(&self, label: &str, said: &[&[u8]]) -> Claim {
        Claim::new(&self.both, label, said)
    }

    /// Returns a claim under the secret alone, or `None` without a secret.
    pub fn secret(&self, label: &str, said: &[&[u8]]) -> Option<Claim> {
        self.secret.as_ref().map(|secret| Claim::new(secret.bytes(), label, said))
    }
}

/// A claim that a [`Proof`] proves.
#[derive(Clone)]
pub struct Claim(Hmac<Sha256>);

impl Claim {
    fn new(key: &[u8], label: &str, said: &[&[u8]]) -> Self {
        let mut mac = keyed(key);
        for part in std::iter::once(label.as_bytes()).chain(said.iter().copied()) {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        Claim(mac)
    }

    /// Returns the proof of the claim.
    pub fn proof(&self) -> Proof {
        self.0.clone().finalize().into_bytes().into()
    }

    /// Returns true if `proof` proves the claim. Takes constant time.
    pub fn holds(&self, proof: &[u8]) -> bool {
        self.0.clone().verify_slice(proof).is_ok()
    }
}

/// Returns a claim under the fleet's secret alone. Without a secret its key is known to everybody,
/// so that the proof shows accidental changes only.
pub fn of_fleet(secret: Option<&Secret>, label: &str, said: &[&[u8]]) -> Claim {
    Claim::new(secret.map_or(&[], |secret| secret.bytes()), label, said)
}

fn keyed(key: &[u8]) -> Hmac<Sha256> {
    <Hmac<Sha256> as KeyInit>::new_from_slice(key).expect("HMAC takes keys of any length")
}

/// Returns the answer to every unauthenticated peer.
pub fn unauthenticated() -> Error {
    ErrorKind::Authentication.because(
        "not authenticated: connect with this agent's newest metadata, and with the fleet's secret",
    )
}

/// Returns the error of two ends with different secrets.
pub fn secret_mismatch() -> Error {
    let why =
        "the shared secrets of the two agents differ: give both the same one with KVX_SECRET_FILE";
    ErrorKind::Authentication.because(why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_one_key_one_label_and_one_content() {
        let (one, other) = (Invitation::from_bytes([1; 32]), Invitation::from_bytes([2; 32]));
        let (a, b) = (Secret::from_bytes([3; 32]), Secret::from_bytes([4; 32]));
        let said: &[&[u8]] = &[b"ab", b"c"];
        let proof = Keys::new(&one, Some(&a)).both("label", said).proof();
        let holds = |invitation, secret, label, said: &[&[u8]]| {
            Keys::new(invitation, secret).both(label, said).holds(&proof)
        };
        assert!(holds(&one, Some(&a), "label", said));
        assert!(!holds(&other, Some(&a), "label", said) && !holds(&one, Some(&b), "label", said));
        assert!(!holds(&one, None, "label", said) && !holds(&one, Some(&a), "labe", said));
        assert!(
            !holds(&one, Some(&a), "label", &[b"a", b"bc"]),
            "the boundaries of the parts count"
        );
        let claim = |keys: &Keys| keys.secret("label", said);
        let proof = claim(&Keys::new(&one, Some(&a))).unwrap().proof();
        assert!(claim(&Keys::new(&other, Some(&a))).unwrap().holds(&proof), "with any invitation");
        assert!(!claim(&Keys::new(&one, Some(&b))).unwrap().holds(&proof));
        assert!(claim(&Keys::new(&one, None)).is_none());
    }
}
