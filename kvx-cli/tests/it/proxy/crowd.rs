//! Tests with many idle connections and many slow ones.

use kvx_instance::Settings;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::proxy::client::{Call, completion, streamed};
use crate::proxy::fleet::Plan;
use crate::proxy::recipes::COMPLETIONS;

const CROWD: usize = 1000;
/// The memory limit in KiB.
const MEMORY: u64 = 128 << 10;

/// Raises the limit of descriptors: test, router and instances hold 3,000 each, more than most
/// shells allow by default.
pub(crate) fn allow_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(8192, |most| most.min(8192));
    if limit.current.is_some_and(|current| current < wanted) {
        setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum: limit.maximum })
            .expect("a limit may be raised up to its maximum");
    }
}

pub(crate) async fn a_thousand_idle_and_a_thousand_slow_connections_stay_under_128_mib() {
    let fleet = Plan::of(1, 1, &Settings { keeps: 0, ..Settings::default() }).start().await;
    let connect =
        async || TcpStream::connect(("127.0.0.1", fleet.port())).await.expect("it listens");
    let mut idle = Vec::new();
    for _ in 0..CROWD {
        idle.push(connect().await);
    }
    let body = streamed(&"slow reader ".repeat(100), 500).to_string();
    let request = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut slow = Vec::new();
    for _ in 0..CROWD {
        let mut stream = connect().await;
        stream.write_all(request.as_bytes()).await.expect("it reads");
        slow.push(stream);
    }
    for stream in &mut slow {
        let mut first = [0; 12];
        stream.read_exact(&mut first).await.expect("it answers"); // and the rest is not read
        assert_eq!(&first, b"HTTP/1.1 200");
    }
    let resident = fleet.proxy.resident();
    assert!(resident < MEMORY, "{resident} KiB for {CROWD} idle and {CROWD} slow connections");
    eprintln!("{resident} KiB with {CROWD} idle and {CROWD} slow connections");
    let answer =
        Call::post(fleet.port(), COMPLETIONS, &completion("beside a crowd", 2)).send().await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    for stream in idle.iter_mut().take(10) {
        stream
            .write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            .await
            .expect("it is still there");
        let mut first = [0; 12];
        stream.read_exact(&mut first).await.expect("it answers");
        assert_eq!(&first, b"HTTP/1.1 200");
    }
}
