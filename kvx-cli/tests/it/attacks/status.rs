//! L2: a client without a key reads the addresses and the failures of the router's instances.

use kvx_testkit::test;

use crate::attacks::http::{Upstream, get};
use crate::proxy::fleet::{Proxy, SetupFile};

#[test]
fn only_clients_with_a_key_see_the_instances() {
    let instance = Upstream::start(|_| "{}".to_owned());
    let name = &instance.url["http://".len()..];
    let keys = SetupFile::new("a-key\n");
    let arguments = ["--port", "0", "--decode", &instance.url, "--api-key-file", keys.path()];
    let proxy = Proxy::start(&arguments, &[]);
    let ask = |path: &str, key: &str| get(proxy.port, path, &format!("connection: close\r\n{key}"));
    for path in ["/status", "/metrics"] {
        for key in ["", "authorization: Bearer another\r\n"] {
            let answer = ask(path, key);
            assert!(answer.starts_with("HTTP/1.1 401 ") && !answer.contains(name), "{answer}");
        }
        let answer = ask(path, "authorization: Bearer a-key\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.contains(name), "{answer}");
    }
    // The page has no data, and probes have no keys.
    for path in ["/", "/health", "/ready", "/healthcheck"] {
        assert!(!ask(path, "").contains(name), "{path}");
    }
    assert!(ask("/health", "").starts_with("HTTP/1.1 200 "));
}
