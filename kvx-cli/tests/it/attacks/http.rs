//! HTTP by hand: an instance whose answers a test writes, and a client that sends any bytes.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use crate::serve::server::LIMIT;

/// A request that an instance received.
#[derive(Clone, Debug)]
pub(super) struct Received {
    /// Its first line and its headers, in lower case.
    pub(super) head: String,
    pub(super) body: Vec<u8>,
}

/// An instance, which ends with the test program.
pub(super) struct Upstream {
    pub(super) url: String,
    received: Arc<Mutex<Vec<Received>>>,
}

impl Upstream {
    /// Starts an instance that answers all requests of clients with this JSON.
    pub(super) fn start(answer: impl Fn(&Received) -> String + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let received = Arc::<Mutex<Vec<Received>>>::default();
        let (answer, kept) = (Arc::new(answer), Arc::clone(&received));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (answer, kept) = (Arc::clone(&answer), Arc::clone(&kept));
                std::thread::spawn(move || serve(stream.unwrap(), &*answer, &kept));
            }
        });
        Upstream { url, received }
    }

    /// Returns the requests of clients so far.
    pub(super) fn received(&self) -> Vec<Received> {
        self.received.lock().unwrap().clone()
    }
}

/// Answers the requests of a connection until it closes.
fn serve(
    stream: TcpStream,
    answer: &dyn Fn(&Received) -> String,
    kept: &Mutex<Vec<Received>>,
) -> Option<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if stream.read_line(&mut head).ok()? == 0 {
                return None;
            }
        }
        head.make_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
        stream.read_exact(&mut body).ok()?;
        // The router's own checks.
        let checks = ["get /health ", "get /v1/models "];
        let text = match checks.iter().any(|check| head.starts_with(check)) {
            true => String::new(),
            false => {
                let received = Received { head, body };
                let text = answer(&received);
                kept.lock().unwrap().push(received);
                text
            }
        };
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            text.len()
        );
        stream.get_mut().write_all([head, text].concat().as_bytes()).ok()?;
    }
}

/// Posts a body with these header lines, and returns the whole answer.
pub(super) fn post(port: u16, path: &str, lines: &str, body: &[u8]) -> String {
    let head =
        format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n{lines}\r\n", body.len());
    send(port, &[head.as_bytes(), body].concat())
}

/// Sends a `GET` with these header lines, and returns the whole answer.
pub(super) fn get(port: u16, path: &str, lines: &str) -> String {
    send(port, format!("GET {path} HTTP/1.1\r\nhost: x\r\n{lines}\r\n").as_bytes())
}

/// Sends these bytes, and reads until the server closes the connection.
fn send(port: u16, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    // An error: the server answers before it has read everything.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}
