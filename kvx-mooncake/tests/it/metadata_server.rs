//! Tests engines that find each other through an HTTP metadata server instead of querying each
//! other.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use kvx_core::{Agent, ErrorKind, Grid, Memory, MemoryKind, Options, Plan};
use kvx_testkit::test;

use crate::adapter;
use crate::exchange::{self, CUT_OFF};
use crate::python::{Python, content};

type Entries = Arc<Mutex<HashMap<String, Vec<u8>>>>;

/// Serves the engine's requests: GET, PUT and DELETE of a value for each key.
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
    write!(
        &stream,
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    )?;
    (&stream).write_all(&body)
}

/// Returns the address and the entries of an empty server.
fn server() -> (String, Entries) {
    let entries = Entries::default();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/metadata", listener.local_addr().unwrap());
    let served = Arc::clone(&entries);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            serve(stream.unwrap(), &served).ok();
        }
    });
    (url, entries)
}

#[test(own_process)]
fn agents_find_each_other_by_a_metadata_server() {
    if adapter::or_skip("agents_find_each_other_by_a_metadata_server").is_none() {
        return;
    }
    let (url, entries) = server();
    exchange::by_way_of(&url, || {
        assert!(!entries.lock().unwrap().is_empty(), "the engines have registered themselves");
    });
}

/// An engine caches a peer's segment, with its data port, and fetches it again only on request.
/// With a metadata server the peer keeps its name after a restart, whatever ports it gets.
#[test(own_process)]
fn a_python_engine_that_restarts_under_its_name_is_reached_again() {
    const TEST: &str = "a_python_engine_that_restarts_under_its_name_is_reached_again";
    let Some(adapter) = adapter::or_skip(TEST) else { return };
    const NAME: &str = "127.0.0.1:1"; // only a name: no process listens there
    const BLOCK: usize = 4096;
    const LEN: usize = 1 << 16;
    let (url, _) = server();
    let mut python = Python::start_as(&adapter, LEN, NAME, &url);
    let mut options = Options::new();
    options.set("mooncake", "metadata", url.clone()).set("mooncake", "mooncake_protocol", "tcp");
    let agent = Agent::builder(format!("loyal-{}", std::process::id())).backends(["MOONCAKE"]);
    let agent = agent.options(options).registry(adapter::registry("")).build().unwrap();
    let ours = agent.register("kv", Arc::new(Memory::owned(vec![0; LEN]))).unwrap();
    let peer = agent.connect_foreign("MOONCAKE", NAME.as_bytes()).unwrap();
    peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    let grid = Grid::packed(BLOCK as u64, 16);
    let read = |address: u64, block: u32| {
        let theirs = peer.foreign(address, LEN as u64, MemoryKind::Host, 0).unwrap();
        let local = ours.grid(grid).unwrap().blocks([block]);
        let plan = Plan::read(local, theirs.grid(grid).unwrap().blocks([block + 1])).unwrap();
        peer.transfer(&plan).deadline(CUT_OFF).post().unwrap().wait_blocking(CUT_OFF)
    };
    let block = |block: usize| {
        let mut bytes = vec![0; BLOCK];
        ours.copy_out(block * BLOCK, &mut bytes).unwrap();
        bytes
    };
    let content_of =
        |block: usize| (block * BLOCK..(block + 1) * BLOCK).map(content).collect::<Vec<u8>>();
    read(python.address, 0).unwrap();
    assert_eq!(block(0), content_of(1));

    python.kill();
    let mut python = Python::start_as(&adapter, LEN, NAME, &url);
    match read(python.address, 2) {
        Err(error) => {
            assert_eq!(
                error.kind(),
                ErrorKind::Native,
                "the engine connects to the old port: {error}"
            );
            assert_eq!(block(2), [0; BLOCK], "the failed transfer moved nothing");
        }
        Ok(_) => assert_eq!(block(2), content_of(3), "it got the same port again"),
    }
    read(python.address, 4).unwrap();
    assert_eq!(block(4), content_of(5));
    peer.notify(b"welcome back", CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    assert!(python.ask("heard").ends_with("=welcome back"));
    agent.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
}
