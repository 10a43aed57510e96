//! Filters clients' headers for the legs, and reads those that the proxy needs.

use hyper::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE,
    EXPECT, HOST, HeaderMap, HeaderName, HeaderValue, LOCATION, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use kvx_vllm::params::{X_REQUEST_ID, XRequestId};

/// `X-kvx-route` of an answer: the route that the request took.
pub(crate) const ROUTE: HeaderName = HeaderName::from_static("x-kvx-route");
/// `X-Request-Id`.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// `traceparent` of W3C trace context.
pub(crate) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

const HOP_BY_HOP: [HeaderName; 9] = [
    CONNECTION,
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

/// Headers that decide how a body is read. `Connection` cannot remove them: an instance would read
/// another body than the one that this proxy filtered.
const OF_THE_BODY: [HeaderName; 2] = [CONTENT_TYPE, CONTENT_ENCODING];

/// Returns true for headers that choose an instance in other routers and engines. Clients cannot
/// choose one here.
fn names_a_host(name: &str) -> bool {
    const STARTS: [&str; 8] = [
        "x-prefill",
        "x-decode",
        "x-data-parallel",
        "x-kv-",
        "x-remote-",
        "x-bootstrap",
        "x-gateway-destination",
        "x-kvx-",
    ];
    STARTS.iter().any(|start| name.starts_with(start))
}

/// Removes hop-by-hop headers, including those that `Connection` names, except for headers of the
/// body.
pub(crate) fn drop_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|list| list.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .filter(|name| !OF_THE_BODY.contains(name))
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// Makes a redirect to the instance itself one to the client's server.
pub(crate) fn drop_instance(headers: &mut HeaderMap, instance: &str) {
    let Some(location) = headers.get(LOCATION).and_then(|value| value.to_str().ok()) else {
        return;
    };
    let path = location
        .split_once("://")
        .and_then(|(_, rest)| rest.strip_prefix(instance))
        .filter(|path| path.starts_with('/'));
    if let Some(path) = path.and_then(|path| HeaderValue::from_str(path).ok()) {
        headers.insert(LOCATION, path);
    }
}

/// Returns a client's headers for any leg: without hop-by-hop headers and headers that name hosts,
/// and with `key` if the client sent no key (or if its key was for this proxy).
pub(crate) fn for_instances(
    mut headers: HeaderMap,
    key: Option<&HeaderValue>,
    key_was_ours: bool,
) -> HeaderMap {
    drop_hop_by_hop(&mut headers);
    let named: Vec<HeaderName> =
        headers.keys().filter(|name| names_a_host(name.as_str())).cloned().collect();
    for name in named.iter().chain(&[HOST, CONTENT_LENGTH, EXPECT]) {
        headers.remove(name);
    }
    match key {
        Some(key) if key_was_ours || !headers.contains_key(AUTHORIZATION) => {
            headers.insert(AUTHORIZATION, key.clone());
        }
        // Instances must not see a key for this proxy.
        None if key_was_ours => drop(headers.remove(AUTHORIZATION)),
        _ => {}
    }
    headers
}

/// Requests an uncompressed answer, for a leg whose answer the proxy reads.
pub(crate) fn readable(headers: &mut HeaderMap) {
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
}

/// Returns `Bearer KEY` as a header value that logs do not show.
pub(crate) fn bearer(key: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(&format!("Bearer {key}")).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// Returns the request id that a client sent.
///
/// # Errors
///
/// Fails if a header cannot carry the id. The message is for the client.
pub(crate) fn request_id(headers: &HeaderMap) -> Result<Option<XRequestId>, String> {
    let Some(value) = headers.get(REQUEST_ID) else { return Ok(None) };
    let text = value.to_str().map_err(|_| {
        format!(
            "{X_REQUEST_ID} has characters that a header cannot carry; send another id, or none to get a generated one"
        )
    })?;
    XRequestId::new(text).map(Some).map_err(|error| error.to_string())
}

/// Returns the boundary of a `multipart/form-data` body; `None` for other types.
///
/// # Errors
///
/// Fails if the form has no boundary. The message is for the client.
pub(crate) fn form_boundary(content_type: &HeaderValue) -> Result<Option<&str>, String> {
    let Ok(text) = content_type.to_str() else { return Ok(None) };
    let mut parts = text.split(';').map(str::trim);
    if !parts.next().is_some_and(|kind| kind.eq_ignore_ascii_case("multipart/form-data")) {
        return Ok(None);
    }
    let boundary = parts.find_map(|part| {
        let (name, value) = part.split_once('=')?;
        let value = value.trim();
        let value =
            value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(value);
        let fits = !value.is_empty() && value.len() <= 70;
        (name.trim().eq_ignore_ascii_case("boundary") && fits).then_some(value)
    });
    match boundary {
        Some(boundary) => Ok(Some(boundary)),
        None => Err("multipart/form-data needs a boundary of 1 to 70 characters".to_owned()),
    }
}

/// Returns the trace id of a client's `traceparent`, if it is valid.
pub(crate) fn trace_id(headers: &HeaderMap) -> Option<&str> {
    let text = headers.get(TRACEPARENT)?.to_str().ok()?;
    let mut parts = text.split('-');
    let (version, trace, span, flags) =
        (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let hex = |text: &str, length| {
        text.len() == length
            && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    };
    let zero = |text: &str| text.bytes().all(|byte| byte == b'0');
    let whole = hex(version, 2) && hex(trace, 32) && hex(span, 16) && hex(flags, 2);
    (whole && version != "ff" && !zero(trace) && !zero(span)).then_some(trace)
}

/// Checks for the fuzz target: no panic, and no header is left that must not reach an instance.
pub(crate) fn fuzz(bytes: &[u8]) {
    let mut headers = HeaderMap::new();
    for line in bytes.split(|byte| *byte == b'\n').take(100) {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else { continue };
        let (name, value) = line.split_at(colon);
        let name = HeaderName::from_bytes(name.trim_ascii());
        let value = HeaderValue::from_bytes(value[1..].trim_ascii());
        if let (Ok(name), Ok(value)) = (name, value) {
            headers.append(name, value);
        }
    }
    if let Ok(Some(id)) = request_id(&headers) {
        assert!(HeaderValue::from_str(id.as_str()).is_ok() && !id.as_str().contains(','));
    }
    if let Some(trace) = trace_id(&headers) {
        assert_eq!(trace.len(), 32);
    }
    let of_the_body = OF_THE_BODY.map(|name| headers.get(&name).cloned());
    let sent = for_instances(headers, bearer("k").as_ref(), false);
    assert!(sent.contains_key(AUTHORIZATION));
    assert_eq!(OF_THE_BODY.map(|name| sent.get(&name).cloned()), of_the_body);
    for name in sent.keys() {
        assert!(
            !HOP_BY_HOP.contains(name) && *name != HOST && !names_a_host(name.as_str()),
            "{name}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        lines
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect()
    }

    #[test]
    fn redirects_to_an_instance_lose_its_address() {
        for (said, passed) in [
            ("http://10.0.0.1:8100/v1/models", "/v1/models"),
            ("http://10.0.0.1:81000/v1", "http://10.0.0.1:81000/v1"),
            ("https://example.com/x", "https://example.com/x"),
            ("/v1", "/v1"),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(LOCATION, said.parse().unwrap());
            drop_instance(&mut headers, "10.0.0.1:8100");
            assert_eq!(headers[LOCATION], passed);
        }
    }

    #[test]
    fn hop_by_hop_headers_and_headers_that_name_hosts_are_removed() {
        let sent = for_instances(
            headers(&[
                ("host", "me"),
                ("connection", "close, X-Mine"),
                ("x-mine", "1"),
                ("keep-alive", "5"),
                ("te", "trailers"),
                ("transfer-encoding", "chunked"),
                ("upgrade", "websocket"),
                ("content-length", "3"),
                ("x-prefiller-host-port", "evil:80"),
                ("x-data-parallel-rank", "3"),
                ("x-kvx-route", "x"),
                ("authorization", "Bearer c"),
                ("traceparent", "00-a"),
                ("x-request-id", "r"),
                ("openai-organization", "o"),
            ]),
            None,
            false,
        );
        let mut names: Vec<&str> = sent.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["authorization", "openai-organization", "traceparent", "x-request-id"]);
    }

    #[test]
    fn connection_cannot_remove_headers_of_the_body() {
        let sent = for_instances(
            headers(&[
                ("connection", "content-type, Content-Encoding, x-mine"),
                ("content-type", "multipart/form-data; boundary=x"),
                ("content-encoding", "identity"),
                ("x-mine", "1"),
            ]),
            None,
            false,
        );
        assert_eq!(sent[CONTENT_TYPE], "multipart/form-data; boundary=x");
        assert_eq!(sent[CONTENT_ENCODING], "identity");
        assert!(!sent.contains_key("x-mine"));
    }

    #[test]
    fn forms_name_their_boundary() {
        let boundary = |text: &'static str| {
            form_boundary(&HeaderValue::from_static(text)).map(|of| of.map(str::to_owned))
        };
        for form in [
            "multipart/form-data; boundary=x-1",
            "Multipart/Form-Data;charset=utf-8; Boundary=\"x-1\"",
        ] {
            assert_eq!(boundary(form), Ok(Some("x-1".to_owned())), "{form}");
        }
        for other in ["application/json", "multipart/mixed; boundary=x", "multipart/form-data-x"] {
            assert_eq!(boundary(other), Ok(None), "{other}");
        }
        for wrong in [
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "multipart/form-data; boundary=\"\"",
        ] {
            assert!(boundary(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_instance_key_replaces_a_missing_key_or_a_proxy_key() {
        let ours = bearer("ours").unwrap();
        let client = headers(&[("authorization", "Bearer c")]);
        let of = |headers: HeaderMap, was_ours| {
            for_instances(headers, Some(&ours), was_ours)[AUTHORIZATION]
                .to_str()
                .unwrap()
                .to_owned()
        };
        assert_eq!(of(HeaderMap::new(), false), "Bearer ours");
        assert_eq!(of(client.clone(), false), "Bearer c");
        assert_eq!(of(client.clone(), true), "Bearer ours");
        assert!(
            !for_instances(client, None, true).contains_key(AUTHORIZATION),
            "it opens this proxy"
        );
        assert!(format!("{ours:?}").contains("Sensitive"));
    }

    #[test]
    fn traces_are_recognised() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert_eq!(
            trace_id(&headers(&[("traceparent", good)])),
            Some("4bf92f3577b34da6a3ce929d0e0e4736")
        );
        for bad in [
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736",
        ] {
            assert_eq!(trace_id(&headers(&[("traceparent", bad)])), None, "{bad}");
        }
    }
}
