//! Listens, serves connections, and shuts down.

pub(crate) mod address_limit;
mod admin;
mod explain;
mod idle;
pub(crate) mod keys;
pub(crate) mod listener;
mod page;
mod realtime;
mod requests;
pub(crate) mod routes;
mod stall;
#[cfg(feature = "tls")]
mod tls;

use std::io::Write;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Body;
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::{http1, http2};
use hyper::service::{Service as _, service_fn};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch::{Receiver, Sender};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use self::idle::OpenRequests;
use self::listener::ClientListener;
use crate::discovery::{Reconciler, providers};
use crate::error::{Error, Result};
use crate::fleet::{subscribe, watch};
use crate::log::AccessLogger;
use crate::recording::writer::Recorder;
use crate::relay::core::{Core, LiveSetup};
use crate::release::KeptBlocks;
use crate::setup::Setup;

/// The most concurrent requests of an HTTP/2 connection. Each takes some 3 KiB until its client has
/// read the answer, also without a key.
const HTTP2_STREAMS: u32 = 64;

/// A proxy that listens but does not serve yet.
#[derive(Debug)]
pub struct Proxy {
    core: Arc<Core>,
    none_works: mpsc::Receiver<()>,
    listener: TcpListener,
    address: SocketAddr,
    handle: Handle,
    discovery: Reconciler,
}

/// A handle that controls a proxy while it [runs](Proxy::run).
#[derive(Clone, Debug)]
pub struct Handle {
    core: Arc<Core>,
    /// The configuration at the start: some of its keys never change.
    started_with: Arc<Setup>,
    drain: Arc<Notify>,
    tls: Tls,
}

/// The TLS acceptor for new connections; `None` without TLS.
#[cfg(feature = "tls")]
pub(crate) type Acceptor = Option<tokio_rustls::TlsAcceptor>;
#[cfg(not(feature = "tls"))]
pub(crate) type Acceptor = Option<NoTls>;

/// A type without values: this build has no TLS.
#[cfg(not(feature = "tls"))]
#[derive(Clone)]
pub(crate) enum NoTls {}

#[derive(Clone, Default)]
struct Tls(Arc<Mutex<Acceptor>>);

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    fn now(&self) -> Acceptor {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, acceptor: Acceptor) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = acceptor;
    }
}

pub(crate) fn acceptor(setup: &Setup) -> Result<Acceptor> {
    match (&setup.tls_cert, &setup.tls_key) {
        #[cfg(feature = "tls")]
        (Some(cert), Some(key)) => Ok(Some(tls::acceptor(cert, key)?)),
        _ => Ok(None),
    }
}

/// Binds the configured address.
pub(crate) async fn listen(setup: &Setup) -> Result<TcpListener> {
    let host = setup.host.trim_start_matches('[').trim_end_matches(']');
    let listener = TcpListener::bind((host, setup.port)).await;
    listener.map_err(|error| {
        let hint = match error.kind() {
            std::io::ErrorKind::AddrInUse => {
                " (choose another --port; 0 for --check next to a running router)"
            }
            _ => "",
        };
        Error::io(format_args!("cannot listen on {}:{}{hint}", setup.host, setup.port), error)
    })
}

impl Handle {
    /// Applies a new configuration after checking its new instances. Requests in progress continue
    /// unchanged, and instances keep their load and health. The address, the limits of connections,
    /// the access log and the recording do not change.
    ///
    /// # Errors
    ///
    /// Fails if the configuration is invalid; the current one then stays.
    pub async fn replace(&self, setup: Setup) -> Result<()> {
        self.reread(|| Ok(setup)).await
    }

    async fn reread(&self, read: impl FnOnce() -> Result<Setup>) -> Result<()> {
        let next = Tls::default();
        let read = || {
            let setup = read()?;
            providers::check(&setup)?;
            let acceptor = acceptor(&setup)?;
            if acceptor.is_some() != self.tls.now().is_some() {
                return Err(Error::new(
                    "TLS cannot be switched on or off while the proxy runs; restart it",
                ));
            }
            next.set(acceptor);
            let fixed = self.started_with.fixed_differences(&setup);
            if !fixed.is_empty() {
                let keys = fixed.join(", ");
                tracing::warn!("a running router does not change {keys}: restart it");
            }
            Ok(setup)
        };
        self.core.replace(read, || self.tls.set(next.now())).await
    }

    /// Stops taking requests. [`run`](Proxy::run) ends when the requests in progress have ended, or
    /// at the configured deadline.
    pub fn drain(&self) {
        self.core.drain();
        self.drain.notify_one();
    }
}

impl Proxy {
    /// Binds the configured address. An access log to `stdout` goes to this process's standard
    /// output.
    ///
    /// # Errors
    ///
    /// Fails if the configuration is invalid, the address cannot be bound, or the access log or the
    /// recording cannot be opened.
    pub async fn bind(setup: Setup) -> Result<Self> {
        Self::bind_with_output(setup, Box::new(std::io::stdout())).await
    }

    /// Like [`bind`](Self::bind), with the caller's writer instead of standard output.
    ///
    /// # Errors
    ///
    /// Fails as [`bind`](Self::bind) does.
    pub async fn bind_with_output(setup: Setup, output: Box<dyn Write + Send>) -> Result<Self> {
        let live = LiveSetup::new(setup, None)?;
        let setup = Arc::clone(&live.setup);
        providers::check(&setup)?;
        let tls = Tls::default();
        tls.set(acceptor(&setup)?);
        let listener = listen(&setup).await?;
        let address = listener.local_addr().map_err(|error| Error::io("cannot listen", error))?;
        let access = AccessLogger::open(&setup.access_log, output)?;
        let recorder = match &setup.record {
            Some(path) => Recorder::open(path, setup.record_size)?,
            None => Recorder::off(),
        };
        let (core, none_works) = Core::new(live, access, recorder);
        let core = Arc::new(core);
        let handle =
            Handle { core: Arc::clone(&core), started_with: setup, drain: Arc::default(), tls };
        let discovery = Reconciler::new(Arc::clone(&core));
        Ok(Proxy { core, none_works, listener, address, handle, discovery })
    }

    /// Returns the address that the proxy listens on.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Returns a handle that controls the proxy while it runs.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Asks for the instances that are discovered, and checks every instance once, so that the first
    /// requests find those that are up. Takes at most a second more than `discovery.timeout`, and
    /// three times `health.timeout`.
    pub async fn check_instances(&mut self) {
        let limit = self.core.live().setup.discovery.first_limit();
        self.discovery.first(providers::all, limit).await; // failures are logged
        watch::round(&self.core, &self.core.live(), watch::WatchScope::Everything).await;
    }

    /// Serves until the proxy has been [drained](Handle::drain).
    ///
    /// # Errors
    ///
    /// Never fails because of a client or an instance.
    pub async fn run(mut self) -> Result<()> {
        let watching = tokio::spawn(watch::watch(Arc::clone(&self.core)));
        let greeting = tokio::spawn(watch::greet(Arc::clone(&self.core)));
        let discovering = tokio::spawn(self.discovery.run(providers::all));
        let core = Arc::clone(&self.core);
        let missed = move |blocks: &KeptBlocks, why: &str| core.errors.add(&blocks.instance, why);
        let releasing = tokio::spawn(Arc::clone(&self.core.releases).serve(missed));
        let subscribing = tokio::spawn(subscribe::subscribe(Arc::clone(&self.core)));
        let router = routes::router(Arc::clone(&self.core));
        let limits = self.core.live().setup.limits.clone();
        let http2 = Http2 {
            builder: http2_connections(&limits),
            service: TowerToHyperService::new(taken_in_time(router.clone(), &self.core)),
        };
        let http1 = Http1 {
            builder: http1_connections(&limits),
            service: TowerToHyperService::new(router),
        };
        let advice = "raise limits.connections_per_address to allow more";
        let mut listener = ClientListener::new(self.listener, &limits, advice);
        let closing = Sender::new(false);
        let accept = async {
            while let Some((stream, _, place)) = listener.accept().await {
                let serving = Connection {
                    core: Arc::clone(&self.core),
                    http1: http1.clone(),
                    http2: http2.clone(),
                    closing: closing.subscribe(),
                    tls: self.handle.tls.now(),
                    header_time: limits.header_time,
                    stall: limits.stall,
                };
                tokio::spawn(async move {
                    serving.connection(stream).await;
                    drop(place);
                });
            }
        };
        let end = async {
            self.handle.drain.notified().await;
            let deadline = Instant::now() + self.core.live().setup.drain;
            tracing::info!("draining: taking no more requests");
            // Ends when no request holds its sender any more.
            if tokio::time::timeout_at(deadline, self.none_works.recv()).await.is_err() {
                tracing::warn!("the drain deadline has passed: ending the requests in progress");
                self.core.end.send_replace(true);
                let _ = tokio::time::timeout(Duration::from_secs(1), self.none_works.recv()).await;
            }
        };
        tokio::select! {
            () = accept => {}
            () = end => {}
        }
        for task in [watching, greeting, discovering, subscribing] {
            task.abort();
        }
        drop(listener);
        // Let connections send their last bytes.
        closing.send_replace(true);
        let _ = tokio::time::timeout(Duration::from_secs(1), closing.closed()).await;
        self.core.releases.flush(Duration::from_secs(1)).await;
        releasing.abort();
        self.core.access.flush(Duration::from_secs(1));
        self.core.recorder.flush(Duration::from_secs(1));
        Ok(())
    }
}

fn http1_connections(limits: &crate::setup::ClientLimits) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_time)
        .max_buf_size(limits.headers)
        .max_headers(128);
    builder
}

fn http2_connections(limits: &crate::setup::ClientLimits) -> http2::Builder<TokioExecutor> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_header_list_size(u32::try_from(limits.headers).unwrap_or(u32::MAX))
        .max_concurrent_streams(HTTP2_STREAMS)
        .max_pending_accept_reset_streams(64)
        .keep_alive_interval(limits.header_time)
        .keep_alive_timeout(limits.header_time);
    builder
}

/// Adds a stall timeout to each answer of a router.
fn taken_in_time(router: axum::Router, core: &Arc<Core>) -> axum::Router {
    let (core, stall) = (Arc::clone(core), core.live().setup.limits.stall);
    router.layer(axum::middleware::map_response(move |response: Response<Body>| {
        let idle = core.live().setup.timeouts.idle;
        async move {
            match response.body().is_end_stream() {
                true => response,
                false => {
                    response.map(|body| Body::new(stall::BodyStallTimeout::new(body, stall, idle)))
                }
            }
        }
    }))
}

/// The builder and the service of HTTP/1.1 connections.
#[derive(Clone)]
struct Http1 {
    builder: http1::Builder,
    service: TowerToHyperService<axum::Router>,
}

/// The builder and the service of HTTP/2 connections.
#[derive(Clone)]
struct Http2 {
    builder: http2::Builder<TokioExecutor>,
    service: TowerToHyperService<axum::Router>,
}

/// A client's connection.
struct Connection {
    core: Arc<Core>,
    http1: Http1,
    http2: Http2,
    /// True once idle connections must close.
    closing: Receiver<bool>,
    tls: Acceptor,
    /// The time of TLS's handshake, and the life of an idle HTTP/2 connection.
    header_time: Duration,
    stall: Duration,
}

impl Connection {
    async fn connection(self, stream: TcpStream) {
        self.core.metrics.connections.fetch_add(1, Relaxed);
        let core = Arc::clone(&self.core);
        match &self.tls {
            #[cfg(feature = "tls")]
            Some(tls) => {
                let handshake = tokio::time::timeout(self.header_time, tls.accept(stream));
                if let Ok(Ok(stream)) = handshake.await {
                    let is_h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                    self.http(stream, is_h2).await;
                }
            }
            #[cfg(not(feature = "tls"))]
            Some(never) => match *never {},
            None => self.http(stream, false).await,
        }
        core.metrics.connections.fetch_sub(1, Relaxed);
    }

    async fn http(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, is_h2: bool) {
        let io = TokioIo::new(stall::StallTimeout::new(stream, self.stall));
        // The protocol is not guessed from the bytes: a client that sends half a preface would wait
        // without a timeout.
        let ended = match is_h2 {
            true => {
                let requests = OpenRequests::default();
                let (service, open) = (self.http2.service, requests.clone());
                let service = service_fn(move |request: Request<Incoming>| {
                    let open = open.begin();
                    let answer = service.call(request);
                    async move { answer.await.map(|answer| open.until_sent(answer)) }
                });
                let connection = Box::pin(self.http2.builder.serve_connection(io, service));
                let idle = || requests.idle_for(self.header_time);
                until_closing(connection, self.closing, idle, http2::Connection::graceful_shutdown)
                    .await
            }
            false => {
                let connection = self.http1.builder.serve_connection(io, self.http1.service);
                let connection = Box::pin(connection.with_upgrades());
                until_closing(
                    connection,
                    self.closing,
                    // hyper's timeout of the next headers ends idle connections.
                    std::future::pending,
                    http1::UpgradeableConnection::graceful_shutdown,
                )
                .await
            }
        };
        match ended {
            Some(Ok(())) => {}
            Some(Err(error)) => tracing::debug!(%error, "a connection ended early"),
            None => tracing::debug!("closed a connection that did not end in time"),
        }
    }
}

/// Serves a connection. Once it is `idle`, or `closing` is true, finishes the requests in progress
/// on it, and closes it. Returns `None` if the client kept it open for so long that it was `idle`
/// again. The connection is boxed: otherwise the task of each would have space for every protocol.
async fn until_closing<C: Future, I: Future<Output = ()>>(
    mut connection: Pin<Box<C>>,
    mut closing: Receiver<bool>,
    idle: impl Fn() -> I,
    shut_down: impl FnOnce(Pin<&mut C>),
) -> Option<C::Output> {
    tokio::select! {
        ended = connection.as_mut() => return Some(ended),
        _ = closing.wait_for(|closing| *closing) => {}
        () = idle() => {}
    }
    shut_down(connection.as_mut());
    tokio::select! {
        ended = connection => Some(ended),
        () = idle() => None,
    }
}

/// Runs a proxy until SIGTERM or SIGINT, and reloads its configuration on SIGHUP. Calls `started`
/// with the address after the first check of the instances.
///
/// # Errors
///
/// Fails as [`Proxy::bind`] does. A failed reload is only logged; the current configuration then
/// stays.
pub async fn serve(
    setup: Setup,
    reread: impl Fn() -> Result<Setup> + Send + Sync + 'static,
    output: Box<dyn Write + Send>,
    started: impl FnOnce(SocketAddr),
) -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let on = |kind| signal(kind).map_err(|error| Error::io("cannot watch for signals", error));
    let reread = Arc::new(reread);
    let (mut hangup, mut terminate, mut interrupt) =
        (on(SignalKind::hangup())?, on(SignalKind::terminate())?, on(SignalKind::interrupt())?);
    let mut proxy = Proxy::bind_with_output(setup, output).await?;
    let handle = proxy.handle();
    let address = proxy.local_addr();
    tokio::select! {
        () = proxy.check_instances() => {}
        _ = terminate.recv() => return Ok(()),
        _ = interrupt.recv() => return Ok(()),
    }
    started(address);
    let running = proxy.run();
    tokio::pin!(running);
    loop {
        tokio::select! {
            ended = &mut running => return ended,
            _ = hangup.recv() => {
                // A task of its own: the reload waits for instances.
                let (reread, handle) = (Arc::clone(&reread), handle.clone());
                tokio::spawn(async move {
                    match handle.reread(|| reread()).await {
                        Ok(()) => tracing::info!("reloaded the configuration"),
                        Err(error) => tracing::error!(%error, "cannot reload the configuration; the current one stays"),
                    }
                });
            }
            _ = terminate.recv() => handle.drain(),
            _ = interrupt.recv() => handle.drain(),
        }
    }
}
