//! REQ and DEALER sockets with one connection. Each handshake opens its own socket.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{ErrorKind, Result};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::connection::SocketConnection;
use super::{Budget, Message, MessageLimits, SocketType};
use kvx_vllm::ids::bare;

/// A socket that asks questions. Drop it after an error: it cannot be used again.
#[derive(Debug)]
pub(crate) struct Client {
    kind: SocketType,
    connection: SocketConnection,
}

impl Client {
    /// Connects to the first reachable address, within `limit`.
    ///
    /// Errors: `PeerLost`: nobody listens, or the peer closes; `Malformed`: it does not speak ZMTP;
    /// `TimedOut`.
    pub(crate) async fn connect(
        kind: SocketType,
        addresses: &[SocketAddr],
        limits: MessageLimits,
        budget: &Arc<Budget>,
        limit: Duration,
    ) -> Result<Self> {
        let until = Instant::now() + limit;
        let mut last = ErrorKind::Invalid.because("no address to connect to");
        for (index, address) in addresses.iter().enumerate() {
            let left = until.saturating_duration_since(Instant::now());
            // An address that does not answer leaves time for the others.
            let share = left / (addresses.len() - index) as u32;
            match timeout(share, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => {
                    let left = until.saturating_duration_since(Instant::now());
                    let connection =
                        SocketConnection::open(stream, kind, limits, budget, left).await?;
                    return Ok(Client { kind, connection });
                }
                Ok(Err(error)) => {
                    last = ErrorKind::PeerLost
                        .because(format!("nobody listens at {address} ({error})"));
                }
                Err(_) => {
                    last = ErrorKind::TimedOut
                        .because(format!("no connection to {address} within {share:.1?}"));
                }
            }
        }
        Err(last)
    }

    /// Sends a question, and waits for the answer.
    ///
    /// Errors: `TimedOut`; `PeerLost`: the other end closed the connection; `Malformed`,
    /// `Exhausted`.
    pub(crate) async fn ask(&mut self, question: &[u8], limit: Duration) -> Result<Message> {
        match timeout(limit, self.exchange(question, limit)).await {
            Ok(done) => done,
            Err(_) => Err(ErrorKind::TimedOut.because(format!("no answer within {limit:.1?}"))),
        }
    }

    async fn exchange(&mut self, question: &[u8], limit: Duration) -> Result<Message> {
        self.send(&[question], limit).await?;
        self.receive(limit).await
    }

    /// Sends a question. Errors: `TimedOut`: the other end does not read; `PeerLost`.
    pub(crate) async fn send(&mut self, question: &[&[u8]], limit: Duration) -> Result<()> {
        // The empty frame that ends the envelope. A REQ socket adds it to a question and removes it
        // from an answer.
        let envelope: &[&[u8]] = if self.kind == SocketType::Req { &[b""] } else { &[] };
        self.connection.send(&[envelope, question].concat(), limit).await
    }

    /// Sets the limits of the following answers, after the peer has authenticated.
    pub(crate) fn set_limits(&mut self, limits: MessageLimits, budget: &Arc<Budget>) {
        self.connection.set_limits(limits, budget);
    }

    /// Returns whether the socket can be used again: no unexpected data has arrived, and the other
    /// end has not closed it.
    pub(crate) fn is_quiet(&self) -> bool {
        self.connection.is_quiet()
    }

    /// Waits for the next answer. The rest of an answer has to arrive within `limit` after its
    /// first byte.
    ///
    /// Errors: `TimedOut`; `PeerLost`: the other end closed the connection; `Malformed`,
    /// `Exhausted`.
    pub(crate) async fn receive(&mut self, limit: Duration) -> Result<Message> {
        let closed = || {
            ErrorKind::PeerLost.because("the side channel closed the connection without an answer")
        };
        let mut message = self.connection.receive(limit).await?.ok_or_else(closed)?;
        if self.kind == SocketType::Req
            && message.take_first().is_none_or(|frame| !frame.is_empty())
        {
            return Err(ErrorKind::Malformed.because(
                "malformed ZMTP: an answer to a REQ socket has no empty frame at its start",
            ));
        }
        Ok(message)
    }
}

/// Returns the addresses of a host. IPv4 comes first, because ZeroMQ binds a name to it.
///
/// Errors: `PeerLost`: the host has no address; `TimedOut`.
pub(crate) async fn resolve(host: &str, port: u16, limit: Duration) -> Result<Vec<SocketAddr>> {
    let bare = bare(host);
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let nowhere = |why: String| ErrorKind::PeerLost.because(format!("host {host:?} {why}"));
    let found = match timeout(limit, tokio::net::lookup_host((bare, port))).await {
        Ok(found) => found.map_err(|error| nowhere(format!("does not resolve ({error})")))?,
        Err(_) => {
            return Err(ErrorKind::TimedOut
                .because(format!("host {host:?} did not resolve within {limit:.1?}")));
        }
    };
    let mut addresses: Vec<_> = found.collect();
    addresses.sort_by_key(|address| address.is_ipv6());
    addresses.dedup();
    match addresses.is_empty() {
        true => Err(nowhere("has no address".to_owned())),
        false => Ok(addresses),
    }
}
