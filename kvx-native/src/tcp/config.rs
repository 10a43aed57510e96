//! The options of TCP: the table `tcp`.
//!
//! | option | default | meaning |
//! |---|---|---|
//! | `bind` | `127.0.0.1` | the address (or name) to listen on; `0.0.0.0` and `::` need `advertise` |
//! | `advertise` | the bound address | the addresses that peers connect to: addresses or names, each with or without a port |
//! | `ports` | a free one | `7000` or `7000-7010`: the first free port is used |
//! | `connections` | 2 | bulk lanes of a link that this agent opens, in addition to a small lane |
//! | `max_connections` | 12288 | the limit for peers' connections: enough for 4,096 peers |
//! | `seal` | `all` with a secret, else `control` | `all`, `control` (all but payload) or `none`: the stricter setting of both ends counts |

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::ops::RangeInclusive;

use kvx_core::{ErrorKind, Options, Result};

use crate::tcp::address::MAX_ADDRESSES;
use crate::tcp::seal::Seal;

/// The number of bulk lanes of a link, unless `tcp.connections` says otherwise.
const CONNECTIONS: u64 = 2;
/// The limit for peers' connections, unless `tcp.max_connections` says otherwise. It is enough for
/// 4,096 peers with a small lane and two bulk lanes each.
const MAX_CONNECTIONS: u64 = 4096 * (1 + CONNECTIONS);

/// The parsed table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) bind: IpAddr,
    /// The addresses that peers connect to; port 0 stands for the bound one. If it is empty, peers
    /// use the bound address.
    pub(crate) advertise: Vec<SocketAddr>,
    pub(crate) ports: Option<RangeInclusive<u16>>,
    pub(crate) connections: usize,
    pub(crate) max_connections: usize,
    /// The seal, or `None` if it depends on whether there is a secret.
    pub(crate) seal: Option<Seal>,
}

impl Config {
    /// Reads the table. Returns `Invalid` with the name of the option.
    pub(crate) fn read(options: &Options) -> Result<Self> {
        let known = ["bind", "advertise", "ports", "connections", "max_connections", "seal"];
        let table = options.table("tcp", &known)?;
        let bind = match table.text("bind")? {
            None => IpAddr::from([127, 0, 0, 1]),
            Some(text) => resolve("bind", text)?.ip(),
        };
        let advertise = table.texts("advertise")?.unwrap_or_default();
        if advertise.len() > MAX_ADDRESSES {
            let count = advertise.len();
            return Err(ErrorKind::Invalid.because(format!(
                "option \"tcp.advertise\" has {count} addresses; write at most {MAX_ADDRESSES}"
            )));
        }
        let advertise =
            advertise.iter().map(|text| resolve("advertise", text)).collect::<Result<Vec<_>>>()?;
        if let Some(bad) = advertise.iter().find(|address| address.ip().is_unspecified()) {
            return Err(ErrorKind::Invalid.because(format!(
                "option \"tcp.advertise\" is {}: peers cannot connect to that; write an address",
                bad.ip()
            )));
        }
        let ports = match table.text("ports") {
            Ok(text) => text.map(parse_ports).transpose()?,
            Err(_) => table.number("ports", 1..=65535)?.map(|port| port as u16..=port as u16),
        };
        Ok(Config {
            bind,
            advertise,
            ports,
            connections: table.number("connections", 1..=64)?.unwrap_or(CONNECTIONS) as usize,
            max_connections: table
                .number("max_connections", 2..=1 << 20)?
                .unwrap_or(MAX_CONNECTIONS) as usize,
            seal: table.text("seal")?.map(parse_seal).transpose()?,
        })
    }

    /// Returns the weakest seal for a connection. Without the option, everything is sealed if the
    /// fleet has a secret, on loopback too, where a sidecar or a tunnel may relay the connection.
    /// Without a secret every holder of the metadata is authenticated, and the metadata often
    /// travels over the same network, so sealed payload would be slower and seldom safer.
    pub(crate) fn wish(&self, have_secret: bool) -> Seal {
        self.seal.unwrap_or(if have_secret { Seal::All } else { Seal::Control })
    }
}

fn parse_seal(text: &str) -> Result<Seal> {
    let found = Seal::NAMED.into_iter().find(|(name, _)| *name == text);
    found.map(|(_, seal)| seal).ok_or_else(|| {
        ErrorKind::Invalid.because(format!(
            "option \"tcp.seal\" is {text:?}; write \"all\", \"control\" or \"none\""
        ))
    })
}

/// Parses `7000` or `7000-7010`.
fn parse_ports(text: &str) -> Result<RangeInclusive<u16>> {
    let (from, to) = text.split_once('-').unwrap_or((text, text));
    match (from.trim().parse::<u16>(), to.trim().parse::<u16>()) {
        (Ok(from), Ok(to)) if from > 0 && from <= to => Ok(from..=to),
        _ => Err(ErrorKind::Invalid.because(format!(
            "option \"tcp.ports\" is {text:?}; write a port such as \"7000\" or a range such as \
             \"7000-7010\""
        ))),
    }
}

/// Resolves an address or a name, with or without a port; 0 stands for no port.
fn resolve(key: &str, text: &str) -> Result<SocketAddr> {
    if let Ok(ip) = text.trim_matches(['[', ']']).parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, 0));
    }
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Ok(address);
    }
    let (name, port) = match text.rsplit_once(':') {
        Some((name, port)) => (name, port.parse::<u16>().ok()),
        None => (text, Some(0)),
    };
    let wrong = |why: String| {
        ErrorKind::Invalid.because(format!(
            "option \"tcp.{key}\" is {text:?}, {why}; write an address of this host or a name that \
             resolves"
        ))
    };
    let port = port.ok_or_else(|| wrong("whose port is not a number".into()))?;
    let mut found = (name, port)
        .to_socket_addrs()
        .map_err(|error| wrong(format!("which does not resolve ({error})")))?;
    found.next().ok_or_else(|| wrong("which resolves to nothing".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Config> {
        Config::read(&Options::parse(json).unwrap())
    }

    #[test]
    fn the_default_is_loopback_and_a_free_port() {
        let config = read("{}").unwrap();
        assert_eq!(config.bind, IpAddr::from([127, 0, 0, 1]));
        assert_eq!((config.ports, config.advertise), (None, vec![]));
    }

    #[test]
    fn ports_are_a_number_or_a_range() {
        assert_eq!(read(r#"{"tcp": {"ports": 7000}}"#).unwrap().ports, Some(7000..=7000));
        assert_eq!(read(r#"{"tcp": {"ports": "7000-7010"}}"#).unwrap().ports, Some(7000..=7010));
        for bad in [r#""7010-7000""#, r#""many""#, "0", "65536", r#""-""#, "[]"] {
            let error = read(&format!(r#"{{"tcp": {{"ports": {bad}}}}}"#)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.sentence().contains("tcp.ports"), "{error}");
        }
    }

    #[test]
    fn addresses_have_an_optional_port_and_either_family() {
        let config = read(
            r#"{"tcp": {"bind": "::1", "advertise": ["10.0.0.5", "[fd00::1]:81", "localhost:80"]}}"#,
        );
        let config = config.unwrap();
        assert_eq!(config.bind, "::1".parse::<IpAddr>().unwrap());
        assert_eq!(config.advertise[0], "10.0.0.5:0".parse().unwrap());
        assert_eq!(config.advertise[1], "[fd00::1]:81".parse().unwrap());
        assert!(config.advertise[2].ip().is_loopback() && config.advertise[2].port() == 80);
        for bad in [
            r#"{"bind": "no such host."}"#,
            r#"{"advertise": "0.0.0.0"}"#,
            r#"{"advertise": "a:b"}"#,
        ] {
            let error = read(&format!(r#"{{"tcp": {bad}}}"#)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        }
    }

    #[test]
    fn the_seal_is_configured_or_depends_on_the_secret() {
        let config = read("{}").unwrap();
        assert_eq!([false, true].map(|secret| config.wish(secret)), [Seal::Control, Seal::All]);
        for (name, seal) in Seal::NAMED {
            let config = read(&format!(r#"{{"tcp": {{"seal": "{name}"}}}}"#)).unwrap();
            assert_eq!((config.wish(false), config.wish(true)), (seal, seal));
        }
        for bad in [r#""All""#, r#""payload""#, "true", "1", "[]"] {
            let error = read(&format!(r#"{{"tcp": {{"seal": {bad}}}}}"#)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.sentence().contains("tcp.seal"), "{error}");
        }
    }

    #[test]
    fn a_misspelt_option_is_named() {
        assert!(read(r#"{"tcp": {"port": 1}}"#).unwrap_err().sentence().contains("tcp.ports"));
    }
}
