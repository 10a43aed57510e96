//! Fuzz targets. They check that no bytes cause a panic, that accepted messages encode to bytes
//! with the same meaning, and that no peer is admitted without the proof.

use kvx_core::backend::{Events, Invitation, LinkId, LinkState, QueueFull};
use kvx_core::{Identity, Incarnation, Secret, Sender};

use crate::control::proof::{Keys, PROOF};
use crate::control::{ControlMessage, Greeting, VERSIONS, verify_hello};
use crate::reactor::{DetachedWork, Outbox, Progress, Queued, Turn};

/// The targets, with the names of their corpora.
pub const TARGETS: &[(&str, fn(&[u8]))] =
    &[("control_messages", messages), ("control_handshake", handshake)];

/// Decodes a message between agents.
pub fn messages(bytes: &[u8]) {
    let Ok(message) = ControlMessage::decode(bytes) else { return };
    assert_ne!(
        message.fits(false, true) || message.fits(false, false),
        message.fits(true, true) || message.fits(true, false),
        "it is valid either during the handshake or after it"
    );
    let written = message.encode();
    match ControlMessage::decode(&written) {
        Ok(again) => assert_eq!(again.encode(), written),
        Err(error) => panic!("{message:?} was decoded, but not after encoding: {error}"),
    }
}

/// Runs a handshake of two agents and alters its messages on the way. The first byte selects the
/// keys of both agents; the rest are the changes.
pub fn handshake(bytes: &[u8]) {
    let Some((flags, changes)) = bytes.split_first() else { return };
    let keys = |invitation: u8, has_secret: bool| {
        let secret = has_secret.then(|| Secret::from_bytes([7; 32]));
        Keys::new(&Invitation::from_bytes([invitation; 32]), secret.as_ref())
    };
    let ours = keys(flags & 1, flags & 2 != 0);
    let theirs = keys(flags >> 2 & 1, flags & 8 != 0);
    let same = flags & 3 == flags >> 2 & 3;
    let altered = |number: u8, before: &[u8]| {
        let message = alter(changes, (number, 3), before);
        let is_altered = message != before;
        (message, is_altered)
    };

    let me = Identity { name: "reader".into(), incarnation: Incarnation([9; 16]) };
    let (greeting, said) =
        Greeting::new(&me, ours, b"an address").expect("the system has random numbers");
    // A hello ends with the proof of the secret alone, which counts only if the first proof fails.
    let proven = said.len() - 4 - if flags & 2 != 0 { PROOF } else { 0 };
    let (hello, is_altered) = altered(0, &said);
    let greeted = match verify_hello(&theirs, VERSIONS, &hello) {
        Ok(greeted) => {
            assert!(
                same && hello.get(..proven) == said.get(..proven),
                "an unauthenticated peer is accepted"
            );
            assert_eq!((&greeted.from, greeted.rest), (&me, &b"an address"[..]));
            greeted
        }
        Err(away) => {
            assert!(!same || is_altered, "an invited peer is rejected: {}", away.why);
            let text = away.message().encode();
            match ControlMessage::decode(&text) {
                Ok(ControlMessage::Refuse { why, proof }) => {
                    drop(greeting.refusal_error(why, proof))
                }
                other => panic!("{other:?} is not a refusal"),
            }
            return;
        }
    };
    let (version, body, claim) =
        greeted.welcome.complete(&theirs, b"news").expect("the system has random numbers");
    let (welcome, is_altered) = altered(1, &body);
    match greeting.verify_welcome(version, &welcome) {
        Ok((rest, proof)) => {
            assert!(!is_altered, "an altered welcome is accepted");
            assert_eq!(rest, b"news");
            let (proof, is_altered) = altered(2, &proof);
            assert_eq!(claim.holds(&proof), !is_altered);
        }
        Err(error) => assert!(is_altered, "a valid welcome is rejected: {error}"),
    }
}

/// Applies the changes for message `number` of `count`. A change has three bytes: the message and
/// the kind of change, the position, and the value.
pub fn alter(changes: &[u8], (number, count): (u8, u8), message: &[u8]) -> Vec<u8> {
    let mut message = message.to_vec();
    for [of, at, by] in changes.as_chunks::<3>().0.iter().filter(|[of, ..]| of % count == number) {
        let at = usize::from(*at) % (message.len() + 1);
        match (of >> 6, message.get_mut(at)) {
            (0 | 1, Some(byte)) => *byte ^= by,
            (2, _) => message.truncate(at),
            _ => message.insert(at, *by),
        }
    }
    message
}

/// Delivers the results of a turn, for the fuzz targets of transports.
pub fn deliver(outbox: &mut Outbox) {
    struct Nobody;
    impl Events for Nobody {
        fn notification(&self, _: Sender<'_>, _: &[u8]) -> Result<(), QueueFull> {
            Ok(())
        }

        fn link(&self, _: LinkId, _: LinkState) {}
    }
    deliver_to(outbox, &Nobody);
}

/// Like [`deliver`], to these `events`.
pub fn deliver_to(outbox: &mut Outbox, events: &dyn Events) {
    outbox.deliver(events);
}

/// Has a machine take a turn, as the reactor has it, on the calling thread.
pub fn turn<P: Progress>(machine: &mut P, out: &mut Outbox) -> Turn {
    while let Some(mut work) = machine.next_work(out) {
        work.run();
        work.rejoin(machine, out);
    }
    machine.progress(&Queued::default(), out)
}

#[cfg(test)]
mod tests {
    kvx_testkit::replay_test!(super::TARGETS);
}
