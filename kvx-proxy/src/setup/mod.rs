//! What the proxy is told: a TOML file, the toys' command lines, or values.

mod api_key;
mod check;
mod instance;
mod toys;
mod units;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde::de::Deserializer;

pub use api_key::ApiKey;
pub use check::Finding;
pub use instance::InstanceSetup;
pub(crate) use instance::InstanceTable;

use crate::error::{Error, Result};

/// The configuration of the proxy. The README lists the keys of the file, which are the names of
/// these fields.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Setup {
    /// Where to listen: an address, or a name that resolves to one.
    pub host: String,
    /// Where to listen; 0 takes any free port.
    pub port: u16,
    /// The connector of pools that name none.
    pub connector: PoolConnector,
    /// How instances are chosen.
    pub choice: Choice,
    /// How many tokens of a prompt [`Choice::Prefix`] looks at.
    pub prefix_tokens: usize,
    /// Prompts of fewer tokens go to decode alone.
    pub local_below: u64,
    /// How long requests may go on once a drain has begun.
    #[serde(deserialize_with = "units::read_duration")]
    pub drain: Duration,
    /// Where a JSON line per request goes.
    pub access_log: AccessLog,
    /// Whether `/` and `/status` answer.
    pub page: bool,
    /// A file with a key a line; clients need one of them.
    pub api_key_file: Option<PathBuf>,
    /// The certificate chain for clients, PEM. Needs the feature `tls`.
    pub tls_cert: Option<PathBuf>,
    /// Its private key, PEM.
    pub tls_key: Option<PathBuf>,
    /// How long things may take.
    pub timeouts: Timeouts,
    /// What is tried again.
    pub retries: Retries,
    /// How instances are watched.
    pub health: Health,
    /// What clients may take up.
    pub limits: ClientLimits,
    /// The fleet.
    #[serde(rename = "pool")]
    pub pools: Vec<Pool>,
    /// The bearer token for instances where a client sent no `Authorization`; from the environment
    /// only.
    #[serde(skip)]
    pub openai_api_key: Option<ApiKey>,
    /// What opens `/instances`; from the environment only.
    #[serde(skip)]
    pub admin_api_key: Option<ApiKey>,
}

/// Which recipe a pool's instances need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum PoolConnector {
    /// Asks: a prefill instance with a bootstrap server is Mooncake's, any other is NIXL's, pull or
    /// push by its answers.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    /// NIXL, pull or push by what prefill instances answer.
    #[serde(rename = "NixlConnector")]
    Nixl,
    /// NIXL, prefill and then decode.
    #[serde(rename = "NixlPullConnector")]
    NixlPull,
    /// NIXL, both legs at once as soon as a prefill instance's first answer has said who it is.
    #[serde(rename = "NixlPushConnector")]
    NixlPush,
    /// Mooncake, both legs at once.
    #[serde(rename = "MooncakeConnector")]
    Mooncake,
}

fn from_name<T: for<'de> Deserialize<'de>>(what: &str, name: &str) -> Result<T> {
    let value = serde::de::value::StrDeserializer::<serde::de::value::Error>::new(name);
    T::deserialize(value).map_err(|error| Error::new(format!("{what}: {error}")))
}

impl PoolConnector {
    /// Reads the name that vLLM gives it.
    ///
    /// # Errors
    ///
    /// Another name; the sentence lists them.
    pub fn from_name(name: &str) -> Result<Self> {
        from_name("connector", name)
    }
}

impl Choice {
    /// Reads `least-tokens`, `round-robin` or `prefix`.
    ///
    /// # Errors
    ///
    /// Another name; the sentence lists them.
    pub fn from_name(name: &str) -> Result<Self> {
        from_name("choice", name)
    }
}

/// How instances are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Choice {
    /// The instance with the fewest outstanding tokens for its weight.
    #[default]
    LeastTokens,
    /// One after the other, by weight.
    RoundRobin,
    /// The instance that had the same beginning of a prompt before, unless it has much more to do
    /// than the others.
    Prefix,
}

/// Where a JSON line per request goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AccessLog {
    /// Nowhere.
    Off,
    /// Standard output.
    #[default]
    Stdout,
    /// The end of a file.
    File(PathBuf),
}

impl<'de> Deserialize<'de> for AccessLog {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        Ok(AccessLog::from_name(&String::deserialize(from)?))
    }
}

impl AccessLog {
    /// `off`, `stdout`, or a path.
    pub fn from_name(name: &str) -> Self {
        match name {
            "off" => AccessLog::Off,
            "stdout" => AccessLog::Stdout,
            path => AccessLog::File(path.into()),
        }
    }
}

/// How long things may take.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "the README's table says it")]
pub struct Timeouts {
    #[serde(deserialize_with = "units::read_duration")]
    pub connect: Duration,
    #[serde(deserialize_with = "units::read_duration")]
    pub prefill: Duration,
    #[serde(deserialize_with = "units::read_duration")]
    pub first_byte: Duration,
    #[serde(deserialize_with = "units::read_duration")]
    pub idle: Duration,
    #[serde(deserialize_with = "units::read_duration")]
    pub request: Duration,
}

/// What is tried again.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "the README's table says it")]
pub struct Retries {
    pub attempts: u32,
    pub budget: f64,
}

/// How instances are watched.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "the README's table says it")]
pub struct Health {
    #[serde(deserialize_with = "units::read_duration")]
    pub every: Duration,
    #[serde(deserialize_with = "units::read_duration")]
    pub timeout: Duration,
    pub down_after: u32,
    pub eject_after: u32,
    #[serde(deserialize_with = "units::read_duration")]
    pub eject_for: Duration,
    #[serde(deserialize_with = "units::read_duration")]
    pub models_every: Duration,
}

/// What clients may take up.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "the README's table says it")]
pub struct ClientLimits {
    pub connections: usize,
    pub in_flight: usize,
    pub queue: usize,
    #[serde(deserialize_with = "units::read_duration")]
    pub queue_wait: Duration,
    #[serde(deserialize_with = "units::read_size")]
    pub headers: usize,
    #[serde(deserialize_with = "units::read_size")]
    pub body: usize,
    #[serde(deserialize_with = "units::read_size")]
    pub bodies: usize,
    #[serde(deserialize_with = "units::read_duration")]
    pub header_time: Duration,
    #[serde(deserialize_with = "units::read_duration")]
    pub body_time: Duration,
    #[serde(deserialize_with = "units::read_duration")]
    pub stall: Duration,
}

/// Prefill and decode instances that may serve a request together.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Pool {
    /// What metrics and logs call it.
    pub name: String,
    /// The recipe of its instances; the set-up's if none is named.
    pub connector: Option<PoolConnector>,
    /// Whether its instances have `bidirectional_kv_xfer`.
    pub bidirectional: bool,
    /// Who computes prompts.
    pub prefill: Vec<InstanceSetup>,
    /// Who generates.
    pub decode: Vec<InstanceSetup>,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            host: "127.0.0.1".to_owned(),
            port: 8000,
            connector: PoolConnector::Auto,
            choice: Choice::LeastTokens,
            prefix_tokens: 256,
            local_below: 0,
            drain: Duration::from_secs(30),
            access_log: AccessLog::Stdout,
            page: true,
            api_key_file: None,
            tls_cert: None,
            tls_key: None,
            timeouts: Timeouts::default(),
            retries: Retries::default(),
            health: Health::default(),
            limits: ClientLimits::default(),
            pools: Vec::new(),
            openai_api_key: None,
            admin_api_key: None,
        }
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts {
            connect: Duration::from_secs(5),
            prefill: Duration::from_secs(120),
            first_byte: Duration::from_secs(120),
            idle: Duration::from_secs(60),
            request: Duration::from_secs(3600),
        }
    }
}

impl Default for Retries {
    fn default() -> Self {
        Retries { attempts: 3, budget: 0.2 }
    }
}

impl Default for Health {
    fn default() -> Self {
        Health {
            every: Duration::from_secs(5),
            timeout: Duration::from_secs(2),
            down_after: 2,
            eject_after: 3,
            eject_for: Duration::from_secs(10),
            models_every: Duration::from_secs(30),
        }
    }
}

impl Default for ClientLimits {
    fn default() -> Self {
        ClientLimits {
            connections: 4096,
            in_flight: 1024,
            queue: 1024,
            queue_wait: Duration::from_secs(30),
            headers: 64 << 10,
            body: 32 << 20,
            bodies: 1 << 30,
            header_time: Duration::from_secs(30),
            body_time: Duration::from_secs(30),
            stall: Duration::from_secs(60),
        }
    }
}

impl Default for Pool {
    fn default() -> Self {
        Pool {
            name: "default".to_owned(),
            connector: None,
            bidirectional: false,
            prefill: Vec::new(),
            decode: Vec::new(),
        }
    }
}

impl Setup {
    /// Reads the text of a file.
    ///
    /// # Errors
    ///
    /// Names the line and key that are wrong; an unknown key is.
    pub fn from_toml(text: &str) -> Result<Self> {
        let setup: Setup = toml::from_str(text).map_err(|error| Error::new(error.to_string()))?;
        setup.valid()?;
        Ok(setup)
    }

    /// Reads a file.
    ///
    /// # Errors
    ///
    /// As [`from_toml`](Self::from_toml), and a file that cannot be read.
    pub fn from_file(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::io(format_args!("cannot read {}", path.display()), error))?;
        Self::from_toml(&text).map_err(|error| Error::new(format!("{}: {error}", path.display())))
    }

    /// Takes `OPENAI_API_KEY` and `ADMIN_API_KEY` from the environment.
    pub fn with_environment(mut self) -> Self {
        let set =
            |name| std::env::var(name).ok().filter(|value| !value.is_empty()).map(ApiKey::new);
        self.openai_api_key = set("OPENAI_API_KEY");
        self.admin_api_key = set("ADMIN_API_KEY");
        self
    }

    /// What cannot be right whatever the machine: checked for every set-up before it is used.
    pub(crate) fn valid(&self) -> Result<()> {
        let mut names = std::collections::HashSet::new();
        for pool in &self.pools {
            if !names.insert(pool.name.as_str()) {
                return Err(Error::new(format!(
                    "two pools are named {:?}; give each its own name",
                    pool.name
                )));
            }
            for (role, instances) in [("prefill", &pool.prefill), ("decode", &pool.decode)] {
                let mut seen = std::collections::HashSet::new();
                if let Some(twice) = instances.iter().find(|instance| !seen.insert(instance.name()))
                {
                    return Err(Error::new(format!(
                        "pool {:?} has the {role} instance {} twice; leave one out, or give it a weight",
                        pool.name,
                        twice.name()
                    )));
                }
            }
        }
        let at_least_one = [
            ("retries.attempts", self.retries.attempts as usize),
            ("health.down_after", self.health.down_after as usize),
            ("health.eject_after", self.health.eject_after as usize),
            ("limits.connections", self.limits.connections),
            ("limits.in_flight", self.limits.in_flight),
        ];
        if let Some((key, _)) = at_least_one.iter().find(|(_, value)| *value == 0) {
            return Err(Error::new(format!("{key} is 0; it takes a number from 1")));
        }
        if !(0.0..=10.0).contains(&self.retries.budget) {
            return Err(Error::new(format!(
                "retries.budget is {}; it takes 0 to 10",
                self.retries.budget
            )));
        }
        if self.limits.headers < 8 << 10 {
            return Err(Error::new(
                "limits.headers is below 8KiB, which no HTTP client is ready for",
            ));
        }
        if self.tls_cert.is_some() != self.tls_key.is_some() {
            return Err(Error::new("TLS needs both tls_cert and tls_key; one of them is missing"));
        }
        if cfg!(not(feature = "tls")) && self.tls_cert.is_some() {
            return Err(Error::new(
                "this build has no TLS: enable feature \"tls\", or put a TLS end in front",
            ));
        }
        Ok(())
    }

    /// Whether it listens for this machine only.
    pub(crate) fn is_loopback(&self) -> bool {
        self.host == "localhost"
            || self.host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_key_is_printed() {
        let key = Some(ApiKey::new("hush"));
        let setup = Setup { openai_api_key: key.clone(), admin_api_key: key, ..Setup::default() };
        let printed = format!("{setup:?}");
        assert!(printed.contains("ApiKey") && !printed.contains("hush"), "{printed}");
    }

    #[test]
    fn the_file_of_the_readme_is_the_defaults() {
        let readme = include_str!("../../README.md");
        let block =
            readme.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
        let mut read = Setup::from_toml(block).unwrap();
        assert_eq!(read.pools.len(), 1);
        assert_eq!(read.pools[0].prefill[0], InstanceSetup::new("http://10.0.0.1:8100/").unwrap());
        assert_eq!(read.pools[0].decode[0].weight, 2.0);
        read.pools.clear();
        assert_eq!(read, Setup::default());
    }

    #[test]
    fn what_is_wrong_is_named() {
        let cases = [
            ("prot = 8000", "prot"),
            ("connector = 'Nixl'", "NixlConnector"),
            ("drain = 5", "invalid type"),
            ("drain = '5 days'", "no duration"),
            ("[limits]\nbody = '5MB'", "no size"),
            ("[[pool]]\nprefill = ['10.0.0.1:8100']", "no URL"),
            ("[[pool]]\nprefill = ['https://10.0.0.1:8100']", "another scheme"),
            ("[[pool]]\nprefill = ['http://a:1/v1']", "has a path"),
            ("[[pool]]\nprefill = ['http://u@a:1']", "has a user"),
            ("[[pool]]\nprefill = [{ url = 'http://a:1', weigth = 2 }]", "weigth"),
            ("[[pool]]\nprefill = [{ url = 'http://a:1', weight = 0 }]", "above 0"),
            ("[[pool]]\ndecode = ['http://a:1', 'http://a:1/']", "twice"),
            ("[[pool]]\n[[pool]]", "two pools"),
            ("[retries]\nattempts = 0", "retries.attempts is 0"),
            ("[limits]\nheaders = 100", "limits.headers"),
            ("tls_cert = 'c'", "both"),
        ];
        for (text, words) in cases {
            let error = Setup::from_toml(text).expect_err(text).to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
