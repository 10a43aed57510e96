//! The address of the API server, and the credentials for it.

use std::fs::File;
use std::io::Read as _;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use hyper::Uri;

use crate::endpoint::Endpoint;
use crate::error::{Error, Result};
use crate::setup::KubernetesDiscovery;
use crate::tls_files::TlsFiles;

/// The folder in which Kubernetes gives a pod its service account.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The most bytes of a token or a namespace.
const LONGEST: u64 = 64 << 10;

/// The access to an API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Access {
    pub(super) endpoint: Endpoint,
    pub(super) files: TlsFiles,
    token: Option<PathBuf>,
    pub(super) namespace: String,
}

impl Access {
    /// Takes what the settings leave out from the pod that this process runs in.
    pub(super) fn new(settings: &KubernetesDiscovery) -> Result<Self> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        Self::in_pod(settings, variable, Path::new(SERVICE_ACCOUNT))
    }

    pub(super) fn in_pod(
        settings: &KubernetesDiscovery,
        variable: impl Fn(&str) -> Option<String>,
        account: &Path,
    ) -> Result<Self> {
        let wrong = |why: &str| Error::new(format!("discovery.kubernetes: {why}"));
        let namespace = match &settings.namespace {
            Some(namespace) => namespace.clone(),
            None => read(&account.join("namespace")).map_err(|_| {
                wrong(
                    "no namespace is set, and this is no pod with a service account; set \
                     discovery.kubernetes.namespace or --service-discovery-namespace",
                )
            })?,
        };
        let (url, files, token) = match &settings.api {
            Some(url) => {
                let (ca, certificate) = (settings.ca.clone(), settings.certificate.clone());
                let files = TlsFiles { ca, certificate, key: settings.key.clone() };
                (url.clone(), files, settings.token.clone())
            }
            None => {
                let host = variable("KUBERNETES_SERVICE_HOST").ok_or_else(|| {
                    wrong(
                        "this is no pod of a cluster (KUBERNETES_SERVICE_HOST is not set); set \
                         api, such as api = \"http://127.0.0.1:8001\" for `kubectl proxy`",
                    )
                })?;
                let port = variable("KUBERNETES_SERVICE_PORT").unwrap_or_else(|| "443".to_owned());
                let host = if host.contains(':') { format!("[{host}]") } else { host };
                let files = TlsFiles { ca: Some(account.join("ca.crt")), ..TlsFiles::default() };
                (format!("https://{host}:{port}"), files, Some(account.join("token")))
            }
        };
        if url.starts_with("https") && cfg!(not(feature = "tls")) {
            return Err(wrong(
                "the API server is asked over https, and this build has no TLS: build with the \
                 feature `tls` (it needs a C compiler), or run `kubectl proxy` in the router's \
                 pod and set api = \"http://127.0.0.1:8001\"",
            ));
        }
        let endpoint = Endpoint::new(&url).map_err(|error| wrong(&format!("api: {error}")))?;
        if token.is_some() && !endpoint.is_https() && !is_loopback(&endpoint) {
            return Err(wrong("a token is not sent over http to another host; use https for api"));
        }
        Ok(Access { endpoint, files, token, namespace })
    }

    /// Reads the token. Kubernetes replaces it about every hour.
    pub(super) fn token(&self) -> std::result::Result<Option<String>, String> {
        let Some(path) = &self.token else { return Ok(None) };
        let token = read(path).map_err(|error| format!("token {}: {error}", path.display()))?;
        Ok(Some(token))
    }
}

/// Returns true if the connection stays on this host.
fn is_loopback(endpoint: &Endpoint) -> bool {
    let url: Option<Uri> = endpoint.url().parse().ok();
    let host = url.as_ref().and_then(Uri::host).unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Reads a file of one line.
fn read(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(LONGEST).read_to_string(&mut text)?;
    match text.trim() {
        "" => Err(std::io::Error::other("it is empty")),
        text => Ok(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(text: &str) -> KubernetesDiscovery {
        let setup = format!("[discovery.kubernetes]\n{text}");
        crate::Setup::from_toml(&setup).unwrap().discovery.kubernetes.unwrap()
    }

    fn of(text: &str, variables: &[(&str, &str)], account: &Path) -> Result<Access> {
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        Access::in_pod(&settings(text), variable, account)
    }

    #[test]
    fn a_pod_has_a_namespace_and_a_service_account() {
        let account = std::env::temp_dir().join(kvx_testkit::unique("kvx-account"));
        std::fs::create_dir(&account).unwrap();
        std::fs::write(account.join("namespace"), "llm\n").unwrap();
        std::fs::write(account.join("token"), "first\n").unwrap();
        let variables =
            [("KUBERNETES_SERVICE_HOST", "fd00::1"), ("KUBERNETES_SERVICE_PORT", "6443")];
        let in_cluster = of("", &variables, &account);
        if cfg!(feature = "tls") {
            let access = in_cluster.unwrap();
            assert_eq!(access.endpoint.url(), "https://[fd00::1]:6443");
            assert_eq!((&*access.namespace, access.token()), ("llm", Ok(Some("first".to_owned()))));
            assert_eq!(access.files.ca, Some(account.join("ca.crt")));
            std::fs::write(account.join("token"), "second").unwrap();
            assert_eq!(access.token(), Ok(Some("second".to_owned())), "it is read again");
        } else {
            let error = in_cluster.unwrap_err().to_string();
            assert!(error.contains("feature `tls`") && error.contains("kubectl proxy"), "{error}");
        }
        let proxied = of("api = 'http://127.0.0.1:8001'", &[], &account).unwrap();
        assert_eq!((&*proxied.namespace, proxied.token()), ("llm", Ok(None)));
        std::fs::remove_dir_all(&account).unwrap();
    }

    #[test]
    fn errors_say_what_to_set() {
        let nowhere = Path::new("/nowhere");
        for (text, words) in [
            ("", "--service-discovery-namespace"),
            ("namespace = 'llm'", "KUBERNETES_SERVICE_HOST"),
            ("namespace = 'llm'\napi = 'http://a:1/?x'", "query"),
            ("namespace = 'llm'\napi = 'http://a:1'\ntoken = 't'", "use https"),
            ("namespace = 'llm'\napi = 'http://127.0.0.1.a:1'\ntoken = 't'", "use https"),
            ("namespace = 'llm'\napi = 'http://a//127.0.0.1'\ntoken = 't'", "use https"),
        ] {
            let error = of(text, &[], nowhere).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
        let missing = of("namespace = 'a'\napi = 'http://localhost:1'\ntoken = '/t'", &[], nowhere);
        assert!(missing.unwrap().token().unwrap_err().contains("/t"));
    }
}
