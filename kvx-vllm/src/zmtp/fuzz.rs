//! The entry point of the fuzz target and the bounded fuzz test: bytes that a socket receives from
//! any sender.

use super::{Budget, Command, Decoder, Input, MessageLimits, check_greeting, message_pieces};

/// The targets, by the names of their corpora.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[("connector_zmtp", zmtp)];

const LIMITS: MessageLimits = MessageLimits { frames: 4, bytes: 600 };

/// Reads the same bytes as a greeting and as frames, whole and in pieces. The result is the same,
/// within the limits.
pub fn zmtp(bytes: &[u8]) {
    if let Some(greeting) = bytes.first_chunk() {
        let _ = check_greeting(greeting);
    }
    let whole = decoded(bytes, bytes.len().max(1));
    for piece in [1, 7] {
        assert_eq!(decoded(bytes, piece), whole, "in pieces of {piece}");
    }
    for input in &whole.0 {
        match input {
            Ok(frames) => {
                assert!(frames.len() <= LIMITS.frames);
                assert!(frames.iter().map(Vec::len).sum::<usize>() <= LIMITS.bytes);
                let written = message_pieces(frames).concat();
                assert_eq!(decoded(&written, 5), (vec![Ok(frames.clone())], true));
            }
            Err(command) => {
                let mut written = Vec::new();
                command.put(&mut written);
                let (again, ok) = decoded(&written, 3);
                assert!(ok, "{command:?}");
                // A reason that is too long for the wire is cut.
                assert!(
                    matches!(command, Command::Error(_)) || again == [Err(command.clone())],
                    "{command:?}"
                );
            }
        }
    }
}

/// Returns the messages and commands up to the first error, and whether there was none.
fn decoded(bytes: &[u8], piece: usize) -> (Vec<Result<Vec<Vec<u8>>, Command>>, bool) {
    let mut decoder = Decoder::new(LIMITS, &Budget::new(1 << 20));
    let mut all = Vec::new();
    for mut piece in bytes.chunks(piece) {
        loop {
            match decoder.next(&mut piece) {
                Ok(None) => break,
                Ok(Some(Input::Message(message))) => all.push(Ok(message.frames().to_vec())),
                Ok(Some(Input::Command(command))) => all.push(Err(command)),
                Err(_) => return (all, false),
            }
        }
    }
    (all, true)
}
