//! One connection, from its greeting on.

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

/// Frames up to this size are sent together.
const SMALL: usize = 16 << 10;
/// Bytes that are read at once: a handshake's answer has some thousands.
const READ: usize = 4 << 10;
/// Commands that a peer may send within [`WHILE`] without a message: a living one sends a ping now
/// and then.
const COMMANDS: u32 = 64;
const WHILE: Duration = Duration::from_secs(1);

/// What has come.
pub(crate) enum Received {
    Message(Message),
    /// A command, which was obeyed.
    Command,
    /// The other end has closed.
    End,
}

/// A connection between two sockets that have greeted each other.
#[derive(Debug)]
pub(super) struct SocketConnection {
    stream: TcpStream,
    decoder: Decoder,
    /// Read, but not yet decoded.
    unread: Vec<u8>,
    at: usize,
    /// Commands without a message, and since when they are counted.
    commands: (u32, Instant),
    /// The identity that the peer wants to have; empty: any.
    pub(super) identity: Vec<u8>,
}

fn broken(error: std::io::Error) -> Error {
    Error::os("the connection of the side channel broke", error)
}

fn ended() -> Error {
    Error::new(ErrorKind::PeerLost, "the other end of the side channel closed the connection")
}

fn late(limit: Duration, what: &str) -> Error {
    Error::new(
        ErrorKind::TimedOut,
        format!("the other end of the side channel {what} within {limit:?}"),
    )
}

impl SocketConnection {
    /// Greets, and is ready when the other end is. Errors: no ZMTP, sockets that do not go
    /// together, `TimedOut`.
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

    /// Returns whether all that has come was taken, and more may come.
    pub(super) fn is_quiet(&self) -> bool {
        let look = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        self.at == self.unread.len()
            && matches!(rustix::net::recv(&self.stream, &mut [0; 1], look), Err(Errno::AGAIN))
    }

    async fn greet(&mut self, kind: SocketType) -> Result<()> {
        self.stream.set_nodelay(true).map_err(broken)?;
        let mut out = zmtp::greeting().to_vec();
        Command::Ready { kind: Some(kind), identity: Vec::new() }.put(&mut out);
        // Greeting and READY may go together: with NULL nothing in READY depends on the other
        // greeting.
        self.stream.write_all(&out).await.map_err(broken)?;
        let mut theirs = [0; zmtp::GREETING];
        let (signature, rest) =
            theirs.split_first_chunk_mut().expect("a greeting begins with its signature");
        self.exact(signature).await?;
        zmtp::check_signature(signature)?;
        self.exact(rest).await?;
        zmtp::check_greeting(&theirs)?;
        match self.input().await? {
            Some(Input::Command(Command::Ready { kind: Some(theirs), identity }))
                if kind.speaks_with(theirs) =>
            {
                self.identity = identity;
                Ok(())
            }
            Some(Input::Command(Command::Ready { .. })) => Err(Error::new(
                ErrorKind::Unsupported,
                format!("the other end is no socket that a {} speaks with", kind.as_str()),
            )),
            Some(Input::Command(Command::Error(why))) => Err(refused(&why)),
            None => Err(ended()),
            Some(_) => Err(Error::new(ErrorKind::Malformed, "malformed ZMTP: READY wanted first")),
        }
    }

    async fn exact(&mut self, bytes: &mut [u8]) -> Result<()> {
        match self.stream.read_exact(bytes).await {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Err(ended()),
            Err(error) => Err(broken(error)),
        }
    }

    /// The next message or command. `None`: the end, between messages.
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

    /// Reads what there is, once there is something. Takes no memory before that.
    async fn fill(&mut self) -> Result<usize> {
        self.unread = Vec::new();
        self.at = 0;
        loop {
            self.stream.readable().await.map_err(broken)?;
            // A peer that sends without end lets the others have their turn.
            tokio::task::coop::consume_budget().await;
            self.unread.reserve(READ);
            match self.stream.try_read_buf(&mut self.unread) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                done => return done.map_err(broken),
            }
        }
    }

    /// Ends when there is something to [`receive`](Self::receive), or an end of it. May be given up
    /// at any moment: nothing of it is lost.
    pub(super) async fn readable(&mut self) -> Result<()> {
        if self.unread.len() == self.at {
            self.fill().await?;
        }
        Ok(())
    }

    /// The next message; pings are answered on the way. `None`: the other end has closed.
    ///
    /// Once a message has begun, the rest has to come within `limit`; for the first byte of it
    /// there is no limit here.
    pub(super) async fn receive(&mut self, limit: Duration) -> Result<Option<Message>> {
        loop {
            match self.receive_one(limit).await? {
                Received::Message(message) => return Ok(Some(message)),
                Received::Command => {}
                Received::End => return Ok(None),
            }
        }
    }

    /// As [`receive`](Self::receive), and ends after a ping, too: who has to say something
    /// meanwhile can do so.
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
            return Err(Error::new(ErrorKind::Malformed, why));
        }
        match command {
            Command::Ping { context } => {
                let mut out = Vec::new();
                Command::Pong { context }.put(&mut out);
                self.write(&[&out], Instant::now() + limit).await
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
        let until = Instant::now() + limit;
        let mut out = Vec::new();
        for (index, frame) in frames.iter().enumerate() {
            let frame = frame.as_ref();
            zmtp::put_head(&mut out, frame.len(), index + 1 < frames.len());
            if frame.len() <= SMALL {
                out.extend_from_slice(frame);
            } else {
                self.write(&[&out, frame], until).await?;
                out.clear();
            }
        }
        self.write(&[&out], until).await
    }

    async fn write(&mut self, pieces: &[&[u8]], until: Instant) -> Result<()> {
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
    Error::new(
        ErrorKind::PeerLost,
        format!("the other end of the side channel refuses to talk: {why:?}"),
    )
}
