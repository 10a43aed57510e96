//! Sessions of decodes with workers of a prefill, in a fleet with a shared secret.
//!
//! 1. The decode sends a hello: the first message of a Noise handshake.
//! 2. The worker answers with the second message, which proves the secret.
//! 3. The decode sends an empty message, sealed. It proves the secret too, and that the decode has
//!    received this answer, so a recorded hello is of no use.
//! 4. Questions and answers follow, each sealed.
//!
//! So a decode sends nothing about its memory before the worker is authenticated, and a worker
//! accepts no long message before the decode is. Sealed messages are encrypted. One that was
//! altered, repeated or lost on its way ends the connection.

use std::time::Duration;

use kvx_core::{Error, ErrorKind, Result, Secret};
use kvx_noise::{NoiseHandshake, RECORD, Seals, TAG, derive_key};

use super::super::zmtp::Client;
use kvx_vllm::wire::mooncake::PullResponse;

/// The beginning of a hello. No msgpack map, as other messages are, begins like this.
const HELLO: &[u8] = b"kvx MooncakeConnector 2: hello";
/// The label with which both ends derive their key from the secret, and to which they bind their
/// handshake.
const LABEL: &[u8] = b"kvx MooncakeConnector 2: a decode and a worker of a prefill";
/// The size of a message's length in bytes.
const LENGTH: usize = 4;

/// The keys of a connection, after both ends have authenticated.
#[derive(Debug)]
pub(super) struct Session(Seals);

impl Session {
    /// Authenticates as the decode.
    ///
    /// Errors: `Authentication`: the worker has no secret, or another one; `TimedOut`; `PeerLost`.
    pub(super) async fn connect(
        client: &mut Client,
        secret: &Secret,
        limit: Duration,
    ) -> Result<Self> {
        let mut handshake = NoiseHandshake::initiator(&derive_key(secret, LABEL), LABEL)?;
        let mut hello = HELLO.to_vec();
        handshake.write(&[], &mut hello)?;
        let answer = client.ask(&hello, limit).await?;
        let answer = answer.frames().first().map_or(&[][..], Vec::as_slice);
        if handshake.read(answer).is_none() {
            return Err(unproven(answer));
        }
        let mut session = Session(handshake.seals());
        client.send(&[&session.seal(&[])], limit).await?;
        Ok(session)
    }

    /// Returns whether a message is a hello.
    pub(super) fn is_hello(message: &[u8]) -> bool {
        message.starts_with(HELLO)
    }

    /// Answers a hello as the worker. The decode is authenticated when its next message opens.
    ///
    /// Errors: `Authentication`: the decode has another secret.
    pub(super) fn accept(secret: &Secret, hello: &[u8]) -> Result<(Self, Vec<u8>)> {
        let mut handshake = NoiseHandshake::responder(&derive_key(secret, LABEL), LABEL)?;
        let first = hello.strip_prefix(HELLO).unwrap_or_default();
        if handshake.read(first).is_none() {
            return Err(ErrorKind::Authentication.because(
                "the shared secrets of the decode and this prefill differ: set KVX_SECRET_FILE of \
                 both to the same secret",
            ));
        }
        let mut answer = Vec::new();
        handshake.write(&[], &mut answer)?;
        Ok((Session(handshake.seals()), answer))
    }

    /// Returns the length of a sealed message of `len` bytes.
    pub(super) const fn sealed_len(len: usize) -> usize {
        LENGTH + TAG + len + len.div_ceil(RECORD) * TAG
    }

    /// Seals a message: a record with its length, and records with its content.
    pub(super) fn seal(&mut self, message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(message.len()).expect("messages are shorter than 4 GiB");
        let mut sealed = Vec::with_capacity(Self::sealed_len(message.len()));
        self.0.sealer.seal(&length.to_be_bytes(), &mut sealed);
        self.0.sealer.seal(message, &mut sealed);
        sealed
    }

    /// Opens a message. Errors: `Malformed`: it was altered, repeated or cut off, or an earlier one
    /// was lost.
    pub(super) fn open(&mut self, sealed: &[u8]) -> Result<Vec<u8>> {
        let cut_off = || {
            ErrorKind::Malformed
                .because("a sealed message was cut off on its way, so the connection was closed")
        };
        let (length, records) = sealed.split_at_checked(LENGTH + TAG).ok_or_else(cut_off)?;
        let mut length = length.to_vec();
        self.0.opener.open(&mut length)?;
        let mut message = Vec::with_capacity(records.len());
        for record in records.chunks(RECORD + TAG) {
            let at = message.len();
            message.extend_from_slice(record);
            self.0.opener.open(&mut message[at..])?;
            message.truncate(message.len() - TAG);
        }
        let length = length.first_chunk().map(|length| u32::from_be_bytes(*length) as usize);
        if length == Some(message.len()) { Ok(message) } else { Err(cut_off()) }
    }
}

/// Returns the error for an answer to a hello that proves nothing.
fn unproven(answer: &[u8]) -> Error {
    let why = PullResponse::decode(answer).ok().and_then(|answer| answer.err_msg);
    let why = why.map_or_else(String::new, |why| {
        format!("; it answered: {}", why.chars().take(500).collect::<String>())
    });
    ErrorKind::Authentication.because(format!(
        "the prefill has not proved that it has this fleet's secret: set KVX_SECRET_FILE of both \
         engines to the same secret{why}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the sessions of a decode and of a worker.
    fn sessions() -> (Session, Session) {
        let secret = Secret::from_bytes([1; Secret::LEN]);
        let mut decode = NoiseHandshake::initiator(&derive_key(&secret, LABEL), LABEL).unwrap();
        let mut hello = HELLO.to_vec();
        decode.write(&[], &mut hello).unwrap();
        let (worker, answer) = Session::accept(&secret, &hello).unwrap();
        decode.read(&answer).unwrap();
        let other = Secret::from_bytes([2; Secret::LEN]);
        let refused = Session::accept(&other, &hello).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Authentication);
        assert!(Session::accept(&secret, HELLO).is_err());
        (Session(decode.seals()), worker)
    }

    #[test]
    fn messages_of_any_length_open_once_and_whole() {
        for len in [0, 1, RECORD - 1, RECORD, RECORD + 1, 3 * RECORD] {
            let (mut decode, mut worker) = sessions();
            let message: Vec<u8> = (0..len).map(|at| at as u8).collect();
            let sealed = decode.seal(&message);
            assert_eq!(sealed.len(), Session::sealed_len(len));
            assert_eq!(worker.open(&sealed).unwrap(), message);
            assert!(worker.open(&sealed).is_err(), "repeated");
            for cut in
                [0, LENGTH + TAG, sealed.len() - 1, sealed.len().saturating_sub(RECORD + TAG)]
            {
                let (mut decode, mut worker) = sessions();
                let sealed = decode.seal(&message);
                let refused = worker.open(&sealed[..cut.min(sealed.len() - 1)]).unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::Malformed, "{len} bytes cut at {cut}");
            }
        }
    }

    #[test]
    fn a_replayed_hello_opens_no_recorded_message() {
        let secret = Secret::from_bytes([1; Secret::LEN]);
        let mut decode = NoiseHandshake::initiator(&derive_key(&secret, LABEL), LABEL).unwrap();
        let mut hello = HELLO.to_vec();
        decode.write(&[], &mut hello).unwrap();
        let (mut worker, answer) = Session::accept(&secret, &hello).unwrap();
        decode.read(&answer).unwrap();
        let proof = Session(decode.seals()).seal(&[]);
        assert_eq!(worker.open(&proof).unwrap(), b"");
        let (mut again, _) = Session::accept(&secret, &hello).unwrap();
        assert!(again.open(&proof).is_err());
    }
}
