//! The handshake, and the libraries with its cryptography.

use std::fmt;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};

use aes_gcm::aead::AeadInOut as _;
use aes_gcm::aead::inout::InOutBuf;
use aes_gcm::{Aes256Gcm, KeyInit as _, Tag};
use curve25519_dalek::MontgomeryPoint;
use hmac::{Hmac, Mac as _};
use kvx_core::backend::random_key;
use kvx_core::{Error, ErrorKind, Result, Secret};
use sha2::{Digest as _, Sha256};
use snow::params::{CipherChoice, DHChoice, HashChoice};
use snow::resolvers::CryptoResolver;
use snow::types::{Cipher, Dh, Hash, Random};
use snow::{Builder, HandshakeState};
use zeroize::{Zeroize as _, Zeroizing};

use crate::seal::Seals;

/// Neither end has a static key; the shared key is mixed in before the first message.
const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";
/// The number of bytes of a key.
pub const KEY: usize = 32;
/// The number of bytes of an authentication tag.
pub const TAG: usize = 16;
/// The number of bytes of a message without a payload.
pub const MESSAGE: usize = KEY + TAG;

/// A key that is erased when it is dropped.
pub type Key = Zeroizing<[u8; KEY]>;

/// Derives a key from a fleet's secret for the purpose that the label names.
pub fn derive_key(secret: &Secret, label: &[u8]) -> Key {
    let mut mac =
        Hmac::<Sha256>::new_from_slice(secret.bytes()).expect("HMAC takes keys of any length");
    mac.update(label);
    Key::new(mac.finalize().into_bytes().into())
}

/// One end of a handshake of two messages, the initiator's first. Each end proves with its message
/// that it has the key. Its keys are erased when it is dropped.
pub struct NoiseHandshake(ErasedState);

impl NoiseHandshake {
    /// Creates the end that sends first. Both ends pass the same `prologue`, which is not sent.
    pub fn initiator(key: &[u8; KEY], prologue: &[u8]) -> Result<Self> {
        builder(key, prologue)
            .and_then(Builder::build_initiator)
            .map(NoiseHandshake::of)
            .map_err(broken)
    }

    /// Creates the end that answers.
    pub fn responder(key: &[u8; KEY], prologue: &[u8]) -> Result<Self> {
        builder(key, prologue)
            .and_then(Builder::build_responder)
            .map(NoiseHandshake::of)
            .map_err(broken)
    }

    fn of(state: HandshakeState) -> Self {
        NoiseHandshake(ErasedState(Box::new(MaybeUninit::new(state))))
    }

    /// Appends this end's message to `out`: [`MESSAGE`] bytes and the payload.
    pub fn write(&mut self, payload: &[u8], out: &mut Vec<u8>) -> Result<()> {
        let at = out.len();
        out.resize(at + MESSAGE + payload.len(), 0);
        let len = self.0.write_message(payload, &mut out[at..]).map_err(broken)?;
        out.truncate(at + len);
        Ok(())
    }

    /// Returns the payload of the other end's message, if that end has the same key.
    pub fn read(&mut self, message: &[u8]) -> Option<Vec<u8>> {
        let mut payload = vec![0; message.len()];
        let len = self.0.read_message(message, &mut payload).ok()?;
        payload.truncate(len);
        Some(payload)
    }

    /// Returns the ciphers for all later messages, with one key for each direction. Both messages
    /// of the handshake must have been written and read.
    pub fn seals(&mut self) -> Seals {
        debug_assert!(self.0.is_handshake_finished(), "the handshake has not finished");
        let (mut to_responder, mut to_initiator) = self.0.dangerously_get_raw_split();
        let seals = match self.0.is_initiator() {
            true => Seals::of(&to_responder, &to_initiator),
            false => Seals::of(&to_initiator, &to_responder),
        };
        to_responder.zeroize();
        to_initiator.zeroize();
        seals
    }
}

impl fmt::Debug for NoiseHandshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NoiseHandshake")
    }
}

/// Snow's state, whose memory is erased when it is dropped. Snow leaves the key of both ends and
/// the key from which all later ones derive in it.
struct ErasedState(Box<MaybeUninit<HandshakeState>>);

impl Deref for ErasedState {
    type Target = HandshakeState;

    fn deref(&self) -> &HandshakeState {
        // SAFETY: the only constructor, `NoiseHandshake::of`, initialises the state, and only
        // `drop` ends it.
        unsafe { self.0.assume_init_ref() }
    }
}

impl DerefMut for ErasedState {
    fn deref_mut(&mut self) -> &mut HandshakeState {
        // SAFETY: the only constructor, `NoiseHandshake::of`, initialises the state, and only
        // `drop` ends it.
        unsafe { self.0.assume_init_mut() }
    }
}

impl Drop for ErasedState {
    fn drop(&mut self) {
        // SAFETY: the state is initialised until here, and nothing can use it after `drop`.
        unsafe { self.0.assume_init_drop() };
        self.0.zeroize();
    }
}

fn builder<'a>(key: &'a [u8; KEY], prologue: &'a [u8]) -> Result<Builder<'a>, snow::Error> {
    Builder::with_resolver(PATTERN.parse()?, Box::new(Algorithms)).psk(0, key)?.prologue(prologue)
}

/// Returns the error for a failure that the peer has not caused: missing randomness.
fn broken(error: snow::Error) -> Error {
    ErrorKind::Native
        .because(format!("the Noise handshake failed on this side ({error:?}): try again"))
}

/// Provides the algorithms that the pattern's name specifies.
struct Algorithms;

impl CryptoResolver for Algorithms {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(System))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        matches!(choice, DHChoice::Curve25519).then(|| Box::<X25519>::default() as _)
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        matches!(choice, HashChoice::SHA256).then(|| Box::<Sha>::default() as _)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        matches!(choice, CipherChoice::AESGCM).then(|| Box::<AesGcm>::default() as _)
    }
}

/// The system's random number generator.
struct System;

impl Random for System {
    fn try_fill_bytes(&mut self, dest: &mut [u8]) -> Result<(), snow::Error> {
        for bytes in dest.chunks_mut(KEY) {
            let random = Key::new(random_key().map_err(|_| snow::Error::Rng)?);
            bytes.copy_from_slice(&random[..bytes.len()]);
        }
        Ok(())
    }
}

#[derive(Default)]
struct X25519 {
    private: [u8; KEY],
    public: [u8; KEY],
}

impl Drop for X25519 {
    fn drop(&mut self) {
        self.private.zeroize();
    }
}

impl Dh for X25519 {
    fn name(&self) -> &'static str {
        "25519"
    }

    fn pub_len(&self) -> usize {
        KEY
    }

    fn priv_len(&self) -> usize {
        KEY
    }

    fn set(&mut self, private: &[u8]) {
        self.private.copy_from_slice(private);
        self.public = MontgomeryPoint::mul_base_clamped(self.private).to_bytes();
    }

    fn generate(&mut self, rng: &mut dyn Random) -> Result<(), snow::Error> {
        let mut private = Key::default();
        rng.try_fill_bytes(&mut private[..])?;
        self.set(&private[..]);
        Ok(())
    }

    fn pubkey(&self) -> &[u8] {
        &self.public
    }

    fn privkey(&self) -> &[u8] {
        &self.private
    }

    fn dh(&self, public: &[u8], out: &mut [u8]) -> Result<(), snow::Error> {
        let public = *public.first_chunk().ok_or(snow::Error::Dh)?;
        out[..KEY].copy_from_slice(&MontgomeryPoint(public).mul_clamped(self.private).to_bytes());
        Ok(())
    }
}

#[derive(Default)]
struct Sha(Sha256);

impl Hash for Sha {
    fn name(&self) -> &'static str {
        "SHA256"
    }

    fn block_len(&self) -> usize {
        64
    }

    fn hash_len(&self) -> usize {
        32
    }

    fn reset(&mut self) {
        self.0.reset();
    }

    fn input(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    fn result(&mut self, out: &mut [u8]) {
        out[..32].copy_from_slice(&self.0.finalize_reset());
    }
}

/// AES-256-GCM, with the processor's instructions if it has them, which is detected at run time.
#[derive(Default)]
pub(crate) struct AesGcm(Option<Box<Aes256Gcm>>);

impl AesGcm {
    /// Creates the cipher for a key.
    pub(crate) fn new(key: &[u8; KEY]) -> Self {
        AesGcm(Some(Box::new(Aes256Gcm::new(key.into()))))
    }

    fn keyed(&self) -> &Aes256Gcm {
        self.0.as_deref().expect("a cipher is used after its key was set")
    }

    /// Returns the nonce for a message number, as Noise defines it.
    fn nonce(number: u64) -> [u8; 12] {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&number.to_be_bytes());
        nonce
    }

    /// Encrypts the message with this number, in place or into another buffer. Returns the
    /// authentication tag.
    pub(crate) fn seal(
        &self,
        number: u64,
        with: &[u8],
        message: InOutBuf<'_, '_, u8>,
    ) -> [u8; TAG] {
        let sealed =
            self.keyed().encrypt_inout_detached(&Self::nonce(number).into(), with, message);
        sealed.expect("it is shorter than 64 GiB").into()
    }

    /// Decrypts the message with this number in place. Returns false, and leaves garbage, if the
    /// message was altered.
    pub(crate) fn open(
        &self,
        number: u64,
        with: &[u8],
        message: InOutBuf<'_, '_, u8>,
        tag: &[u8; TAG],
    ) -> bool {
        let tag: &Tag = tag.into();
        self.keyed().decrypt_inout_detached(&Self::nonce(number).into(), with, message, tag).is_ok()
    }
}

impl Cipher for AesGcm {
    fn name(&self) -> &'static str {
        "AESGCM"
    }

    fn set(&mut self, key: &[u8; KEY]) {
        *self = AesGcm::new(key);
    }

    /// Like Noise's default, but erases the new key after its use.
    fn rekey(&mut self) {
        let mut key = Key::default();
        self.seal(u64::MAX, &[], (&mut key[..]).into());
        self.set(&key);
    }

    fn encrypt(&self, number: u64, with: &[u8], message: &[u8], out: &mut [u8]) -> usize {
        let (sealed, rest) = out.split_at_mut(message.len());
        let whole = InOutBuf::new(message, sealed).expect("they are equally long");
        rest[..TAG].copy_from_slice(&self.seal(number, with, whole));
        message.len() + TAG
    }

    fn decrypt(
        &self,
        number: u64,
        with: &[u8],
        message: &[u8],
        out: &mut [u8],
    ) -> Result<usize, snow::Error> {
        let (sealed, tag) = message.split_last_chunk().ok_or(snow::Error::Decrypt)?;
        let whole = out.get_mut(..sealed.len()).and_then(|out| InOutBuf::new(sealed, out).ok());
        let whole = whole.ok_or(snow::Error::Decrypt)?;
        if self.open(number, with, whole, tag) {
            Ok(sealed.len())
        } else {
            Err(snow::Error::Decrypt)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let digits = hex.as_bytes().chunks(2);
        digits
            .map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap())
            .collect()
    }

    /// A dialogue that other implementations of Noise publish for this pattern.
    #[test]
    fn it_interoperates_with_other_implementations_of_noise() {
        let prologue = bytes("4a6f686e2047616c74");
        let key = bytes("54686973206973206d7920417573747269616e20706572737065637469766521");
        let key: &[u8; KEY] = key[..].try_into().unwrap();
        let ephemeral = [
            bytes("893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a"),
            bytes("bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b"),
        ];
        let fixed = |end: usize| {
            builder(key, &prologue).unwrap().fixed_ephemeral_key_for_testing_only(&ephemeral[end])
        };
        let mut initiator = NoiseHandshake::of(fixed(0).build_initiator().unwrap());
        let mut responder = NoiseHandshake::of(fixed(1).build_responder().unwrap());
        let mut said = Vec::new();
        initiator.write(&bytes("4c756477696720766f6e204d69736573"), &mut said).unwrap();
        let expected = "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944\
                        7c37a89fc17813788d30df2d59501d6066f5f8aecc3406bbd9829f2d24a531b1";
        assert_eq!(said, bytes(expected));
        assert_eq!(responder.read(&said).unwrap(), b"Ludwig von Mises");
        said.clear();
        responder.write(&bytes("4d757272617920526f746862617264"), &mut said).unwrap();
        let expected = "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843\
                        2f29d79368ef9de4e1ae7a362fb05bf0ad668e026bf5714554497b3a720461";
        assert_eq!(said, bytes(expected));
        assert_eq!(initiator.read(&said).unwrap(), b"Murray Rothbard");
        let (to_responder, to_initiator) = initiator.0.dangerously_get_raw_split();
        for (key, plain, expected) in [
            (
                to_responder,
                "462e20412e20486179656b",
                "7c01e898a6201f36aecee532e29cd0b7f8ffa29d3366ad0dce39a6",
            ),
            (
                to_initiator,
                "4361726c204d656e676572",
                "a9ff535aace3db6a1da1a7fb00fe2de2622bb373abad9fb42c00e0",
            ),
        ] {
            let mut sealed = bytes(plain);
            let tag = AesGcm::new(&key).seal(0, &[], (&mut sealed[..]).into());
            sealed.extend_from_slice(&tag);
            assert_eq!(sealed, bytes(expected));
        }
    }

    #[test]
    fn another_key_or_prologue_and_truncated_messages_are_rejected() {
        let said = |key: u8, prologue: &[u8]| {
            let mut said = Vec::new();
            let mut initiator = NoiseHandshake::initiator(&[key; KEY], prologue).unwrap();
            initiator.write(b"payload", &mut said).unwrap();
            said
        };
        let read =
            |said: &[u8]| NoiseHandshake::responder(&[1; KEY], b"prologue").unwrap().read(said);
        let good = said(1, b"prologue");
        assert_eq!(read(&good).unwrap(), b"payload");
        assert!(read(&said(2, b"prologue")).is_none() && read(&said(1, b"prologu")).is_none());
        for len in 0..good.len() {
            assert!(read(&good[..len]).is_none(), "{len} bytes");
        }
    }

    #[test]
    fn freed_memory_contains_no_key() {
        let key: [u8; KEY] = std::array::from_fn(|at| 0x41 + at as u8);
        let private = [[0x91; KEY], [0x92; KEY]];
        let end = |end: usize| {
            builder(&key, &[]).unwrap().fixed_ephemeral_key_for_testing_only(&private[end])
        };
        let mut initiator =
            Box::new(NoiseHandshake::of(end(0).build_initiator().expect("a valid pattern")));
        let mut responder =
            Box::new(NoiseHandshake::of(end(1).build_responder().expect("a valid pattern")));
        let unfinished = Box::new(NoiseHandshake::initiator(&key, &[]).unwrap());
        let mut message = Vec::new();
        initiator.write(&[], &mut message).unwrap();
        responder.read(&message).unwrap();
        message.clear();
        responder.write(&[], &mut message).unwrap();
        initiator.read(&message).unwrap();
        let (to_responder, to_initiator) = initiator.0.dangerously_get_raw_split();
        let (mut ours, theirs) = (Box::new(initiator.seals()), Box::new(responder.seals()));
        let keys = [key, private[0], private[1], to_responder, to_initiator];
        let freed = crate::freed::containing(&keys, || {
            ours.sealer.rekey_for_test();
            drop((initiator, responder, unfinished, ours, theirs));
        });
        assert_eq!(freed, 0, "freed blocks contain keys");
    }
}
