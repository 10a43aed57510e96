//! The fuzz target of SHM.

use super::address::Address;
use super::messages::{Message, Probe, RegionAccess};
use crate::fuzz::check;

/// Decodes a packet, the contents of other messages, and an owner's address.
pub(crate) fn messages(bytes: &[u8]) {
    if let Ok(message) = Message::decode(bytes) {
        if let Message::Write { into, from, .. } = &message {
            assert_eq!(into.bytes(), from.bytes());
            [into, from].into_iter().for_each(check);
        }
        let written = message.encode();
        match Message::decode(&written) {
            Ok(again) => assert_eq!(again.encode(), written),
            Err(error) => panic!("{message:?} was decoded, but not after encoding: {error}"),
        }
    }
    if let Ok(probe) = Probe::of_hello(bytes) {
        assert_eq!(Probe::of_hello(&probe.hello_rest()).ok(), Some(probe));
    }
    if let Ok((probe, reads_us)) = Probe::of_welcome(bytes) {
        let again = Probe::of_welcome(&probe.welcome_rest(&reads_us));
        assert_eq!(again.ok(), Some((probe, reads_us)));
    }
    if let Ok(access) = RegionAccess::of_grant(bytes) {
        assert_eq!(access.grant_rest(), bytes);
    }
    if let Ok(address) = Address::decode(bytes) {
        assert_eq!(address.encode(), bytes);
    }
}
