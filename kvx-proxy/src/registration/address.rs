//! The address of a fleet in etcd.

use std::time::Duration;

use crate::endpoint::Endpoint;
use crate::error::{Error, Result};
use crate::etcd::{Client, Login};
use crate::setup::{ApiKey, Role};

/// The default lifetime of a lease: an instance that dies leaves the list after this time.
const LEASE: Duration = Duration::from_secs(15);
/// The most characters of a fleet's name.
const LONGEST_NAME: usize = 64;

/// A fleet in etcd: `etcd://HOST:PORT[,HOST:PORT…]/FLEET`, or `etcd+https://` with the feature
/// `tls`.
///
/// ```
/// use kvx_proxy::registration::FleetAddress;
///
/// assert!(FleetAddress::new("etcd://10.0.0.7:2379,10.0.0.8:2379/chat").is_ok());
/// let error = FleetAddress::new("etcd://10.0.0.7:2379").unwrap_err();
/// assert!(error.to_string().contains("/FLEET"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetAddress {
    endpoints: Vec<Endpoint>,
    fleet: String,
    login: Option<Login>,
    lease: Duration,
}

impl FleetAddress {
    /// Parses an address.
    ///
    /// # Errors
    ///
    /// Fails for other texts, and for https without the feature `tls`.
    pub fn new(url: &str) -> Result<Self> {
        let wrong = |why: &str| {
            Error::new(format!(
                "{url:?} {why}; write etcd://HOST:PORT[,HOST:PORT]/FLEET, or etcd+https://"
            ))
        };
        let (scheme, rest) = match url.split_once("://") {
            Some(("etcd" | "etcd+http", rest)) => ("http", rest),
            Some(("etcd+https", rest)) => ("https", rest),
            _ => return Err(wrong("is no address in etcd")),
        };
        if rest.contains('@') {
            return Err(wrong(
                "names a user; set ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD, which `ps` does not \
                 show",
            ));
        }
        let (hosts, fleet) = rest.split_once('/').ok_or_else(|| wrong("names no fleet"))?;
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if fleet.is_empty() || fleet.len() > LONGEST_NAME || !fleet.chars().all(is_name) {
            return Err(wrong(
                "needs a FLEET of 1 to 64 letters, digits, dots, hyphens and underscores",
            ));
        }
        let has_port = |host: &str| {
            host.rsplit_once(':')
                .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
        };
        if !hosts.split(',').all(has_port) {
            return Err(wrong("needs HOST:PORT for each member; etcd's port is 2379"));
        }
        let endpoints = hosts.split(',').map(|host| Endpoint::new(&format!("{scheme}://{host}")));
        Ok(FleetAddress {
            endpoints: endpoints.collect::<Result<_>>()?,
            fleet: fleet.to_owned(),
            login: None,
            lease: LEASE,
        })
    }

    /// Sets the user of etcd.
    pub fn with_login(mut self, user: impl Into<String>, password: impl Into<String>) -> Self {
        self.login = Some(Login { user: user.into(), password: ApiKey::new(password) });
        self
    }

    /// Takes the user of etcd from `ETCD_AUTH_USERNAME` and `ETCD_AUTH_PASSWORD`, if the first is
    /// set.
    pub fn with_environment(self) -> Self {
        match std::env::var("ETCD_AUTH_USERNAME") {
            Ok(user) if !user.is_empty() => {
                self.with_login(user, std::env::var("ETCD_AUTH_PASSWORD").unwrap_or_default())
            }
            _ => self,
        }
    }

    /// Sets the lifetime of a registration's lease, which is renewed three times as often; 15 s by
    /// default. etcd counts whole seconds, and has a minimum of its own.
    pub fn with_lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    pub(super) fn lease(&self) -> Duration {
        self.lease
    }

    pub(super) fn fleet(&self) -> &str {
        &self.fleet
    }

    pub(super) fn client(&self) -> Result<Client> {
        Client::new(self.endpoints.clone(), self.login.clone())
    }

    /// Returns the prefix of the fleet's keys. Its slash at the end keeps other fleets out whose
    /// names begin with this one's.
    pub(super) fn prefix(&self) -> String {
        format!("/kvx/v1/instances/{}/", self.fleet)
    }

    pub(super) fn key(&self, role: Role, id: u64) -> String {
        format!("{}{}/{id:016x}", self.prefix(), role.as_str())
    }

    /// Returns the role and the id in a key of this fleet.
    pub(super) fn parse_key(&self, key: &[u8]) -> Option<(Role, u64)> {
        let key = std::str::from_utf8(key).ok()?;
        let (role, digits) = key.strip_prefix(&self.prefix())?.split_once('/')?;
        let (role, id) = (Role::from_name(role).ok()?, u64::from_str_radix(digits, 16).ok()?);
        (self.key(role, id) == key).then_some((role, id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_hosts_with_ports_and_a_fleet() {
        let fleet = FleetAddress::new("etcd://a:1,[::1]:2/chat.v-2_x").unwrap();
        let urls: Vec<_> = fleet.endpoints.iter().map(Endpoint::url).collect();
        assert_eq!(urls, ["http://a:1", "http://[::1]:2"]);
        assert_eq!(fleet.prefix(), "/kvx/v1/instances/chat.v-2_x/");
        for (url, words) in [
            ("http://a:1/f", "no address in etcd"),
            ("etcd://a:1", "names no fleet"),
            ("etcd://a:1/", "needs a FLEET"),
            ("etcd://a:1/f/g", "needs a FLEET"),
            ("etcd://a:1/ä", "needs a FLEET"),
            ("etcd://a/f", "needs HOST:PORT"),
            ("etcd://a:1,/f", "needs HOST:PORT"),
            ("etcd://:1/f", "needs HOST:PORT"),
            ("etcd://me:secret@a:1/f", "ETCD_AUTH_USERNAME"),
        ] {
            let error = FleetAddress::new(url).map(|_| url).unwrap_err().to_string();
            assert!(error.contains(words), "{url}: {error}");
        }
        let https = FleetAddress::new("etcd+https://a:1/f").map_err(|error| error.to_string());
        match cfg!(feature = "tls") {
            true => assert_eq!(https.unwrap().endpoints[0].url(), "https://a:1"),
            false => assert!(https.unwrap_err().contains("no TLS: build with")),
        }
    }

    #[test]
    fn keys_are_of_one_fleet_and_one_spelling() {
        let fleet = FleetAddress::new("etcd://a:1/f").unwrap();
        let key = fleet.key(Role::Decode, 0xab);
        assert_eq!(key, "/kvx/v1/instances/f/decode/00000000000000ab");
        assert_eq!(fleet.parse_key(key.as_bytes()), Some((Role::Decode, 0xab)));
        for wrong in [
            "/kvx/v1/instances/f2/decode/00000000000000ab",
            "/kvx/v1/instances/f/decode/ab",
            "/kvx/v1/instances/f/decode/00000000000000AB",
            "/kvx/v1/instances/f/decode/00000000000000ab/",
            "/kvx/v1/instances/f/router/00000000000000ab",
            "/kvx/v1/instances/f/",
        ] {
            assert_eq!(fleet.parse_key(wrong.as_bytes()), None, "{wrong}");
        }
        assert_eq!(fleet.parse_key(b"\xff"), None);
    }
}
