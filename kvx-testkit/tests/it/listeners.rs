//! A small server with a flaw, which an attack on its listener must notice.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use kvx_testkit::{
    ATTACKER_CONNECTS, AttackBytes, Bounds, Child, Client, Failure, Listener, connect_from, test,
};

/// The variable with the flaw of a server.
const FLAW: &str = "KVX_TESTKIT_FLAW";
const LIMIT: Duration = Duration::from_secs(10);
/// The bounds of the server.
const KEPT: usize = 32;
const TIME: Duration = Duration::from_secs(2);

/// A message is its length and four letters: the password, or a question.
const PASSWORD: &[u8; 8] = b"\x04\0\0\0open";
const QUESTION: &[u8; 8] = b"\x04\0\0\0ping";

/// Serves until the process is killed, if it was started for that.
pub(crate) fn serve_if_asked() {
    if let Ok(flaw) = std::env::var(FLAW) {
        Server::new(flaw).run();
    }
}

struct Connection {
    stream: TcpStream,
    since: Instant,
    unread: Vec<u8>,
    /// Memory that the server keeps for it.
    kept: Vec<u8>,
    is_known: bool,
    has_ended: bool,
}

struct Server {
    flaw: String,
    open: Vec<Connection>,
    ended: Vec<Connection>,
}

impl Server {
    fn new(flaw: String) -> Self {
        Server { flaw, open: Vec::new(), ended: Vec::new() }
    }

    fn has(&self, flaw: &str) -> bool {
        self.flaw == flaw
    }

    fn unknown(&self) -> usize {
        self.open.iter().filter(|connection| !connection.is_known).count()
    }

    fn run(&mut self) -> ! {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        println!("{}", listener.local_addr().unwrap().port());
        loop {
            while !self.has("does not accept beyond its limit") || self.unknown() < KEPT {
                let Ok((stream, _)) = listener.accept() else { break };
                self.enter(stream);
            }
            (0..self.open.len()).for_each(|at| self.turn(at));
            self.let_go();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Closes the connections that have ended.
    fn let_go(&mut self) {
        let (ended, open) = self.open.drain(..).partition(|connection| connection.has_ended);
        self.open = open;
        if self.has("keeps what has ended") {
            self.ended.extend(ended);
        }
    }

    fn enter(&mut self, stream: TcpStream) {
        stream.set_nonblocking(true).unwrap();
        let kept = if self.has("keeps memory") { vec![1; 1 << 20] } else { Vec::new() };
        if self.has("starts threads") {
            std::thread::spawn(|| std::thread::sleep(LIMIT));
        }
        let (since, unread) = (Instant::now(), Vec::new());
        self.open.push(Connection {
            stream,
            since,
            unread,
            kept,
            is_known: false,
            has_ended: false,
        });
        let evicts_any = self.has("evicts any");
        if self.has("keeps all connections") || self.unknown() <= KEPT {
            return;
        }
        // Connections that have ended leave their places first.
        (0..self.open.len()).for_each(|at| self.turn(at));
        self.let_go();
        if self.unknown() <= KEPT {
            return;
        }
        let oldest = self.open.iter().position(|one| evicts_any || !one.is_known).unwrap();
        self.open.remove(oldest);
    }

    /// Reads from a connection, and answers.
    fn turn(&mut self, at: usize) {
        let (allocates, is_patient) = (self.has("allocates lengths"), self.has("is patient"));
        let one = &mut self.open[at];
        let mut bytes = [0; 4096];
        match one.stream.read(&mut bytes) {
            Ok(0) => one.has_ended = true,
            Ok(count) => one.unread.extend(&bytes[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(_) => one.has_ended = true,
        }
        if !one.is_known && !is_patient && one.since.elapsed() > TIME {
            one.has_ended = true;
        }
        while let Some((length, rest)) = one.unread.split_first_chunk::<4>() {
            let length = u32::from_le_bytes(*length) as usize;
            if allocates {
                one.kept.reserve_exact(length);
            } else if length != 4 {
                one.has_ended = true;
                return;
            }
            if rest.len() < length {
                return;
            }
            let message: Vec<u8> = one.unread.drain(..4 + length).skip(4).collect();
            one.is_known |= message == b"open";
            if !one.is_known || one.stream.write_all(b"pong").is_err() {
                one.has_ended = true;
                return;
            }
        }
    }
}

/// Asks a question over a connection, after the password over a new one.
fn ask(stream: &mut TcpStream, messages: &[&[u8; 8]]) -> Result<(), Failure> {
    stream.set_read_timeout(Some(LIMIT))?;
    for message in messages {
        stream.write_all(*message)?;
        let mut answer = [0; 4];
        stream.read_exact(&mut answer)?;
        assert_eq!(&answer, b"pong");
    }
    Ok(())
}

/// Attacks a server with this flaw.
fn attack(flaw: &str) -> Result<(), Failure> {
    let server = Child::start_self_with(&[(FLAW, flaw.to_owned())])?;
    let port = server.hear(LIMIT)?.parse().unwrap();
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut kept = TcpStream::connect(at)?;
    ask(&mut kept, &[PASSWORD])?;
    let bytes = AttackBytes {
        prelude: Vec::new(),
        message: b"\x04\0\0\0shut".to_vec(),
        claims: vec![(64_u32 << 20).to_le_bytes().to_vec()],
        longest: (1_u32 << 20).to_le_bytes().to_vec(),
    };
    let cost = Listener {
        name: "a small server",
        process: server.pid(),
        bounds: Bounds { deadline: Duration::from_secs(1), ..Bounds::new(KEPT, TIME) },
        clients: vec![
            Client::new("a connection that exists", || ask(&mut kept, &[QUESTION])),
            Client::new("a new connection", || {
                ask(&mut TcpStream::connect(at)?, &[PASSWORD, QUESTION])
            }),
        ],
    }
    .attack(|| Ok(connect_from(Ipv4Addr::LOCALHOST, at, ATTACKER_CONNECTS)?.into()), &bytes)?;
    println!("{cost}");
    Ok(())
}

#[test]
fn a_server_within_its_bounds_passes_the_attack() -> Result<(), Failure> {
    attack("none")
}

#[test]
fn each_broken_bound_is_noticed() {
    let flaws = [
        ("keeps all connections", "descriptors, "),
        ("keeps what has ended", " descriptors"),
        ("is patient", "outlast their time limit"),
        ("allocates lengths", "more allocated memory"),
        ("keeps memory", "more resident memory"),
        ("starts threads", "threads, "),
        ("evicts any", "a connection that exists is not served"),
        ("does not accept beyond its limit", "a new connection took"),
    ];
    std::thread::scope(|scope| {
        for (flaw, words) in flaws {
            scope.spawn(move || {
                let why = attack(flaw).err().map(|why| why.to_string()).unwrap_or_default();
                assert!(why.contains(words), "{flaw}: {why:?}");
            });
        }
    });
}
