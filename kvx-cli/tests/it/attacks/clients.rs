//! H2: clients of `kvx serve` send half requests until nobody else is answered, or JSON that takes
//! a hundred times its length once it is parsed.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::process::Command;

use kvx_testkit::{connect_from, test};
use serde_json::json;

use crate::serve::server::{LIMIT, Server, ServerArgs, model};

/// The second address of the loopback interface: another client.
const OTHER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

fn connect(from: Ipv4Addr, port: u16) -> TcpStream {
    let stream = connect_from(from, (Ipv4Addr::LOCALHOST, port), LIMIT).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

/// Starts a server with few descriptors, as many services have.
pub(super) fn server_with_few_descriptors(arguments: &[&str]) -> Server {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 256 && exec \"$0\" serve \"$@\"", env!("CARGO_BIN_EXE_kvx")]);
    command.arg(model(&["--arch", "llama"])).args([
        "--port",
        "0",
        "--kv-cache-memory-bytes",
        "16M",
    ]);
    command.args(arguments);
    Server::spawn(command).listening()
}

#[test]
fn half_requests_of_one_client_do_not_keep_another_from_an_answer() {
    let server = server_with_few_descriptors(&[]);
    let head = b"POST /v1/completions HTTP/1.1\r\nhost: m\r\ncontent-type: application/json\r\n";
    let half: Vec<TcpStream> = (0..300)
        .map(|at| {
            let mut stream = connect(Ipv4Addr::LOCALHOST, server.port);
            // The server may have closed it.
            let _ = stream.write_all(head);
            if at % 2 == 0 {
                let _ = stream.write_all(b"content-length: 1000000\r\n\r\n{");
            }
            stream
        })
        .collect();
    let mut stream = connect(OTHER, server.port);
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: m\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer in time");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    drop(half);
}

/// Returns the most memory that a process has used, in MiB.
fn most_memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    most.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

#[test]
fn bodies_take_bounded_memory_whatever_their_shape() {
    let server = Server::start(&model(&["--arch", "llama"]), ServerArgs::default());
    let before = most_memory(server.pid());
    let objects = vec![json!({"": 0}); (4 << 20) / r#"{"":0},"#.len()];
    let body = json!({"model": "m", "prompt": "a", "ignored": objects});
    let streams = [(); 4].map(|()| server.send("POST", "/v1/completions", Some(&body)));
    for mut stream in streams {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer in time");
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("of memory"), "{answer}");
    }
    let more = most_memory(server.pid()) - before;
    assert!(more < 400, "4 bodies of 4 MiB took {more} MiB");
    // A longer one is not read.
    let body = json!({"model": "m", "prompt": "a".repeat(16 << 20)});
    let mut stream = connect(OTHER, server.port);
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: m\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.to_string().len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).expect("an answer in time");
    assert_eq!(&answer, b"HTTP/1.1 413");
}
