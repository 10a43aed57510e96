//! A client that sends one request.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::CUT_OFF;

/// Posts JSON with these header lines. Returns the answer's head in lower case, and the bytes after
/// it.
pub(crate) async fn post(
    to: SocketAddr,
    path: &str,
    lines: &str,
    body: &serde_json::Value,
) -> (String, Vec<u8>) {
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n{lines}\r\n",
        body.len()
    );
    let talk = async {
        let mut stream = TcpStream::connect(to).await.unwrap();
        stream.write_all([head, body].concat().as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        answer
    };
    let mut answer = tokio::time::timeout(CUT_OFF, talk).await.unwrap();
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
    let rest = answer.split_off(end);
    (String::from_utf8(answer).unwrap().to_ascii_lowercase(), rest)
}
