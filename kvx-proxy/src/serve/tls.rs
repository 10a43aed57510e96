//! TLS for clients.

use std::path::Path;
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::error::{Error, Result};

/// What a certificate chain and its key give.
pub(crate) fn acceptor(cert: &Path, key: &Path) -> Result<TlsAcceptor> {
    let wrong = |path: &Path, why: &dyn std::fmt::Display| Error::new(format!("{}: {why}", path.display()));
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect)
        .map_err(|error| wrong(cert, &error))?;
    if chain.is_empty() {
        return Err(wrong(cert, &"has no certificate; it takes a chain in PEM"));
    }
    let private = PrivateKeyDer::from_pem_file(key).map_err(|error| wrong(key, &error))?;
    // The provider is named here: no process-wide default is needed, and none is changed.
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(cert, &error))?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(|error| wrong(cert, &error))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::{ClientConfig, RootCertStore};

    use super::*;
    use crate::{AccessLog, Proxy, Setup};

    fn file(name: &str) -> PathBuf {
        [env!("CARGO_MANIFEST_DIR"), "src/serve/testdata", name].iter().collect()
    }

    const REQUEST: &[u8] = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";

    #[tokio::test]
    async fn clients_are_served_over_tls_and_only_so() {
        let mut setup = Setup::default();
        (setup.port, setup.access_log) = (0, AccessLog::Off);
        (setup.tls_cert, setup.tls_key) = (Some(file("cert.pem")), Some(file("key.pem")));
        let proxy = Proxy::bind(setup).await.unwrap();
        let (address, handle) = (proxy.local_addr(), proxy.handle());
        let running = tokio::spawn(proxy.run());

        let talk = async {
            let mut roots = RootCertStore::empty();
            roots.add(CertificateDer::from_pem_file(file("cert.pem")).unwrap()).unwrap();
            let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots)
                .with_no_client_auth();
            let stream = TcpStream::connect(address).await.unwrap();
            let name = "localhost".try_into().unwrap();
            let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
            stream.write_all(REQUEST).await.unwrap();
            let mut answer = Vec::new();
            // The other side may close without TLS's goodbye.
            let _ = stream.read_to_end(&mut answer).await;
            assert!(answer.starts_with(b"HTTP/1.1 200 OK"), "{}", answer.escape_ascii());

            let mut plain = TcpStream::connect(address).await.unwrap();
            plain.write_all(REQUEST).await.unwrap();
            let mut answer = Vec::new();
            let _ = plain.read_to_end(&mut answer).await;
            assert!(!answer.starts_with(b"HTTP/"), "{}", answer.escape_ascii());
        };
        tokio::time::timeout(Duration::from_secs(10), talk).await.unwrap();
        handle.drain();
        tokio::time::timeout(Duration::from_secs(10), running).await.unwrap().unwrap().unwrap();
    }

    #[test]
    fn files_that_are_something_else_are_named() {
        let error = acceptor(&file("key.pem"), &file("key.pem")).err().unwrap().to_string();
        assert!(error.contains("key.pem") && error.contains("no certificate"), "{error}");
        let error = acceptor(&file("cert.pem"), &file("none.pem")).err().unwrap().to_string();
        assert!(error.contains("none.pem"), "{error}");
    }
}
