//! Attackers without the fleet's secret, for tests: one reaches a library's port, and sends
//! hand-made hellos over a library instance of its own; another one alters metadata.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::backend::{Context, Events, Invitation, LinkId, LinkState, Metadata, QueueFull};
use kvx_core::{ErrorKind, Identity, Incarnation, Options, Result, Secret, Sender};

use super::handshake::hello_rest;
use super::lanes;
use super::library::{EndpointId, Fabric, SendStatus};
use super::signed::{Part, PartSigner};
use super::stream::Outgoing;
use super::transport::Parts;
use crate::checksum;
use crate::control::proof::PROOF;
use crate::control::violations::greet;
use crate::process::ProcessId;

/// The time after which the library must have taken a frame.
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns a context to open a library without an agent.
pub fn context(options: Options) -> Context {
    Context {
        agent: stranger(),
        options,
        events: Arc::new(NoEvents),
        devices: Vec::new(),
        invitation: Invitation::from_bytes([9; 32]),
        secret: None,
        peer_timeout: PATIENCE,
    }
}

/// Sends hellos to `owner` for `time`, some 20,000 a second, of two kinds: with the secret `wrong`
/// and every byte of the address altered under a fresh checksum, which would crash a process that
/// parses it; and valid hellos with every byte outside the proofs altered. Returns the number of
/// hellos.
///
/// # Errors
///
/// The library's, or `TimedOut` if it takes no frame.
pub fn flood_with_hellos<F: Fabric>(
    parts: Parts<F>,
    owner: &Metadata,
    (secret, wrong): (&Secret, &Secret),
    time: Duration,
) -> Result<usize> {
    let missing =
        || ErrorKind::Malformed.because("the owner's metadata does not say how it is reached");
    let own = (parts.address)()?;
    let plain = checksum::strip("address", &own)?;
    let invitation = owner.invited.ok_or_else(missing)?.by;
    let (_, section) =
        owner.backends.iter().find(|(name, _)| **name == *parts.name).ok_or_else(missing)?;
    let signer = PartSigner::new(parts.name, Some(secret.clone()));
    let mut library = parts.fabric;
    library.connect(TO, &owner.identity, signer.addresses(&owner.identity, section)?[0])?;
    let mut sender = HelloSender { library, said: 0 };
    let until = Instant::now() + time;
    while sender.said == 0 || Instant::now() < until {
        for flip in FLIPS {
            for at in 0..plain.len() {
                let address = checksum::append(altered(plain, at, flip));
                sender.say(&hello(&invitation, wrong, &address)?)?;
            }
            let true_hello = hello(&invitation, secret, &own)?;
            // A hello ends in two proofs, either of which alone gets an answer.
            for at in 0..true_hello.len() - 2 * PROOF - 4 {
                sender.say(&altered(&true_hello, at, flip))?;
            }
        }
    }
    sender.library.sever(TO);
    sender.library.disconnect(TO);
    sender.library.stop();
    Ok(sender.said)
}

/// Returns the metadata of `owner` once for each byte of the first address of `backend` and each of
/// three changes of it, which would crash a process that parses it: under a fresh checksum, under
/// another name, so that one process can connect with all of them, and signed with the secret
/// `wrong`.
///
/// # Errors
///
/// `Malformed` or `Authentication` if the metadata is not that of an agent with `secret`.
pub fn with_altered_addresses(
    backend: &'static str,
    owner: &Metadata,
    (secret, wrong): (&Secret, Option<&Secret>),
) -> Result<Vec<Metadata>> {
    let missing = || ErrorKind::Malformed.because("the owner does not list the backend");
    let position = owner.backends.iter().position(|(name, _)| **name == *backend);
    let position = position.ok_or_else(missing)?;
    let signer = PartSigner::new(backend, Some(secret.clone()));
    let forger = PartSigner::new(backend, wrong.cloned());
    let addresses = signer.addresses(&owner.identity, &owner.backends[position].1)?;
    let plain = checksum::strip("address", addresses[0])?;
    let forged = (0..plain.len()).flat_map(|at| FLIPS.map(|flip| altered(plain, at, flip)));
    let metadata = forged.enumerate().map(|(number, address)| {
        let first = std::iter::once(checksum::append(address));
        let rest = addresses[1..].iter().map(|address| address.to_vec());
        let all: Vec<_> = first.chain(rest).map(Ok).collect();
        let mut metadata = owner.clone();
        metadata.identity.name = format!("{}-{number}", owner.identity.name).into();
        let section = lanes::encode(all.into_iter())?;
        metadata.backends[position].1 = forger.sign(Part::Addresses, &metadata.identity, section);
        Ok(metadata)
    });
    metadata.collect()
}

/// Removes the signature from a backend's export of a region.
pub fn strip_signature(export: &mut Vec<u8>) {
    export.truncate(export.len().saturating_sub(PROOF));
}

/// Signs a backend's export of a region of `owner`, which has no secret.
pub fn sign_export(backend: &'static str, owner: &Identity, export: &mut Vec<u8>) {
    let signer = PartSigner::new(backend, None);
    *export = signer.sign(Part::Export, owner, std::mem::take(export));
}

/// The changes of a byte.
const FLIPS: [u8; 3] = [0x01, 0x80, 0xff];
const TO: EndpointId = EndpointId(1);
/// The number of hellos in a burst, and the pause after it: without a pause libfabric's ofi_rxm may
/// read without end and starve the owner (docs/project/decisions/libfabric-buffers.md).
const BURST: (usize, Duration) = (32, Duration::from_millis(1));

struct HelloSender<F> {
    library: F,
    said: usize,
}

impl<F: Fabric> HelloSender<F> {
    /// Sends a message as the first one of a new link.
    fn say(&mut self, message: &[u8]) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        self.said += 1;
        if self.said.is_multiple_of(BURST.0) {
            std::thread::sleep(BURST.1);
        }
        let mut frames = Outgoing::default();
        frames.push(0, self.said as u64, message, self.library.max_message());
        while let Some(frame) = frames.front() {
            match self.library.send(TO, frame)? {
                SendStatus::Taken => frames.pop(),
                SendStatus::Later if Instant::now() >= until => {
                    return Err(
                        ErrorKind::TimedOut.because("the library did not take a frame in time")
                    );
                }
                SendStatus::Later => {}
            }
            self.library.poll(&mut Vec::new());
        }
        Ok(())
    }
}

fn altered(bytes: &[u8], at: usize, flip: u8) -> Vec<u8> {
    let mut altered = bytes.to_vec();
    altered[at] ^= flip;
    altered
}

fn stranger() -> Identity {
    Identity { name: "stranger".into(), incarnation: Incarnation([9; 16]) }
}

fn hello(invitation: &Invitation, secret: &Secret, address: &[u8]) -> Result<Vec<u8>> {
    Ok(greet(invitation, Some(secret), &hello_rest(ProcessId::current(), address))?.1)
}

struct NoEvents;

impl Events for NoEvents {
    fn notification(&self, _: Sender<'_>, _: &[u8]) -> Result<(), QueueFull> {
        Err(QueueFull)
    }
    fn link(&self, _: LinkId, _: LinkState) {}
}
