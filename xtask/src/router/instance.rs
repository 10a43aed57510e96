//! A server that answers as a prefill and as a decode instance would: enough for a router that is
//! checked alone.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

/// Its model.
pub(super) const MODEL: &str = "m";
/// Its answer to every prompt.
pub(super) const TEXT: &str = "an answer";
/// The most bytes of a request's body, and of all its headers.
const LONGEST: u64 = 64 << 10;

/// Starts the server on a free port, until this process ends.
pub(super) fn start() -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        for stream in listener.incoming().map_while(std::io::Result::ok) {
            // An error ends one connection; the router then reports it.
            thread::spawn(move || answer(stream));
        }
    });
    Ok(address)
}

/// Answers one request.
fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let mut reader = BufReader::new(stream.try_clone()?.take(LONGEST));
    let (mut first, mut length) = (String::new(), 0);
    reader.read_line(&mut first)?;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        match line.to_ascii_lowercase().split_once(':') {
            Some(("content-length", value)) => {
                length = value.trim().parse().unwrap_or(0);
            }
            Some(_) => {}
            None => break,
        }
    }
    std::io::copy(&mut reader.take(length), &mut std::io::sink())?;
    let body = body(&first);
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Returns the body for a request with this first line.
fn body(first: &str) -> String {
    let value = match first {
        _ if first.starts_with("POST ") => serde_json::json!({
            "id": "x",
            "object": "text_completion",
            "model": MODEL,
            "choices": [{"index": 0, "text": TEXT, "finish_reason": "length"}],
            "kv_transfer_params": {
                "do_remote_prefill": true,
                "do_remote_decode": false,
                "remote_engine_id": "e",
                "remote_block_ids": [1],
                "remote_host": "127.0.0.1",
                "remote_port": 1,
                "remote_request_id": "x",
                "tp_size": 1,
            },
        }),
        _ if first.starts_with("GET /v1/models ") => {
            serde_json::json!({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        }
        _ => serde_json::json!({}),
    };
    value.to_string()
}
