//! The certificates of connections to endpoints, as PEM files.

use std::path::PathBuf;

#[cfg(feature = "tls")]
use {
    crate::error::{Error, Result},
    hyper_rustls::ConfigBuilderExt as _,
    std::fmt::Display,
    std::path::Path,
    std::sync::Arc,
    tokio_rustls::rustls::crypto::ring,
    tokio_rustls::rustls::pki_types::pem::PemObject as _,
    tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer},
    tokio_rustls::rustls::{ClientConfig, RootCertStore},
};

/// Files for TLS to a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TlsFiles {
    /// The authorities to trust instead of the system's.
    pub(crate) ca: Option<PathBuf>,
    /// The client's certificate chain.
    pub(crate) certificate: Option<PathBuf>,
    /// The private key of the certificate.
    pub(crate) key: Option<PathBuf>,
}

#[cfg(feature = "tls")]
impl TlsFiles {
    /// Reads the files.
    ///
    /// # Errors
    ///
    /// Fails if one of them is missing, cannot be read, or has no certificate or key; the message
    /// names it.
    pub(crate) fn config(&self) -> Result<ClientConfig> {
        // The provider is named here: no process-wide default is needed, and none is changed.
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::new(error.to_string()))?;
        let builder = match &self.ca {
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for authority in certificates(path)? {
                    roots.add(authority).map_err(|error| wrong(path, &error))?;
                }
                builder.with_root_certificates(roots)
            }
            // Or the certificates in the file that SSL_CERT_FILE names.
            None => builder.with_native_roots().map_err(|error| {
                Error::new(format!("this system's trusted certificates: {error}"))
            })?,
        };
        match (&self.certificate, &self.key) {
            (Some(chain), Some(key)) => {
                let private = PrivateKeyDer::from_pem_file(key);
                let private = private.map_err(|error| wrong(key, &error))?;
                builder
                    .with_client_auth_cert(certificates(chain)?, private)
                    .map_err(|error| wrong(chain, &error))
            }
            (None, None) => Ok(builder.with_no_client_auth()),
            (Some(path), None) | (None, Some(path)) => {
                Err(wrong(path, &"a client's certificate and its key need each other; set both"))
            }
        }
    }
}

#[cfg(feature = "tls")]
fn wrong(path: &Path, why: &dyn Display) -> Error {
    Error::new(format!("{}: {why}", path.display()))
}

#[cfg(feature = "tls")]
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let all: Vec<_> = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|error| wrong(path, &error))?;
    if all.is_empty() {
        return Err(wrong(path, &"has no certificate; it must contain PEM"));
    }
    Ok(all)
}
