//! A scripted instance: each test writes its answers.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::CUT_OFF;

/// The answer to a `POST`: pieces, each after a pause.
pub(crate) type Pieces = Vec<(Duration, Vec<u8>)>;

/// A received `POST`: its head and its body.
type Post = (String, Vec<u8>);

/// A scripted instance, which ends with the test's runtime.
pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    posts: Arc<Mutex<Vec<Post>>>,
    gone: UnboundedReceiver<()>,
}

impl Upstream {
    pub(crate) async fn start(pieces: Pieces) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let posts = Arc::<Mutex<Vec<Post>>>::default();
        let (sender, gone) = unbounded_channel();
        let (pieces, kept) = (Arc::new(pieces), Arc::clone(&posts));
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(serve(stream, Arc::clone(&pieces), Arc::clone(&kept), sender.clone()));
            }
        });
        Upstream { address, posts, gone }
    }

    /// Returns the heads of the received `POST`s, in lower case.
    pub(crate) fn heads(&self) -> Vec<String> {
        self.posts.lock().unwrap().iter().map(|(head, _)| head.to_ascii_lowercase()).collect()
    }

    /// Returns the JSON bodies of the received `POST`s.
    pub(crate) fn bodies(&self) -> Vec<serde_json::Value> {
        self.posts
            .lock()
            .unwrap()
            .iter()
            .map(|(_, body)| serde_json::from_slice(body).unwrap())
            .collect()
    }

    /// Waits until a connection that had a `POST` is closed.
    pub(crate) async fn left_alone(&mut self) {
        let gone = tokio::time::timeout(CUT_OFF, self.gone.recv()).await;
        gone.expect("no client waits for its answer any more").unwrap();
    }
}

/// Returns a complete JSON answer, sent at once.
pub(crate) fn json(body: &serde_json::Value) -> Pieces {
    let body = body.to_string();
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    vec![(Duration::ZERO, [head, body].concat().into_bytes())]
}

async fn serve(
    mut stream: TcpStream,
    pieces: Arc<Pieces>,
    posts: Arc<Mutex<Vec<Post>>>,
    gone: UnboundedSender<()>,
) {
    let (mut read, mut posted) = (Vec::new(), false);
    loop {
        let end = loop {
            if let Some(end) = read.windows(4).position(|four| four == b"\r\n\r\n") {
                break end + 4;
            }
            match stream.read_buf(&mut read).await {
                Ok(0) | Err(_) => {
                    if posted {
                        gone.send(()).ok(); // an error: no test waits for it
                    }
                    return;
                }
                Ok(_) => {}
            }
        };
        let head = String::from_utf8(read.drain(..end).collect()).unwrap();
        let length = head
            .to_ascii_lowercase()
            .lines()
            .find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
        while read.len() < length.unwrap_or(0) {
            stream.read_buf(&mut read).await.unwrap();
        }
        let body = read.drain(..length.unwrap_or(0)).collect();
        if head.starts_with("GET") {
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
            continue;
        }
        posted = true;
        posts.lock().unwrap().push((head, body));
        for (pause, piece) in pieces.iter() {
            tokio::time::sleep(*pause).await; // deliberately slow
            stream.write_all(piece).await.ok(); // an error: the next read sees it
        }
    }
}
