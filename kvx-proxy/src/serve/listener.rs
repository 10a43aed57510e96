//! Accepts clients within the limits of connections, for the proxy and for `kvx serve`.

use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch::Sender;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, timeout};

use super::address_limit::{AddressLimit, AddressPlace};
use super::stall::StallTimeout;
use super::{http1_connections, until_closing};
use crate::setup::ClientLimits;

/// The least time between two warnings about an address with too many connections.
const WARNINGS: Duration = Duration::from_secs(10);

/// A listener that limits the connections of all clients, and those of one address.
#[derive(Debug)]
pub(super) struct ClientListener {
    listener: TcpListener,
    places: Arc<Semaphore>,
    addresses: AddressLimit,
    /// How to allow more connections of one address.
    advice: &'static str,
    warned: Option<Instant>,
}

/// A connection's place among all, and among those of its address. Dropping it frees both.
#[derive(Debug)]
pub(super) struct ConnectionPlace {
    _of_all: OwnedSemaphorePermit,
    _of_address: AddressPlace,
}

impl ClientListener {
    pub(super) fn new(listener: TcpListener, limits: &ClientLimits, advice: &'static str) -> Self {
        ClientListener {
            listener,
            places: Arc::new(Semaphore::new(limits.connections.min(Semaphore::MAX_PERMITS))),
            addresses: AddressLimit::new(limits.connections_per_address),
            advice,
            warned: None,
        }
    }

    /// Accepts a connection within the limits. Closes connections beyond the limit of their
    /// address. Returns `None` only if the semaphore is closed, which it never is.
    pub(super) async fn accept(&mut self) -> Option<(TcpStream, SocketAddr, ConnectionPlace)> {
        loop {
            // Beyond the limit of all, connections wait in the system's queue.
            let Ok(of_all) = Arc::clone(&self.places).acquire_owned().await else {
                debug_assert!(false, "the semaphore is never closed");
                return None;
            };
            let (stream, client) = accept(&self.listener).await;
            if let Some(of_address) = self.addresses.enter(client.ip()) {
                let place = ConnectionPlace { _of_all: of_all, _of_address: of_address };
                return Some((stream, client, place));
            }
            if self.warned.is_none_or(|warned| warned.elapsed() >= WARNINGS) {
                self.warned = Some(Instant::now());
                tracing::warn!(
                    "closed a connection of {}, which has {} already; {}",
                    client.ip(),
                    self.addresses.most,
                    self.advice
                );
            }
        }
    }
}

/// Serves clients over HTTP/1.1 until `stop` is ready and the requests in progress have ended, at
/// most `drain` later. Calls `locate` with each request and its client's address.
///
/// The limits of connections, of time and of headers apply.
/// [`read_body`](crate::server::read_body) checks those of bodies.
pub async fn serve_http1(
    listener: TcpListener,
    router: Router,
    limits: &ClientLimits,
    locate: impl Fn(&mut Request<Incoming>, SocketAddr) + Clone + Send + Sync + 'static,
    stop: impl Future<Output = ()>,
    drain: Duration,
) {
    let (builder, service) = (http1_connections(limits), TowerToHyperService::new(router));
    let advice = "a higher limit of file descriptors (ulimit -n) may allow more";
    let mut listener = ClientListener::new(listener, limits, advice);
    let closing = Sender::new(false);
    let accept = async {
        while let Some((stream, address, place)) = listener.accept().await {
            let (service, locate) = (service.clone(), locate.clone());
            let service = service_fn(move |mut request: Request<Incoming>| {
                locate(&mut request, address);
                service.call(request)
            });
            let io = TokioIo::new(StallTimeout::new(stream, limits.stall));
            let connection = Box::pin(builder.serve_connection(io, service));
            let closing = closing.subscribe();
            tokio::spawn(async move {
                let shut_down = http1::Connection::graceful_shutdown;
                let ended = until_closing(connection, closing, pending, shut_down).await;
                if let Some(Err(error)) = ended {
                    tracing::debug!(%error, "a connection ended early");
                }
                drop(place);
            });
        }
    };
    tokio::select! {
        () = accept => {}
        () = stop => {}
    }
    drop(listener);
    closing.send_replace(true);
    if timeout(drain, closing.closed()).await.is_err() {
        tracing::warn!("requests in progress have not ended within {drain:?}");
    }
}

/// Accepts a connection and disables Nagle's algorithm. Otherwise the second piece of an answer
/// would wait until the client acknowledges the first, for up to 40 ms.
async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok((stream, address)) => {
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, "the client disconnected before it was served");
                }
                return (stream, address);
            }
            Err(error) => {
                // Probably out of file descriptors: wait until some are closed.
                tracing::warn!(%error, "cannot accept a connection");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpSocket;

    use super::*;

    const HEALTH: &[u8] = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";

    async fn connect(from: &str, to: SocketAddr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(format!("{from}:0").parse().unwrap()).unwrap();
        socket.connect(to).await.unwrap()
    }

    /// Returns the answer to a request from this address.
    async fn ask(from: &str, to: SocketAddr) -> String {
        let mut stream = connect(from, to).await;
        let mut answer = String::new();
        // A connection that is closed at once may be reset.
        let _ = stream.write_all(HEALTH).await;
        let _ = timeout(Duration::from_secs(10), stream.read_to_string(&mut answer)).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn half_requests_end_in_time_and_leave_places_for_other_addresses() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let header_time = Duration::from_secs(2);
        let limits = ClientLimits {
            connections: 8,
            connections_per_address: 4,
            header_time,
            ..ClientLimits::default()
        };
        let router = Router::new().route("/health", get(|| async { "alive" }));
        tokio::spawn(async move {
            serve_http1(listener, router, &limits, |_, _| {}, pending(), header_time).await;
        });
        let mut half = Vec::new();
        for _ in 0..32 {
            let mut stream = connect("127.0.0.1", address).await;
            let _ = stream.write_all(&HEALTH[..20]).await;
            half.push(stream);
        }
        assert!(ask("127.0.0.2", address).await.ends_with("alive"));
        assert_eq!(ask("127.0.0.1", address).await, "");
        for mut stream in half {
            let mut answer = Vec::new();
            let _ = timeout(header_time * 10, stream.read_to_end(&mut answer)).await.unwrap();
        }
        assert!(ask("127.0.0.1", address).await.ends_with("alive"));
    }

    #[tokio::test]
    async fn no_piece_of_an_answer_waits_for_the_one_before_it() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (client, served) = tokio::join!(TcpStream::connect(address), accept(&listener));
        assert!(served.0.nodelay().unwrap());
        drop(client.unwrap());
    }
}
