//! A ROUTER socket. A [`ConnectionHandler`] handles whole connections, a [`Handler`] single
//! messages.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvx_core::{Error, ErrorKind, Result};
use tokio::net::TcpListener;
use tokio::task::AbortHandle;

use super::connection::{Received, SocketConnection};
use super::connections::{ConnectionPlace, Connections, PeerLimits};
use super::{Budget, Message, SocketType};

/// The behaviour of a ROUTER, connection by connection.
pub(crate) trait ConnectionHandler: Send + Sync + 'static {
    /// Talks with one peer. When it returns, the connection is closed.
    fn talk(&self, peer: RouterConnection) -> impl Future<Output = Result<()>> + Send;
}

/// One connection of a ROUTER.
#[derive(Debug)]
pub(crate) struct RouterConnection {
    connection: SocketConnection,
    name: Vec<u8>,
    answers: Arc<Budget>,
    patience: Duration,
    place: ConnectionPlace,
}

impl RouterConnection {
    /// Counts the peer as authenticated from now on: its messages get the limits and the budget of
    /// authenticated peers, and only a connection of one of these can replace its own.
    ///
    /// Errors: `PeerLost`: the connection has been closed meanwhile.
    pub(crate) fn set_authenticated(&mut self) -> Result<()> {
        let (limits, messages) = self
            .place
            .authenticated()
            .ok_or_else(|| ErrorKind::PeerLost.because("a new connection has replaced this one"))?;
        self.connection.set_limits(limits, &messages);
        Ok(())
    }

    /// Waits until there is something to receive. The future may be dropped at any moment.
    pub(crate) async fn readable(&mut self) -> Result<()> {
        self.connection.readable().await
    }

    /// Returns the next message, whose first frame names the peer. `None`: the peer has closed.
    pub(crate) async fn receive(&mut self) -> Result<Option<Message>> {
        loop {
            match self.receive_one().await? {
                Received::Message(message) => return Ok(Some(message)),
                Received::Command => {}
                Received::End => return Ok(None),
            }
        }
    }

    /// Returns the next message, or a ping that was answered, so that the caller can send in
    /// between.
    pub(crate) async fn receive_one(&mut self) -> Result<Received> {
        let mut received = self.connection.receive_one(self.patience).await?;
        if let Received::Message(message) = &mut received {
            self.place.note_message();
            message.put_first(self.name.clone());
        }
        Ok(received)
    }

    /// Sends frames, without one that names the peer. Errors: `TimedOut`: the peer does not read;
    /// `Exhausted`.
    pub(crate) async fn send<F: AsRef<[u8]>>(&mut self, frames: &[F]) -> Result<()> {
        let mut unread = self.answers.share();
        unread.take(frames.iter().map(|frame| frame.as_ref().len()).sum())?;
        self.connection.send(frames, self.patience).await
    }
}

/// Answers one message after the other.
struct MessageHandler<H>(Arc<H>);

impl<H: Handler> ConnectionHandler for MessageHandler<H> {
    async fn talk(&self, mut peer: RouterConnection) -> Result<()> {
        let mut session = H::Session::default();
        while let Some(message) = peer.receive().await? {
            let Some(answer) = self.0.answer(&mut session, message.frames()) else { return Ok(()) };
            drop(message);
            peer.send(&answer[1..]).await?;
        }
        Ok(())
    }
}

/// The behaviour of a ROUTER, message by message.
pub(crate) trait Handler: Send + Sync + 'static {
    /// The state that is kept for a connection.
    type Session: Default + Send;

    /// Returns the answer to a message. Both start with the frame that names the peer. `None`:
    /// there is no answer, and the connection ends.
    fn answer(&self, session: &mut Self::Session, message: &[Vec<u8>]) -> Option<Vec<Arc<[u8]>>>;
}

/// The limits for the peers of a ROUTER.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RouterLimits {
    /// The limits for peers that have not [authenticated](RouterConnection::set_authenticated).
    pub(crate) unauthenticated: PeerLimits,
    /// The limits for peers that have.
    pub(crate) authenticated: PeerLimits,
    /// The bytes of all answers that peers have not read yet.
    pub(crate) answers: usize,
    /// The time limit for a greeting, for the rest of a message, and for the reading of an answer.
    pub(crate) patience: Duration,
}

/// A ROUTER socket that listens until it is dropped.
#[derive(Debug)]
pub(crate) struct Router {
    local: SocketAddr,
    accepting: AbortHandle,
    connections: Arc<Connections>,
}

impl Router {
    /// Answers all connections, on tasks of the current runtime.
    ///
    /// Errors: those of the operating system for the socket.
    pub(crate) fn serve(
        listener: TcpListener,
        limits: RouterLimits,
        handler: Arc<impl Handler>,
    ) -> Result<Self> {
        Router::serve_by(listener, limits, Arc::new(MessageHandler(handler)))
    }

    /// Serves as [`serve`](Self::serve) does, for handlers that may send several answers to one
    /// message, at any time.
    pub(crate) fn serve_by(
        listener: TcpListener,
        limits: RouterLimits,
        handler: Arc<impl ConnectionHandler>,
    ) -> Result<Self> {
        let local = listener
            .local_addr()
            .map_err(|error| Error::os("a listening socket has no address", error))?;
        let connections = Connections::new(limits.unauthenticated, limits.authenticated);
        let accepting = accept(listener, limits, handler, Arc::clone(&connections));
        Ok(Router { local, accepting: tokio::spawn(accepting).abort_handle(), connections })
    }

    /// Returns the address where the socket listens.
    pub(crate) fn local(&self) -> SocketAddr {
        self.local
    }

    #[cfg(test)]
    pub(crate) fn connections(&self) -> usize {
        self.connections.len()
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.accepting.abort();
        self.connections.close_all();
    }
}

async fn accept(
    listener: TcpListener,
    limits: RouterLimits,
    handler: Arc<impl ConnectionHandler>,
    connections: Arc<Connections>,
) {
    let answers = Budget::new(limits.answers);
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                let (handler, answers) = (Arc::clone(&handler), Arc::clone(&answers));
                connections.start(from, |place, message, messages| {
                    let (messages, patience) = (Arc::clone(messages), limits.patience);
                    let talk = async move {
                        let connection = SocketConnection::open(
                            stream,
                            SocketType::Router,
                            message,
                            &messages,
                            patience,
                        );
                        let connection = connection.await?;
                        let name = name_of(&connection, place.number);
                        let peer = RouterConnection { connection, name, answers, patience, place };
                        handler.talk(peer).await
                    };
                    let task = tokio::spawn(async move {
                        if let Err(error) = talk.await {
                            tracing::debug!(
                                %from,
                                %error,
                                "a connection to the side channel ended"
                            );
                        }
                    });
                    task.abort_handle()
                });
                // Lets the task of a replaced connection end, which frees its descriptor.
                tokio::task::yield_now().await;
            }
            Err(error) => {
                // The process has no file descriptor left. Closing a connection frees one. The
                // pause avoids a busy loop if other parts of the process hold them all.
                tracing::warn!(%error, "a connection to the side channel was not accepted");
                connections.close_unauthenticated();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// Returns the frame that names a peer. ZeroMQ names peers without an identity by a zero and a
/// number.
fn name_of(connection: &SocketConnection, number: u64) -> Vec<u8> {
    match connection.identity.is_empty() {
        true => [&[0], &number.to_be_bytes()[4..]].concat(),
        false => connection.identity.clone(),
    }
}
