//! The subset of ZMTP 3 that vLLM's sockets use, as bytes: greetings, frames and commands of
//! versions 3.0 and 3.1 with the NULL mechanism.
//!
//! The decoder checks limits before it allocates memory for a peer: the frames and bytes of a
//! message ([`MessageLimits`]), and the bytes of all messages of a socket ([`Budget`]).

mod budget;
#[doc(hidden)]
pub mod fuzz;
mod opening;

use std::borrow::Cow;
use std::sync::Arc;

use crate::{DecodeError, DecodeErrorKind};

pub use self::budget::{Budget, BudgetShare};
pub use self::opening::{PeerSocket, check_ready, opening};

type Result<T> = std::result::Result<T, DecodeError>;

/// The length of a greeting, in bytes.
pub const GREETING: usize = 64;
/// The length of the prefix of a greeting that identifies ZMTP, in bytes.
pub const SIGNATURE: usize = 10;
/// The longest command that is read, in bytes. A READY with an identity of 255 bytes takes less
/// than 400.
const MAX_COMMAND: usize = 1024;
/// The longest identity of a socket, in bytes.
const MAX_IDENTITY: usize = 255;
/// The longest context of a PING, in bytes.
const MAX_CONTEXT: usize = 16;
/// Frames up to this size are copied, and sent together.
const SMALL: usize = 16 << 10;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// The type of a socket, as it names itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketType {
    /// Sends a request, then waits for the reply.
    Req,
    /// Sends requests without waiting for replies.
    Dealer,
    /// Replies to both of the others.
    Router,
    /// Sends each message to all subscribers of its topic.
    Pub,
    /// Receives the messages of the topics that it has subscribed to.
    Sub,
    /// A [`Pub`](SocketType::Pub) whose program sees subscriptions.
    XPub,
    /// A [`Sub`](SocketType::Sub) whose program sends subscriptions.
    XSub,
}

impl SocketType {
    /// Returns the name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            SocketType::Req => "REQ",
            SocketType::Dealer => "DEALER",
            SocketType::Router => "ROUTER",
            SocketType::Pub => "PUB",
            SocketType::Sub => "SUB",
            SocketType::XPub => "XPUB",
            SocketType::XSub => "XSUB",
        }
    }

    /// Parses a name. Returns `None` for other socket types.
    pub fn parse(name: &[u8]) -> Option<Self> {
        use SocketType::{Dealer, Pub, Req, Router, Sub, XPub, XSub};
        [Req, Dealer, Router, Pub, Sub, XPub, XSub]
            .into_iter()
            .find(|kind| kind.as_str().as_bytes() == name)
    }

    /// Returns whether sockets of the two types may connect here.
    pub fn speaks_with(self, other: SocketType) -> bool {
        use SocketType::{Dealer, Pub, Req, Router, Sub, XPub, XSub};
        match self {
            Req | Dealer => other == Router,
            Router => matches!(other, Req | Dealer),
            Pub | XPub => matches!(other, Sub | XSub),
            Sub | XSub => matches!(other, Pub | XPub),
        }
    }
}

/// Returns the greeting that both ends send first: ZMTP 3.1, no security.
pub fn greeting() -> [u8; GREETING] {
    let mut bytes = [0; GREETING];
    (bytes[0], bytes[9]) = (0xff, 0x7f);
    (bytes[10], bytes[11]) = (3, 1);
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

fn malformed(why: impl std::fmt::Display) -> DecodeError {
    DecodeError::new(DecodeErrorKind::Malformed, format!("malformed ZMTP: {why}"))
}

/// Checks the first bytes of a greeting.
///
/// # Errors
///
/// `Malformed`: the other end is not a ZeroMQ socket.
pub fn check_signature(bytes: &[u8; SIGNATURE]) -> Result<()> {
    match (bytes[0], bytes[9]) {
        (0xff, 0x7f) => Ok(()),
        _ => Err(malformed(
            "no ZeroMQ socket is at the other end; check host and port of the side channel",
        )),
    }
}

/// Checks a greeting.
///
/// # Errors
///
/// `Malformed`; `Incompatible`: an older protocol; `Unsupported`: another security mechanism.
pub fn check_greeting(bytes: &[u8; GREETING]) -> Result<()> {
    check_signature(bytes.first_chunk().expect("a greeting is longer than its signature"))?;
    if bytes[10] < 3 {
        return Err(DecodeError::new(
            DecodeErrorKind::Incompatible,
            format!(
                "the peer speaks ZMTP version {}, not 3; upgrade its ZeroMQ to 4.0 or later",
                bytes[10]
            ),
        ));
    }
    let mechanism = bytes[12..32].split(|byte| *byte == 0).next().unwrap_or_default();
    if mechanism != b"NULL" {
        return Err(DecodeError::new(
            DecodeErrorKind::Unsupported,
            format!(
                "the peer's ZeroMQ socket uses the security mechanism {:?}; vLLM's side channel uses NULL",
                mechanism.escape_ascii().to_string()
            ),
        ));
    }
    Ok(())
}

/// Returns the bytes of a message, to be sent one piece after the other. Large frames are not
/// copied.
pub fn message_pieces<F: AsRef<[u8]>>(frames: &[F]) -> Vec<Cow<'_, [u8]>> {
    let (mut pieces, mut small) = (Vec::new(), Vec::new());
    for (index, frame) in frames.iter().enumerate() {
        let frame = frame.as_ref();
        put_head(&mut small, frame.len(), index + 1 < frames.len());
        if frame.len() <= SMALL {
            small.extend_from_slice(frame);
        } else {
            pieces.extend([Cow::Owned(std::mem::take(&mut small)), Cow::Borrowed(frame)]);
        }
    }
    if !small.is_empty() {
        pieces.push(Cow::Owned(small));
    }
    pieces
}

/// Appends the head of a frame of `len` bytes.
fn put_head(out: &mut Vec<u8>, len: usize, more: bool) {
    let more = if more { MORE } else { 0 };
    match u8::try_from(len) {
        Ok(len) => out.extend([more, len]),
        Err(_) => {
            out.push(more | LONG);
            out.extend((len as u64).to_be_bytes());
        }
    }
}

/// A ZMTP command, which maintains the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// The type of the peer's socket and the identity that it asks for.
    Ready {
        /// The type of the socket, if it is a [`SocketType`].
        kind: Option<SocketType>,
        /// The identity; empty for none.
        identity: Vec<u8>,
    },
    /// The peer rejects the connection, for this reason.
    Error(String),
    /// A request for a [`Pong`](Command::Pong) with the same context.
    Ping {
        /// The bytes that the answer repeats.
        context: Vec<u8>,
    },
    /// The answer to a [`Ping`](Command::Ping).
    Pong {
        /// The context of the ping.
        context: Vec<u8>,
    },
    /// A SUB socket wants the messages of a topic, and of all longer ones that begin with it.
    Subscribe(Vec<u8>),
    /// A SUB socket does not want the messages of a topic any more.
    Cancel(Vec<u8>),
    /// A command of a later version.
    Other,
}

impl Command {
    /// Appends the command, with the head of its frame.
    pub fn put(&self, out: &mut Vec<u8>) {
        let mut body = Vec::new();
        let mut name = |name: &[u8]| {
            body.push(name.len() as u8);
            body.extend(name);
        };
        match self {
            Command::Ready { kind, identity } => {
                name(b"READY");
                let kind = kind.map_or("", SocketType::as_str);
                let properties = [(&b"Socket-Type"[..], kind.as_bytes()), (b"Identity", identity)];
                for (key, value) in properties {
                    body.push(key.len() as u8);
                    body.extend(key);
                    body.extend((value.len() as u32).to_be_bytes());
                    body.extend(value);
                }
            }
            Command::Error(why) => {
                name(b"ERROR");
                let why = &why.as_bytes()[..why.len().min(255)];
                body.push(why.len() as u8);
                body.extend(why);
            }
            Command::Ping { context } => {
                name(b"PING");
                body.extend([0, 0]);
                body.extend(context);
            }
            Command::Pong { context } => {
                name(b"PONG");
                body.extend(context);
            }
            Command::Subscribe(topic) => {
                name(b"SUBSCRIBE");
                body.extend(topic);
            }
            Command::Cancel(topic) => {
                name(b"CANCEL");
                body.extend(topic);
            }
            Command::Other => name(b"OTHER"),
        }
        match u8::try_from(body.len()) {
            Ok(len) => out.extend([COMMAND, len]),
            Err(_) => {
                out.push(COMMAND | LONG);
                out.extend((body.len() as u64).to_be_bytes());
            }
        }
        out.extend(body);
    }

    fn read(body: &[u8]) -> Result<Self> {
        let mut left = body;
        let name = counted(&mut left, 1)?;
        Ok(match name {
            b"READY" => {
                let (mut kind, mut identity) = (None, Vec::new());
                while !left.is_empty() {
                    let (key, value) = (counted(&mut left, 1)?, counted(&mut left, 4)?);
                    // Property names are case-insensitive.
                    if key.eq_ignore_ascii_case(b"Socket-Type") {
                        kind = SocketType::parse(value);
                    } else if key.eq_ignore_ascii_case(b"Identity") {
                        if value.len() > MAX_IDENTITY {
                            return Err(malformed("an identity longer than 255 bytes"));
                        }
                        identity = value.to_owned();
                    }
                }
                Command::Ready { kind, identity }
            }
            b"ERROR" => {
                Command::Error(String::from_utf8_lossy(counted(&mut left, 1)?).into_owned())
            }
            b"PING" => match left.split_at_checked(2) {
                Some((_, context)) if context.len() <= MAX_CONTEXT => {
                    Command::Ping { context: context.to_owned() }
                }
                _ => return Err(malformed("a PING of invalid length")),
            },
            b"PONG" if left.len() <= MAX_CONTEXT => Command::Pong { context: left.to_owned() },
            b"PONG" => return Err(malformed("a PONG of invalid length")),
            b"SUBSCRIBE" => Command::Subscribe(left.to_owned()),
            b"CANCEL" => Command::Cancel(left.to_owned()),
            _ => Command::Other,
        })
    }
}

/// Reads a length of `width` bytes, and a value of that length.
fn counted<'a>(left: &mut &'a [u8], width: usize) -> Result<&'a [u8]> {
    let cut = || malformed("a command ends in the middle");
    let (len, rest) = left.split_at_checked(width).ok_or_else(cut)?;
    let len = len.iter().fold(0, |len, byte| len << 8 | usize::from(*byte));
    let (value, rest) = rest.split_at_checked(len).ok_or_else(cut)?;
    *left = rest;
    Ok(value)
}

/// The limits of one message.
#[derive(Clone, Copy, Debug)]
pub struct MessageLimits {
    /// The most frames.
    pub frames: usize,
    /// The most bytes in all frames.
    pub bytes: usize,
}

/// A message or command from a peer.
#[derive(Debug)]
pub enum Input {
    /// A message.
    Message(Message),
    /// A command.
    Command(Command),
}

/// The frames of a message. Dropping it returns its bytes to the budget.
#[derive(Debug)]
pub struct Message {
    frames: Vec<Vec<u8>>,
    _held: BudgetShare,
}

impl Message {
    /// Returns the frames.
    pub fn frames(&self) -> &[Vec<u8>] {
        &self.frames
    }

    /// Inserts a frame at the front: the identity by which a ROUTER addresses its peer.
    pub fn put_first(&mut self, frame: Vec<u8>) {
        self.frames.insert(0, frame);
    }

    /// Removes and returns the first frame.
    pub fn take_first(&mut self) -> Option<Vec<u8>> {
        (!self.frames.is_empty()).then(|| self.frames.remove(0))
    }
}

/// A decoder of messages and commands in the bytes after the greeting, in pieces of any size.
#[derive(Debug)]
pub struct Decoder {
    limits: MessageLimits,
    /// The complete frames of the current message.
    frames: Vec<Vec<u8>>,
    held: BudgetShare,
    /// The number of bytes in `frames`.
    taken: usize,
    head: Vec<u8>,
    body: Option<Body>,
}

#[derive(Debug)]
struct Body {
    flags: u8,
    len: usize,
    bytes: Vec<u8>,
}

impl Decoder {
    /// Creates a decoder with these limits. The bytes of messages are taken from `budget`.
    pub fn new(limits: MessageLimits, budget: &Arc<Budget>) -> Self {
        Decoder {
            limits,
            frames: Vec::new(),
            held: budget.share(),
            taken: 0,
            head: Vec::new(),
            body: None,
        }
    }

    /// Returns whether no byte of the next message or command has arrived.
    pub fn is_between(&self) -> bool {
        self.frames.is_empty() && self.head.is_empty() && self.body.is_none()
    }

    /// Consumes `bytes` from the front until a message or command is complete. Returns `None` if
    /// more bytes are needed.
    ///
    /// # Errors
    ///
    /// `Malformed`; `Exhausted`: the budget has no more bytes.
    pub fn next(&mut self, bytes: &mut &[u8]) -> Result<Option<Input>> {
        loop {
            let Some(body) = &mut self.body else {
                let Some((first, rest)) = bytes.split_first() else { return Ok(None) };
                self.head.push(*first);
                *bytes = rest;
                self.body = self.headed()?;
                continue;
            };
            let wanted = body.len - body.bytes.len();
            let (piece, rest) = bytes.split_at(wanted.min(bytes.len()));
            // Memory grows with the bytes that arrive, not with the announced length.
            self.held.take(piece.len())?;
            body.bytes.extend_from_slice(piece);
            *bytes = rest;
            if body.bytes.len() < body.len {
                return Ok(None);
            }
            let Some(Body { flags, len, bytes: body }) = self.body.take() else { continue };
            if flags & COMMAND != 0 {
                self.held.give_back(len);
                return Command::read(&body).map(|command| Some(Input::Command(command)));
            }
            self.taken += len;
            self.frames.push(body);
            if flags & MORE == 0 {
                self.taken = 0;
                let frames = std::mem::take(&mut self.frames);
                return Ok(Some(Input::Message(Message { frames, _held: self.held.hand_over() })));
            }
        }
    }

    /// Returns the body that the head announces, or `None` while the head is incomplete.
    fn headed(&mut self) -> Result<Option<Body>> {
        let flags = self.head[0];
        if flags & !(MORE | LONG | COMMAND) != 0 || flags & COMMAND != 0 && flags & MORE != 0 {
            return Err(malformed(format_args!("invalid frame flags {flags:#04x}")));
        }
        let width = if flags & LONG == 0 { 1 } else { 8 };
        if self.head.len() <= width {
            return Ok(None);
        }
        let len = self.head[1..].iter().fold(0, |len: u64, byte| len << 8 | u64::from(*byte));
        self.head.clear();
        let most = match flags & COMMAND {
            0 => self.limits.bytes - self.taken,
            _ if !self.frames.is_empty() => return Err(malformed("a command within a message")),
            _ => MAX_COMMAND,
        };
        if self.frames.len() >= self.limits.frames {
            return Err(malformed(format_args!(
                "a message of more than {} frames",
                self.limits.frames
            )));
        }
        match usize::try_from(len).ok().filter(|len| *len <= most) {
            Some(len) => Ok(Some(Body { flags, len, bytes: Vec::new() })),
            None => {
                Err(malformed(format_args!("a frame of {len} bytes exceeds the limit of {most}")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_frames_are_sent_together_and_large_ones_are_not_copied() {
        let (small, large) = (vec![1; SMALL], vec![2; SMALL + 1]);
        let frames = [&small[..], &small, &large, &small];
        let pieces = message_pieces(&frames);
        assert_eq!(pieces.len(), 3);
        assert!(matches!(pieces[1], Cow::Borrowed(piece) if std::ptr::eq(piece, frames[2])));
        let limits = MessageLimits { frames: 4, bytes: 1 << 20 };
        let mut decoder = Decoder::new(limits, &Budget::new(1 << 20));
        let Some(Input::Message(message)) = decoder.next(&mut &pieces.concat()[..]).unwrap() else {
            panic!("the message is whole");
        };
        assert_eq!(message.frames(), frames);
        assert_eq!(message_pieces(&[large]).len(), 2, "nothing follows the last frame");
    }
}
