//! A limit on the connections of one address.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};

/// The connections of each address that has any.
type Counts = Arc<Mutex<HashMap<IpAddr, usize>>>;

/// A limit on the connections of one address, so that others find places.
#[derive(Debug)]
pub(super) struct AddressLimit {
    counts: Counts,
    pub(super) most: usize,
}

/// A connection's place among those of its address.
#[derive(Debug)]
pub(super) struct AddressPlace {
    counts: Counts,
    address: IpAddr,
}

/// Returns the address that counts: clients choose the last 64 bits of an IPv6 address.
pub fn counted_address(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address => address,
    }
}

impl AddressLimit {
    pub(super) fn new(most: usize) -> Self {
        AddressLimit { counts: Counts::default(), most }
    }

    /// Takes a place for a connection; `None` if its address has none left.
    pub(super) fn enter(&self, address: IpAddr) -> Option<AddressPlace> {
        let address = counted_address(address);
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(address).or_default();
        (*count < self.most).then(|| {
            *count += 1;
            AddressPlace { counts: Arc::clone(&self.counts), address }
        })
    }
}

impl Drop for AddressPlace {
    fn drop(&mut self) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_counted_per_address_and_freed() {
        let limit = AddressLimit::new(2);
        let enter = |address: &str| limit.enter(address.parse().unwrap());
        let (one, other) = (enter("10.0.0.1").unwrap(), enter("::ffff:10.0.0.1").unwrap());
        assert!(enter("10.0.0.1").is_none() && enter("10.0.0.2").is_some());
        drop(one);
        let again = enter("10.0.0.1");
        assert!(again.is_some() && enter("10.0.0.1").is_none());
        let _six = (enter("2001:db8::1").unwrap(), enter("2001:db8::2").unwrap());
        assert!(enter("2001:db8::3").is_none(), "of the same network");
        assert!(enter("2001:db8:0:1::1").is_some());
        drop((again, other));
        let counts = limit.counts.lock().unwrap();
        assert_eq!(counts.len(), 1, "addresses without connections are forgotten: {counts:?}");
    }
}
