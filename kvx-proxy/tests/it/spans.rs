//! Tests of a request's records: a span with both legs, a line in the access log, one trace.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Arc, Mutex};

use kvx_proxy::{Proxy, Setup};
use serde_json::{Value, json};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;

use crate::CUT_OFF;
use crate::client::post;
use crate::upstream::{Upstream, json};

/// A span that has ended.
#[derive(Clone, Debug, Default)]
struct Seen {
    name: &'static str,
    parent: Option<&'static str>,
    fields: BTreeMap<&'static str, String>,
}

impl Visit for Seen {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.fields.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields.insert(field.name(), value.to_owned());
    }
}

thread_local! {
    /// The spans that have ended on this thread; each test has its own thread.
    static ENDED: RefCell<Vec<Seen>> = const { RefCell::new(Vec::new()) };
}

/// A layer for the whole process: `tracing` caches that no subscriber wants a span, if another test
/// creates that span first.
struct Spans;

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Spans {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let span = context.span(id).unwrap();
        let parent = span.parent().map(|parent| parent.name());
        let mut seen = Seen { name: span.name(), parent, fields: BTreeMap::new() };
        attributes.record(&mut seen);
        span.extensions_mut().insert(seen);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let span = context.span(id).unwrap();
        let mut extensions = span.extensions_mut();
        values.record(extensions.get_mut::<Seen>().unwrap());
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let span = context.span(&id).unwrap();
        ENDED.with_borrow_mut(|ended| ended.extend(span.extensions().get::<Seen>().cloned()));
    }
}

/// A writer that keeps its output.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<u8>>>);

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

#[tokio::test]
async fn a_request_is_a_span_with_both_legs_a_line_and_one_trace() {
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(Spans)).unwrap();
    let params = json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1]], "remote_engine_id": "e",
        "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1,
    });
    let choices = json!([{"index": 0, "text": "a", "finish_reason": "length"}]);
    let prefill =
        Upstream::start(json(&json!({"choices": choices, "kv_transfer_params": params}))).await;
    let decode = Upstream::start(json(&json!({"choices": choices}))).await;
    let setup = format!(
        "port = 0\nconnector = 'NixlConnector'\n[[pool]]\nprefill = ['http://{}']\ndecode = ['http://{}']",
        prefill.address, decode.address
    );
    let log = Kept::default();
    let mut proxy =
        Proxy::bind_with_output(Setup::from_toml(&setup).unwrap(), Box::new(log.clone()))
            .await
            .unwrap();
    proxy.check_instances().await;
    let (address, handle) = (proxy.local_addr(), proxy.handle());
    let running = tokio::spawn(proxy.run());

    let asked = json!({"model": "m", "prompt": "some words", "max_tokens": 1});
    let lines = format!(
        "x-request-id: mine\r\ntracestate: a=b\r\ntraceparent: 00-{TRACE}-b7ad6b7169203331-01\r\n"
    );
    let (head, _) = post(address, "/v1/completions", &lines, &asked).await;
    for part in ["http/1.1 200", "x-kvx-route: disaggregated", "x-request-id: mine"] {
        assert!(head.contains(part), "{part}: {head}");
    }
    handle.drain();
    tokio::time::timeout(CUT_OFF, running).await.unwrap().unwrap().unwrap();

    for instance in [&prefill, &decode] {
        let [head] = &instance.heads()[..] else { panic!("each leg once: {:?}", instance.heads()) };
        assert!(head.contains(&format!("traceparent: 00-{TRACE}-")), "{head}");
        assert!(head.contains("tracestate: a=b"), "{head}");
    }
    let spans = ENDED.take();
    let one = |name: &str| {
        let of: Vec<&Seen> = spans.iter().filter(|span| span.name == name).collect();
        assert_eq!(of.len(), 1, "one span {name}: {spans:?}");
        of[0].clone()
    };
    let request = one("request");
    for (field, value) in [
        ("id", "mine"),
        ("trace", TRACE),
        ("path", "/v1/completions"),
        ("model", "m"),
        ("route", "disaggregated"),
        ("status", "200"),
        ("outcome", "ok"),
    ] {
        assert_eq!(
            request.fields.get(field).map(String::as_str),
            Some(value),
            "{field}: {request:?}"
        );
    }
    for (name, instance) in [("prefill", &prefill), ("decode", &decode)] {
        let leg = one(name);
        assert_eq!(
            (leg.parent, &leg.fields["instance"]),
            (Some("request"), &instance.address.to_string())
        );
    }
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let [line] = &lines[..] else { panic!("one line: {log}") };
    let expected = json!({
        "id": "mine", "trace": TRACE, "method": "POST", "path": "/v1/completions", "model": "m", "status": 200,
        "outcome": "ok", "why": null, "route": "disaggregated", "reason": null, "attempts": 1, "events": 0,
        "prefill": prefill.address.to_string(), "decode": decode.address.to_string(),
    });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&line[key], value, "{key}: {line}");
    }
    for key in ["time", "queue_ms", "prefill_ms", "ttft_ms", "total_ms", "bytes"] {
        assert!(line[key].is_number(), "{key}: {line}");
    }
}
