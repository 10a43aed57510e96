//! A connection of a decode to a worker of a prefill.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_core::{Result, Secret};

use super::super::zmtp::{Budget, Client, MessageLimits, SocketType};
use super::session::Session;
use kvx_vllm::wire::mooncake::PullResponse;

/// The limits of an answer, with frames that later versions may add.
const ANSWER: MessageLimits =
    MessageLimits { frames: 4, bytes: Session::sealed_len(PullResponse::MAX_LEN) };
/// The limits of an answer to a hello.
const HELLO_ANSWER: MessageLimits = MessageLimits { frames: 4, bytes: 4 << 10 };

/// A connection to a worker, for one question after the other.
#[derive(Debug)]
pub(super) struct PrefillConnection {
    client: Client,
    session: Option<Session>,
}

impl PrefillConnection {
    /// Connects to the first reachable address, within `limit`. With a secret, both ends have
    /// proved it when this returns.
    ///
    /// Errors: those of [`Client::connect`] and [`Session::connect`].
    pub(super) async fn open(
        kind: SocketType,
        addresses: &[SocketAddr],
        secret: Option<&Secret>,
        budget: &Arc<Budget>,
        limit: Duration,
    ) -> Result<Self> {
        let Some(secret) = secret else {
            let client = Client::connect(kind, addresses, ANSWER, budget, limit).await?;
            return Ok(PrefillConnection { client, session: None });
        };
        let until = Instant::now() + limit;
        let mut client = Client::connect(kind, addresses, HELLO_ANSWER, budget, limit).await?;
        let left = until.saturating_duration_since(Instant::now());
        let session = Session::connect(&mut client, secret, left).await?;
        client.set_limits(ANSWER, budget);
        Ok(PrefillConnection { client, session: Some(session) })
    }

    /// Returns whether both ends have proved the secret.
    pub(super) fn is_authenticated(&self) -> bool {
        self.session.is_some()
    }

    /// Returns whether the connection can be used for another question.
    pub(super) fn is_quiet(&self) -> bool {
        self.client.is_quiet()
    }

    /// Sends a question. Errors: `TimedOut`: the worker does not read; `PeerLost`.
    pub(super) async fn send(&mut self, question: &[u8], limit: Duration) -> Result<()> {
        match &mut self.session {
            Some(session) => self.client.send(&[&session.seal(question)], limit).await,
            None => self.client.send(&[question], limit).await,
        }
    }

    /// Waits for the next answer. The rest of an answer has to arrive within `limit` after its
    /// first byte.
    ///
    /// Errors: those of [`Client::receive`] and [`Session::open`].
    pub(super) async fn receive(&mut self, limit: Duration) -> Result<Vec<u8>> {
        let mut answer = self.client.receive(limit).await?;
        let answer = answer.take_first().unwrap_or_default();
        match &mut self.session {
            Some(session) => session.open(&answer),
            None => Ok(answer),
        }
    }
}
