//! The configuration of one server: a URL or a table.

use std::fmt;
use std::net::IpAddr;

use hyper::Uri;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::zmtp::parse_endpoint;

/// The role of an instance in its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Computes prompts.
    Prefill,
    /// Generates tokens.
    Decode,
}

impl Role {
    /// Returns `prefill` or `decode`.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }

    /// Parses `prefill` or `decode`.
    ///
    /// # Errors
    ///
    /// Fails for any other name; the message lists the valid ones.
    pub fn from_name(name: &str) -> Result<Self> {
        super::from_name("role", name)
    }
}

/// The configuration of one server, or of all that DNS has under a name.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct InstanceSetup {
    /// Scheme `http`, host and port. Scheme `dns+http`: each address of the host is an instance
    /// with these settings. Scheme `dnssrv+http`, without a port: each target of the SRV records.
    pub url: Uri,
    /// The share of the load that the instance gets, relative to other instances.
    pub weight: f64,
    /// True if the instance gets no new requests.
    pub draining: bool,
    /// The number of the instance's data parallel ranks, if the proxy chooses one by
    /// `X-data-parallel-rank`; with 1 the instance chooses.
    pub ranks: u32,
    /// The port of the instance's Mooncake bootstrap server.
    pub bootstrap_port: Option<u16>,
    /// True if the proxy uses HTTP/2 without TLS.
    pub h2c: bool,
    /// Instances with different values are not paired; one without a value pairs with all.
    pub compatibility: Option<String>,
    /// Where the instance publishes the events of its prefix cache.
    pub events: Option<EventSource>,
}

/// Where an instance publishes the events of its prefix cache, as vLLM's `--kv-events-config` says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EventSource {
    /// Host and port of the publisher.
    pub endpoint: (String, u16),
    /// Host and port of its replays. Without them the router lacks events that were published
    /// before it subscribed.
    pub replay: Option<(String, u16)>,
}

/// The DNS records that list instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DnsRecords {
    /// A and AAAA.
    Addresses,
    /// SRV.
    Services,
}

impl InstanceSetup {
    /// Creates an instance from `http://HOST:PORT`, or several from `dns+http://HOST:PORT` or
    /// `dnssrv+http://NAME`.
    ///
    /// # Errors
    ///
    /// Fails if the URL has another scheme, no host, a user, or a path, and for `dnssrv+http` a
    /// port.
    pub fn new(url: &str) -> Result<Self> {
        let wrong = |why: &str| {
            Error::new(format!(
                "instance {url:?} {why}; write http://HOST:PORT, dns+http://HOST:PORT or \
                 dnssrv+http://NAME"
            ))
        };
        let uri: Uri = url.parse().map_err(|_| wrong("is not a URL"))?;
        let scheme = uri.scheme_str().ok_or_else(|| wrong("is not a URL"))?;
        if !["http", "dns+http", "dnssrv+http"].contains(&scheme) {
            return Err(wrong("has a scheme other than http, dns+http and dnssrv+http"));
        }
        let authority = uri.authority().ok_or_else(|| wrong("has no host"))?;
        if authority.as_str().contains('@') || authority.host().is_empty() {
            return Err(wrong("has a user, or no host"));
        }
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(wrong("has a path"));
        }
        let (host, port) = (authority.host(), authority.port_u16());
        let url = match scheme {
            "dnssrv+http" if port.is_some() => {
                return Err(wrong("has a port, which SRV records have themselves"));
            }
            "dnssrv+http" => format!("{scheme}://{host}").parse(),
            _ => format!("{scheme}://{host}:{}", port.unwrap_or(80)).parse(),
        };
        Ok(InstanceSetup {
            url: url.map_err(|_| wrong("has an invalid port"))?,
            weight: 1.0,
            draining: false,
            ranks: 1,
            bootstrap_port: None,
            h2c: false,
            compatibility: None,
            events: None,
        })
    }

    /// Sets the endpoints of its events, such as `tcp://10.0.0.1:5557`. A host `*`, as vLLM's
    /// configuration has it, is that of the instance. An empty endpoint switches events, or replays, off.
    ///
    /// # Errors
    ///
    /// Fails if an endpoint is invalid, or a replay has no events.
    pub fn set_events(&mut self, endpoint: Option<&str>, replay: Option<&str>) -> Result<()> {
        let host = self.host().to_owned();
        let name = self.name().to_owned();
        let parse = |key: &str, endpoint: &str| match parse_endpoint(endpoint) {
            Ok((any, port)) if any == "*" => Ok((host.clone(), port)),
            Ok(parsed) => Ok(parsed),
            Err(error) => Err(Error::new(format!("{key} of {name}: {error}"))),
        };
        match endpoint {
            None => {}
            Some("") => self.events = None,
            Some(endpoint) => {
                let replay = self.events.take().and_then(|events| events.replay);
                let endpoint = parse("events", endpoint)?;
                self.events = Some(EventSource { endpoint, replay });
            }
        }
        match (replay, &mut self.events) {
            (None, _) => {}
            (Some(""), Some(events)) => events.replay = None,
            (Some(replay), Some(events)) => events.replay = Some(parse("events_replay", replay)?),
            (Some(_), None) => {
                return Err(Error::new(format!(
                    "{name} has events_replay and no events; set both"
                )));
            }
        }
        if self.events.is_some() && self.ranks > 1 {
            return Err(Error::new(format!(
                "{name} has events and {} ranks; each rank publishes its own, so leave one of \
                 both out",
                self.ranks
            )));
        }
        Ok(())
    }

    /// Returns `HOST:PORT`, which names it in metrics, logs and errors.
    pub fn name(&self) -> &str {
        self.url.authority().map_or("", |authority| authority.as_str())
    }

    /// Returns the host, an IPv6 address without brackets.
    pub(crate) fn host(&self) -> &str {
        self.url.host().unwrap_or_default().trim_matches(['[', ']'])
    }

    /// Returns true if only this host reaches the address.
    pub(crate) fn is_local(&self) -> bool {
        let address = self.host().parse::<IpAddr>();
        self.host() == "localhost" || address.is_ok_and(|address| address.is_loopback())
    }

    /// Returns the records that list the instances; `None` if this is one instance.
    pub(crate) fn records(&self) -> Option<DnsRecords> {
        match self.url.scheme_str() {
            Some("dns+http") => Some(DnsRecords::Addresses),
            Some("dnssrv+http") => Some(DnsRecords::Services),
            _ => None,
        }
    }

    /// Returns the URL without a path, which names the provider of instances.
    pub(crate) fn provider(&self) -> String {
        format!("{}://{}", self.url.scheme_str().unwrap_or_default(), self.name())
    }

    /// Returns an instance with these settings at a host and port that were found; `None` if they
    /// make no URL.
    pub(crate) fn at(&self, host: &str, port: u16) -> Option<Self> {
        let mut found = self.clone();
        found.url = format!("http://{host}:{port}").parse().ok()?;
        let own = found.host().to_owned();
        if let Some(EventSource { endpoint, replay }) = &mut found.events {
            // `*`, the instance's host, was taken for the name.
            for endpoint in [Some(endpoint), replay.as_mut()].into_iter().flatten() {
                if endpoint.0 == self.host() {
                    endpoint.0.clone_from(&own);
                }
            }
        }
        Some(found)
    }
}

/// The role and the pool of an instance in JSON.
#[derive(Deserialize)]
pub(crate) struct InstanceTarget {
    pub(crate) role: Role,
    pub(crate) pool: Option<String>,
}

impl InstanceTarget {
    /// Splits the JSON of an instance, as `POST /instances` takes it, into its target and its
    /// settings.
    pub(crate) fn split(
        mut instance: Map<String, Value>,
    ) -> serde_json::Result<(Self, InstanceTable)> {
        let mut target = Map::new();
        for key in ["role", "pool"] {
            target.extend(instance.remove_entry(key));
        }
        Ok((
            serde_json::from_value(Value::Object(target))?,
            serde_json::from_value(Value::Object(instance))?,
        ))
    }
}

/// An instance as a table; `url` and the rest are checked together.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct InstanceTable {
    pub(crate) url: String,
    weight: Option<f64>,
    draining: Option<bool>,
    ranks: Option<u32>,
    bootstrap_port: Option<u16>,
    http: Option<String>,
    compatibility: Option<String>,
    events: Option<String>,
    events_replay: Option<String>,
}

impl InstanceTable {
    /// Builds the instance. Absent keys take the values of `before`, or the defaults.
    pub(crate) fn over(self, before: Option<&InstanceSetup>) -> Result<InstanceSetup> {
        let mut instance = match before {
            Some(before) => before.clone(),
            None => InstanceSetup::new(&self.url)?,
        };
        let name = instance.name().to_owned();
        if let Some(weight) = self.weight {
            if !(weight > 0.0 && weight <= 1e6) {
                return Err(Error::new(format!(
                    "weight of {name} is {weight}; it must be a number above 0"
                )));
            }
            instance.weight = weight;
        }
        if let Some(ranks) = self.ranks {
            if !(1..=65536).contains(&ranks) {
                return Err(Error::new(format!(
                    "ranks of {name} is {ranks}; it must be 1 to 65536"
                )));
            }
            instance.ranks = ranks;
        }
        match self.http.as_deref() {
            None => {}
            Some("1.1") => instance.h2c = false,
            Some("h2c") => instance.h2c = true,
            Some(other) => {
                return Err(Error::new(format!(
                    "http of {name} is {other:?}; it must be \"1.1\" or \"h2c\""
                )));
            }
        }
        instance.draining = self.draining.unwrap_or(instance.draining);
        instance.bootstrap_port = self.bootstrap_port.or(instance.bootstrap_port);
        instance.compatibility = self.compatibility.or(instance.compatibility);
        instance.set_events(self.events.as_deref(), self.events_replay.as_deref())?;
        Ok(instance)
    }
}

impl<'de> Deserialize<'de> for InstanceSetup {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct TextOrTable;
        impl<'de> Visitor<'de> for TextOrTable {
            type Value = InstanceSetup;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"http://HOST:PORT\", a name of DNS, or a table with url")
            }

            fn visit_str<E: serde::de::Error>(
                self,
                url: &str,
            ) -> std::result::Result<InstanceSetup, E> {
                InstanceSetup::new(url).map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                map: A,
            ) -> std::result::Result<InstanceSetup, A::Error> {
                let table = InstanceTable::deserialize(MapAccessDeserializer::new(map))?;
                table.over(None).map_err(A::Error::custom)
            }
        }
        from.deserialize_any(TextOrTable)
    }
}
