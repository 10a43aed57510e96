//! ZeroMQ connections of KV cache events. `kvx serve` publishes over them, and the proxy subscribes.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use kvx_vllm::zmtp::{
    Budget, Command, Decoder, GREETING, Input, MessageLimits, SocketType, check_greeting,
    check_ready, message_pieces, opening,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::error::{Error, Result};

/// The bytes that are read at once.
const READ: usize = 16 << 10;

/// A connection between two sockets that have greeted each other.
#[derive(Debug)]
pub struct EventConnection {
    stream: TcpStream,
    decoder: Decoder,
    /// Bytes that were read and not decoded yet.
    unread: Vec<u8>,
    at: usize,
    /// The type of the peer's socket.
    peer: SocketType,
}

fn broken(error: std::io::Error) -> Error {
    Error::io("the connection broke", error)
}

fn wrong(error: kvx_vllm::DecodeError) -> Error {
    Error::new(error.to_string())
}

fn closed() -> Error {
    Error::new("the other end closed the connection")
}

/// A host and a port, from an endpoint such as `tcp://10.0.0.1:5557`. The host is `*` for all
/// addresses.
///
/// # Errors
///
/// Fails if the text has another form.
pub fn parse_endpoint(endpoint: &str) -> Result<(String, u16)> {
    let wrong = || Error::new(format!("{endpoint:?} is not an endpoint; write tcp://HOST:PORT"));
    let rest = endpoint.strip_prefix("tcp://").ok_or_else(wrong)?;
    let (host, port) = rest.rsplit_once(':').ok_or_else(wrong)?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let is_host = |host: &str| {
        !host.is_empty() && !host.contains(|c: char| c.is_whitespace() || "/@?#[]".contains(c))
    };
    match port.parse() {
        Ok(port) if is_host(bare) => Ok((bare.to_owned(), port)),
        _ => Err(wrong()),
    }
}

impl EventConnection {
    /// Greets the other end as a socket of this type.
    ///
    /// # Errors
    ///
    /// Fails if the other end is no such socket, or does not greet in time.
    pub async fn open(
        stream: TcpStream,
        kind: SocketType,
        limits: MessageLimits,
        budget: &Arc<Budget>,
        within: Duration,
    ) -> Result<Self> {
        let mut connection = EventConnection {
            stream,
            decoder: Decoder::new(limits, budget),
            unread: Vec::new(),
            at: 0,
            peer: kind,
        };
        match timeout(within, connection.greet(kind)).await {
            Ok(greeted) => greeted.map(|()| connection),
            Err(_) => Err(Error::new(format!("the other end did not greet within {within:.1?}"))),
        }
    }

    async fn greet(&mut self, kind: SocketType) -> Result<()> {
        self.stream.set_nodelay(true).map_err(broken)?;
        self.stream.write_all(&opening(kind)).await.map_err(broken)?;
        let mut theirs = [0; GREETING];
        match self.stream.read_exact(&mut theirs).await {
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Err(closed()),
            read => read.map_err(broken)?,
        };
        check_greeting(&theirs).map_err(wrong)?;
        let input = self.next().await?.ok_or_else(closed)?;
        self.peer = check_ready(kind, input).map_err(wrong)?.kind;
        Ok(())
    }

    /// Returns the type of the peer's socket.
    pub fn peer(&self) -> SocketType {
        self.peer
    }

    /// Returns the next message or command; `None` if the other end has closed the connection. The
    /// future may be dropped at any moment without losing data.
    ///
    /// # Errors
    ///
    /// Fails if the connection breaks, or if what arrives is malformed or too large.
    pub async fn next(&mut self) -> Result<Option<Input>> {
        loop {
            let mut left = &self.unread[self.at..];
            let input = self.decoder.next(&mut left);
            self.at = self.unread.len() - left.len();
            if let Some(input) = input.map_err(wrong)? {
                return Ok(Some(input));
            }
            self.unread.clear();
            self.at = 0;
            self.unread.reserve(READ);
            let read = self.stream.read_buf(&mut self.unread).await.map_err(broken)?;
            if read == 0 {
                return if self.decoder.is_between() { Ok(None) } else { Err(closed()) };
            }
        }
    }

    /// Sends a message.
    ///
    /// # Errors
    ///
    /// Fails if the connection breaks, or if the other end does not read in time.
    pub async fn send<F: AsRef<[u8]>>(&mut self, frames: &[F], within: Duration) -> Result<()> {
        self.write(&message_pieces(frames), within).await
    }

    /// Sends a command.
    ///
    /// # Errors
    ///
    /// Fails as [`send`](Self::send) does.
    pub async fn command(&mut self, command: &Command, within: Duration) -> Result<()> {
        let mut out = Vec::new();
        command.put(&mut out);
        self.write(&[Cow::Owned(out)], within).await
    }

    async fn write(&mut self, pieces: &[Cow<'_, [u8]>], within: Duration) -> Result<()> {
        let all = async {
            for piece in pieces {
                self.stream.write_all(piece).await?;
            }
            Ok(())
        };
        match timeout(within, all).await {
            Ok(written) => written.map_err(broken),
            Err(_) => Err(Error::new(format!("the other end read nothing for {within:.1?}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_have_a_host_and_a_port() {
        let host = |endpoint| parse_endpoint(endpoint).unwrap();
        assert_eq!(host("tcp://*:5557"), ("*".to_owned(), 5557));
        assert_eq!(host("tcp://10.0.0.1:1"), ("10.0.0.1".to_owned(), 1));
        assert_eq!(host("tcp://[::1]:5557"), ("::1".to_owned(), 5557));
        for wrong in ["", "tcp://", "tcp://a", "tcp://:1", "a:1", "ipc://a:1", "tcp://a:65536"] {
            assert!(parse_endpoint(wrong).unwrap_err().to_string().contains("tcp://HOST:PORT"));
        }
    }
}
