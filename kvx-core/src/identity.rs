//! Names and numbers of agents, regions, links and transfers.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::fault_injection::injected;
use crate::{Error, ErrorKind, Result};

/// One run of an agent: 128 random bits that are drawn when it is built. A restarted agent has a
/// new incarnation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Incarnation(pub [u8; 16]);

impl Incarnation {
    /// Draws a new incarnation.
    ///
    /// # Errors
    /// `Native` if the operating system gives no random bytes.
    pub fn random() -> Result<Self> {
        random_bytes().map(Incarnation)
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The number of changes of an agent's metadata within one incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Generation(pub u64);

/// The number of a region within one incarnation of an agent; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(pub u64);

impl fmt::Display for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// A key of 128 random bits that a peer must present to reach a region.
#[derive(Clone, Copy)]
pub struct RegionKey(pub [u8; 16]);

impl RegionKey {
    /// Draws a new key.
    ///
    /// # Errors
    /// `Native` if the operating system gives no random bytes.
    pub fn random() -> Result<Self> {
        random_bytes().map(RegionKey)
    }

    /// Compares two keys in constant time.
    pub fn matches(&self, other: &RegionKey) -> bool {
        u128::from_ne_bytes(self.0) ^ u128::from_ne_bytes(other.0) == 0 || injected("any-key")
    }
}

/// Keys stay out of logs.
impl fmt::Debug for RegionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RegionKey(…)")
    }
}

/// The invitation in an agent's metadata: 256 random bits, drawn for each incarnation. Peers that
/// cannot prove that they have it are unauthenticated and get no information. It travels only in
/// metadata.
#[derive(Clone, Copy)]
pub struct Invitation([u8; 32]);

impl Invitation {
    /// Draws a new invitation.
    ///
    /// # Errors
    /// `Native` if the operating system gives no random bytes.
    pub fn random() -> Result<Self> {
        if injected("any-invitation") {
            return Ok(Invitation([0; 32]));
        }
        random_key().map(Invitation)
    }

    /// Creates the invitation from its bytes in metadata.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Invitation(bytes)
    }

    /// Returns the bytes: a secret key for the handshake's proof.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Invitations stay out of logs.
impl fmt::Debug for Invitation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Invitation(…)")
    }
}

/// The number of a link between two agents over one transport, assigned by the initiating agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u64);

/// A handle to a peer within this process. Never reused, even if two handles refer to the same
/// incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerId(u64);

impl PeerId {
    /// Returns the next number.
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        PeerId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The number of a transfer of one agent; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(pub u64);

/// The maximum length of an agent's or a region's name, in bytes.
pub const MAX_NAME: usize = 255;

/// An agent, by name and incarnation.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Identity {
    /// The agent's name, which its program chose.
    pub name: Arc<str>,
    /// The run of the agent.
    pub incarnation: Incarnation,
}

impl Identity {
    /// Borrows the identity as the sender of a notification.
    pub fn as_sender(&self) -> Sender<'_> {
        Sender { name: &self.name, incarnation: self.incarnation }
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.name, self.incarnation)
    }
}

/// The sender of a notification. Each notification carries it, so the receiver need not have
/// connected to the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sender<'a> {
    /// The sending agent's name.
    pub name: &'a str,
    /// The sender's incarnation.
    pub incarnation: Incarnation,
}

/// Checks the name of an agent or a region: 1 to 255 bytes without control characters.
///
/// # Errors
/// `Invalid` for any other name.
pub(crate) fn checked_name(what: &str, name: &str) -> Result<Arc<str>> {
    if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
        return Err(ErrorKind::Invalid.because(format!(
            "{what} {name:?} is not a name: use 1 to {MAX_NAME} bytes without control characters"
        )));
    }
    Ok(name.into())
}

/// Returns an unpredictable number from the operating system.
///
/// # Errors
/// `Native` if the operating system gives no random bytes.
pub fn random_number() -> Result<u64> {
    let [a, b, c, d, e, f, g, h, ..] = random_bytes()?;
    Ok(u64::from_le_bytes([a, b, c, d, e, f, g, h]))
}

/// Returns 256 unpredictable bits from the operating system.
///
/// # Errors
/// `Native` if the operating system gives no random bytes.
pub fn random_key() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    bytes[..16].copy_from_slice(&random_bytes()?);
    bytes[16..].copy_from_slice(&random_bytes()?);
    Ok(bytes)
}

#[cfg(all(target_os = "linux", not(kvx_portable)))]
fn random_bytes() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| Error::os("the operating system gave no random bytes", error))?;
    if got != bytes.len() {
        return Err(
            ErrorKind::Native.because("the operating system gave too few random bytes; try again")
        );
    }
    Ok(bytes)
}

#[cfg(any(not(target_os = "linux"), kvx_portable))]
fn random_bytes() -> Result<[u8; 16]> {
    use std::io::Read as _;
    let mut bytes = [0; 16];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut source| source.read_exact(&mut bytes))
        .map_err(|error| Error::os("the operating system gave no random bytes", error))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incarnations_and_keys_differ_from_draw_to_draw() {
        assert_ne!(Incarnation::random().unwrap(), Incarnation::random().unwrap());
        assert!(!RegionKey::random().unwrap().matches(&RegionKey::random().unwrap()));
    }

    #[test]
    fn a_key_is_not_printed() {
        assert_eq!(format!("{:?}", RegionKey([7; 16])), "RegionKey(…)");
        assert_eq!(format!("{:?}", Invitation([7; 32])), "Invitation(…)");
    }

    #[test]
    fn names_are_checked() {
        assert!(checked_name("agent", "prefill-0").is_ok());
        for bad in ["", "a\nb", &"x".repeat(256)] {
            assert_eq!(checked_name("agent", bad).unwrap_err().kind(), ErrorKind::Invalid);
        }
    }
}
