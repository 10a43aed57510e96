//! Splits streams of server-sent events at the ends of events, so that an error event can always
//! follow a complete event.

use bytes::{Bytes, BytesMut};

/// The most bytes that are held without the end of an event; more are forwarded as they are.
const LONGEST_HELD: usize = 4 << 20;

/// A splitter that forwards complete events only. Most events arrive as one piece, which is
/// forwarded at once without a copy.
#[derive(Debug, Default)]
pub(crate) struct WholeEvents {
    held: BytesMut,
    done: bool,
    count: u64,
    /// The status that the last error named.
    error: Option<u16>,
    /// True if an error has passed since it was last asked for.
    fails: bool,
    split: bool,
}

impl WholeEvents {
    /// Takes the next bytes, and returns those that may be forwarded now.
    pub(crate) fn push(&mut self, bytes: Bytes) -> Bytes {
        let ready = if self.held.is_empty() {
            let end = end_of_events(&bytes);
            self.held.extend_from_slice(&bytes[end..]);
            bytes.slice(..end)
        } else {
            // An event may end across the old and the new bytes.
            let seam = self.held.len().saturating_sub(3);
            self.held.extend_from_slice(&bytes);
            match end_of_events(&self.held[seam..]) {
                0 => Bytes::new(),
                end => self.held.split_to(seam + end).freeze(),
            }
        };
        self.look(&ready);
        if self.held.len() > LONGEST_HELD {
            self.split = true;
            return [ready, self.held.split().freeze()].concat().into();
        }
        ready
    }

    /// Returns the rest of a stream that has ended normally: an event without its final empty line.
    pub(crate) fn finish(&mut self) -> Bytes {
        let left = self.held.split().freeze();
        self.look(&left);
        left
    }

    /// Returns true if `[DONE]` has passed.
    pub(crate) fn done(&self) -> bool {
        self.done
    }

    /// Returns true if an error of the instance has passed, so that the client knows the reason.
    pub(crate) fn has_error(&self) -> bool {
        self.error.is_some()
    }

    /// Returns true if an error has passed since the last call: it may have addresses.
    pub(crate) fn take_error(&mut self) -> bool {
        std::mem::take(&mut self.fails)
    }

    /// Returns true if a server error has passed, as opposed to a client error.
    pub(crate) fn has_failed(&self) -> bool {
        self.error.is_some_and(|code| code >= 500)
    }

    /// Returns the number of events with data that have passed, without `[DONE]`.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Returns the text before an event of the proxy: it ends an event that was too long to hold.
    pub(crate) fn gap(&self) -> &'static str {
        if self.split { "\n\n" } else { "" }
    }

    fn look(&mut self, events: &[u8]) {
        for line in events.split(|byte| matches!(byte, b'\n' | b'\r')) {
            if let Some(name) = line.strip_prefix(b"event:") {
                self.fails |= matches!(name.trim_ascii(), b"error" | b"response.failed");
            }
            let Some(data) = line.strip_prefix(b"data:") else { continue };
            match data.trim_ascii() {
                b"[DONE]" => self.done = true,
                data => {
                    self.count += 1;
                    let error = error_code(data);
                    self.fails |= error.is_some();
                    self.error = error.or(self.error);
                }
            }
        }
    }
}

/// Returns the end of the last complete event: after an empty line.
fn end_of_events(bytes: &[u8]) -> usize {
    // Search backwards for a line break that follows another.
    let mut at = bytes.len();
    while at >= 2 {
        let two = &bytes[at - 2..at];
        if two == b"\n\n" || two == b"\r\r" || (at >= 4 && &bytes[at - 4..at] == b"\r\n\r\n") {
            return at;
        }
        at -= 1;
    }
    0
}

/// Returns the status in an event's data if it is an error, which vLLM sends in the stream of a
/// failed request.
fn error_code(data: &[u8]) -> Option<u16> {
    // Ordinary chunks begin differently: do not parse them.
    if !(data.starts_with(b"{\"error\"") || data.starts_with(b"{ \"error\"")) {
        return None;
    }
    let error: serde_json::Value = serde_json::from_slice(data).unwrap_or_default();
    let code = error.pointer("/error/code").and_then(serde_json::Value::as_u64);
    Some(code.and_then(|code| u16::try_from(code).ok()).unwrap_or(500))
}

/// Returns true if a stream begins with a server error: no part of an answer has been forwarded
/// yet.
pub(crate) fn opens_with_failure(bytes: &[u8]) -> bool {
    let first = bytes.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"data:"));
    first.and_then(|data| error_code(data.trim_ascii())).is_some_and(|code| code >= 500)
}

/// Removes `kv_transfer_params`, which name hosts, from events.
pub(crate) fn without_transfer_params(events: Bytes) -> Bytes {
    if !crate::request::names_transfer_params(&events) {
        return events;
    }
    with_data(&events, |data| {
        let mut chunk: serde_json::Map<_, _> = serde_json::from_slice(data).ok()?;
        chunk.remove("kv_transfer_params")?;
        Some(serde_json::Value::Object(chunk).to_string())
    })
}

/// Replaces the data of those events for which `change` returns another text.
pub(crate) fn with_data(events: &[u8], change: impl Fn(&[u8]) -> Option<String>) -> Bytes {
    let mut rest = Vec::with_capacity(events.len());
    for line in events.split_inclusive(|byte| *byte == b'\n') {
        match line.strip_prefix(b"data:").and_then(|data| change(data.trim_ascii())) {
            Some(data) => {
                let end = &line[line.trim_ascii_end().len()..];
                rest.extend_from_slice(&[b"data: ", data.as_bytes(), end].concat());
            }
            None => rest.extend_from_slice(line),
        }
    }
    rest.into()
}

/// Returns an `error` event in the format that vLLM and OpenAI's clients use.
pub(crate) fn error_event(message: &str, kind: &str, code: u16) -> Bytes {
    let error = serde_json::json!({"error": {"message": message, "type": kind, "param": null, "code": code}});
    format!("event: error\ndata: {error}\n\n").into()
}

/// Checks for the fuzz target: bytes leave as they arrived, in order, cut at ends of events only.
pub(crate) fn fuzz(bytes: &[u8]) {
    let Some((step, stream)) = bytes.split_first() else { return };
    let mut events = WholeEvents::default();
    let mut passed = Vec::new();
    for piece in stream.chunks(usize::from(*step).max(1)) {
        let ready = events.push(Bytes::copy_from_slice(piece));
        passed.extend_from_slice(&ready);
        assert!(ready.is_empty() || end_of_events(&passed) == passed.len(), "cut inside an event");
        assert!(stream.starts_with(&passed));
    }
    passed.extend_from_slice(&events.finish());
    assert_eq!(passed, stream);
    let mut whole = WholeEvents::default();
    whole.push(Bytes::copy_from_slice(stream));
    whole.finish();
    assert_eq!(
        (whole.done, whole.count, whole.error),
        (events.done, events.count, events.error),
        "pieces change nothing"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_events_pass_at_once_and_parts_wait() {
        let mut events = WholeEvents::default();
        let event = Bytes::from_static(b"data: {\"a\": 1}\n\n");
        let passed = events.push(event.clone());
        assert_eq!(passed.as_ptr(), event.as_ptr(), "without a copy");
        assert_eq!(events.push(Bytes::from_static(b"data: \xe2\x82")), "");
        assert_eq!(events.push(Bytes::from_static(b"\xac\n")), "");
        assert_eq!(events.push(Bytes::from_static(b"\ndata: [DO")), &b"data: \xe2\x82\xac\n\n"[..]);
        assert!(!events.done());
        assert_eq!(events.push(Bytes::from_static(b"NE]\r\n\r\n")), &b"data: [DONE]\r\n\r\n"[..]);
        assert!(events.done() && events.count() == 2);
    }

    #[test]
    fn errors_are_seen() {
        assert!(opens_with_failure(b"data: {\"error\": {\"message\": \"x\"}}\n\n"));
        assert!(opens_with_failure(b"event: error\ndata: {\"error\":1}\n\n"));
        assert!(!opens_with_failure(b"data: {\"id\": \"error\"}\n\ndata: {\"error\": 1}\n\n"));
        let clients =
            Bytes::from_static(b"data: {\"error\": {\"message\": \"x\", \"code\": 400}}\n\n");
        assert!(!opens_with_failure(&clients));
        let mut events = WholeEvents::default();
        events.push(clients);
        assert!(events.has_error() && !events.has_failed());
        let mut events = WholeEvents::default();
        events.push(Bytes::from_static(b"data: {}\n\ndata: {\"error\": 1}\n\n"));
        assert!(events.has_error() && events.has_failed());
        assert!(events.take_error() && !events.take_error());
        events.push(Bytes::from_static(b"event: response.failed\ndata: {\"type\": \"x\"}\n\n"));
        assert!(events.take_error());
        events.push(Bytes::from_static(b"data: {\"text\": \"event: error\"}\n\n"));
        assert!(!events.take_error());
    }

    #[test]
    fn transfer_params_leave_the_one_chunk_that_has_them() {
        let plain = Bytes::from_static(b"data: {\"text\": \"a\"}\n\n");
        assert_eq!(
            without_transfer_params(plain.clone()).as_ptr(),
            plain.as_ptr(),
            "without a copy"
        );
        let said = b"data: {\"text\": \"\\\"kv_transfer_params\\\": 1\"}\r\n\r\n";
        let last = b"data: {\"kv_transfer_params\": {\"remote_host\": \"h\"}, \"text\": \"b\"}\r\n\r\ndata: [DONE]\n\n";
        let passed = without_transfer_params([&said[..], last].concat().into());
        let expected = [&said[..], b"data: {\"text\":\"b\"}\r\n\r\ndata: [DONE]\n\n"].concat();
        assert_eq!(passed, expected, "{}", passed.escape_ascii());
    }

    #[test]
    fn an_error_event_is_one_event_for_any_message() {
        let event = error_event("two\nlines\n\n", "upstream_error", 502);
        assert_eq!(end_of_events(&event), event.len());
        assert_eq!(event.iter().filter(|byte| **byte == b'\n').count(), 3);
    }

    #[test]
    fn an_event_without_end_is_not_held_for_ever() {
        let mut events = WholeEvents::default();
        let piece = Bytes::from(vec![b'x'; 1 << 20]);
        let passed: usize = (0..5).map(|_| events.push(piece.clone()).len()).sum();
        assert_eq!(passed, 5 << 20);
        assert_eq!(events.gap(), "\n\n");
    }
}
