//! Tests of TLS for clients: the feature `tls`, which only the whole run enables.

#[cfg(feature = "tls")]
use std::process::Command;

#[cfg(feature = "tls")]
use kvx_instance::{Instance, Settings, answer_to};
#[cfg(feature = "tls")]
use kvx_testkit::{output, skip};

#[cfg(feature = "tls")]
use crate::proxy::client::{CUT_OFF, completion};
#[cfg(feature = "tls")]
use crate::proxy::commands::kvx_proxy_with;
use crate::proxy::commands::{kvx_proxy, said};
#[cfg(feature = "tls")]
use crate::proxy::fleet::{Proxy, SetupFile};

/// The certificate of `localhost`, and its key.
const CERT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../kvx-proxy/tests/it/testdata/cert.pem");
const KEY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../kvx-proxy/tests/it/testdata/key.pem");

#[cfg(not(feature = "tls"))]
pub(crate) async fn a_build_without_tls_reports_it() {
    for check in [&[][..], &["--check"]] {
        let flags = [&["--port", "0", "--tls-cert", CERT, "--tls-key", KEY], check].concat();
        let output = kvx_proxy(&flags);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains("this build has no TLS"), "{}", said(&output));
    }
    let output = kvx_proxy(&["--compare", "http://localhost:1", "https://localhost:1"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("this build has no TLS"), "{}", said(&output));
}

/// Starts two instances and a router that serves clients over TLS.
#[cfg(feature = "tls")]
fn serve_over_tls() -> ([Instance; 2], Proxy) {
    let instances = [(); 2].map(|()| Instance::start(Settings::default()));
    let [prefill, decode] = instances.each_ref().map(Instance::url);
    let pool = format!("port = 0\n[[pool]]\nprefill = [\"{prefill}\"]\ndecode = [\"{decode}\"]\n");
    let file = SetupFile::new(&pool);
    let proxy = Proxy::start(&["--config", file.path(), "--tls-cert", CERT, "--tls-key", KEY], &[]);
    (instances, proxy)
}

#[cfg(feature = "tls")]
pub(crate) async fn curl_is_served_over_tls_only() {
    if !output(Command::new("sh").args(["-c", "command -v curl"]), CUT_OFF).status.success() {
        skip(
            "proxy::tls::curl_is_served_over_tls_only",
            "curl is not installed",
            "apt-get install -y curl",
        );
        return;
    }
    let (_instances, proxy) = serve_over_tls();
    let address = format!("localhost:{}", proxy.port);
    let curl = |version: &str, scheme: &str| {
        let mut curl = Command::new("curl");
        curl.args([
            "-sS",
            "--fail",
            "--max-time",
            "10",
            "--cacert",
            CERT,
            version,
            "-w",
            "\n%{http_version}",
        ])
        .args([
            "--resolve",
            &format!("{address}:127.0.0.1"),
            "-H",
            "Content-Type: application/json",
        ])
        .args(["-d", &completion("over TLS", 6).to_string()])
        .arg(format!("{scheme}://{address}/v1/completions"));
        output(&mut curl, CUT_OFF * 2)
    };
    for (flag, version) in [("--http1.1", "1.1"), ("--http2", "2")] {
        let output = curl(flag, "https");
        assert!(output.status.success(), "{}", said(&output));
        let text = String::from_utf8_lossy(&output.stdout);
        let (body, spoken) = text.rsplit_once('\n').expect("the version follows the answer");
        let body: serde_json::Value = serde_json::from_str(body).expect("the answer is JSON");
        assert_eq!(body["choices"][0]["text"], answer_to("over TLS", 6), "{flag}");
        assert_eq!(spoken, version, "{flag}");
    }
    let plain = curl("--http1.1", "http");
    assert!(!plain.status.success(), "{}", said(&plain));
}

#[cfg(feature = "tls")]
pub(crate) async fn compare_uses_tls_with_trusted_endpoints() {
    let ([_prefill, decode], proxy) = serve_over_tls();
    let https = format!("https://localhost:{}/v1", proxy.port);
    let compared =
        kvx_proxy_with(&[("SSL_CERT_FILE", CERT)], &["--compare", &https, &decode.url()]);
    assert_eq!(compared.status.code(), Some(0), "{}", said(&compared));
    assert!(said(&compared).contains("the same answers"), "{}", said(&compared));
    // The system does not trust that certificate.
    let untrusted = kvx_proxy(&["--compare", &https, &decode.url()]);
    assert_eq!(untrusted.status.code(), Some(1), "{}", said(&untrusted));
    assert!(said(&untrusted).contains("certificate"), "{}", said(&untrusted));
}

#[cfg(feature = "tls")]
pub(crate) async fn check_reads_the_files_as_serving_does() {
    for (cert, key, word) in [(KEY, KEY, "key.pem: has no certificate"), (CERT, CERT, "cert.pem")] {
        let flags = ["--port", "0", "--tls-cert", cert, "--tls-key", key];
        let served = kvx_proxy(&flags);
        let checked = kvx_proxy(&[&flags[..], &["--check"]].concat());
        for output in [served, checked] {
            assert_eq!(output.status.code(), Some(1), "{}", said(&output));
            assert!(said(&output).contains(word), "{}", said(&output));
        }
    }
}
