//! The bootstrap server and the side channel of a MooncakeConnector.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvx::Secret;
use kvx_testkit::{AttackBytes, Bounds, Client, Failure, Listener, free_port, test};
use kvx_vllm::params::BootstrapRequest;
use serde_json::{Value, json};

use super::{HANDSHAKE, attack, frame, frame_of, from, succeeds};
use crate::attacks::http::KeptConnection;
use crate::attacks::mooncake::{greeting, server};
use crate::serve::hosts::secret;
use crate::serve::server::{Server, greedy};

/// A prefill with MooncakeConnector and a secret.
struct MooncakePrefill {
    server: Server,
    bootstrap: u16,
    secret: Secret,
    /// The number of loads so far.
    loads: AtomicU64,
}

impl MooncakePrefill {
    fn start() -> Result<Self, Failure> {
        let (bootstrap, file) = (free_port(1)?, secret());
        let text = bootstrap.to_string();
        let variables =
            [("VLLM_MOONCAKE_BOOTSTRAP_PORT", &*text), ("KVX_SECRET_FILE", file.to_str().unwrap())];
        let server = server("kv_producer", "0.33", &variables);
        let (secret, loads) = (Secret::from_file(file)?, AtomicU64::new(0));
        Ok(MooncakePrefill { server, bootstrap, secret, loads })
    }

    fn decode() -> Server {
        let variables = [("KVX_SECRET_FILE", secret().to_str().unwrap())];
        server("kv_consumer", "0.33", &variables)
    }

    /// Queries the bootstrap server, and proves the secret when it demands that. Returns its list.
    fn query(&self, connection: &mut KeptConnection) -> Result<Value, Failure> {
        let demand = connection.get("/query", "")?.head;
        let header = format!("{}: ", BootstrapRequest::NONCE.to_ascii_lowercase());
        let nonce = demand.lines().find_map(|line| line.strip_prefix(&header));
        let nonce = nonce.ok_or_else(|| Failure::new(format!("no nonce: {demand}")))?;
        let proof = BootstrapRequest::Query.prove(self.secret.bytes(), nonce, b"");
        let header = format!("{}: {proof}\r\n", BootstrapRequest::PROOF);
        let answer = connection.get("/query", &header)?;
        succeeds(&answer.head)?;
        serde_json::from_slice(&answer.body).map_err(|error| Failure::new(error.to_string()))
    }

    /// Loads the blocks of a prompt that it has not had before.
    fn load(&self, engine: &Value, decode: &Server) -> Result<(), Failure> {
        let number = self.loads.fetch_add(1, Ordering::Relaxed);
        let digits = [number % 90, number / 90 % 90, number / 8100].map(|digit| 33 + digit);
        let prompt: Vec<u64> = digits.into_iter().chain((0..40).map(|at| 33 + at)).collect();
        let legs = [
            (
                &self.server,
                json!({"do_remote_decode": true, "do_remote_prefill": false,
                       "transfer_id": number.to_string()}),
            ),
            (
                decode,
                json!({"do_remote_decode": false, "do_remote_prefill": true,
                       "transfer_id": number.to_string(), "remote_engine_id": engine,
                       "remote_bootstrap_addr": format!("http://127.0.0.1:{}", self.bootstrap)}),
            ),
        ];
        for (server, params) in legs {
            let mut body = greedy(&json!(prompt), 1);
            body["kv_transfer_params"] = params;
            let (status, answer) = server.post("/v1/completions", &body);
            if status != 200 {
                return Err(Failure::new(answer.to_string()));
            }
        }
        Ok(())
    }
}

#[test(own_process)]
fn peers_of_the_bootstrap_server_without_the_secret_cost_little() -> Result<(), Failure> {
    let prefill = MooncakePrefill::start()?;
    let mut kept = KeptConnection::open(prefill.bootstrap)?;
    let post = |length: u64| {
        format!("POST /register HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n")
            .into_bytes()
    };
    attack(
        Listener {
            name: "Mooncake bootstrap server",
            process: prefill.server.pid(),
            bounds: Bounds::new(256, HANDSHAKE),
            clients: vec![
                Client::new("a kept connection", || prefill.query(&mut kept).map(drop)),
                Client::new("a new connection", || {
                    prefill.query(&mut KeptConnection::open(prefill.bootstrap)?).map(drop)
                }),
            ],
        },
        from(Ipv4Addr::LOCALHOST, prefill.bootstrap),
        &AttackBytes {
            message: b"GET /query HTTP/1.1\r\nhost: x\r\n\r\n".to_vec(),
            claims: [8 << 10, 64 << 20, u64::MAX].map(post).to_vec(),
            longest: post(8 << 10),
            ..AttackBytes::default()
        },
    )
}

#[test(own_process)]
fn peers_of_mooncakes_side_channel_without_the_secret_cost_little() -> Result<(), Failure> {
    /// The number of loads after which the next decode asks for the first time.
    const LOADS: usize = 5;
    let prefill = MooncakePrefill::start()?;
    let listed = prefill.query(&mut KeptConnection::open(prefill.bootstrap)?)?;
    let engine = &listed["0"]["engine_id"];
    let worker = listed["0"]["worker_addr"]["0"]["0"].as_str().unwrap_or_default().to_owned();
    let port = worker.rsplit(':').next().and_then(|port| port.parse().ok());
    let port = port.ok_or_else(|| Failure::new(format!("no worker: {listed}")))?;
    let before = MooncakePrefill::decode();
    let newcomers = [(); 3].map(|()| MooncakePrefill::decode());
    let mut loads = 0;
    attack(
        Listener {
            name: "Mooncake side channel",
            process: prefill.server.pid(),
            bounds: Bounds {
                // A newcomer opens a side channel and the connections of a TCP link.
                spare: 16,
                deadline: Duration::from_secs(3),
                ..Bounds::new(512, HANDSHAKE)
            },
            clients: vec![
                Client::new("a decode that has asked before", || prefill.load(engine, &before)),
                Client::new("a decode that asks for the first time", || {
                    let at = loads / LOADS;
                    loads += 1;
                    prefill.load(engine, &newcomers[at.min(newcomers.len() - 1)])
                }),
            ],
        },
        from(Ipv4Addr::LOCALHOST, port),
        &AttackBytes {
            prelude: greeting("DEALER"),
            message: frame(&[9; 80]),
            claims: [4 << 10, 16 << 20, u64::MAX].map(frame_of).to_vec(),
            longest: frame_of(4 << 10),
        },
    )
}
