//! HTTP by hand: an instance whose answers a test writes, and a client that sends any bytes.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use crate::serve::server::LIMIT;

/// A request that an instance received, or an answer.
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
    /// Starts an instance that answers all requests of clients with this JSON. It sends back the
    /// bytes of a WebSocket.
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

/// Reads a message whose head says how long its body is.
fn receive(stream: &mut BufReader<TcpStream>) -> io::Result<Received> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    head.make_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
    stream.read_exact(&mut body)?;
    Ok(Received { head, body })
}

/// Answers the requests of a connection until it closes.
fn serve(
    stream: TcpStream,
    answer: &dyn Fn(&Received) -> String,
    kept: &Mutex<Vec<Received>>,
) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let received = receive(&mut stream)?;
        if received.head.contains("upgrade: websocket") {
            return send_back(&mut stream);
        }
        // The router's own checks.
        let checks = ["get /health ", "get /v1/models "];
        let text = match checks.iter().any(|check| received.head.starts_with(check)) {
            true => String::new(),
            false => {
                let text = answer(&received);
                kept.lock().unwrap().push(received);
                text
            }
        };
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            text.len()
        );
        stream.get_mut().write_all([head, text].concat().as_bytes())?;
    }
}

/// Accepts a WebSocket, and sends its bytes back.
fn send_back(stream: &mut BufReader<TcpStream>) -> io::Result<()> {
    let head = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\n\
                 connection: Upgrade\r\nsec-websocket-accept: accepted\r\n\r\n";
    stream.get_mut().write_all(head)?;
    let mut bytes = [0; 1024];
    loop {
        match stream.read(&mut bytes)? {
            0 => return Ok(()),
            count => stream.get_mut().write_all(&bytes[..count])?,
        }
    }
}

/// A connection that a client keeps, for several requests or as a WebSocket.
pub(super) struct KeptConnection(BufReader<TcpStream>);

impl KeptConnection {
    pub(super) fn open(port: u16) -> io::Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(LIMIT))?;
        Ok(KeptConnection(BufReader::new(stream)))
    }

    /// Sends a `GET` with these header lines, and returns the answer.
    pub(super) fn get(&mut self, path: &str, lines: &str) -> io::Result<Received> {
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\n{lines}\r\n");
        self.0.get_mut().write_all(request.as_bytes())?;
        receive(&mut self.0)
    }

    /// Opens a WebSocket through the router, with these header lines.
    pub(super) fn web_socket(port: u16, lines: &str) -> io::Result<Self> {
        let mut connection = Self::open(port)?;
        let upgrade = "connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-key: key\r\n\
                       sec-websocket-version: 13\r\n";
        let answer = connection.get("/v1/realtime", &format!("{upgrade}{lines}"))?;
        match answer.head.starts_with("http/1.1 101 ") {
            true => Ok(connection),
            false => Err(io::Error::other(answer.head)),
        }
    }

    /// Sends bytes over a WebSocket whose other end sends them back.
    pub(super) fn echo(&mut self) -> io::Result<()> {
        self.0.get_mut().write_all(b"ping")?;
        let mut answer = [0; 4];
        self.0.read_exact(&mut answer)?;
        assert_eq!(&answer, b"ping");
        Ok(())
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
