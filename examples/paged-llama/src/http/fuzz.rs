//! Fuzz targets: the bodies of clients, and the messages of other data-parallel hosts.

use std::io::Cursor;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use serde_json::Value;

use super::fields::{Fields, tokens};
use super::handshake::{JoinRequest, read_message, write_message};
use super::json;

/// Parses a body, and reads fields of every type.
pub(crate) fn body(bytes: &[u8]) {
    let Ok(body) = json::parse(bytes) else { return };
    assert_eq!(body, serde_json::from_slice::<Value>(bytes).expect("it was parsed"));
    let Ok(fields) = Fields::of(&body) else { return };
    drop((fields.text("model"), fields.flag("stream"), fields.flag_or("echo", true)));
    drop((fields.integer("seed"), fields.number("top_p", 0.0, 1.0), fields.count("n", 1)));
    drop((fields.texts("stop"), fields.tokens("stop_token_ids")));
    fields.get("prompt").map(tokens);
}

/// Reads the message with which a host joins.
pub(crate) fn join(bytes: &[u8]) {
    let read = |bytes: &[u8]| ready(read_message::<JoinRequest>(&mut Cursor::new(bytes.to_vec())));
    let Ok(request) = read(bytes) else { return };
    let mut written = Cursor::new(Vec::new());
    ready(write_message(&mut written, &request)).expect("memory can be written");
    let again = read(written.get_ref()).expect("a message is read as it was written");
    assert_eq!(again.ranks, request.ranks);
    assert_eq!(again.config.difference(&request.config), None);
}

/// Returns the result of a future that never waits.
fn ready<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("memory is read at once"),
    }
}
