//! Engines that find each other by a metadata server instead of asking each other.

#![allow(clippy::unwrap_used, reason = "a test's unwrap is its assertion")]

mod adapter;

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvx_core::{Agent, Grid, Memory, Options, Plan};

const CUT_OFF: Duration = Duration::from_secs(10);

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
    let agent = |name: &str| {
        let mut options = Options::new();
        options.set("mooncake", "metadata", url.clone()).set("mooncake", "mooncake_protocol", "tcp");
        let builder = Agent::builder(format!("{name}-{}", std::process::id())).backends(["MOONCAKE"]);
        builder.options(options).build(&adapter::registry("")).unwrap()
    };
    let (decode, prefill) = (agent("decode"), agent("prefill"));
    assert!(!entries.lock().unwrap().is_empty(), "the engines have told the server of themselves");
    let grid = Grid::packed(4096, 16);
    let theirs = prefill.register("kv", Arc::new(Memory::owned(vec![7; 65536]))).unwrap();
    let ours = decode.register("kv", Arc::new(Memory::owned(vec![0; 65536]))).unwrap();
    let peer = decode.connect(&prefill.metadata().unwrap()).unwrap();
    peer.ready(CUT_OFF).wait(CUT_OFF).unwrap();
    let remote = peer.region("kv").unwrap().grid(grid).unwrap();
    let plan = Plan::read(ours.grid(grid).unwrap().blocks([3, 1]), remote.blocks([2, 9])).unwrap();
    let transfer = peer.transfer(&plan).deadline(CUT_OFF).notify(*b"read").post().unwrap();
    assert_eq!(transfer.wait(CUT_OFF).unwrap().bytes, 8192);
    assert_eq!(&*prefill.notification(CUT_OFF).wait().unwrap().bytes, b"read");
    let mut bytes = vec![0; 65536];
    ours.copy_out(0, &mut bytes).unwrap();
    assert!(
        bytes.iter().enumerate().all(|(at, byte)| *byte == if matches!(at / 4096, 1 | 3) { 7 } else { 0 })
    );
    drop(theirs);
    decode.shutdown(CUT_OFF).wait(CUT_OFF).unwrap();
    prefill.shutdown(CUT_OFF).wait(CUT_OFF).unwrap();
}
