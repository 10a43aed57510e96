//! How a link begins: who greets whom, in which versions, and what the other end says to it.

use kvx_core::{Error, Identity, Incarnation, Kind, Result};

use super::Refusal;
use super::reasons::malformed;

/// The versions of this protocol that this release speaks: from, to.
pub const VERSIONS: (u16, u16) = (1, 1);

/// An initiator's first words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The versions that it speaks: from, to.
    pub versions: (u16, u16),
    /// Who it is.
    pub from: Identity,
    /// Whom it expects.
    pub to: Identity,
}

impl Hello {
    /// Of this release.
    pub fn new(from: Identity, to: Identity) -> Self {
        Hello { versions: VERSIONS, from, to }
    }

    /// What the target `me` says to it: the version that both speak. Errors: why it is turned away, `Incompatible` or `PeerRestarted`.
    pub fn verdict(&self, me: &Identity) -> Result<u16> {
        let (from, to) = self.versions;
        if to < VERSIONS.0 || from > VERSIONS.1 {
            let why = format!(
                "link versions {from} to {to} meet {} to {}: update the older end",
                VERSIONS.0, VERSIONS.1
            );
            return Err(Error::new(Kind::Incompatible, why));
        }
        if self.to != *me {
            let why = format!("{:?} was expected, and this is {me:?}", self.to);
            return Err(Error::new(Kind::PeerRestarted, why));
        }
        Ok(to.min(VERSIONS.1))
    }
}

/// Who welcomes must be whom the initiator expects. Errors: `Malformed`.
pub fn check_welcome(from: &Identity, expected: &Identity) -> Result<()> {
    if from == expected { Ok(()) } else { Err(malformed(format_args!("{from:?} answers for {expected:?}"))) }
}

/// What it means to the initiator that `from` turned it away: an error, and the incarnation that answers if the peer was restarted.
pub fn turned_away(from: &Identity, expected: &Identity, why: Refusal) -> (Error, Option<Incarnation>) {
    if why.kind != Kind::PeerRestarted {
        return (why.into(), None);
    }
    if from.name == expected.name && from.incarnation != expected.incarnation {
        let why = format!("{from:?} answers for {expected:?}: connect with its new metadata");
        return (Error::new(Kind::PeerRestarted, why), Some(from.incarnation));
    }
    let why = "another agent answers at the peer's address: the peer has ended";
    (Error::new(Kind::PeerLost, why), None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(name: &str, life: u8) -> Identity {
        Identity { name: name.into(), incarnation: Incarnation([life; 16]) }
    }

    #[test]
    fn only_who_means_this_life_in_a_common_version_is_welcome() {
        let me = identity("owner", 1);
        let hello = |versions, to| Hello { versions, ..Hello::new(identity("reader", 9), to) };
        let said = |versions, to| hello(versions, to).verdict(&me).map_err(|why| why.kind());
        assert_eq!(said(VERSIONS, me.clone()), Ok(VERSIONS.1));
        assert_eq!(said((0, 9), me.clone()), Ok(VERSIONS.1));
        for versions in [(7, 9), (0, 0), (2, 1), (u16::MAX, 0)] {
            assert_eq!(said(versions, me.clone()), Err(Kind::Incompatible), "{versions:?}");
        }
        assert_eq!(said(VERSIONS, identity("owner", 2)), Err(Kind::PeerRestarted));
        assert_eq!(said(VERSIONS, identity("other", 1)), Err(Kind::PeerRestarted));
        assert!(check_welcome(&me, &me).is_ok());
        assert_eq!(check_welcome(&identity("owner", 2), &me).unwrap_err().kind(), Kind::Malformed);
    }

    #[test]
    fn who_is_turned_away_knows_whether_the_peer_was_restarted() {
        let (expected, away) = (identity("owner", 1), |kind| Refusal { kind, text: "no".into() });
        let told = |from: Identity, kind| {
            let (why, restarted) = turned_away(&from, &expected, away(kind));
            (why.kind(), restarted)
        };
        let next = Incarnation([2; 16]);
        assert_eq!(told(identity("owner", 2), Kind::PeerRestarted), (Kind::PeerRestarted, Some(next)));
        assert_eq!(told(identity("other", 2), Kind::PeerRestarted), (Kind::PeerLost, None));
        assert_eq!(told(expected.clone(), Kind::PeerRestarted), (Kind::PeerLost, None));
        assert_eq!(told(identity("owner", 2), Kind::Incompatible), (Kind::Incompatible, None));
    }
}
