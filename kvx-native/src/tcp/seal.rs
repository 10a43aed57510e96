//! The sealing of a lane after the handshake: frames, and payload too if the ends want that.
//!
//! A header is sealed separately. The bytes after it are sealed in records of
//! [`RECORD`](kvx_noise::RECORD) bytes, the last one shorter, each with its tag.

use std::fmt;

use kvx_core::{ErrorKind, Result};

/// The part of a connection that is sealed after the handshake: `tcp.seal`. The stricter of both
/// ends' settings counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Seal {
    None,
    Control,
    All,
}

impl Seal {
    /// All seals, with their names in options.
    pub(crate) const NAMED: [(&str, Seal); 3] =
        [("none", Seal::None), ("control", Seal::Control), ("all", Seal::All)];

    /// Returns the number on the wire.
    pub(crate) fn number(self) -> u8 {
        self as u8
    }

    /// Returns the seal with this number, or `Malformed`.
    pub(crate) fn of_number(number: u8) -> Result<Self> {
        let found = Self::NAMED.into_iter().find(|(_, seal)| seal.number() == number);
        found.map(|(_, seal)| seal).ok_or_else(|| {
            ErrorKind::Malformed.because(format!(
                "malformed handshake: unknown seal {number}; update kvx on both ends to the same \
                 release"
            ))
        })
    }
}

impl fmt::Display for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Seal::None => "nothing is sealed",
            Seal::Control => "control is sealed, payload is not",
            Seal::All => "everything is sealed",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stricter_seal_is_the_greater_one() {
        assert_eq!(Seal::None.max(Seal::Control).max(Seal::All), Seal::All);
        for (_, seal) in Seal::NAMED {
            assert_eq!(Seal::of_number(seal.number()).unwrap(), seal);
        }
        assert_eq!(Seal::of_number(3).unwrap_err().kind(), ErrorKind::Malformed);
    }
}
