//! The encoding of the reason why a peer refuses something.

use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{Error, ErrorKind, Result};

/// The error kinds with a number on the wire: the position plus one, the same for every transport.
/// Other kinds are sent as 0, a native error. New kinds may only be appended.
const KINDS: [ErrorKind; 13] = [
    ErrorKind::WrongKey,
    ErrorKind::Unregistered,
    ErrorKind::Revoked,
    ErrorKind::OutOfBounds,
    ErrorKind::Unsupported,
    ErrorKind::Cancelled,
    ErrorKind::Malformed,
    ErrorKind::Exhausted,
    ErrorKind::Authentication,
    ErrorKind::Incompatible,
    ErrorKind::PeerRestarted,
    ErrorKind::Closed,
    ErrorKind::Invalid,
];

/// The limit of a refusal's text in bytes.
const MAX_TEXT: usize = 768;

/// An error kind and a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The kind, for programs.
    pub kind: ErrorKind,
    /// The sentence, for people.
    pub text: String,
}

impl From<&Error> for Refusal {
    fn from(error: &Error) -> Self {
        let sentence = error.sentence();
        let fits = |at: &usize| sentence.is_char_boundary(*at);
        let end = (0..=MAX_TEXT.min(sentence.len())).rev().find(fits).unwrap_or(0);
        Refusal { kind: error.kind(), text: sentence[..end].to_owned() }
    }
}

impl Refusal {
    /// The largest number of bytes that [`encode`](Refusal::encode) writes.
    pub const MAX_BYTES: usize = 1 + 4 + MAX_TEXT;

    /// Returns the error of the refused operation.
    pub fn into_error(self) -> Error {
        Error::new(self.kind, self.text)
    }

    /// Appends the encoded refusal.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let kind = match self.kind {
            // Both share a number: initiators check permissions before they send a request.
            ErrorKind::PermissionDenied => ErrorKind::Authentication,
            kind => kind,
        };
        out.put_u8(KINDS.iter().position(|known| *known == kind).map_or(0, |at| at as u8 + 1));
        out.put_block(self.text.as_bytes());
    }

    /// Decodes a peer's refusal. Replaces control characters with spaces, because its text appears
    /// in logs and terminals.
    ///
    /// # Errors
    /// `Malformed`.
    pub fn decode(reader: &mut Reader<'_>) -> Result<Self> {
        let kind = KINDS
            .get(usize::from(reader.u8()?).wrapping_sub(1))
            .copied()
            .unwrap_or(ErrorKind::Native);
        let text = std::str::from_utf8(reader.block(MAX_TEXT)?)
            .map_err(|_| reader.malformed("its text is not UTF-8"))?;
        Ok(Refusal { kind, text: text.replace(char::is_control, " ") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn travelled(refusal: &Refusal) -> Refusal {
        let mut bytes = Vec::new();
        refusal.encode(&mut bytes);
        assert!(bytes.len() <= Refusal::MAX_BYTES);
        let mut reader = Reader::new("refusal", &bytes);
        let back = Refusal::decode(&mut reader).unwrap();
        reader.end().unwrap();
        back
    }

    #[test]
    fn kinds_keep_their_numbers() {
        for (at, kind) in KINDS.into_iter().enumerate() {
            let refusal = Refusal { kind, text: "why".into() };
            let mut bytes = Vec::new();
            refusal.encode(&mut bytes);
            assert_eq!((usize::from(bytes[0]), travelled(&refusal)), (at + 1, refusal));
        }
        assert_eq!(
            (KINDS[0], KINDS[11], KINDS[12]),
            (ErrorKind::WrongKey, ErrorKind::Closed, ErrorKind::Invalid)
        );
        assert_eq!(
            travelled(&Refusal { kind: ErrorKind::Busy, text: String::new() }).kind,
            ErrorKind::Native
        );
        let later = [200, 0, 0, 0, 0];
        assert_eq!(
            Refusal::decode(&mut Reader::new("refusal", &later)).unwrap().kind,
            ErrorKind::Native
        );
    }

    #[test]
    fn control_characters_are_removed_from_texts_and_their_length_is_bounded() {
        let cleaned = travelled(&Refusal {
            kind: ErrorKind::Authentication,
            text: "\x1b[2Jno\nkey\u{9b}".into(),
        });
        assert_eq!(cleaned.text, " [2Jno key ");
        let long = ErrorKind::Native.because("é".repeat(MAX_TEXT));
        let cut = Refusal::from(&long);
        assert_eq!(travelled(&cut), cut);
        assert!(cut.text.len() <= MAX_TEXT && cut.text.chars().all(|character| character == 'é'));
        for bad in [&[1, 0xff, 0xff, 0, 0][..], &[1, 1, 0, 0, 0, 0xff], &[1, 2, 0, 0, 0, b'a'], &[]]
        {
            assert!(Refusal::decode(&mut Reader::new("refusal", bad)).is_err(), "{bad:?}");
        }
    }
}
