//! One connection, from its greeting on.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{Error, ErrorKind, Result};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{Budget, Message, MessageLimits, SocketType};
use kvx_vllm::zmtp::{self, Command, Decoder, Input};

/// The number of bytes read at once. A handshake's answer has some thousands.
const READ: usize = 4 << 10;
/// The number of commands that a peer may send within [`WHILE`] without a message. A live peer
/// sends a ping now and then.
const COMMANDS: u32 = 64;
const WHILE: Duration = Duration::from_secs(1);

/// The next item of a connection.
pub(crate) enum Received {
    Message(Message),
    /// A command, which has been handled.
    Command,
    /// The other end has closed the connection.
    End,
}

/// A connection between two sockets that have greeted each other.
#[derive(Debug)]
pub(super) struct SocketConnection {
    stream: TcpStream,
    decoder: Decoder,
    /// Bytes that were read and not decoded yet.
    unread: Vec<u8>,
    at: usize,
    /// The number of commands since the last message, and the time from which they are counted.
    commands: (u32, Instant),
    /// The identity that the peer asks for. Empty if it has none.
    pub(super) identity: Vec<u8>,
}

fn broken(error: std::io::Error) -> Error {
    Error::os("the connection of the side channel broke", error)
}

fn ended() -> Error {
    ErrorKind::PeerLost.because("the other end of the side channel closed the connection")
}

fn late(limit: Duration, what: &str) -> Error {
    ErrorKind::TimedOut
        .because(format!("the other end of the side channel {what} within {limit:.1?}"))
}

impl SocketConnection {
    /// Exchanges greetings. Errors: `Malformed`, `Incompatible`, `Unsupported`: the peer does not
    /// speak this ZMTP, or its socket type does not match; `TimedOut`; `PeerLost`.
    pub(super) async fn open(
        stream: TcpStream,
        kind: SocketType,
        limits: MessageLimits,
        budget: &Arc<Budget>,
        limit: Duration,
    ) -> Result<Self> {
        let mut connection = SocketConnection {
            stream,
            decoder: Decoder::new(limits, budget),
            unread: Vec::new(),
            at: 0,
            commands: (0, Instant::now()),
            identity: Vec::new(),
        };
        match timeout(limit, connection.greet(kind)).await {
            Ok(done) => done.map(|()| connection),
            Err(_) => Err(late(limit, "did not greet")),
        }
    }

    /// Returns whether all received bytes were taken and the connection is still open.
    pub(super) fn is_quiet(&self) -> bool {
        let look = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        self.at == self.unread.len()
            && matches!(rustix::net::recv(&self.stream, &mut [0; 1], look), Err(Errno::AGAIN))
    }

    /// Sets the limits of the following messages. Must be called between two messages.
    pub(super) fn set_limits(&mut self, limits: MessageLimits, budget: &Arc<Budget>) {
        debug_assert!(self.decoder.is_between(), "a message has arrived in part");
        self.decoder = Decoder::new(limits, budget);
    }

    async fn greet(&mut self, kind: SocketType) -> Result<()> {
        self.stream.set_nodelay(true).map_err(broken)?;
        self.stream.write_all(&zmtp::opening(kind)).await.map_err(broken)?;
        let mut theirs = [0; zmtp::GREETING];
        let (signature, rest) =
            theirs.split_first_chunk_mut().expect("a greeting begins with its signature");
        self.exact(signature).await?;
        zmtp::check_signature(signature)?;
        self.exact(rest).await?;
        zmtp::check_greeting(&theirs)?;
        let input = self.input().await?.ok_or_else(ended)?;
        self.identity = zmtp::check_ready(kind, input)?.identity;
        Ok(())
    }

    async fn exact(&mut self, bytes: &mut [u8]) -> Result<()> {
        match self.stream.read_exact(bytes).await {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Err(ended()),
            Err(error) => Err(broken(error)),
        }
    }

    /// Returns the next message or command. `None`: the other end has closed between messages.
    async fn input(&mut self) -> Result<Option<Input>> {
        loop {
            let mut left = &self.unread[self.at..];
            let input = self.decoder.next(&mut left)?;
            self.at = self.unread.len() - left.len();
            if input.is_some() {
                return Ok(input);
            }
            if self.fill().await? == 0 {
                return if self.decoder.is_between() { Ok(None) } else { Err(ended()) };
            }
        }
    }

    /// Waits for data, and reads the available bytes. Allocates no memory before there are any.
    async fn fill(&mut self) -> Result<usize> {
        self.unread = Vec::new();
        self.at = 0;
        loop {
            self.stream.readable().await.map_err(broken)?;
            // Yield, so that a peer that sends without end does not starve other connections.
            tokio::task::coop::consume_budget().await;
            self.unread.reserve(READ);
            match self.stream.try_read_buf(&mut self.unread) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                done => return done.map_err(broken),
            }
        }
    }

    /// Waits until there is something to [`receive`](Self::receive), or the connection has ended.
    /// The future may be dropped at any moment without losing data.
    pub(super) async fn readable(&mut self) -> Result<()> {
        if self.unread.len() == self.at {
            self.fill().await?;
        }
        Ok(())
    }

    /// Returns the next message. Answers pings in between. `None`: the other end has closed.
    ///
    /// The rest of a message has to arrive within `limit` after its first byte. The wait for the
    /// first byte has no limit.
    pub(super) async fn receive(&mut self, limit: Duration) -> Result<Option<Message>> {
        loop {
            match self.receive_one(limit).await? {
                Received::Message(message) => return Ok(Some(message)),
                Received::Command => {}
                Received::End => return Ok(None),
            }
        }
    }

    /// Receives as [`receive`](Self::receive) does, but returns after a ping too, so that the
    /// caller can send something in between.
    pub(super) async fn receive_one(&mut self, limit: Duration) -> Result<Received> {
        let nothing_of_it = self.unread.len() == self.at && self.decoder.is_between();
        if nothing_of_it && self.fill().await? == 0 {
            return Ok(Received::End);
        }
        match timeout(limit, self.input()).await {
            Err(_) => Err(late(limit, "did not finish a message")),
            Ok(input) => match input? {
                None => Ok(Received::End),
                Some(Input::Message(message)) => {
                    self.commands.0 = 0;
                    Ok(Received::Message(message))
                }
                Some(Input::Command(command)) => {
                    self.obey(command, limit).await?;
                    Ok(Received::Command)
                }
            },
        }
    }

    async fn obey(&mut self, command: Command, limit: Duration) -> Result<()> {
        let (count, since) = &mut self.commands;
        if since.elapsed() > WHILE {
            (*count, *since) = (0, Instant::now());
        }
        *count += 1;
        if *count > COMMANDS {
            let why = format!(
                "malformed ZMTP: more than {COMMANDS} commands within {WHILE:?}, and no message"
            );
            return Err(ErrorKind::Malformed.because(why));
        }
        match command {
            Command::Ping { context } => {
                let mut out = Vec::new();
                Command::Pong { context }.put(&mut out);
                self.write(&[Cow::Owned(out)], Instant::now() + limit).await
            }
            Command::Error(why) => Err(refused(&why)),
            _ => Ok(()),
        }
    }

    /// Sends a message. Errors: `TimedOut`: the other end does not read.
    pub(super) async fn send<F: AsRef<[u8]>>(
        &mut self,
        frames: &[F],
        limit: Duration,
    ) -> Result<()> {
        self.write(&zmtp::message_pieces(frames), Instant::now() + limit).await
    }

    async fn write(&mut self, pieces: &[Cow<'_, [u8]>], until: Instant) -> Result<()> {
        let limit = until.saturating_duration_since(Instant::now());
        let all = async {
            for piece in pieces {
                self.stream.write_all(piece).await?;
            }
            Ok(())
        };
        match timeout(limit, all).await {
            Ok(done) => done.map_err(broken),
            Err(_) => Err(late(limit, "did not read its answer")),
        }
    }
}

fn refused(why: &str) -> Error {
    ErrorKind::PeerLost
        .because(format!("the other end of the side channel refused the connection: {why:?}"))
}
