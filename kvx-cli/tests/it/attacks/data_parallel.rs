//! H3: a process without the secret joins the data-parallel port of `kvx serve`, receives prompts
//! and answers them.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use kvx_testkit::{free_port, test};
use serde_json::json;

use crate::serve::hosts::secret;
use crate::serve::server::{LIMIT, Server, ServerArgs, model};

/// Joins as the second rank of two, without a proof. Returns the head's answer.
fn join(port: u16, model: &str) -> Vec<u8> {
    let until = Instant::now() + LIMIT;
    let mut stream = loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => break stream,
            Err(why) => assert!(Instant::now() < until, "the head does not listen: {why}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let alike = json!({"model": model, "data_parallel_size": 2, "model_len": 64, "block_size": 16});
    let joining = json!({"ranks": {"start": 1, "end": 2}, "alike": alike}).to_string();
    stream
        .write_all(&[&(joining.len() as u32).to_be_bytes()[..], joining.as_bytes()].concat())
        .unwrap();
    // Long enough for a head that accepts the rank: it answers at once.
    stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let mut heard = Vec::new();
    let _ = stream.read_to_end(&mut heard);
    heard
}

#[test]
fn an_unauthenticated_process_does_not_join_a_head_with_a_secret() {
    let (model, port) = (model(&["--arch", "llama"]), free_port(1).unwrap());
    let port_text = port.to_string();
    let arguments = ["-dp", "2", "-dpl", "1", "-dpp", &port_text, "--max-model-len", "64"];
    let variables = [("KVX_SECRET_FILE", secret().to_str().unwrap())];
    let told = ServerArgs { arguments: &arguments, variables: &variables };
    let _head = Server::try_start(&model, told);
    let heard = join(port, model.to_str().unwrap());
    assert!(
        heard.is_empty(),
        "the head answers without a proof: {}",
        String::from_utf8_lossy(&heard)
    );
}

#[test]
fn a_head_without_a_secret_does_not_listen_beyond_this_machine() {
    let model = model(&["--arch", "llama"]);
    let port = free_port(1).unwrap().to_string();
    let arguments = ["-dp", "2", "-dpl", "1", "-dpa", "0.0.0.0", "-dpp", &port];
    let head =
        Server::try_start(&model, ServerArgs { arguments: &arguments, ..ServerArgs::default() });
    let (status, said) = head.ended();
    assert!(!status.success() && said.contains("KVX_SECRET_FILE"), "{said}");
}
