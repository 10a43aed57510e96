//! The configuration of the proxy: from a TOML file, the command lines of vLLM's toy proxies, or
//! code.

mod api_key;
mod check;
mod fleet_address;
mod instance;
mod kubernetes;
mod toys;
mod units;

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde::de::Deserializer;

pub use api_key::{ApiKey, FleetSecret};
pub use check::Finding;
pub use fleet_address::FleetAddress;
pub(crate) use fleet_address::Login;
pub(crate) use instance::{DnsRecords, InstanceTable, InstanceTarget};
pub use instance::{EventSource, InstanceSetup, Role};
pub use kubernetes::{KubernetesDiscovery, LabelSelector};

use crate::error::{Error, Result};
use crate::release::BlockReleaser;

/// The configuration of the proxy. The README lists the keys of the file, which are the names of
/// these fields.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Setup {
    /// The address to listen on, or a name that resolves to one.
    pub host: String,
    /// The port to listen on; 0 takes any free port.
    pub port: u16,
    /// The connector of pools that name none.
    pub connector: PoolConnector,
    /// The policy for choosing instances.
    pub choice: Choice,
    /// Who computes prompts while no prefill instance is up.
    pub fallback: Fallback,
    /// The backends over which blocks that no decode instance fetches are released; none: they stay
    /// until their lease ends. For the program that sets [`releaser`](Self::releaser).
    pub release: Vec<String>,
    /// The number of a prompt's tokens that [`Choice::Prefix`] compares.
    pub prefix_tokens: usize,
    /// Prompts of fewer tokens go to decode alone.
    pub local_below: u64,
    /// The time for which requests may continue once a drain has begun.
    #[serde(deserialize_with = "units::read_duration")]
    pub drain: Duration,
    /// The destination of the access log, which has one JSON line per request.
    pub access_log: AccessLog,
    /// A file that [`replay`](crate::replay) can play: times, lengths and outcomes of requests, and
    /// keyed hashes of their prompts.
    pub record: Option<PathBuf>,
    /// The most bytes of the recording.
    #[serde(deserialize_with = "units::read_size")]
    pub record_size: usize,
    /// Enables `/` and `/status`.
    pub page: bool,
    /// A file with one key per line; clients need one of them, also for `/status` and `/metrics`.
    pub api_key_file: Option<PathBuf>,
    /// The certificate chain for clients, PEM. Needs the feature `tls`.
    pub tls_cert: Option<PathBuf>,
    /// The private key of the certificate, PEM.
    pub tls_key: Option<PathBuf>,
    /// Timeouts.
    pub timeouts: Timeouts,
    /// Limits on retries.
    pub retries: Retries,
    /// Health checks and ejections of instances.
    pub health: Health,
    /// Discovery of instances.
    pub discovery: Discovery,
    /// Limits on clients.
    pub limits: ClientLimits,
    /// The fleet.
    #[serde(rename = "pool")]
    pub pools: Vec<Pool>,
    /// The bearer token for instances if a client sent no `Authorization`; from the environment
    /// only.
    #[serde(skip)]
    pub openai_api_key: Option<ApiKey>,
    /// The key for `/instances`; from the environment only.
    #[serde(skip)]
    pub admin_api_key: Option<ApiKey>,
    /// The fleet's secret, which the proxy proves to the bootstrap servers of Mooncake instances;
    /// from the program only.
    #[serde(skip)]
    pub fleet_secret: Option<FleetSecret>,
    /// Releases blocks that no decode instance fetches; from the program only. A running proxy keeps
    /// the one that it was started with. `None`: the blocks stay until their lease ends.
    #[serde(skip)]
    pub releaser: Option<BlockReleaser>,
}

/// The connector of a pool's instances, which determines the recipe of its requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum PoolConnector {
    /// Detected. A prefill instance with a bootstrap server uses Mooncake; any other uses NIXL,
    /// with pull or push as its answers show.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    /// NIXL, with pull or push as prefill instances' answers show.
    #[serde(rename = "NixlConnector")]
    Nixl,
    /// NIXL: prefill, then decode.
    #[serde(rename = "NixlPullConnector")]
    NixlPull,
    /// NIXL: both legs at once, after a prefill instance's first answer has named its engine.
    #[serde(rename = "NixlPushConnector")]
    NixlPush,
    /// Mooncake: both legs at once.
    #[serde(rename = "MooncakeConnector")]
    Mooncake,
}

fn from_name<T: for<'de> Deserialize<'de>>(what: &str, name: &str) -> Result<T> {
    let value = serde::de::value::StrDeserializer::<serde::de::value::Error>::new(name);
    T::deserialize(value).map_err(|error| Error::new(format!("{what}: {error}")))
}

impl PoolConnector {
    /// Parses vLLM's name of a connector.
    ///
    /// # Errors
    ///
    /// Fails for any other name; the message lists the valid ones.
    pub fn from_name(name: &str) -> Result<Self> {
        from_name("connector", name)
    }
}

impl Fallback {
    /// Parses `off` or `decode`.
    ///
    /// # Errors
    ///
    /// Fails for any other name; the message lists the valid ones.
    pub fn from_name(name: &str) -> Result<Self> {
        from_name("fallback", name)
    }
}

impl Choice {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Choice::Cached => "cached",
            Choice::LeastTokens => "least-tokens",
            Choice::RoundRobin => "round-robin",
            Choice::Prefix => "prefix",
        }
    }

    /// Parses `cached`, `least-tokens`, `round-robin` or `prefix`.
    ///
    /// # Errors
    ///
    /// Fails for any other name; the message lists the valid ones.
    pub fn from_name(name: &str) -> Result<Self> {
        from_name("choice", name)
    }
}

/// The policy for choosing instances.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Choice {
    /// The instance that would finish computing the prompt first: that has the fewest tokens to
    /// compute, those of the prompt included that are not in its cache, for its weight. The router
    /// knows the cache by the prompts that it has sent there.
    #[default]
    Cached,
    /// The instance with the fewest outstanding tokens for its weight.
    LeastTokens,
    /// One after the other, by weight.
    RoundRobin,
    /// The instance that has served the same prompt prefix before, unless it has much more load
    /// than the others.
    Prefix,
}

/// Who computes prompts while no prefill instance is up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fallback {
    /// Nobody: such requests get 503.
    #[default]
    Off,
    /// The decode instances. These requests take at most a tenth of the tokens that a pool's decode
    /// instances are busy with, but one is always served; others get 503.
    Decode,
}

/// The destination of the access log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AccessLog {
    /// Nowhere.
    Off,
    /// Standard output.
    #[default]
    Stdout,
    /// A file that lines are appended to.
    File(PathBuf),
}

impl<'de> Deserialize<'de> for AccessLog {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        Ok(AccessLog::from_name(&String::deserialize(from)?))
    }
}

impl AccessLog {
    /// Parses `off`, `stdout`, or a path.
    pub fn from_name(name: &str) -> Self {
        match name {
            "off" => AccessLog::Off,
            "stdout" => AccessLog::Stdout,
            path => AccessLog::File(path.into()),
        }
    }
}

/// Timeouts.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "docs/operations/configuration.md documents these keys")]
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

/// Limits on retries.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "docs/operations/configuration.md documents these keys")]
pub struct Retries {
    pub attempts: u32,
    pub budget: f64,
}

/// Health checks and ejections of instances.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "docs/operations/configuration.md documents these keys")]
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

/// Discovery of instances.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "docs/operations/configuration.md documents these keys")]
pub struct Discovery {
    #[serde(deserialize_with = "units::read_duration")]
    pub every: Duration,
    #[serde(deserialize_with = "units::read_duration")]
    pub timeout: Duration,
    pub absences: u32,
    pub resolvers: Vec<SocketAddr>,
    pub etcd: Option<FleetAddress>,
    pub kubernetes: Option<KubernetesDiscovery>,
}

/// Limits on clients.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "docs/operations/configuration.md documents these keys")]
pub struct ClientLimits {
    pub connections: usize,
    pub connections_per_address: usize,
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
    /// The name in metrics and logs.
    pub name: String,
    /// The connector of the pool's instances; `None` takes that of [`Setup`].
    pub connector: Option<PoolConnector>,
    /// True if the pool's instances use `bidirectional_kv_xfer`.
    pub bidirectional: bool,
    /// The instances that compute prompts.
    pub prefill: Vec<InstanceSetup>,
    /// The instances that generate tokens.
    pub decode: Vec<InstanceSetup>,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            host: "127.0.0.1".to_owned(),
            port: 8000,
            connector: PoolConnector::Auto,
            choice: Choice::default(),
            fallback: Fallback::Off,
            release: ["SHM", "TCP"].map(str::to_owned).into(),
            prefix_tokens: 256,
            local_below: 0,
            drain: Duration::from_secs(30),
            access_log: AccessLog::Stdout,
            record: None,
            record_size: 256 << 20,
            page: true,
            api_key_file: None,
            tls_cert: None,
            tls_key: None,
            timeouts: Timeouts::default(),
            retries: Retries::default(),
            health: Health::default(),
            discovery: Discovery::default(),
            limits: ClientLimits::default(),
            pools: Vec::new(),
            openai_api_key: None,
            admin_api_key: None,
            fleet_secret: None,
            releaser: None,
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

impl Default for Discovery {
    fn default() -> Self {
        Discovery {
            every: Duration::from_secs(5),
            timeout: Duration::from_secs(3),
            absences: 3,
            resolvers: Vec::new(),
            etcd: None,
            kubernetes: None,
        }
    }
}

impl Discovery {
    /// Returns true if instances of this role may be found for a pool, beside those of its names.
    pub(crate) fn may_find(&self, pool: &str, role: Role) -> bool {
        let has_pods = self.kubernetes.as_ref().is_some_and(|one| one.may_find(pool, role));
        has_pods || self.etcd.is_some()
    }

    /// Returns true if a pool needs prefill instances that are found beside those of its names.
    pub(crate) fn needs_prefill(&self, pool: &str) -> bool {
        let has_pods = self.kubernetes.as_ref().is_some_and(|one| one.needs_prefill(pool));
        has_pods || self.etcd.is_some()
    }

    /// Returns the time in which each provider reports for the first time: after its own timeout if
    /// nothing answers.
    pub(crate) fn first_limit(&self) -> Duration {
        self.timeout + Duration::from_secs(1)
    }
}

impl Default for ClientLimits {
    fn default() -> Self {
        ClientLimits {
            connections: 4096,
            connections_per_address: 2048,
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

/// Parses a duration as the configuration has them: `250ms`, `5s`, `2m` or `1h`.
///
/// # Errors
///
/// Fails for other texts; the message lists the units.
pub fn parse_duration(text: &str) -> Result<Duration> {
    units::duration(text).map_err(Error::new)
}

/// Parses a size as the configuration has them: bytes, `64KiB`, `32MiB` or
/// `1GiB`.
///
/// # Errors
///
/// Fails for other texts; the message lists the units.
pub fn parse_size(text: &str) -> Result<usize> {
    units::size(text).map_err(Error::new)
}

impl Setup {
    /// Parses the text of a configuration file.
    ///
    /// # Errors
    ///
    /// Fails if a key is unknown or a value is invalid; the message names the line and the key.
    pub fn from_toml(text: &str) -> Result<Self> {
        let setup: Setup = toml::from_str(text).map_err(|error| Error::new(error.to_string()))?;
        setup.valid()?;
        Ok(setup)
    }

    /// Reads a configuration file.
    ///
    /// # Errors
    ///
    /// Fails as [`from_toml`](Self::from_toml) does, and if the file cannot be read.
    pub fn from_file(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::io(format_args!("cannot read {}", path.display()), error))?;
        Self::from_toml(&text).map_err(|error| Error::new(format!("{}: {error}", path.display())))
    }

    /// Reads `OPENAI_API_KEY`, `ADMIN_API_KEY` and the user of etcd from the environment.
    pub fn with_environment(mut self) -> Self {
        let set =
            |name| std::env::var(name).ok().filter(|value| !value.is_empty()).map(ApiKey::new);
        self.openai_api_key = set("OPENAI_API_KEY");
        self.admin_api_key = set("ADMIN_API_KEY");
        self.discovery.etcd = self.discovery.etcd.map(FleetAddress::with_environment);
        self
    }

    /// Checks for errors that do not depend on the machine. Every configuration is checked before
    /// it is used.
    pub(crate) fn valid(&self) -> Result<()> {
        let (pools, mut names) = (self.pools(), std::collections::HashSet::new());
        for pool in &*pools {
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
                        "pool {:?} has the {role} instance {} twice; remove one, or give it a \
                         weight",
                        pool.name,
                        twice.name()
                    )));
                }
            }
        }
        if let Some(kubernetes) = &self.discovery.kubernetes {
            kubernetes.valid()?;
            if !names.contains(kubernetes.pool.as_str()) {
                return Err(Error::new(format!(
                    "discovery.kubernetes.pool is {:?}, and no pool has this name; add a [[pool]] \
                     with it",
                    kubernetes.pool
                )));
            }
        }
        let at_least_one = [
            ("retries.attempts", self.retries.attempts as usize),
            ("health.down_after", self.health.down_after as usize),
            ("health.eject_after", self.health.eject_after as usize),
            ("discovery.absences", self.discovery.absences as usize),
            ("limits.connections", self.limits.connections),
            ("limits.connections_per_address", self.limits.connections_per_address),
            ("limits.in_flight", self.limits.in_flight),
        ];
        if let Some((key, _)) = at_least_one.iter().find(|(_, value)| *value == 0) {
            return Err(Error::new(format!("{key} is 0; it must be at least 1")));
        }
        if !(0.0..=10.0).contains(&self.retries.budget) {
            return Err(Error::new(format!(
                "retries.budget is {}; it must be 0 to 10",
                self.retries.budget
            )));
        }
        if self.limits.headers < 8 << 10 {
            return Err(Error::new(
                "limits.headers is below 8KiB, which is too small for common HTTP clients",
            ));
        }
        if self.tls_cert.is_some() != self.tls_key.is_some() {
            return Err(Error::new("TLS needs both tls_cert and tls_key; one of them is missing"));
        }
        if cfg!(not(feature = "tls")) && self.tls_cert.is_some() {
            return Err(Error::new(
                "this build has no TLS: enable feature \"tls\", or put a TLS terminator in front",
            ));
        }
        Ok(())
    }

    /// Returns the pools. Where etcd or Kubernetes lists instances, the default pool need not be
    /// written.
    pub(crate) fn pools(&self) -> Cow<'_, [Pool]> {
        let is_listed = self.discovery.etcd.is_some() || self.discovery.kubernetes.is_some();
        match self.pools.is_empty() && is_listed {
            true => Cow::Owned(vec![Pool::default()]),
            false => Cow::Borrowed(&self.pools),
        }
    }

    /// Returns true if the proxy listens on a loopback address only.
    pub(crate) fn is_loopback(&self) -> bool {
        self.host == "localhost"
            || self.host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    }
}

#[cfg(test)]
mod tests;
