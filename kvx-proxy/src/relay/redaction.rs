//! Removes addresses and engine ids from errors that clients see.

use std::net::{IpAddr, SocketAddr};

use bytes::Bytes;
use hyper::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use hyper::http::response::Parts;
use serde_json::Value;

use crate::fleet::Fleet;
use crate::fleet::instance::PrefillKind;

/// The text in place of an address or an engine id.
const HIDDEN: &str = "<hidden>";
/// The longest error that is searched for addresses.
const LONGEST: usize = 64 << 10;

/// The names of a fleet's hosts and engines, which clients must not see.
#[derive(Debug)]
pub(crate) struct Redaction {
    /// In lower case, the longest first.
    names: Vec<String>,
    /// The client's request id, which stays in errors.
    id: String,
}

/// Returns true if a name is not also a word or a number: those are hidden only after a
/// [label](is_label).
fn is_distinct(name: &str) -> bool {
    let is_plain = |of: fn(char) -> bool| name.chars().all(of);
    name == "localhost"
        || (name.len() > 2
            && name.contains(char::is_alphanumeric)
            && !is_plain(char::is_alphabetic)
            && !is_plain(char::is_numeric))
}

/// Returns the host of a URL or an address.
fn host_of(address: &str) -> &str {
    let authority = address.split_once("://").map_or(address, |(_, rest)| rest);
    let authority = authority.split('/').next().unwrap_or_default();
    match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => authority,
    }
}

impl Redaction {
    /// Knows the instances of a fleet, and what the request's legs `named`: hosts and engine ids.
    pub(crate) fn new(fleet: &Fleet, named: &[String], id: &str) -> Self {
        let mut names = named.to_vec();
        for one in fleet.all() {
            names.extend([one.name().to_owned(), host_of(one.name()).to_owned()]);
            match one.state.kind() {
                PrefillKind::Push(targets) => {
                    for target in targets.into_iter().flatten() {
                        names.extend([target.engine_id, target.host]);
                    }
                }
                PrefillKind::Mooncake(targets) => {
                    for target in targets {
                        names.push(host_of(&target.bootstrap_addr).to_owned());
                        names.push(target.engine_id);
                    }
                }
                PrefillKind::Unknown | PrefillKind::Nixl => {}
            }
        }
        names.iter_mut().for_each(|name| {
            *name = name.trim_matches(['[', ']']).to_ascii_lowercase();
        });
        names.retain(|name| is_distinct(name));
        names.sort_by(|one, other| (other.len(), one).cmp(&(one.len(), other)));
        names.dedup();
        Redaction { names, id: id.to_owned() }
    }

    /// Hides addresses and engine ids in a text.
    pub(crate) fn text(&self, text: &str) -> String {
        without_names(without_ipv4(&self.without_addresses(text)), &self.names)
    }

    /// Hides addresses and engine ids in all texts of a JSON value.
    fn value(&self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.text(text),
            Value::Array(list) => list.iter_mut().for_each(|one| self.value(one)),
            Value::Object(map) => {
                for (key, mut value) in std::mem::take(map) {
                    match &value {
                        Value::String(_) | Value::Number(_) if is_label(&key) => {
                            value = HIDDEN.into();
                        }
                        _ => self.value(&mut value),
                    }
                    map.insert(self.text(&key), value);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// Returns the body of an instance's error with everything hidden, or `None` if there is
    /// nothing to hide.
    fn body(&self, body: &[u8]) -> Option<Bytes> {
        let hidden = match serde_json::from_slice::<Value>(body) {
            Ok(value) => {
                let mut hidden = value.clone();
                self.value(&mut hidden);
                (hidden != value).then(|| hidden.to_string())
            }
            Err(_) => {
                let text = String::from_utf8_lossy(body);
                let hidden = self.text(&text);
                (hidden != text).then_some(hidden)
            }
        };
        hidden.map(Bytes::from)
    }

    /// Replaces the body of an instance's error, and adapts its headers. Returns the text for the
    /// log if something is hidden. A long error is hidden as a whole.
    pub(crate) fn error(&self, parts: &mut Parts, body: &mut Bytes) -> Option<String> {
        let encoded = body.len() > LONGEST
            || parts.headers.get(CONTENT_ENCODING).is_some_and(|coding| coding != "identity");
        let original = std::mem::take(body);
        let hidden = match encoded && !original.is_empty() {
            true => {
                parts.headers.remove(CONTENT_ENCODING);
                parts.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
                Some(unreadable(parts.status.as_u16()))
            }
            false => self.body(&original),
        };
        let Some(hidden) = hidden else {
            *body = original;
            return None;
        };
        parts.headers.remove(CONTENT_LENGTH);
        *body = hidden;
        Some(match encoded {
            true => format!("an error of {} bytes, long or compressed", original.len()),
            false => String::from_utf8_lossy(&original).into_owned(),
        })
    }

    /// Returns the data of a stream's event with everything hidden if it is an error. Texts of an
    /// answer beside the error stay.
    pub(crate) fn event(&self, data: &str) -> Option<String> {
        let Ok(value) = serde_json::from_str::<Value>(data) else {
            let hidden = self.text(data);
            return (hidden != data).then_some(hidden);
        };
        let mut hidden = value.clone();
        match hidden.get("type").and_then(Value::as_str) {
            Some("error") => self.value(&mut hidden),
            _ => {
                for path in ["/error", "/response/error"] {
                    hidden.pointer_mut(path).into_iter().for_each(|error| self.value(error));
                }
            }
        }
        (hidden != value).then(|| hidden.to_string())
    }

    /// Hides words that are addresses, engine ids, or the values of labels such as `port`.
    fn without_addresses(&self, text: &str) -> String {
        let mut shown = String::with_capacity(text.len());
        let mut label = Label::None;
        let mut rest = text;
        while !rest.is_empty() {
            let (gap, tail) = rest.split_at(rest.find(is_of_word).unwrap_or(rest.len()));
            let (word, after) = tail.split_at(tail.find(|c| !is_of_word(c)).unwrap_or(tail.len()));
            rest = after;
            shown.push_str(gap);
            label = label.then(gap);
            // Quotes stand between a label and its colon.
            if !word.contains(char::is_alphanumeric) {
                shown.push_str(word);
                label = label.then(word);
                continue;
            }
            let core = core_of(word);
            let quoted = gap.ends_with(['"', '\'']) || gap.ends_with('=');
            match label.names(core, quoted) || self.is_address(core) {
                true => shown.push_str(&word.replacen(core, HIDDEN, 1)),
                false => match word.split_once(':') {
                    Some((name, value)) if is_label(name) && has_digit(value) => {
                        shown.push_str(&format!("{name}:{HIDDEN}"));
                    }
                    _ => shown.push_str(&self.without_uuids(word)),
                },
            }
            label = Label::of(word);
        }
        shown
    }

    /// Hides the UUIDs in a word, except in the ids of requests and responses. vLLM makes engine ids
    /// of UUIDs.
    fn without_uuids(&self, word: &str) -> String {
        const LENGTH: usize = 36;
        let of_a_request = ["cmpl-", "chatcmpl-", "resp_", "msg_"];
        let is_uuid = |part: &&str| {
            part.bytes().enumerate().all(|(at, byte)| match at {
                8 | 13 | 18 | 23 => byte == b'-',
                _ => byte.is_ascii_hexdigit(),
            })
        };
        let (mut shown, mut from, mut at) = (String::new(), 0, 0);
        while at + LENGTH <= word.len() {
            if !word.get(at..at + LENGTH).as_ref().is_some_and(is_uuid) {
                at += 1;
                continue;
            }
            let (before, end) = (&word[..at], at + LENGTH);
            let is_of_a_request = of_a_request.iter().any(|start| before.ends_with(start))
                || before.strip_suffix('-').is_some_and(|id| !self.id.is_empty() && id == self.id)
                || self.id == word[at..end];
            if !is_of_a_request {
                let rank = word[end..].strip_prefix("_dp");
                let digits =
                    rank.map_or(0, |rank| 3 + rank.bytes().take_while(u8::is_ascii_digit).count());
                shown.push_str(&word[from..at]);
                shown.push_str(HIDDEN);
                from = end + digits;
            }
            at = end;
        }
        shown + &word[from..]
    }

    /// Returns true for an address of a host, as far as it can be told from other words.
    fn is_address(&self, word: &str) -> bool {
        let (scheme, authority) = word.split_once("://").unzip();
        let authority = authority.unwrap_or(word).rsplit('@').next().unwrap_or_default();
        let host = authority.split(['/', '%', '?']).next().unwrap_or_default();
        let bare = host.trim_matches(['[', ']']);
        if bare.parse::<IpAddr>().is_ok() || host.parse::<SocketAddr>().is_ok() {
            return true;
        }
        let (name, port) = host.rsplit_once(':').unwrap_or((host, ""));
        let is_host = has_letter(name)
            && name.chars().all(|c| c.is_ascii_alphanumeric() || ".-_".contains(c));
        let lower = name.to_ascii_lowercase();
        let is_internal = lower == "localhost"
            || [".internal", ".local", ".svc", ".lan"].iter().any(|end| lower.ends_with(end));
        let is_port = |least: usize| {
            (least..=5).contains(&port.len()) && port.bytes().all(|byte| byte.is_ascii_digit())
        };
        match scheme {
            // Public URLs, such as that of an error's documentation, stay.
            Some(_) => {
                !name.contains('.')
                    || is_internal
                    || !port.is_empty()
                    || self.names.contains(&lower)
            }
            None if port.is_empty() => is_host && is_internal,
            None if is_internal => is_host && is_port(2),
            // A file has lines, and a parameter a number.
            None => match name.rsplit_once('.') {
                Some((_, end)) => is_host && is_port(2) && !SOURCES.contains(&end),
                None => is_host && is_port(3) && (name.contains('-') || has_digit(name)),
            },
        }
    }
}

/// The endings of files that errors name with a line.
const SOURCES: [&str; 10] = ["py", "rs", "c", "cc", "cpp", "cu", "h", "hpp", "js", "go"];

fn has_letter(word: &str) -> bool {
    word.contains(|c: char| c.is_ascii_alphabetic())
}

/// Returns the body of an error that cannot be shown.
pub(crate) fn unreadable(status: u16) -> Bytes {
    let message = "an instance answered with an error that this router cannot show";
    let error = serde_json::json!({"error": {
        "message": message, "type": "upstream_error", "param": null, "code": status,
    }});
    error.to_string().into()
}

/// A label before a value, in the order of reading it.
#[derive(Clone, Copy)]
enum Label {
    None,
    /// A label whose value may follow after a colon.
    Name,
    /// A label whose value may also follow at once, if it is a number.
    Port,
    /// A label whose value may also follow at once, if it is not a word.
    Engine,
    /// A label and a colon.
    Colon,
}

impl Label {
    fn of(word: &str) -> Self {
        let name = word.trim_end_matches(':');
        if !is_label(name) {
            return Label::None;
        }
        match name.to_ascii_lowercase() {
            _ if name.len() < word.len() => Label::Colon,
            name if name.ends_with("port") => Label::Port,
            name if name.ends_with("engine") || name.ends_with("engine_id") => Label::Engine,
            _ => Label::Name,
        }
    }

    /// Reads what separates the label from the next word.
    fn then(self, gap: &str) -> Self {
        match self {
            Label::None => Label::None,
            // The value is an object or a list.
            _ if gap.contains(['{', '(']) => Label::None,
            _ if gap.contains([':', '=']) => Label::Colon,
            label => label,
        }
    }

    /// Returns true if the next word is the label's value: a plain word may begin a sentence.
    fn names(self, word: &str, quoted: bool) -> bool {
        match self {
            Label::None | Label::Name => false,
            Label::Port => word.bytes().all(|byte| byte.is_ascii_digit()),
            Label::Engine => is_distinct(word) && has_digit(word),
            Label::Colon => quoted || has_digit(word),
        }
    }
}

fn has_digit(word: &str) -> bool {
    word.contains(|c: char| c.is_ascii_digit())
}

/// Returns true for a word or a key whose value is an address or an engine, such as `remote_host`.
fn is_label(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let last = name.rsplit(['_', '.']).next().unwrap_or_default();
    matches!(last, "host" | "hostname" | "port" | "addr" | "address" | "engine")
        || name.ends_with("engine_id")
}

fn is_of_word(c: char) -> bool {
    c.is_alphanumeric() || ".-_:/[]@%?".contains(c)
}

/// Returns a word without the punctuation around it.
fn core_of(word: &str) -> &str {
    let mut core = word.trim_end_matches(['.', ':', '?', '/']);
    if !core.contains(']') {
        core = core.trim_start_matches('[');
    } else if !core.contains('[') {
        core = core.trim_end_matches(']');
    }
    core
}

/// Replaces names, in lower case, where they are not parts of longer ones, with a port after them.
fn without_names(mut text: String, names: &[String]) -> String {
    let is_part = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
    let mut lower = text.to_ascii_lowercase();
    for name in names {
        let (mut shown, mut from) = (String::new(), 0);
        for (at, _) in lower.match_indices(name.as_str()) {
            let end = at + name.len();
            if at < from
                || is_part(lower[..at].chars().next_back())
                || is_part(lower[end..].chars().next())
            {
                continue;
            }
            shown.push_str(&text[from..at]);
            shown.push_str(HIDDEN);
            from = end + port_len(&text[end..]);
        }
        if from > 0 {
            text = shown + &text[from..];
            lower = text.to_ascii_lowercase();
        }
    }
    text
}

/// Returns the length of a port with its colon at the start of a text; 0 if there is none.
fn port_len(text: &str) -> usize {
    let Some(port) = text.strip_prefix(':') else { return 0 };
    let digits = port.bytes().take_while(u8::is_ascii_digit).count();
    if (1..=5).contains(&digits) { 1 + digits } else { 0 }
}

/// Hides IPv4 addresses, with a port after them, wherever they stand.
fn without_ipv4(text: &str) -> String {
    let (bytes, mut shown, mut from, mut at) = (text.as_bytes(), String::new(), 0, 0);
    while at < bytes.len() {
        let begins = bytes[at].is_ascii_digit()
            && (at == 0 || !(bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'.'));
        if !begins {
            at += 1;
            continue;
        }
        let is_of_it = |byte: &&u8| byte.is_ascii_digit() || **byte == b'.';
        let end = at + bytes[at..].iter().take_while(is_of_it).count();
        let address = text[at..end].trim_end_matches('.');
        let goes_on = bytes.get(end).is_some_and(u8::is_ascii_alphabetic);
        if address.parse::<std::net::Ipv4Addr>().is_ok() && !goes_on {
            shown.push_str(&text[from..at]);
            shown.push_str(HIDDEN);
            from = at + address.len();
            from += port_len(&text[from..]);
        }
        at = end.max(from);
    }
    shown + &text[from..]
}

#[cfg(test)]
mod tests {
    use hyper::Response;

    use super::*;
    use crate::setup::Setup;

    fn redaction() -> Redaction {
        let setup = Setup::from_toml(
            "[[pool]]\nprefill = ['http://prefill-0:8100']\ndecode = ['http://decode:8200']",
        );
        let named = ["engine-7".to_owned(), "side.example".to_owned()];
        Redaction::new(&Fleet::new(&setup.unwrap(), None), &named, "the-clients-id")
    }

    #[test]
    fn addresses_and_engine_ids_are_hidden() {
        for (said, shown) in [
            ("connect to 10.0.0.1:8100 failed", "connect to <hidden> failed"),
            ("no route to 10.0.0.1.", "no route to <hidden>."),
            ("GET http://h/v1?a=1: refused", "GET <hidden>=1: refused"),
            ("ip:10.0.0.1 and tcp:10.0.0.1:8100", "ip:<hidden> and tcp:<hidden>"),
            ("to /10.0.0.1:8100", "to /<hidden>"),
            ("10.0.0.1:8100->10.0.0.2:5600", "<hidden>-><hidden>"),
            ("rank_10.0.0.1", "rank_<hidden>"),
            ("prefill-0:8100 hangs", "<hidden> hangs"),
            (
                "see http://prefill-0.ns.svc/v1 and http://side.example/",
                "see <hidden> and <hidden>/",
            ),
            ("tcp://10.0.0.1:5600, and [::1]:80: gone", "<hidden>, and <hidden>: gone"),
            ("peer fe80::1%eth0 is silent", "peer <hidden> is silent"),
            ("at prefill-0: stopped", "at <hidden>: stopped"),
            ("PREFILL-0/worker", "<hidden>/worker"),
            ("node-3:5600 hangs", "<hidden> hangs"),
            ("it is localhost", "it is <hidden>"),
            ("ip-10-0-0-1.ec2.internal hangs", "<hidden> hangs"),
            ("engine-7 and engine-7_dp1", "<hidden> and <hidden>_dp1"),
            (
                "Address { host: \"a\", port: 5600 }",
                "Address { host: \"<hidden>\", port: <hidden> }",
            ),
            (r#"failed {"remote_host":"a"}"#, r#"failed {"remote_host":"<hidden>"}"#),
            ("remote_host=a", "remote_host=<hidden>"),
            ("host: 'a'", "host: '<hidden>'"),
            ("port 5600 of it", "port <hidden> of it"),
            ("engine prefill-9 stopped", "engine <hidden> stopped"),
            ("engine 01234567-89ab-cdef-0123-456789abcdef_dp3: gone", "engine <hidden>: gone"),
            (
                "01234567-89ab-cdef-0123-456789abcdef/01234567-89ab-cdef-0123-456789abcdef",
                "<hidden>/<hidden>",
            ),
        ] {
            assert_eq!(redaction().text(said), shown, "{said}");
        }
    }

    #[test]
    fn what_clients_may_see_stays() {
        for text in [
            "This model's maximum context length is 4096 tokens. However, you requested 5000.",
            "The model `org/name:8b` does not exist.",
            "messages.0.content: Field required",
            "image_url: Input should be a valid string",
            "it began at 12:30:45 and ended after 3:14",
            "the decode instance is not up; the host is down, and the engine restarts",
            "tools.0.address: Field required",
            "port: Input should be a valid integer",
            "schema {'address': {'type': 'string'}}",
            "status:404 max_tokens:4096 foo.py:123",
            "https://errors.pydantic.dev/2/v/missing",
            "no 1.2.3 and no v1.2.3.4",
            "vLLM 0.33.0: std::io::Error, a/b, 50%",
            "cmpl-01234567-89ab-cdef-0123-456789abcdef-0 failed",
            "request the-clients-id-01234567-89ab-cdef-0123-456789abcdef failed",
            "",
        ] {
            assert_eq!(redaction().text(text), text);
        }
    }

    fn parts(headers: &[(&str, &str)]) -> Parts {
        let mut builder = Response::builder().status(404);
        for (name, value) in headers {
            builder = builder.header(*name, *value);
        }
        builder.body(()).unwrap().into_parts().0
    }

    #[test]
    fn a_body_is_replaced_only_if_something_is_hidden() {
        let hide = |headers: &[(&str, &str)], body: &str| {
            let (mut parts, mut bytes) = (parts(headers), Bytes::from(body.to_owned()));
            let logged = redaction().error(&mut parts, &mut bytes);
            (String::from_utf8(bytes.to_vec()).unwrap(), parts.headers, logged)
        };
        let plain = r#"{"error": {"message": "no", "code": 404}}"#;
        let (body, headers, logged) = hide(&[("content-length", "41")], plain);
        assert_eq!((body.as_str(), headers.len(), logged), (plain, 1, None));
        let said = r#"{"error": {"message": "no 10.0.0.1", "code": 404, "remote_port": 5600}}"#;
        let (body, headers, logged) = hide(&[("content-length", "41")], said);
        assert_eq!(
            serde_json::from_str::<Value>(&body).unwrap(),
            serde_json::json!({"error":
                {"message": "no <hidden>", "code": 404, "remote_port": "<hidden>"}})
        );
        assert_eq!((headers.len(), logged.as_deref()), (0, Some(said)));
        let (body, ..) = hide(&[], "<p>10.0.0.1</p>");
        assert_eq!(body, "<p><hidden></p>");
        let (body, headers, logged) = hide(&[("content-encoding", "gzip")], "10.0.0.1");
        assert!(body.contains("cannot show") && logged.is_some(), "{body}");
        assert!(!headers.contains_key(CONTENT_ENCODING), "{headers:?}");
        assert_eq!(hide(&[("content-encoding", "gzip")], "").0, "", "such as to HEAD");
    }

    #[test]
    fn events_lose_addresses_in_their_error_alone() {
        let event = |data: &str| redaction().event(data);
        assert_eq!(event(r#"{"error":{"message":"no"}}"#), None);
        assert_eq!(
            event(r#"{"error":{"message":"10.0.0.1"}}"#).unwrap(),
            r#"{"error":{"message":"<hidden>"}}"#
        );
        assert_eq!(
            event(r#"{"type":"error","message":"10.0.0.1"}"#).unwrap(),
            r#"{"message":"<hidden>","type":"error"}"#
        );
        assert_eq!(
            event(r#"{"response":{"error":{"message":"10.0.0.1"},"output":"10.0.0.1"}}"#).unwrap(),
            r#"{"response":{"error":{"message":"<hidden>"},"output":"10.0.0.1"}}"#
        );
    }
}
