//! The port at which hosts of data-parallel ranks join `kvx serve`.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use kvx::Secret;
use kvx_noise::{MESSAGE, NoiseHandshake, derive_key};
use kvx_testkit::{AttackBytes, Bounds, Client, Failure, Listener, free_port, test};
use serde_json::json;

use super::{ELSEWHERE, HANDSHAKE, attack, from};
use crate::serve::hosts::secret;
use crate::serve::server::{LIMIT, Server, ServerArgs, greedy, model, prompt};

/// The purpose of the key of a head and its hosts.
const LABEL: &[u8] = b"kvx serve 1: a head and its hosts";
/// The most connections of hosts that have not proven the secret yet.
const CONNECTIONS: usize = 16;

/// A head with one rank, and the secret of its hosts.
struct Head {
    port: u16,
    model: String,
    secret: Secret,
}

impl Head {
    /// Returns one end of a handshake, and its first message.
    fn greeting(&self) -> Result<(NoiseHandshake, Vec<u8>), Failure> {
        let mut handshake = NoiseHandshake::initiator(&derive_key(&self.secret, LABEL), LABEL)?;
        let mut message = Vec::new();
        handshake.write(&[], &mut message)?;
        Ok((handshake, message))
    }

    /// Proves the secret as a host of the second rank, which has joined already. Fails unless the
    /// head says so.
    fn join(&self) -> Result<(), Failure> {
        let (mut handshake, message) = self.greeting()?;
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.write_all(&message)?;
        let mut proof = [0; MESSAGE];
        stream.read_exact(&mut proof)?;
        handshake.read(&proof).ok_or_else(|| Failure::new("the head has not proven the secret"))?;
        let mut seals = handshake.seals();
        let alike = json!({"model": self.model, "data_parallel_size": 2, "model_len": 64,
                           "block_size": 16});
        let joining = json!({"ranks": {"start": 1, "end": 2}, "alike": alike}).to_string();
        let joining = [&(joining.len() as u32).to_be_bytes()[..], joining.as_bytes()].concat();
        let mut sealed = Vec::new();
        seals.sealer.seal_stream(&joining, &mut sealed);
        stream.write_all(&sealed)?;
        // The head closes the connection after its refusal.
        let (mut sealed, mut answer) = (Vec::new(), Vec::new());
        stream.read_to_end(&mut sealed)?;
        seals.opener.open_stream(&mut sealed, &mut answer)?;
        let answer = String::from_utf8_lossy(&answer);
        if answer.contains("have already joined") { Ok(()) } else { Err(Failure::new(answer)) }
    }
}

/// Starts a server with one of two data-parallel ranks.
fn start(model: &Path, port: &str, more: &[&str]) -> Server {
    let arguments =
        [&["-dp", "2", "-dpl", "1", "-dpp", port, "--max-model-len", "64"], more].concat();
    let variables = [("KVX_SECRET_FILE", secret().to_str().unwrap())];
    Server::try_start(model, ServerArgs { arguments: &arguments, variables: &variables })
}

/// Half of the attackers send nothing of their own first, and the other half repeat the first
/// message of a host, which they have recorded.
#[test(own_process)]
fn peers_of_the_data_parallel_port_without_the_secret_cost_little() -> Result<(), Failure> {
    let (model, port) = (model(&["--arch", "llama"]), free_port(1)?);
    let text = port.to_string();
    let (server, _host) =
        (start(&model, &text, &[]), start(&model, &text, &["--headless", "-dpr", "1"]));
    let server = server.listening();
    let model = model.to_str().unwrap().to_owned();
    let head = Head { port, model, secret: Secret::from_file(secret())? };
    let recorded = head.greeting()?.1;
    let (connect, repeats) = (from(ELSEWHERE, port), AtomicBool::new(false));
    let connect = || {
        let connection = connect()?;
        if repeats.fetch_xor(true, Ordering::Relaxed) {
            let written = rustix::io::write(&connection, &recorded).map_err(io::Error::from)?;
            assert_eq!(written, MESSAGE);
        }
        Ok(connection)
    };
    let body = greedy(&prompt(1, 20), 1);
    let clients = vec![
        Client::new("a host that has joined", || {
            let (status, answer) = server.post_to(1, "/v1/completions", &body);
            if status == 200 { Ok(()) } else { Err(Failure::new(answer.to_string())) }
        }),
        Client::new("a host that joins", || head.join()),
    ];
    attack(
        Listener {
            name: "data-parallel port",
            process: server.pid(),
            bounds: Bounds { crowd: 8 * CONNECTIONS, ..Bounds::new(CONNECTIONS, HANDSHAKE) },
            clients,
        },
        connect,
        // As long as a message of Noise, and a part of one.
        &AttackBytes {
            message: vec![7; MESSAGE],
            // Lengths of sealed messages, and of one in the clear.
            claims: vec![vec![0x3f, 0xff], vec![0xff; 4], vec![0, 0, 0xff, 0xff]],
            longest: vec![7; MESSAGE / 3],
            ..AttackBytes::default()
        },
    )
}
