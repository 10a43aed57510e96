//! P6: one client takes all connections of the router, and its `/health` no longer answers.
//! kvx-proxy's tests have the connections over HTTP/2, which need TLS.

use kvx_testkit::{Failure, test};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpSocket;

use crate::proxy::client::Call;
use crate::proxy::fleet::{Proxy, SetupFile};

const CONNECTIONS: usize = 64;

#[test]
fn one_address_does_not_take_all_connections() -> Result<(), Failure> {
    crate::proxy::run(|| async {
        let setup = "port = 0\n[limits]\nconnections = 64\nconnections_per_address = 48\n\
                     [[pool]]\ndecode = [\"http://127.0.0.1:1\"]\n";
        let file = SetupFile::new(setup);
        let proxy = Proxy::start(&["--config", file.path()], &[]);
        let mut crowd = Vec::new();
        for _ in 0..2 * CONNECTIONS {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
            let mut stream = socket.connect(([127, 0, 0, 1], proxy.port).into()).await.unwrap();
            // Half a request, which the router awaits for `header_time`. An error: it was closed.
            let _ = stream.write_all(b"GET /health HTTP/1.1\r\n").await;
            crowd.push(stream);
        }
        assert_eq!(Call::get(proxy.port, "/health").send().await.status, 200);
    })
}
