//! The side channel of a NixlConnector.

use std::net::Ipv4Addr;

use kvx::Secret;
use kvx::connector::{Address, Version, WorkerRank, probe};
use kvx_testkit::{AttackBytes, Bounds, Client, Failure, Listener, test};
use serde_json::json;

use super::{HANDSHAKE, attack, frame, frame_of, from};
use crate::attacks::mooncake::greeting;
use crate::serve::hosts::secret;
use crate::serve::server::{LIMIT, Server, ServerArgs, model, prompt};
use crate::serve::transfers::published;

/// Decodes of vLLM have no secret, so that the connections of attackers may stay after a greeting,
/// up to the limit of their number.
#[test(own_process)]
fn peers_of_the_side_channel_without_the_secret_cost_little() -> Result<(), Failure> {
    let file = secret();
    let variables = [("KVX_SECRET_FILE", file.to_str().unwrap())];
    let told = ServerArgs { arguments: &[], variables: &variables };
    let server = Server::configured(&model(&["--arch", "llama"]), "TCP", &json!({}), told);
    let port = published(&server, &prompt(1, 20))["remote_port"].as_u64().unwrap() as u16;
    let secret = Secret::from_file(file)?;
    let address = Address { host: "127.0.0.1".into(), port };
    let question = || -> Result<(), Failure> {
        let (rank, version) = (WorkerRank { pp: 0, tp: 0 }, Version::default());
        Ok(probe(&address, rank, version, Some(secret.clone()), LIMIT).map(drop)?)
    };
    attack(
        Listener {
            name: "NIXL side channel",
            process: server.pid(),
            bounds: Bounds { idle: true, ..Bounds::new(512, HANDSHAKE) },
            clients: vec![Client::new("a decode with the secret", question)],
        },
        from(Ipv4Addr::LOCALHOST, port),
        &AttackBytes {
            prelude: greeting("DEALER"),
            message: frame(b"\x93\xc4\x0cget_meta_msg\x00\x00"),
            claims: [4 << 10, 64 << 20, u64::MAX].map(frame_of).to_vec(),
            longest: frame_of(4 << 10),
        },
    )
}
