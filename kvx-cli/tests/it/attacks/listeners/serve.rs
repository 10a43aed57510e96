//! The clients of `kvx serve`.

use kvx_testkit::{Bounds, Client, Failure, Listener, test};

use super::{ELSEWHERE, HANDSHAKE, KEY, WITH_KEY, attack, from, requests, succeeds};
use crate::attacks::clients::server_with_few_descriptors;
use crate::attacks::http::KeptConnection;
use crate::serve::server::{greedy, prompt};

/// Its limit of 30 s for headers is longer than a test may take; it is that of the proxy, which has
/// a shorter one above.
#[test(own_process)]
fn clients_of_a_server_without_a_key_cost_little() -> Result<(), Failure> {
    let server = server_with_few_descriptors(&["--api-key", KEY, "--served-model-name", "m"]);
    let mut kept = KeptConnection::open(server.port)?;
    let body = greedy(&prompt(1, 20), 1);
    let clients = vec![
        Client::new("a kept connection", move || succeeds(&kept.get("/v1/models", WITH_KEY)?.head)),
        Client::new("a new connection", || {
            let (status, text) = server.call_with(WITH_KEY, "POST", "/v1/completions", Some(&body));
            if status == 200 { Ok(()) } else { Err(Failure::new(text)) }
        }),
    ];
    attack(
        Listener {
            name: "kvx serve",
            process: server.pid(),
            // A quarter of 256 descriptors.
            bounds: Bounds { time: None, ..Bounds::new(64, HANDSHAKE) },
            clients,
        },
        from(ELSEWHERE, server.port),
        &requests(),
    )
}
