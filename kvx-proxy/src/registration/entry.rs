//! The value of a registration's key.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hmac::{Hmac, KeyInit, Mac as _};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use sha2::Sha256;

use super::{Refusal, Registration};
use crate::error::{Error, Result};
use crate::setup::{FleetAddress, FleetSecret, InstanceTarget, Role};

/// The most bytes of a value.
pub(super) const LONGEST: usize = 4 << 10;
/// The time for which a value is valid.
pub(super) const VALID: Duration = Duration::from_secs(300);
/// The tolerance in seconds for differences between two hosts' clocks.
const CLOCKS: u64 = 300;
/// Separates these MACs from other proofs with the same secret.
const LABEL: &[u8] = b"kvx registration 1: an instance says where it serves";

/// A value as JSON. The MAC covers the text of `instance`, so that nothing depends on how JSON is
/// written.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Entry<'a> {
    #[serde(borrow)]
    instance: &'a RawValue,
    /// Seconds since the Unix epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mac: Option<String>,
}

/// The entry of an instance, under the same key for its whole life.
#[derive(Clone, Debug)]
pub(super) struct OwnEntry {
    pub(super) key: String,
    pub(super) id: u64,
    fleet: String,
    role: Role,
    instance: Box<RawValue>,
    secret: Option<FleetSecret>,
}

impl OwnEntry {
    /// Creates the entry of an instance with this id, from the JSON that `POST /instances` takes.
    pub(super) fn new(
        fleet: &FleetAddress,
        id: u64,
        instance: &str,
        secret: Option<&FleetSecret>,
    ) -> Result<Self> {
        let wrong = |why: String| {
            Error::new(format!(
                "cannot register {instance}: {why}; write it as for POST /instances of the router"
            ))
        };
        let read: Map<String, Value> =
            serde_json::from_str(instance).map_err(|error| wrong(error.to_string()))?;
        let (role, registration) = parse(id, read.clone()).map_err(wrong)?;
        if registration.setup.is_local() {
            tracing::warn!(
                "routers on other hosts cannot reach {}: register the address that they reach \
                 (kvx serve: --host or --register-url; kvx register: --url)",
                registration.setup.name()
            );
        }
        let text = Value::Object(read).to_string();
        let raw = RawValue::from_string(text).map_err(|error| wrong(error.to_string()))?;
        let entry = OwnEntry {
            key: fleet.key(role, id),
            id,
            fleet: fleet.fleet.clone(),
            role,
            instance: raw,
            secret: secret.cloned(),
        };
        match entry.value().len() {
            ..=LONGEST => Ok(entry),
            length => Err(wrong(format!("it takes {length} bytes, and {LONGEST} is the most"))),
        }
    }

    /// Logs that the entry is in etcd.
    pub(super) fn log_registered(&self) {
        let signed = match &self.secret {
            Some(_) => "signed",
            None => "not signed: without KVX_SECRET_FILE, routers with a secret refuse it",
        };
        tracing::info!("registered as {}, {signed}", self.key);
    }

    /// Returns the value, valid from now on.
    pub(super) fn value(&self) -> String {
        self.value_until(now() + VALID.as_secs())
    }

    pub(super) fn value_until(&self, expires: u64) -> String {
        let Self { fleet, role, id, instance, .. } = self;
        let sign = |secret| mac(secret, fleet, *role, *id, instance.get(), expires).finalize();
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let mac = self.secret.as_ref().map(|secret| hex(&sign(secret).into_bytes()));
        let entry = Entry { instance, expires: Some(expires), mac };
        serde_json::to_string(&entry).expect("texts and numbers are JSON")
    }
}

/// Reads an instance, and checks its settings.
fn parse(
    id: u64,
    instance: Map<String, Value>,
) -> std::result::Result<(Role, Registration), String> {
    let (target, table) = InstanceTarget::split(instance).map_err(|error| error.to_string())?;
    let setup = table.over(None).map_err(|error| error.to_string())?;
    if setup.records().is_some() {
        return Err("its URL is a name of DNS for several; write http://HOST:PORT".to_owned());
    }
    let InstanceTarget { role, pool } = target;
    Ok((role, Registration { id, role, pool, setup }))
}

/// Returns the registration in an entry of a fleet, and when it expires. Does not check that it has
/// not expired.
///
/// # Errors
///
/// The reason why the entry is none.
pub(super) fn decode(
    fleet: &FleetAddress,
    key: &[u8],
    value: &[u8],
    secret: Option<&FleetSecret>,
) -> std::result::Result<(Registration, Option<u64>), Refusal> {
    let malformed = |error: serde_json::Error| Refusal::Malformed(error.to_string());
    let (role, id) = fleet.parse_key(key).ok_or(Refusal::Key)?;
    if value.len() > LONGEST {
        return Err(Refusal::Size);
    }
    let entry: Entry<'_> = serde_json::from_slice(value).map_err(malformed)?;
    if let Some(secret) = secret {
        let (Some(proof), Some(expires)) = (&entry.mac, entry.expires) else {
            return Err(Refusal::Unsigned);
        };
        let mac = mac(secret, &fleet.fleet, role, id, entry.instance.get(), expires);
        let proof = unhex(proof).ok_or(Refusal::Forged)?;
        // Compares in constant time.
        mac.verify_slice(&proof).map_err(|_| Refusal::Forged)?;
    }
    let instance = serde_json::from_str(entry.instance.get()).map_err(malformed)?;
    let (own_role, registration) = parse(id, instance).map_err(Refusal::Malformed)?;
    if own_role != role {
        return Err(Refusal::Malformed("its role is not that of its key".to_owned()));
    }
    Ok((registration, entry.expires))
}

/// Checks that an entry has not expired, and does so in time.
///
/// # Errors
///
/// If not, taking into account that clocks differ.
pub(super) fn check_expiry(expires: Option<u64>, now: u64) -> std::result::Result<(), Refusal> {
    let Some(expires) = expires else { return Ok(()) };
    if now > expires.saturating_add(CLOCKS) {
        return Err(Refusal::Expired(now - expires));
    }
    // An old entry could be written again when another program has its address.
    if expires > now.saturating_add(VALID.as_secs() + CLOCKS) {
        return Err(Refusal::Future(expires - now));
    }
    Ok(())
}

/// Returns the seconds since the Unix epoch.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Computes the MAC of an entry. Numbers have eight bytes; texts follow their lengths.
fn mac(
    secret: &FleetSecret,
    fleet: &str,
    role: Role,
    id: u64,
    instance: &str,
    expires: u64,
) -> Hmac<Sha256> {
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(secret.bytes())
        .expect("HMAC takes keys of any length");
    mac.update(LABEL);
    for number in [id, expires] {
        mac.update(&number.to_be_bytes());
    }
    for text in [fleet, role.as_str(), instance] {
        mac.update(&(text.len() as u64).to_be_bytes());
        mac.update(text.as_bytes());
    }
    mac
}

/// Returns the bytes of 64 hexadecimal digits in lower case.
fn unhex(text: &str) -> Option<[u8; 32]> {
    if text.len() != 64 || !text.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    let mut bytes = [0; 32];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(bytes)
}

/// Decodes an entry: its key, a NUL byte, and its value.
pub(crate) fn fuzz(bytes: &[u8]) {
    let Some(end) = bytes.iter().position(|byte| *byte == 0) else { return };
    let (key, value) = (&bytes[..end], &bytes[end + 1..]);
    let fleet = FleetAddress::new("etcd://a:1/f").expect("it is an address");
    let secret = FleetSecret::new([7; 32]);
    let signed = decode(&fleet, key, value, Some(&secret));
    if let Ok((registration, _)) = decode(&fleet, key, value, None) {
        let own = fleet.key(registration.role, registration.id);
        assert_eq!(own.as_bytes(), key, "a key has one spelling");
    } else {
        assert!(signed.is_err(), "a secret makes no entry valid");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INSTANCE: &str = r#"{"role": "prefill", "url": "http://10.0.0.1:8000", "pool": "a", "weight": 2.5, "events": "tcp://*:5557"}"#;

    fn fleet(name: &str) -> FleetAddress {
        FleetAddress::new(&format!("etcd://a:1/{name}")).unwrap()
    }

    fn secret(byte: u8) -> FleetSecret {
        FleetSecret::new([byte; 32])
    }

    #[test]
    fn an_entry_is_read_as_it_was_written() {
        for secret in [None, Some(&secret(1))] {
            let own = OwnEntry::new(&fleet("f"), 5, INSTANCE, secret).unwrap();
            let value = own.value_until(1000);
            let decoded = decode(&fleet("f"), own.key.as_bytes(), value.as_bytes(), secret);
            let (registration, expires) = decoded.unwrap();
            assert_eq!(
                (registration.id, registration.role, expires),
                (5, Role::Prefill, Some(1000))
            );
            assert_eq!(registration.pool.as_deref(), Some("a"));
            assert_eq!(registration.setup.name(), "10.0.0.1:8000");
            assert_eq!(registration.setup.weight, 2.5);
            assert_eq!(registration.setup.events.unwrap().endpoint, ("10.0.0.1".to_owned(), 5557));
        }
    }

    /// The MAC is that of another program, written from the description of `mac`:
    /// `hmac.new(b'\1' * 32, label + pack('>QQ', 5, 1000) + texts, 'sha256')` in Python.
    #[test]
    fn a_mac_is_that_of_the_golden_vector() {
        let own = OwnEntry::new(
            &fleet("f"),
            5,
            r#"{"role":"decode","url":"http://10.0.0.1:8000"}"#,
            Some(&secret(1)),
        );
        assert_eq!(
            own.unwrap().value_until(1000),
            "{\"instance\":{\"role\":\"decode\",\"url\":\"http://10.0.0.1:8000\"},\"expires\":1000,\
             \"mac\":\"308088e47158834b83c129a90bd83e84e51c78552de7d6ba3db84c5f2c877245\"}"
        );
    }

    #[test]
    fn with_a_secret_only_unaltered_entries_of_their_key_are_valid() {
        let key = secret(1);
        let own = OwnEntry::new(&fleet("f"), 5, INSTANCE, Some(&key)).unwrap();
        let value = own.value_until(1000);
        let check = |name: &str, role, id, value: &str, byte| {
            let fleet = fleet(name);
            let key = fleet.key(role, id);
            decode(&fleet, key.as_bytes(), value.as_bytes(), Some(&secret(byte))).map(|_| ())
        };
        assert_eq!(check("f", Role::Prefill, 5, &value, 1), Ok(()));
        let forged = Err(Refusal::Forged);
        for (what, result) in [
            ("another secret", check("f", Role::Prefill, 5, &value, 2)),
            ("another fleet", check("g", Role::Prefill, 5, &value, 1)),
            ("another role", check("f", Role::Decode, 5, &value, 1)),
            ("another id", check("f", Role::Prefill, 6, &value, 1)),
        ] {
            assert_eq!(result, forged, "{what}");
        }
        for (from, to) in [
            ("10.0.0.1", "10.0.0.2"),
            ("5557", "5558"),
            ("\"a\"", "\"b\""),
            ("2.5", "2.50"),
            ("1000", "1001"),
            ("\"mac\":\"", "\"mac\":\"0"),
            ("\"mac\":\"", "\"mac\":\"ä"),
        ] {
            let altered = value.replace(from, to);
            assert_ne!(altered, value);
            assert_eq!(check("f", Role::Prefill, 5, &altered, 1), forged, "{altered}");
        }
        let unsigned = OwnEntry::new(&fleet("f"), 5, INSTANCE, None).unwrap();
        let refused = check("f", Role::Prefill, 5, &unsigned.value_until(1000), 1);
        assert_eq!(refused, Err(Refusal::Unsigned));
        let endless = value.replace(",\"expires\":1000", "");
        assert_eq!(check("f", Role::Prefill, 5, &endless, 1), Err(Refusal::Unsigned));
    }

    #[test]
    fn other_values_are_refused() {
        let fleet = fleet("f");
        let check = |key: &str, value: &str| decode(&fleet, key.as_bytes(), value.as_bytes(), None);
        let key = fleet.key(Role::Decode, 1);
        let of = |instance: &str| format!("{{\"instance\":{instance}}}");
        let good = of(r#"{"role":"decode","url":"http://a:1"}"#);
        assert_eq!(check(&key, &good).unwrap().1, None);
        assert_eq!(check("/kvx/v1/instances/f/decode/1", &good), Err(Refusal::Key));
        assert_eq!(check(&key, &(good + &" ".repeat(LONGEST))), Err(Refusal::Size));
        for wrong in [
            String::new(),
            "[]".into(),
            of("1"),
            of(r#"{"role":"prefill","url":"http://a:1"}"#),
            of(r#"{"role":"decode"}"#),
            of(r#"{"role":"decode","url":"http://a:1","else":1}"#),
            of(r#"{"role":"decode","url":"http://a:1","weight":-1}"#),
            r#"{"instance":{"role":"decode","url":"http://a:1"},"else":1}"#.into(),
            r#"{"instance":{"role":"decode","url":"http://a:1"},"expires":"1"}"#.into(),
        ] {
            let refused = check(&key, &wrong);
            assert!(matches!(refused, Err(Refusal::Malformed(_))), "{wrong}: {refused:?}");
        }
    }

    #[test]
    fn entries_expire_with_a_tolerance_for_clocks() {
        assert_eq!(check_expiry(None, u64::MAX), Ok(()));
        assert_eq!(check_expiry(Some(1000), 1000 + CLOCKS), Ok(()));
        let expired = check_expiry(Some(1000), 1001 + CLOCKS);
        assert_eq!(expired, Err(Refusal::Expired(1 + CLOCKS)));
        assert_eq!(check_expiry(Some(u64::MAX), u64::MAX), Ok(()));
        let longest = VALID.as_secs() + CLOCKS;
        assert_eq!(check_expiry(Some(1000 + longest), 1000), Ok(()));
        let future = check_expiry(Some(1001 + longest), 1000);
        assert_eq!(future, Err(Refusal::Future(longest + 1)), "it could be used for years");
    }

    #[test]
    fn what_cannot_be_registered_is_named() {
        for (instance, words) in [
            ("prefill", "POST /instances"),
            (r#"{"url":"http://a:1"}"#, "role"),
            (r#"{"role":"prefill","url":"https://a:1"}"#, "scheme"),
            (r#"{"role":"prefill","url":"http://a:1","mass":1}"#, "mass"),
        ] {
            let error = OwnEntry::new(&fleet("f"), 1, instance, None).unwrap_err().to_string();
            assert!(error.contains(words), "{instance}: {error}");
        }
        let long = format!(
            r#"{{"role":"prefill","url":"http://a:1","compatibility":"{}"}}"#,
            "x".repeat(LONGEST)
        );
        let error = OwnEntry::new(&fleet("f"), 1, &long, None).unwrap_err().to_string();
        assert!(error.contains("is the most"), "{error}");
    }
}
