//! Signatures of parameters.
//!
//! `kv_transfer_params` travel through routers, and any client of a decode can write its own. With
//! other block numbers, the client would get another request's data. If the fleet has a secret, the
//! engine that holds the blocks signs their parameters for as long as it keeps them. Routers write
//! the parameters of MooncakeConnector and of push, which name no blocks and are unsigned: there
//! the engines authenticate each other with the secret when they connect. Two things are not signed
//! either. A proxy changes the flags when it makes a decode's answer the parameters of the next
//! turn's prefill leg. vLLM's scheduler adds the number of cached tokens to what a connector
//! returns; vLLM uses it in statistics and in the `usage` of answers, and kvx for nothing.
//!
//! A router that releases blocks proves with the same secret that it may.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hmac::{Hmac, KeyInit, Mac as _};
use kvx_core::Secret;
use sha2::Sha256;

use crate::params::{RemoteBlocks, TransferMode};

/// The label that separates these signatures from other proofs with the same secret.
const LABEL: &[u8] = b"kvx params 1: an engine says which blocks it holds";
/// The label of proofs that blocks may be released.
const RELEASE_LABEL: &[u8] = b"kvx release 1: no decode will fetch these blocks";
/// The tolerance in seconds for differences between two hosts' clocks, and for the time that a
/// router keeps parameters beyond a lease.
const CLOCKS: u64 = 300;

/// The rules by which an engine accepts parameters. Without a secret, it accepts all.
#[derive(Clone, Debug, Default)]
pub struct ParamsTrust {
    secret: Option<Secret>,
    unsigned_hosts: Arc<[String]>,
}

/// The reason why an engine rejects parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Untrusted {
    /// The parameters have no signature. Contains the host that they name.
    Unsigned(Arc<str>),
    /// The signature is wrong: the parameters were altered, or the secrets differ.
    Altered,
    /// The signature expired this many seconds ago, and the peer no longer keeps the blocks.
    Expired(u64),
}

impl fmt::Display for Untrusted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Untrusted::Unsigned(host) => write!(
                f,
                "the parameters have no signature of this fleet: give the engine at {host:?} the \
                 same KVX_SECRET_FILE, or, if it is a vLLM, add {host:?} to \
                 kv_connector_extra_config.allow_unsigned_params"
            ),
            Untrusted::Altered => f.write_str(
                "the signature of the parameters is invalid: forward the prefill's answer \
                 unchanged, and give both engines the same KVX_SECRET_FILE",
            ),
            Untrusted::Expired(seconds) => write!(
                f,
                "the parameters and their blocks expired {seconds} s ago: send the request to the \
                 prefill again; if the hosts' clocks differ by that much, synchronize them"
            ),
        }
    }
}

impl std::error::Error for Untrusted {}

impl ParamsTrust {
    /// Creates the rules from the fleet's secret, if it has one, and the hosts whose engines cannot
    /// sign.
    pub fn new<T: Into<String>>(
        secret: Option<&Secret>,
        unsigned_hosts: impl IntoIterator<Item = T>,
    ) -> Self {
        let unsigned_hosts = unsigned_hosts.into_iter().map(Into::into).collect();
        ParamsTrust { secret: secret.cloned(), unsigned_hosts }
    }

    /// Returns whether engines sign parameters.
    pub fn has_secret(&self) -> bool {
        self.secret.is_some()
    }

    /// Returns whether parameters that name this host need no signature.
    pub fn allows_unsigned(&self, host: &str) -> bool {
        self.unsigned_hosts.iter().any(|allowed| allowed == host)
    }

    /// Signs blocks that an engine keeps for the duration `kept`. Returns the value of
    /// [`RemoteBlocks::signature`].
    pub fn sign(&self, remote: &RemoteBlocks, kept: Duration) -> Option<String> {
        self.sign_until(remote, now().saturating_add(kept.as_secs()))
    }

    fn sign_until(&self, remote: &RemoteBlocks, expires: u64) -> Option<String> {
        Some(written(expires, signature(self.secret.as_ref()?, remote, expires)))
    }

    /// Checks that an engine may load these blocks. Accepts everything in push mode, where
    /// parameters name no blocks.
    ///
    /// # Errors
    ///
    /// The reason, if it may not load them.
    pub fn check(&self, remote: &RemoteBlocks) -> Result<(), Untrusted> {
        self.check_at(remote, now())
    }

    fn check_at(&self, remote: &RemoteBlocks, now: u64) -> Result<(), Untrusted> {
        let Some(secret) = self.secret.as_ref().filter(|_| remote.mode == TransferMode::Pull)
        else {
            return Ok(());
        };
        let Some(written) = &remote.signature else {
            return match self.allows_unsigned(&remote.host) {
                true => Ok(()),
                false => Err(Untrusted::Unsigned(remote.host.as_str().into())),
            };
        };
        let (expires, proof) = parse(written).ok_or(Untrusted::Altered)?;
        // `verify_slice` compares in constant time.
        signature(secret, remote, expires).verify_slice(&proof).map_err(|_| Untrusted::Altered)?;
        if now > expires.saturating_add(CLOCKS) {
            return Err(Untrusted::Expired(now - expires));
        }
        Ok(())
    }
}

/// Proofs of releases.
impl ParamsTrust {
    /// Proves for the duration `valid` that the blocks of an engine's request may be released.
    /// Returns `None` without a secret.
    pub fn sign_release(&self, engine: &str, request: &str, valid: Duration) -> Option<String> {
        let expires = now().saturating_add(valid.as_secs());
        Some(written(expires, release(self.secret.as_ref()?, engine, request, expires)))
    }

    /// Checks a proof that the blocks of a request of this engine may be released. Without a secret,
    /// an engine accepts releases that have no proof.
    ///
    /// # Errors
    ///
    /// The reason why they may not: there is a proof and this engine has no secret, the proof is
    /// missing or was made with another secret or for another request, or it has expired.
    pub fn check_release(
        &self,
        engine: &str,
        request: &str,
        proof: &str,
    ) -> Result<(), UntrustedRelease> {
        let Some(secret) = &self.secret else {
            return if proof.is_empty() { Ok(()) } else { Err(UntrustedRelease::NoSecret) };
        };
        let (expires, proof) = parse(proof).ok_or(UntrustedRelease::Wrong)?;
        release(secret, engine, request, expires)
            .verify_slice(&proof)
            .map_err(|_| UntrustedRelease::Wrong)?;
        match now().checked_sub(expires.saturating_add(CLOCKS)) {
            None | Some(0) => Ok(()),
            Some(late) => Err(UntrustedRelease::Expired(late.saturating_add(CLOCKS))),
        }
    }
}

/// The reason why an engine rejects a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum UntrustedRelease {
    /// This engine has no secret.
    NoSecret,
    /// The proof is wrong or missing.
    Wrong,
    /// The proof expired this many seconds ago.
    Expired(u64),
}

impl fmt::Display for UntrustedRelease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UntrustedRelease::NoSecret => f.write_str(
                "the release has a proof, and this engine has no secret to check it with: set \
                 KVX_SECRET_FILE here to the router's",
            ),
            UntrustedRelease::Wrong => f.write_str(
                "the proof of the release is invalid or missing: give the router and this engine \
                 the same KVX_SECRET_FILE",
            ),
            UntrustedRelease::Expired(seconds) => write!(
                f,
                "the proof of the release expired {seconds} s ago: synchronize the hosts' clocks"
            ),
        }
    }
}

impl std::error::Error for UntrustedRelease {}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn written(expires: u64, mac: Hmac<Sha256>) -> String {
    let mac = mac.finalize().into_bytes();
    format!("{expires}:{}", mac.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

fn parse(written: &str) -> Option<(u64, [u8; 32])> {
    let (expires, proof) = written.split_once(':')?;
    if proof.len() != 64 || !proof.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    let mut bytes = [0; 32];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&proof[2 * at..2 * at + 2], 16).ok()?;
    }
    Some((expires.parse().ok()?, bytes))
}

/// Computes the MAC of a release. Texts follow their lengths.
fn release(secret: &Secret, engine: &str, request: &str, expires: u64) -> Hmac<Sha256> {
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(secret.bytes())
        .expect("HMAC takes keys of any length");
    mac.update(RELEASE_LABEL);
    mac.update(&expires.to_be_bytes());
    for text in [engine, request] {
        mac.update(&(text.len() as u64).to_be_bytes());
        mac.update(text.as_bytes());
    }
    mac
}

/// Computes the MAC over the label and every other field. Numbers have eight bytes, texts and lists
/// follow their lengths, and a byte before each optional field says whether it is present.
fn signature(secret: &Secret, remote: &RemoteBlocks, expires: u64) -> Hmac<Sha256> {
    let RemoteBlocks {
        engine_id,
        request_id,
        host,
        port,
        block_ids,
        tp_size,
        dcp_size,
        pp_size,
        num_tokens,
        expiry_time,
        registration_generation,
        mode,
        prefill_cached_tokens: _,
        block_reference,
        signature: _,
    } = remote;
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(secret.bytes())
        .expect("HMAC takes keys of any length");
    mac.update(LABEL);
    let mut number = |number: u64| mac.update(&number.to_be_bytes());
    for known in [
        expires,
        (*port).into(),
        (*tp_size).into(),
        (*dcp_size).into(),
        (*pp_size).into(),
        *registration_generation,
        block_ids.len() as u64,
    ] {
        number(known);
    }
    for group in block_ids {
        number(group.len() as u64);
        group.iter().for_each(|block| number((*block).into()));
    }
    for optional in [*num_tokens, expiry_time.map(f64::to_bits)] {
        mac.update(&[u8::from(optional.is_some())]);
        mac.update(&optional.unwrap_or(0).to_be_bytes());
    }
    let texts = [Some(engine_id), Some(request_id), Some(host), block_reference.as_ref()];
    for text in texts.map(|text| text.map(String::as_str)).into_iter().chain([Some(mode.as_str())])
    {
        mac.update(&[u8::from(text.is_some())]);
        mac.update(&(text.map_or(0, str::len) as u64).to_be_bytes());
        mac.update(text.unwrap_or_default().as_bytes());
    }
    mac
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "what fails here is the test")]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::params::TransferParams;

    /// Golden vectors that another program made from this module's description: see `made_by` in
    /// the file.
    const GOLDEN: &str = include_str!("../../tests/it/golden/signed_params.json");

    fn trust(byte: u8) -> ParamsTrust {
        ParamsTrust::new(Some(&Secret::from_bytes([byte; Secret::LEN])), ["10.0.0.9"])
    }

    fn remote() -> RemoteBlocks {
        let mut remote =
            RemoteBlocks::new("engine", "request", "10.0.0.1", 5600, vec![vec![1, 2], vec![3]]);
        remote.num_tokens = Some(40);
        remote.block_reference = Some("0123456789abcdef0123456789abcdef".into());
        remote
    }

    #[test]
    fn signatures_are_those_of_the_golden_vectors() {
        let golden: Value = serde_json::from_str(GOLDEN).unwrap();
        let vectors = golden["vectors"].as_array().unwrap();
        assert!(vectors.len() >= 4);
        for vector in vectors {
            let byte = u8::try_from(vector["secret_byte"].as_u64().unwrap()).unwrap();
            let params = TransferParams::from_value(&vector["params"]).unwrap();
            let remote = params.remote_blocks().unwrap();
            let expires = vector["expires"].as_u64().unwrap();
            let signed = trust(byte).sign_until(&remote, expires);
            assert_eq!(signed.as_deref(), vector["params"]["kvx_signature"].as_str(), "{vector}");
            assert_eq!(trust(byte).check_at(&remote, expires), Ok(()));
        }
    }

    #[test]
    fn an_alteration_of_any_signed_field_is_rejected() {
        let mut signed = remote();
        signed.signature = trust(1).sign_until(&signed, 1000);
        assert_eq!(trust(1).check_at(&signed, 900), Ok(()));
        let altered: [(&str, fn(&mut RemoteBlocks)); 15] = [
            ("engine", |remote| remote.engine_id.push('x')),
            ("request", |remote| remote.request_id = "other".into()),
            ("host", |remote| remote.host = "10.0.0.2".into()),
            ("port", |remote| remote.port += 1),
            ("a block", |remote| remote.block_ids[1][0] = 4),
            ("one more block", |remote| remote.block_ids[0].push(9)),
            ("groups", |remote| remote.block_ids = vec![vec![1, 2, 3]]),
            ("tp", |remote| remote.tp_size = 2),
            ("dcp", |remote| remote.dcp_size = 2),
            ("pp", |remote| remote.pp_size = 2),
            ("tokens", |remote| remote.num_tokens = None),
            ("expiry", |remote| remote.expiry_time = Some(1.0)),
            ("registration", |remote| remote.registration_generation = 1),
            ("reference", |remote| remote.block_reference = None),
            ("until when", |remote| {
                remote.signature = remote.signature.take().map(|it| it.replace("1000", "1001"))
            }),
        ];
        for (what, alter) in altered {
            let mut remote = signed.clone();
            alter(&mut remote);
            assert_eq!(trust(1).check_at(&remote, 900), Err(Untrusted::Altered), "{what}");
        }
        assert_eq!(trust(2).check_at(&signed, 900), Err(Untrusted::Altered), "another secret");
    }

    #[test]
    fn vllm_may_add_the_number_of_cached_tokens() {
        let mut signed = remote();
        signed.signature = trust(1).sign_until(&signed, 1000);
        signed.prefill_cached_tokens = Some(0);
        assert_eq!(trust(1).check_at(&signed, 900), Ok(()));
    }

    #[test]
    fn malformed_signatures_are_rejected() {
        let mut signed = remote();
        let good = trust(1).sign_until(&signed, 1000).unwrap();
        for wrong in [
            "",
            ":",
            "1000",
            &good[..good.len() - 1],
            &format!("{good}0"),
            &good.to_uppercase(),
            "1000:äö",
            &good.replace("1000", "-1"),
        ] {
            signed.signature = Some(wrong.to_owned());
            let refused = trust(1).check_at(&signed, 900);
            // Uppercase text is identical if the signature has no letters.
            assert!(refused == Err(Untrusted::Altered) || wrong == good, "{wrong:?}");
        }
    }

    #[test]
    fn a_signature_expires_with_the_blocks() {
        let mut signed = remote();
        signed.signature = trust(1).sign_until(&signed, 1000);
        assert_eq!(trust(1).check_at(&signed, 1000 + CLOCKS), Ok(()));
        assert_eq!(trust(1).check_at(&signed, 1001 + CLOCKS), Err(Untrusted::Expired(1 + CLOCKS)));
        signed.signature = trust(1).sign_until(&signed, u64::MAX);
        assert_eq!(trust(1).check_at(&signed, u64::MAX), Ok(()));
    }

    #[test]
    fn a_release_needs_the_secret_the_engine_and_the_request() {
        let minute = Duration::from_secs(60);
        let proof = trust(1).sign_release("engine", "request", minute).unwrap();
        let check = |secret, engine, request, proof: &str| {
            trust(secret).check_release(engine, request, proof)
        };
        assert_eq!(check(1, "engine", "request", &proof), Ok(()));
        let wrong = Err(UntrustedRelease::Wrong);
        assert_eq!(check(2, "engine", "request", &proof), wrong, "another secret");
        assert_eq!(check(1, "other", "request", &proof), wrong);
        assert_eq!(check(1, "engine", "other", &proof), wrong);
        let (longer, shorter) = "enginerequest".split_at(7);
        assert_eq!(check(1, longer, shorter, &proof), wrong, "lengths are part of the proof");
        for malformed in ["", ":", "1", &proof[..proof.len() - 1]] {
            assert_eq!(check(1, "engine", "request", malformed), wrong, "{malformed}");
        }
        // A signature of parameters is no proof of a release.
        let params = trust(1).sign(&remote(), minute).unwrap();
        assert_eq!(check(1, "engine", "request", &params), wrong);
        let without = ParamsTrust::default();
        assert_eq!(without.sign_release("engine", "request", minute), None);
        let none = without.check_release("engine", "request", &proof);
        assert_eq!(none, Err(UntrustedRelease::NoSecret));
        assert_eq!(without.check_release("engine", "request", ""), Ok(()));
    }

    #[test]
    fn a_proof_of_a_release_expires() {
        let secret = Secret::from_bytes([1; Secret::LEN]);
        let at = |expires| written(expires, release(&secret, "engine", "request", expires));
        let check = |proof: &str| trust(1).check_release("engine", "request", proof);
        assert_eq!(check(&at(now() - CLOCKS + 30)), Ok(()));
        let expired = check(&at(now() - CLOCKS - 30));
        assert!(
            matches!(expired, Err(UntrustedRelease::Expired(late)) if late >= CLOCKS + 30),
            "{expired:?}"
        );
        assert_eq!(check(&at(u64::MAX)), Ok(()));
    }

    #[test]
    fn with_a_secret_only_allowed_hosts_need_no_signature() {
        let mut unsigned = remote();
        assert_eq!(trust(1).check_at(&unsigned, 0), Err(Untrusted::Unsigned("10.0.0.1".into())));
        assert_eq!(ParamsTrust::default().check_at(&unsigned, 0), Ok(()));
        unsigned.host = "10.0.0.9".into();
        assert_eq!(trust(1).check_at(&unsigned, 0), Ok(()));
        // Push names no blocks. A wrong signature is not a missing one.
        let push = RemoteBlocks { mode: TransferMode::Push, ..remote() };
        assert_eq!(trust(1).check_at(&push, 0), Ok(()));
        unsigned.signature = Some("1:2".into());
        assert_eq!(trust(1).check_at(&unsigned, 0), Err(Untrusted::Altered));
    }
}
