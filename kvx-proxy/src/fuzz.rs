//! Entry points of the fuzz targets, and a bounded, seeded run of each: no input may cause a panic.

/// The targets, by the names of their corpora.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[
    ("proxy_sse", sse),
    ("proxy_body", body),
    ("proxy_dns", dns),
    ("proxy_headers", headers),
    ("proxy_kubernetes", kubernetes),
    ("proxy_setup", setup),
    ("proxy_etcd", etcd),
    ("proxy_registration", registration),
];

/// Parses a stream of events, cut into pieces of the length in its first byte.
pub fn sse(bytes: &[u8]) {
    crate::sse::fuzz(bytes);
}

/// Parses the body of a completion.
pub fn body(bytes: &[u8]) {
    crate::request::fuzz(bytes);
}

/// Parses an answer of a resolver, and its configuration.
pub fn dns(bytes: &[u8]) {
    crate::discovery::srv::fuzz(bytes);
}

/// Parses a client's headers, one per line.
pub fn headers(bytes: &[u8]) {
    crate::request::headers::fuzz(bytes);
}

/// Parses a list of pods, and the lines of a watch.
pub fn kubernetes(bytes: &[u8]) {
    crate::discovery::kubernetes::fuzz(bytes);
}

/// Parses a configuration file, and builds its fleet.
pub fn setup(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(setup) = crate::Setup::from_toml(text) {
        crate::fleet::Fleet::new(&setup, None);
    }
}

/// Parses an answer of etcd, and a line of its watch.
pub fn etcd(bytes: &[u8]) {
    crate::etcd::fuzz(bytes);
}

/// Decodes a registration: its key, a NUL byte, and its value.
pub fn registration(bytes: &[u8]) {
    crate::registration::fuzz(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    const CASES: u64 = 10_000;

    const PIECES: &[&[u8]] = &[
        b"\n\n",
        b"\r\n",
        b"\r",
        b"data: ",
        b"[DONE]",
        b"event: error",
        b"{\"error\"",
        b"\xe2\x82",
        b"null",
        b"[[",
        b"]",
        b"{",
        b"}",
        b"\"",
        b"-1",
        b"1e999",
        b"\"n\": 2,",
        b"\"kv_transfer_params\": {},",
        b"\\u0073",
        b":",
        b",",
        b" ",
        b"connection: ",
        b"x-request-id: ",
        b"x-prefill-host: ",
        b"[[pool]]\n",
        b"= ",
        b"'http://",
        b"99999999999999999999",
        b"\xc0\x0c",
        b"\0\x21\0\x01",
        b"dns+http://",
        b"\"revision\":\"",
        b"\"canceled\":true,",
        b"YQ==",
        b"/kvx/v1/instances/f/decode/",
        b"\"instance\":{",
        b"\"expires\":",
        b"\"mac\":\"",
        b"\"llm-d.ai/role\":\"decode\"",
        b"\"resourceVersion\":\"",
        b"{\"type\":\"MODIFIED\",\"object\":",
    ];

    fn run(name: &str, seeds: &[&[u8]], check: fn(&[u8])) {
        kvx_testkit::fuzz(name, seeds, PIECES, CASES, check);
    }

    kvx_testkit::replay_test!(super::TARGETS);

    #[test]
    fn streams() {
        let seeds: [&[u8]; 3] = [
            b"\x07data: {\"choices\": [{\"text\": \"a\"}]}\n\ndata: [DONE]\n\n",
            b"\x01event: error\r\ndata: {\"error\": {}}\r\n\r\n: ping\r\n\r\n",
            b"\xffdata: \xe2\x82\xac\r\rdata: x\r\r",
        ];
        run("sse", &seeds, sse);
    }

    #[test]
    fn bodies() {
        let seeds: [&[u8]; 3] = [
            br#"{"model": "m", "prompt": "a", "max_tokens": 5, "min_tokens": 2, "stream": true, "stream_options": {}, "n": 1}"#,
            br#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "vllm_xargs": {"kv_transfer_params": 1}}"#,
            br#"{"prompt": [[1, 2, 3]], "echo": true, "logprobs": null, "kv_transfer_params": {"remote_host": "h"}}"#,
        ];
        run("body", &seeds, body);
    }

    #[test]
    fn header_lines() {
        let seeds: [&[u8]; 2] = [
            b"host: a\nconnection: close, x-a\nx-a: 1\nx-request-id: 5\nauthorization: Bearer k\n",
            b"traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\nx-prefiller-host-port: a\nte: trailers",
        ];
        run("headers", &seeds, headers);
    }

    #[test]
    fn answers_of_resolvers() {
        let seeds: [&[u8]; 2] = [
            b"\x12\x34\x81\x80\0\x01\0\x01\0\0\0\0\x05_http\x04_tcp\x01p\0\0\x21\0\x01\
              \xc0\x0c\0\x21\0\x01\0\0\0\x05\0\x0b\0\0\0\0\x1f\x90\x02p0\xc0\x17",
            b"search a.test b.test\nnameserver 10.0.0.1\nnameserver fd00::1\noptions ndots:5\n",
        ];
        run("dns", &seeds, dns);
    }

    #[test]
    fn pods() {
        let seeds: [&[u8]; 3] = [
            br#"{"kind":"PodList","metadata":{"resourceVersion":"7","continue":"x"},"items":[{"metadata":{"uid":"u","labels":{"llm-d.ai/role":"decode"},"annotations":{"smg.ai/worker-ports":"8000,8001"}},"status":{"phase":"Running","podIP":"10.0.0.1","conditions":[{"type":"Ready","status":"True"}]}}]}"#,
            br#"{"type":"ADDED","object":{"metadata":{"name":"p","uid":"u","resourceVersion":"8","labels":{"llm-d.ai/role":"prefill"},"annotations":{"sglang.ai/bootstrap-port":"8998"}},"status":{"phase":"Running","podIP":"fd00::1","conditions":[{"type":"Ready","status":"True"}]}}}"#,
            b"{\"type\":\"BOOKMARK\",\"object\":{\"metadata\":{\"resourceVersion\":\"9\"}}}\n{\"type\":\"ERROR\",\"object\":{\"code\":410,\"message\":\"too old\"}}\n",
        ];
        run("kubernetes", &seeds, kubernetes);
    }

    #[test]
    fn set_ups() {
        let seeds: [&[u8]; 2] = [
            b"port = 1\ndrain = '5s'\n[limits]\nbody = '5MiB'\n[[pool]]\nprefill = ['http://[::1]:1']\n",
            b"[[pool]]\nname = 'a'\ndecode = [{ url = 'http://d:1', weight = 2.5, ranks = 4, http = 'h2c' }]\n",
        ];
        run("setup", &seeds, setup);
    }

    #[test]
    fn answers_of_etcd() {
        let seeds: [&[u8]; 3] = [
            br#"{"header":{"revision":"7"},"kvs":[{"key":"YQ==","mod_revision":"5","value":"Yg=="}],"more":true}"#,
            br#"{"result":{"header":{"revision":"9"},"events":[{"type":"DELETE","kv":{"key":"YQ==","mod_revision":"9"}}]}}"#,
            br#"{"error":{"grpc_code":14,"message":"no leader"}}"#,
        ];
        run("etcd", &seeds, etcd);
    }

    #[test]
    fn registrations() {
        let seeds: [&[u8]; 2] = [
            b"/kvx/v1/instances/f/decode/0000000000000005\0{\"instance\":{\"role\":\"decode\",\"url\":\"http://10.0.0.1:8000\"},\"expires\":1000}",
            b"/kvx/v1/instances/f/prefill/0123456789abcdef\0{\"instance\":{\"url\":\"http://[::1]:1\",\"role\":\"prefill\",\"events\":\"tcp://*:5\",\"weight\":2.5}}",
        ];
        run("registration", &seeds, registration);
    }
}
