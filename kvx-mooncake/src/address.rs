//! An agent's Mooncake address: MOONCAKE's section of the metadata.

use kvx_core::{ErrorKind, Result};

/// The maximum length of a peer's address.
const MAX_ADDRESS: usize = 512;

/// Returns the name of a segment: `host:port`, or the name that a metadata server knows. Errors:
/// `Malformed`.
pub(crate) fn checked(address: &[u8]) -> Result<&str> {
    let text = std::str::from_utf8(address).ok().filter(|text| {
        (1..=MAX_ADDRESS).contains(&text.len())
            && !text.chars().any(|c| c.is_control() || c.is_whitespace())
    });
    text.ok_or_else(|| {
        let shown = String::from_utf8_lossy(&address[..address.len().min(80)]).into_owned();
        ErrorKind::Malformed.because(format!(
            "{shown:?} is not the address of a Mooncake engine: expected host:port"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked_before_the_engine_gets_them() {
        assert_eq!(checked(b"10.0.0.1:15000").expect("an address"), "10.0.0.1:15000");
        assert!(checked(b"[fd00::1]:15000").is_ok());
        for bad in [&b""[..], b"a b", b"a\0b", &[0xff, 0xfe], &[b'x'; 600]] {
            assert_eq!(checked(bad).unwrap_err().kind(), ErrorKind::Malformed);
        }
    }
}
