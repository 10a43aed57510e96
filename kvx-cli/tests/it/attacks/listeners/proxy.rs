//! `kvx proxy` over HTTP/1.1 and WebSocket.

use std::time::{Duration, Instant};

use kvx_testkit::{Bounds, Client, Failure, Listener, test};

use super::{ELSEWHERE, KEY, WITH_KEY, attack, from, requests, succeeds};
use crate::attacks::http::{KeptConnection, Upstream, get, post};
use crate::proxy::fleet::{Proxy, SetupFile};
use crate::serve::server::LIMIT;

/// The most connections to the proxy of one address, and the time limit for headers, bodies, and
/// answers that are not read.
const CONNECTIONS: usize = 64;
const TIME: Duration = Duration::from_secs(2);

/// Starts a proxy with a key in front of this instance.
fn proxy(instance: &Upstream, more: &[&str]) -> (Proxy, [SetupFile; 2]) {
    let keys = SetupFile::new(KEY);
    let seconds = TIME.as_secs();
    let setup = SetupFile::new(&format!(
        "port = 0\naccess_log = 'off'\napi_key_file = '{}'\n[limits]\nconnections = {}\n\
         connections_per_address = {CONNECTIONS}\nheader_time = '{seconds}s'\n\
         body_time = '{seconds}s'\nstall = '{seconds}s'\n[[pool]]\ndecode = ['{}']\n",
        keys.path(),
        2 * CONNECTIONS,
        instance.url
    ));
    let proxy = Proxy::start(&[&["--config", setup.path()][..], more].concat(), &[]);
    (proxy, [keys, setup])
}

/// Clients over HTTP/1.1, and over a WebSocket, for which attackers have no key either.
#[test(own_process)]
fn clients_of_the_proxy_without_a_key_cost_little() -> Result<(), Failure> {
    let instance = Upstream::start(|_| "{}".to_owned());
    let (proxy, _files) = proxy(&instance, &[]);
    let port = proxy.port;
    let until = Instant::now() + LIMIT;
    while succeeds(&get(port, "/ready", "connection: close\r\n")).is_err() {
        assert!(Instant::now() < until, "the proxy does not find its instance");
        std::thread::sleep(Duration::from_millis(20));
    }
    let lines = format!("{WITH_KEY}connection: close\r\ncontent-type: application/json\r\n");
    let body = br#"{"model": "m", "input": "a"}"#;
    let mut kept = KeptConnection::open(port)?;
    let mut web_socket = KeptConnection::web_socket(port, WITH_KEY)?;
    let clients = vec![
        Client::new("a kept connection", move || succeeds(&kept.get("/metrics", WITH_KEY)?.head)),
        Client::new("a new connection", move || {
            succeeds(&post(port, "/v1/embeddings", &lines, body))
        }),
        Client::new("an open WebSocket", move || Ok(web_socket.echo()?)),
        Client::new("a new WebSocket", move || {
            Ok(KeptConnection::web_socket(port, WITH_KEY)?.echo()?)
        }),
    ];
    attack(
        Listener {
            name: "kvx proxy, HTTP/1.1 and WebSocket",
            process: proxy.pid(),
            bounds: Bounds::new(CONNECTIONS, TIME),
            clients,
        },
        from(ELSEWHERE, port),
        &requests(),
    )
}
