//! The keys of a fleet in etcd.

use crate::endpoint::Endpoint;
use crate::error::Result;
use crate::etcd::Client;
use crate::setup::{FleetAddress, Role};

impl FleetAddress {
    pub(super) fn client(&self) -> Result<Client> {
        let members = self.members.iter().map(|url| Endpoint::new(url));
        Client::new(members.collect::<Result<_>>()?, self.login.clone(), &self.files)
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

    #[cfg(feature = "tls")]
    #[test]
    fn files_for_https_are_read_before_etcd_is_asked() {
        let fleet = FleetAddress::new("etcd+https://a:1/f").unwrap();
        let certificate = Some("/nowhere/cert".into());
        let error = fleet.with_tls_files(None, certificate, None).client().unwrap_err();
        assert!(error.to_string().contains("/nowhere/cert"), "{error}");
        assert!(error.to_string().contains("set both"), "{error}");
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
