//! P5: a client sends JSON as a form, past the filter of `kv_transfer_params`, and removes the
//! form's `Content-Type` on the way.

use kvx_testkit::test;

use crate::attacks::http::{Upstream, post};
use crate::proxy::fleet::Proxy;

const HIDDEN: &[u8] =
    br#"{"model": "m", "input": "a", "kv_transfer_params": {"remote_host": "evil"}}"#;

#[test]
fn json_does_not_pass_as_a_form() {
    let instance = Upstream::start(|_| "{}".to_owned());
    let proxy = Proxy::start(&["--port", "0", "--decode", &instance.url], &[]);
    let form = "content-type: multipart/form-data; boundary=x\r\n";
    for lines in [
        format!("connection: close, content-type\r\n{form}"),
        format!("connection: close\r\n{form}"),
        format!("connection: close\r\n{form}content-type: application/json\r\n"),
    ] {
        let answer = post(proxy.port, "/v1/embeddings", &lines, HIDDEN);
        for received in instance.received() {
            let body = String::from_utf8_lossy(&received.body).into_owned();
            assert!(!body.contains("evil"), "{lines}: {}{body}", received.head);
        }
        assert!(answer.starts_with("HTTP/1.1 400 "), "{lines}: {answer}");
    }
    // A form stays one.
    let body = b"--x\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nm\r\n--x--\r\n";
    let lines = format!("connection: close, content-type\r\n{form}");
    let answer = post(proxy.port, "/v1/audio/transcriptions", &lines, body);
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let received = instance.received();
    assert_eq!(received.len(), 1);
    assert!(received[0].head.contains(form), "{}", received[0].head);
    assert_eq!(received[0].body, body);
}
