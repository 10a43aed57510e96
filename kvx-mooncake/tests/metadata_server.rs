//! Engines that find each other by a metadata server of the web instead of asking each other.

#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod adapter;
mod exchange;

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use exchange::CUT_OFF;

type Entries = Arc<Mutex<HashMap<String, Vec<u8>>>>;

/// What Mooncake's engine asks of such a server: a value for each key, by GET, PUT and DELETE.
fn serve(stream: TcpStream, entries: &Entries) -> std::io::Result<()> {
    stream.set_read_timeout(Some(CUT_OFF))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let (mut request, mut len) = (String::new(), 0);
    reader.read_line(&mut request)?;
    loop {
        let mut header = String::new();
        if reader.read_line(&mut header)? <= 2 {
            break;
        }
        let header = header.to_ascii_lowercase();
        if let Some(value) = header.strip_prefix("content-length:") {
            len = value.trim().parse().unwrap();
        }
        if header.starts_with("expect:") {
            (&stream).write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
    }
    let mut body = vec![0; len];
    reader.read_exact(&mut body)?;
    let mut words = request.split(' ');
    let (method, key) = (words.next().unwrap(), words.next().unwrap().to_owned());
    let mut entries = entries.lock().unwrap();
    let found = match method {
        "PUT" => {
            entries.insert(key, body);
            Some(Vec::new())
        }
        "DELETE" => entries.remove(&key).map(|_| Vec::new()),
        _ => entries.get(&key).cloned(),
    };
    let (status, body) = found.map_or(("404 Not Found", Vec::new()), |body| ("200 OK", body));
    write!(&stream, "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len())?;
    (&stream).write_all(&body)
}

#[test]
fn agents_find_each_other_by_a_metadata_server() {
    if adapter::adapter().is_none() {
        let why = "Mooncake's wheel and the adapter are not there";
        return kvx_testkit::skip(
            "agents_find_each_other_by_a_metadata_server",
            why,
            "cargo xtask peers mooncake",
        );
    }
    let entries = Entries::default();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/metadata", listener.local_addr().unwrap());
    let served = Arc::clone(&entries);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            serve(stream.unwrap(), &served).ok();
        }
    });
    exchange::by_way_of(&url, || {
        assert!(!entries.lock().unwrap().is_empty(), "the engines have told the server of themselves");
    });
}
