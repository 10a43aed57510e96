//! Tests of clients over TLS.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use kvx_proxy::{AccessLog, Finding, Proxy, Setup};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::{CUT_OFF, within};

const REQUEST: &[u8] = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";

/// Returns the path of the certificate of `localhost`, or of its key.
pub(crate) fn file(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests/it/testdata", name].iter().collect()
}

/// Returns the configuration of a client that trusts the certificate and offers these protocols.
pub(crate) fn client_config(protocols: &[&[u8]]) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(file("cert.pem")).unwrap()).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
    config
}

/// Connects such a client.
pub(crate) async fn connect(to: SocketAddr, protocols: &[&[u8]]) -> TlsStream<TcpStream> {
    let connector = TlsConnector::from(Arc::new(client_config(protocols)));
    let stream = within(TcpStream::connect(to)).await;
    within(connector.connect("localhost".try_into().unwrap(), stream)).await
}

fn setup(cert: &str, key: &str) -> Setup {
    let mut setup = Setup::default();
    (setup.port, setup.access_log) = (0, AccessLog::Off);
    (setup.tls_cert, setup.tls_key) = (Some(file(cert)), Some(file(key)));
    setup
}

#[tokio::test]
async fn clients_are_served_over_tls_only() {
    let proxy = Proxy::bind(setup("cert.pem", "key.pem")).await.unwrap();
    let (address, handle) = (proxy.local_addr(), proxy.handle());
    let running = tokio::spawn(proxy.run());
    let talk = async {
        let mut stream = connect(address, &[]).await;
        stream.write_all(REQUEST).await.unwrap();
        let mut answer = Vec::new();
        // The proxy may close without a TLS `close_notify`.
        let _ = stream.read_to_end(&mut answer).await;
        assert!(answer.starts_with(b"HTTP/1.1 200 OK"), "{}", answer.escape_ascii());

        let mut plain = TcpStream::connect(address).await.unwrap();
        plain.write_all(REQUEST).await.unwrap();
        let mut answer = Vec::new();
        let _ = plain.read_to_end(&mut answer).await;
        assert!(!answer.starts_with(b"HTTP/"), "{}", answer.escape_ascii());
    };
    tokio::time::timeout(CUT_OFF, talk).await.unwrap();
    handle.drain();
    tokio::time::timeout(CUT_OFF, running).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn errors_name_files_with_the_wrong_content() {
    for (cert, key, words) in [
        ("key.pem", "key.pem", "key.pem: has no certificate"),
        ("cert.pem", "none.pem", "none.pem"),
        ("cert.pem", "cert.pem", "cert.pem"),
    ] {
        let error = Proxy::bind(setup(cert, key)).await.unwrap_err().to_string();
        assert!(error.contains(words), "{cert} {key}: {error}");
        let found =
            tokio::time::timeout(CUT_OFF, kvx_proxy::check(setup(cert, key))).await.unwrap();
        assert!(found.contains(&Finding::Fails(error.clone())), "{cert} {key}: {error}: {found:?}");
    }
    let well = kvx_proxy::check(setup("cert.pem", "key.pem"));
    let well = tokio::time::timeout(CUT_OFF, well).await.unwrap();
    assert!(
        !well.iter().any(|one| matches!(one, Finding::Fails(words) if words.contains("pem"))),
        "{well:?}"
    );
}
