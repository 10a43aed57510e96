//! SRV records: the question to a resolver, and its answer.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use crate::random::random_bytes;

/// The time for one question to one resolver.
const ASK: Duration = Duration::from_secs(1);
/// The longest answer over UDP, which the question names as well. A longer one is asked for again
/// over TCP.
const UDP_ANSWER: u16 = 1232;
/// The longest name.
const MAX_NAME: usize = 253;
/// As in the C library.
const MAX_RESOLVERS: usize = 3;
const MAX_SEARCH: usize = 6;

const SRV: u16 = 33;
const INTERNET: u16 = 1;

/// A host without a dot at its end, and a port.
pub(crate) type Target = (String, u16);

/// A question for the SRV records of a name.
struct Question {
    id: u16,
    name: String,
}

/// An answer to a question.
#[derive(Debug, PartialEq)]
enum Reply {
    /// The targets; none if the name has no such records, or does not exist.
    Targets(Vec<Target>),
    /// The answer did not fit.
    Truncated,
    Failed(String),
}

impl Question {
    /// Returns the bytes, or `None` if the name is invalid.
    fn encode(&self) -> Option<Vec<u8>> {
        let [id, answer] = [self.id, UDP_ANSWER].map(u16::to_be_bytes);
        // Recursion is desired; one question, and one record for the length of the answer.
        let mut bytes = vec![id[0], id[1], 1, 0, 0, 1, 0, 0, 0, 0, 0, 1];
        for label in self.name.split('.') {
            let length =
                u8::try_from(label.len()).ok().filter(|length| (1..64).contains(length))?;
            bytes.push(length);
            bytes.extend(label.bytes());
        }
        bytes.extend([0, 0, SRV as u8, 0, INTERNET as u8]);
        bytes.extend([0, 0, 41, answer[0], answer[1], 0, 0, 0, 0, 0, 0]);
        (self.name.len() <= MAX_NAME).then_some(bytes)
    }

    /// Reads a message; `None` if it does not answer this question.
    fn reply(&self, message: &[u8]) -> Option<Reply> {
        let mut reader = Reader { message, at: 0 };
        let (id, flags, questions) = (reader.number()?, reader.number()?, reader.number()?);
        let answers = reader.number()?;
        reader.skip(4)?;
        let is_answer = flags & 0xf800 == 0x8000;
        if id != self.id || !is_answer || questions != 1 {
            return None;
        }
        let asked = (reader.name()?, reader.number()?, reader.number()?);
        if asked != (self.name.to_ascii_lowercase(), SRV, INTERNET) {
            return None;
        }
        Some(match flags & 0xf {
            0 if flags & 0x0200 != 0 => Reply::Truncated,
            0 => match reader.targets(answers) {
                Some(targets) => Reply::Targets(targets),
                None => Reply::Failed("its answer is malformed".to_owned()),
            },
            3 => Reply::Targets(Vec::new()),
            2 => Reply::Failed("it answered SERVFAIL".to_owned()),
            5 => Reply::Failed("it answered REFUSED".to_owned()),
            code => Reply::Failed(format!("it answered with the code {code}")),
        })
    }
}

/// A place in a message.
struct Reader<'a> {
    message: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn skip(&mut self, bytes: usize) -> Option<()> {
        self.at += bytes;
        (self.at <= self.message.len()).then_some(())
    }

    fn number(&mut self) -> Option<u16> {
        let bytes = self.message.get(self.at..self.at + 2)?;
        self.at += 2;
        Some(u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    /// Reads a name in lower case, without a dot at its end.
    fn name(&mut self) -> Option<String> {
        let (mut at, mut end) = (self.at, None);
        // Pointers go back only, so they end.
        let mut before = self.at;
        let mut name = String::new();
        loop {
            let length = usize::from(*self.message.get(at)?);
            match length {
                0 => break,
                1..64 => {
                    let label = self.message.get(at + 1..at + 1 + length)?;
                    if !label
                        .iter()
                        .all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(byte))
                    {
                        return None;
                    }
                    if !name.is_empty() {
                        name.push('.');
                    }
                    name.extend(label.iter().map(|byte| char::from(byte.to_ascii_lowercase())));
                    at += 1 + length;
                }
                192.. => {
                    let to = (length & 0x3f) << 8 | usize::from(*self.message.get(at + 1)?);
                    if to >= before || name.len() > MAX_NAME {
                        return None;
                    }
                    end.get_or_insert(at + 2);
                    (at, before) = (to, to);
                }
                _ => return None,
            }
            if name.len() > MAX_NAME {
                return None;
            }
        }
        self.at = end.unwrap_or(at + 1);
        Some(name)
    }

    /// Reads this many records, and returns the targets of those that are SRV.
    fn targets(&mut self, records: u16) -> Option<Vec<Target>> {
        let mut targets = Vec::new();
        for _ in 0..records {
            self.name()?;
            let (kind, class) = (self.number()?, self.number()?);
            self.skip(4)?; // the time to live: the router asks again at its own pace
            let length = usize::from(self.number()?);
            let start = self.at;
            self.skip(length)?;
            if (kind, class) != (SRV, INTERNET) {
                continue;
            }
            let mut data = Reader { message: &self.message[..self.at], at: start };
            data.skip(4)?; // priority and weight: the router chooses by load
            let port = data.number()?;
            let host = data.name()?;
            if data.at != self.at {
                return None;
            }
            // The root means that there is no such service.
            if !host.is_empty() && port != 0 {
                targets.push((host, port));
            }
        }
        Some(targets)
    }
}

/// The resolvers to ask, and how they complete names.
#[derive(Clone, Debug, Default, PartialEq)]
struct Resolvers {
    servers: Vec<SocketAddr>,
    search: Vec<String>,
    /// Names with fewer dots are first tried with the domains in `search`.
    dots: usize,
}

impl Resolvers {
    /// Reads the text of `/etc/resolv.conf`.
    fn parse(text: &str) -> Self {
        let mut found = Resolvers { dots: 1, ..Resolvers::default() };
        for line in text.lines() {
            let mut words = line.split_ascii_whitespace();
            match words.next() {
                Some("nameserver") if found.servers.len() < MAX_RESOLVERS => {
                    let address = words.next().and_then(|word| word.parse::<IpAddr>().ok());
                    found.servers.extend(address.map(|address| SocketAddr::new(address, 53)));
                }
                Some("search" | "domain") => {
                    let domains = words.map(|word| word.trim_matches('.').to_owned());
                    found.search = domains.filter(|one| !one.is_empty()).take(MAX_SEARCH).collect();
                }
                Some("options") => {
                    let dots = words.find_map(|word| word.strip_prefix("ndots:")?.parse().ok());
                    found.dots = dots.unwrap_or(found.dots);
                }
                _ => {}
            }
        }
        found
    }

    /// Returns the names to ask for, in order.
    fn candidates(&self, name: &str) -> Vec<String> {
        if let Some(absolute) = name.strip_suffix('.') {
            return vec![absolute.to_owned()];
        }
        let mut names: Vec<_> =
            self.search.iter().map(|domain| format!("{name}.{domain}")).collect();
        let is_first = name.matches('.').count() >= self.dots;
        names.insert(if is_first { 0 } else { names.len() }, name.to_owned());
        names
    }
}

/// Returns the targets of the SRV records of a name; none if there are none. Asks `servers`, or
/// those of this machine if that is empty.
///
/// # Errors
///
/// Fails if no resolver knows the name, and one could not say so.
pub(super) async fn targets(name: &str, servers: &[SocketAddr]) -> Result<Vec<Target>, String> {
    let resolvers = match servers {
        [] => {
            let text = tokio::task::spawn_blocking(|| std::fs::read_to_string("/etc/resolv.conf"));
            let text = text.await.unwrap_or_else(|error| Err(std::io::Error::other(error)));
            Resolvers::parse(
                &text.map_err(|error| format!("cannot read /etc/resolv.conf: {error}"))?,
            )
        }
        servers => Resolvers { servers: servers.to_vec(), ..Resolvers::default() },
    };
    if resolvers.servers.is_empty() {
        return Err("/etc/resolv.conf names no server; set discovery.resolvers".to_owned());
    }
    let (mut servers, mut failed) = (resolvers.servers.clone(), None);
    for name in resolvers.candidates(name) {
        match ask_all(&name, &mut servers).await {
            Ok(targets) if targets.is_empty() => {}
            Ok(targets) => return Ok(targets),
            Err(why) => failed = Some(why),
        }
    }
    failed.map_or(Ok(Vec::new()), Err)
}

/// Asks one resolver after the other until one answers, and puts that one first: the next name does
/// not wait for dead ones again.
async fn ask_all(name: &str, servers: &mut [SocketAddr]) -> Result<Vec<Target>, String> {
    let mut failed = String::new();
    for at in 0..servers.len() {
        match ask(name, servers[at]).await {
            Ok(targets) => {
                servers.rotate_left(at);
                return Ok(targets);
            }
            Err(why) => failed = format!("resolver {}, asked for {name}: {why}", servers[at]),
        }
    }
    Err(failed)
}

async fn ask(name: &str, server: SocketAddr) -> Result<Vec<Target>, String> {
    let id = u16::from_be_bytes(random_bytes().map_err(|error| error.to_string())?);
    let question = Question { id, name: name.to_owned() };
    let bytes = question.encode().ok_or("this is not a name of DNS")?;
    let late = |_| format!("no answer within {ASK:?}");
    let failed = |error: std::io::Error| error.to_string();
    let reply = timeout(ASK, over_udp(&question, &bytes, server)).await.map_err(late)?;
    let reply = match reply.map_err(failed)? {
        Reply::Truncated => {
            let reply = timeout(ASK, over_tcp(&question, &bytes, server)).await.map_err(late)?;
            reply.map_err(|error| format!("over TCP: {error}"))?
        }
        reply => reply,
    };
    match reply {
        Reply::Targets(targets) => Ok(targets),
        Reply::Truncated => Err("its answer is too long for TCP too".to_owned()),
        Reply::Failed(why) => Err(why),
    }
}

async fn over_udp(question: &Question, bytes: &[u8], server: SocketAddr) -> std::io::Result<Reply> {
    let any = if server.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(server).await?;
    socket.send(bytes).await?;
    // One byte more shows that an answer was longer.
    let mut message = [0; UDP_ANSWER as usize + 1];
    loop {
        let length = socket.recv(&mut message).await?;
        if length == message.len() && message.starts_with(&question.id.to_be_bytes()) {
            return Ok(Reply::Truncated);
        }
        // Anything else is an answer to someone else, or a forged one.
        if let Some(reply) = question.reply(&message[..length]) {
            return Ok(reply);
        }
    }
}

async fn over_tcp(question: &Question, bytes: &[u8], server: SocketAddr) -> std::io::Result<Reply> {
    let mut stream = TcpStream::connect(server).await?;
    stream.write_all(&[&(bytes.len() as u16).to_be_bytes(), bytes].concat()).await?;
    let length = stream.read_u16().await?;
    let mut message = vec![0; usize::from(length)];
    stream.read_exact(&mut message).await?;
    let reply = question.reply(&message);
    reply.ok_or_else(|| std::io::Error::other("the answer is to another question"))
}

/// Reads a message as the answer to the question that it names, and a text as `resolv.conf`.
pub(crate) fn fuzz(bytes: &[u8]) {
    let mut reader = Reader { message: bytes, at: 12 };
    let name = reader.name().unwrap_or_default();
    let id = bytes.first_chunk().map_or(0, |id| u16::from_be_bytes(*id));
    if let Some(Reply::Targets(targets)) = (Question { id, name }).reply(bytes) {
        for (host, port) in targets {
            assert!(host.len() <= MAX_NAME && port != 0);
            let url = format!("http://{host}:{port}");
            assert!(url.parse::<hyper::Uri>().is_ok(), "{url}");
        }
    }
    let resolvers = Resolvers::parse(&String::from_utf8_lossy(bytes));
    assert!(resolvers.servers.len() <= MAX_RESOLVERS && resolvers.search.len() <= MAX_SEARCH);
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "_http._tcp.p.test";

    fn question() -> Question {
        Question { id: 0x1234, name: NAME.to_owned() }
    }

    /// Returns an answer with these flags and records.
    fn message(flags: u16, records: &[&[u8]]) -> Vec<u8> {
        let mut bytes = question().encode().unwrap();
        bytes.truncate(bytes.len() - 11);
        bytes[2..4].copy_from_slice(&flags.to_be_bytes());
        bytes[7] = records.len() as u8;
        bytes[11] = 0;
        bytes.extend(records.concat());
        bytes
    }

    /// Returns a record of the question's name.
    fn record(kind: u8, data: &[u8]) -> Vec<u8> {
        let head = [0xc0, 12, 0, kind, 0, 1, 0, 0, 0, 5, 0, data.len() as u8];
        [&head[..], data].concat()
    }

    #[test]
    fn targets_are_read_with_compressed_names() {
        // The name of the question is at 12; "p.test" is at 12 + 6 + 5.
        let srv = |data: &[u8]| record(33, &[&[0, 1, 0, 2, 0x1f, 0x90][..], data].concat());
        let records =
            [srv(b"\x02D0\xc0\x17"), record(5, b"\x01x\0"), srv(b"\x05pod-1\x02ns\0"), srv(b"\0")];
        let bytes = message(0x8180, &records.each_ref().map(Vec::as_slice));
        let targets = vec![("d0.p.test".to_owned(), 8080), ("pod-1.ns".to_owned(), 8080)];
        assert_eq!(question().reply(&bytes), Some(Reply::Targets(targets)));
        // Whatever is cut off, it is an error and no shorter list.
        for length in 0..bytes.len() {
            let reply = question().reply(&bytes[..length]);
            assert!(matches!(reply, None | Some(Reply::Failed(_))), "{length}: {reply:?}");
        }
    }

    #[test]
    fn an_answer_to_another_question_is_none() {
        let bytes = message(0x8180, &[]);
        assert_eq!(question().reply(&bytes), Some(Reply::Targets(Vec::new())));
        let other = Question { id: 0x1235, ..question() };
        assert_eq!(other.reply(&bytes), None);
        let other = Question { name: "_http._tcp.q.test".to_owned(), ..question() };
        assert_eq!(other.reply(&bytes), None);
        assert_eq!(question().reply(&message(0x0100, &[])), None, "it is a question");
    }

    #[test]
    fn codes_of_failures_are_no_empty_lists() {
        let reply = |flags| question().reply(&message(flags, &[])).unwrap();
        assert_eq!(reply(0x8183), Reply::Targets(Vec::new()), "NXDOMAIN");
        assert_eq!(reply(0x8380), Reply::Truncated);
        for (flags, words) in [(0x8182, "SERVFAIL"), (0x8185, "REFUSED"), (0x8184, "code 4")] {
            let reply = reply(flags);
            assert!(matches!(&reply, Reply::Failed(why) if why.contains(words)), "{reply:?}");
        }
    }

    #[test]
    fn pointers_cannot_loop_and_names_are_checked() {
        let srv = |data: &[u8]| record(33, &[&[0, 0, 0, 0, 0, 1][..], data].concat());
        let start = message(0x8180, &[]).len() as u8 + 18;
        for data in [
            &[0xc0, start][..],              // to itself
            &[1, b'a', 0xc0, start],         // to its own start
            &[0xc0, start + 2, 0xc0, start], // forward
            b"\x01/\0",
            b"\x03a.b\0",
            b"\x40a\0",
            b"\x01a\0more",
        ] {
            let reply = question().reply(&message(0x8180, &[&srv(data)]));
            assert!(matches!(reply, Some(Reply::Failed(_))), "{data:?}: {reply:?}");
        }
        let long = "a".repeat(63);
        let name = |labels: usize| vec![long.as_str(); labels].join(".");
        let encoded = |name: String| Question { id: 1, name }.encode();
        assert!(encoded(name(3)).is_some() && encoded(name(4)).is_none());
        assert!(encoded("a..b".to_owned()).is_none() && encoded("a".repeat(64)).is_none());
    }

    #[test]
    fn resolv_conf_names_servers_and_domains() {
        let text = "# of a pod\nnameserver 10.96.0.10\nnameserver fd00::a\nnameserver fe80::1%eth0\n\
                    search ns.svc.cluster.local svc.cluster.local\noptions edns0 ndots:5\n";
        let found = Resolvers::parse(text);
        let servers = ["10.96.0.10:53", "[fd00::a]:53"].map(|one| one.parse().unwrap());
        assert_eq!(found.servers, servers);
        let name = "_http._tcp.p.ns.svc";
        assert_eq!(
            found.candidates(name),
            [
                "_http._tcp.p.ns.svc.ns.svc.cluster.local",
                "_http._tcp.p.ns.svc.svc.cluster.local",
                name
            ]
        );
        assert_eq!(found.candidates("_http._tcp.p.test."), ["_http._tcp.p.test"]);
        let first = Resolvers { dots: 1, ..found };
        assert_eq!(first.candidates(name)[0], name);
    }
}
