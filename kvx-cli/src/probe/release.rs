//! The release of the engine behind a side channel, from `/version` of its HTTP API. A question to
//! the side channel in the form of another version would crash a vLLM.

use std::io::{ErrorKind, Read, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::{Duration, Instant};

use kvx::connector::Version;
use serde_json::Value;

use crate::Result;

/// The time limit of the whole answer.
const LIMIT: Duration = Duration::from_secs(5);
/// The longest answer that is read, in bytes.
const MAX_ANSWER: usize = 64 << 10;
/// The longest release that is read, in bytes.
const MAX_RELEASE: usize = 128;

/// An engine, as its API describes it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Release {
    /// A server on kvx. Its side channel answers the questions of all versions.
    Kvx,
    /// A vLLM, with its own name of its release.
    Vllm(String, Version),
}

impl Release {
    /// Asks the API at a URL, such as `http://10.0.0.1:8000`.
    pub(super) fn of(api: &str) -> Result<Release> {
        let url = format!("{}/version", api.trim_end_matches('/'));
        let told = get(&url).map_err(|why| format!("{url}: {why}"))?;
        Release::parse(&told).map_err(|why| format!("{url}: {why}").into())
    }

    fn parse(body: &[u8]) -> Result<Release> {
        let body: Option<Value> = serde_json::from_slice(body).ok();
        let told = body.as_ref().and_then(|body| body["version"].as_str());
        let is_name = |told: &&str| {
            (1..=MAX_RELEASE).contains(&told.len())
                && told.chars().all(|one| one.is_ascii_graphic())
        };
        let Some(told) = told.filter(is_name) else {
            return Err("the answer names no version, so no vLLM or `kvx serve` is there".into());
        };
        if told.starts_with("kvx-") {
            return Ok(Release::Kvx);
        }
        match Version::of_release(told) {
            Some(version) if version == version.spoken() => {
                Ok(Release::Vllm(told.to_owned(), version))
            }
            _ => Err(format!("kvx does not know the handshake of vLLM {told}").into()),
        }
    }
}

/// Returns the body of an answer with status 200.
fn get(url: &str) -> Result<Vec<u8>> {
    let until = Instant::now() + LIMIT;
    let (authority, path) = url
        .strip_prefix("http://")
        .and_then(|rest| rest.split_once('/'))
        .filter(|(authority, _)| !authority.is_empty() && !url.contains(char::is_whitespace))
        .ok_or("this is no URL of the form http://HOST:PORT")?;
    let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| !port.ends_with(']'));
    let target = if has_port { authority.to_owned() } else { format!("{authority}:80") };
    let mut connection = connect(&target, until)?;
    connection.set_write_timeout(Some(LIMIT))?;
    // An answer to HTTP/1.0 ends with its connection, and has no chunks.
    let request =
        format!("GET /{path} HTTP/1.0\r\nHost: {authority}\r\nAccept: application/json\r\n\r\n");
    connection.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(format!("no whole answer within {LIMIT:?}").into());
        }
        connection.set_read_timeout(Some(left))?;
        match connection.read(&mut piece) {
            Ok(0) => break,
            Ok(len) => answer.extend(&piece[..len]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error.into()),
        }
        if answer.len() > MAX_ANSWER {
            return Err(format!("the answer exceeds {MAX_ANSWER} bytes").into());
        }
    }
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n");
    let end = end.filter(|_| answer.starts_with(b"HTTP/1.")).ok_or("the answer is not HTTP")?;
    match answer.get(9..12) {
        Some(b"200") => Ok(answer.split_off(end + 4)),
        status => Err(format!(
            "HTTP {}",
            String::from_utf8_lossy(status.unwrap_or_default()).escape_debug()
        )
        .into()),
    }
}

fn connect(target: &str, until: Instant) -> Result<TcpStream> {
    let mut last = None;
    let addresses: Vec<_> = target.to_socket_addrs()?.collect();
    for (at, address) in addresses.iter().enumerate() {
        // A host may drop packets to one of its addresses.
        let left = until.saturating_duration_since(Instant::now());
        let share = left / u32::try_from(addresses.len() - at).unwrap_or(u32::MAX);
        match TcpStream::connect_timeout(address, share.max(Duration::from_millis(1))) {
            Ok(connection) => return Ok(connection),
            Err(error) => last = Some(error),
        }
    }
    Err(last.map_or_else(|| "the name has no address".into(), Into::into))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn the_release_decides_the_form_of_the_question() {
        let of = |told: &str| Release::parse(format!("{{\"version\": \"{told}\"}}").as_bytes());
        assert_eq!(of("kvx-0.1.0").unwrap(), Release::Kvx);
        for (told, version) in [
            ("0.33.0", Version::V0_33),
            ("0.32.1+cpu", Version::V0_32),
            ("0.27.2", Version::V0_26),
            ("0.24.0", Version::V0_22),
            ("0.26.0rc1", Version::V0_26),
        ] {
            assert_eq!(of(told).unwrap(), Release::Vllm(told.into(), version));
        }
        // The next version, one that no version covers, one whose handshake kvx does not speak, and
        // a build between two releases.
        for told in ["0.34.0", "0.19.1", "0.10.2", "0.25.1.dev3+g1234567", "1.0.0"] {
            let why = of(told).unwrap_err().to_string();
            assert!(why.contains(&format!("does not know the handshake of vLLM {told}")), "{why}");
        }
        for told in ["", "0.33.0\\n", "\\u001b[2J", &"9".repeat(MAX_RELEASE + 1)] {
            assert!(of(told).unwrap_err().to_string().contains("names no version"), "{told:?}");
        }
    }

    #[test]
    fn answers_are_bounded_and_only_http_with_status_200_counts() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let api = format!("http://{}/", listener.local_addr().unwrap());
        let ok = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n";
        let answers = [
            (format!("{ok}{{\"version\": \"0.33.0\"}}"), ""),
            ("HTTP/1.1 404 Not Found\r\n\r\n{\"version\": \"0.33.0\"}".into(), "HTTP 404"),
            ("\u{1}\0\0\0hello".into(), "the answer is not HTTP"),
            (format!("{ok}{}", " ".repeat(2 * MAX_ANSWER)), "the answer exceeds"),
        ];
        let sent = answers.clone();
        let server = std::thread::spawn(move || {
            for (answer, _) in sent {
                let (mut stream, _) = listener.accept().unwrap();
                let mut asked = [0; 256];
                let len = stream.read(&mut asked).unwrap();
                assert!(asked[..len].starts_with(b"GET /version HTTP/1.0\r\n"));
                let _ = stream.write_all(answer.as_bytes()); // the client may have read enough
            }
        });
        for (_, expected) in answers {
            match Release::of(&api) {
                Ok(release) => {
                    assert_eq!(release, Release::Vllm("0.33.0".into(), Version::V0_33));
                    assert_eq!(expected, "");
                }
                Err(why) => {
                    let why = why.to_string();
                    assert!(!expected.is_empty() && why.contains(expected), "{why}");
                }
            }
        }
        server.join().unwrap();
        for api in ["10.0.0.1:8000", "https://10.0.0.1", "http://", "http://a b"] {
            let why = Release::of(api).unwrap_err().to_string();
            assert!(why.contains("http://HOST:PORT"), "{api}: {why}");
        }
    }
}
