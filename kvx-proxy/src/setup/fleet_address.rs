//! The address of a fleet in etcd.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use hyper::http::uri::Authority;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

use super::ApiKey;
use crate::error::{Error, Result};
use crate::tls_files::TlsFiles;

/// The default lifetime of a lease: an instance that dies leaves the list after this time.
const LEASE: Duration = Duration::from_secs(15);
/// The most characters of a fleet's name.
const LONGEST_NAME: usize = 64;

/// A user of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Login {
    pub(crate) user: String,
    pub(crate) password: ApiKey,
}

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
    /// The members' URLs, without a path.
    pub(crate) members: Vec<String>,
    /// The name of the fleet.
    pub(crate) fleet: String,
    pub(crate) login: Option<Login>,
    pub(crate) files: TlsFiles,
    pub(crate) lease: Duration,
}

impl FleetAddress {
    /// Parses an address.
    ///
    /// # Errors
    ///
    /// Fails for other texts, and for https without the feature `tls`.
    pub fn new(url: &str) -> Result<Self> {
        // A password is not repeated in the error.
        let shown = url.rsplit_once('@').map_or(url, |(_, after)| after);
        let wrong = |why: &str| {
            Error::new(format!(
                "{shown:?} {why}; write etcd://HOST:PORT[,HOST:PORT]/FLEET, or etcd+https://"
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
        if scheme == "https" && cfg!(not(feature = "tls")) {
            return Err(wrong(
                "needs TLS, and this build has none: build with the feature `tls` (it needs a C \
                 compiler)",
            ));
        }
        let member = |host: &str| {
            let authority: Authority = host.parse().ok()?;
            (authority.port().is_some() && !authority.host().is_empty())
                .then(|| format!("{scheme}://{authority}"))
        };
        let members: Option<Vec<_>> = hosts.split(',').map(member).collect();
        Ok(FleetAddress {
            members: members
                .ok_or_else(|| wrong("needs HOST:PORT for each member; etcd's port is 2379"))?,
            fleet: fleet.to_owned(),
            login: None,
            files: TlsFiles::default(),
            lease: LEASE,
        })
    }

    /// Sets the user of etcd.
    pub fn with_login(mut self, user: impl Into<String>, password: impl Into<String>) -> Self {
        self.login = Some(Login { user: user.into(), password: ApiKey::new(password) });
        self
    }

    /// Sets the PEM files for `etcd+https`: the authorities to trust instead of the system's, and
    /// the client's certificate chain and key. A missing file is an error once etcd is to be asked.
    pub fn with_tls_files(
        mut self,
        ca: Option<PathBuf>,
        certificate: Option<PathBuf>,
        key: Option<PathBuf>,
    ) -> Self {
        self.files = TlsFiles { ca, certificate, key };
        self
    }

    /// Takes the user of etcd from `ETCD_AUTH_USERNAME` and `ETCD_AUTH_PASSWORD`, if the first is
    /// set, and the files for `etcd+https` from `ETCD_AUTH_CA`, `ETCD_AUTH_CLIENT_CERT` and
    /// `ETCD_AUTH_CLIENT_KEY`.
    pub fn with_environment(self) -> Self {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let [ca, certificate, key] =
            ["ETCD_AUTH_CA", "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY"]
                .map(|name| set(name).map(PathBuf::from));
        let TlsFiles { ca: own, certificate: chain, key: private } = self.files.clone();
        let fleet = self.with_tls_files(ca.or(own), certificate.or(chain), key.or(private));
        match std::env::var("ETCD_AUTH_USERNAME") {
            Ok(user) if !user.is_empty() => {
                fleet.with_login(user, std::env::var("ETCD_AUTH_PASSWORD").unwrap_or_default())
            }
            _ => fleet,
        }
    }

    /// Sets the lifetime of a registration's lease, which is renewed three times as often; 15 s by
    /// default. etcd counts whole seconds, and has a minimum of its own.
    pub fn with_lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }
}

/// Writes the address, without the user.
impl fmt::Display for FleetAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_https = self.members.iter().any(|member| member.starts_with("https"));
        f.write_str(if is_https { "etcd+https://" } else { "etcd://" })?;
        for (at, member) in self.members.iter().enumerate() {
            let host = member.split_once("://").map_or(&**member, |(_, host)| host);
            write!(f, "{}{host}", if at > 0 { "," } else { "" })?;
        }
        write!(f, "/{}", self.fleet)
    }
}

impl<'de> Deserialize<'de> for FleetAddress {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        FleetAddress::new(&String::deserialize(from)?).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_hosts_with_ports_and_a_fleet() {
        let fleet = FleetAddress::new("etcd://a:1,[::1]:2/chat.v-2_x").unwrap();
        assert_eq!(fleet.members, ["http://a:1", "http://[::1]:2"]);
        assert_eq!(fleet.fleet, "chat.v-2_x");
        assert_eq!(fleet.to_string(), "etcd://a:1,[::1]:2/chat.v-2_x");
        for (url, words) in [
            ("http://a:1/f", "no address in etcd"),
            ("etcd://a:1", "names no fleet"),
            ("etcd://a:1/", "needs a FLEET"),
            ("etcd://a:1/f/g", "needs a FLEET"),
            ("etcd://a:1/ä", "needs a FLEET"),
            ("etcd://a/f", "needs HOST:PORT"),
            ("etcd://a:1,/f", "needs HOST:PORT"),
            ("etcd://:1/f", "needs HOST:PORT"),
            ("etcd://me:word@a:1/f", "ETCD_AUTH_USERNAME"),
        ] {
            let error = FleetAddress::new(url).map(|_| url).unwrap_err().to_string();
            assert!(error.contains(words) && !error.contains("word@"), "{url}: {error}");
        }
        let https = FleetAddress::new("etcd+https://a:1/f").map_err(|error| error.to_string());
        match cfg!(feature = "tls") {
            true => assert_eq!(https.unwrap().members, ["https://a:1"]),
            false => assert!(https.unwrap_err().contains("build with the feature `tls`")),
        }
    }
}
