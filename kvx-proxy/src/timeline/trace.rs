//! Timelines in Chrome's trace event format, which Perfetto opens. The router and each instance are
//! a process of the trace; requests that overlap are on different threads of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};

use super::{History, RequestView, Timeline};

/// The process of the router.
const ROUTER: u64 = 1;

#[derive(Debug, Serialize)]
struct Event {
    name: String,
    cat: &'static str,
    ph: &'static str,
    /// Microseconds since the Unix epoch.
    ts: u64,
    dur: u64,
    pid: u64,
    tid: usize,
    args: Value,
}

/// The times until which the threads of a process are taken.
#[derive(Default)]
struct Lanes(Vec<u64>);

impl Lanes {
    /// Returns the first thread that is free at `start`.
    fn take(&mut self, start: u64, end: u64) -> usize {
        let free = self.0.iter().position(|taken| *taken <= start);
        let lane = free.unwrap_or_else(|| {
            self.0.push(0);
            self.0.len() - 1
        });
        self.0[lane] = end;
        lane + 1
    }
}

#[derive(Default)]
struct Trace {
    events: Vec<Event>,
    lanes: HashMap<u64, Lanes>,
    pids: HashMap<String, u64>,
    names: Vec<Value>,
}

impl Trace {
    fn pid(&mut self, name: &str) -> u64 {
        if let Some(pid) = self.pids.get(name) {
            return *pid;
        }
        let pid = ROUTER + self.pids.len() as u64;
        self.pids.insert(name.to_owned(), pid);
        for (kind, key, value) in [
            ("process_name", "name", Value::from(name)),
            ("process_sort_index", "sort_index", Value::from(pid)),
        ] {
            self.names.push(json!({"name": kind, "ph": "M", "pid": pid, "args": {key: value}}));
        }
        pid
    }

    /// Adds a span of a process on a thread that is free. Spans are added in the order of their start.
    fn span(&mut self, pid: u64, ts: u64, dur: u64, name: &str, cat: &'static str, args: Value) {
        let tid = self.lanes.entry(pid).or_default().take(ts, ts + dur);
        self.within(pid, tid, ts, dur, name, cat, args);
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of an event")]
    fn within(
        &mut self,
        pid: u64,
        tid: usize,
        ts: u64,
        dur: u64,
        name: &str,
        cat: &'static str,
        args: Value,
    ) {
        self.events.push(Event { name: name.to_owned(), cat, ph: "X", ts, dur, pid, tid, args });
    }
}

fn micros(time: Duration) -> u64 {
    time.as_micros() as u64
}

/// Returns the requests as a trace.
pub(crate) fn trace(history: &History, requests: &[Arc<Timeline>]) -> Value {
    let mut trace = Trace::default();
    trace.pid("kvx proxy");
    let mut requests: Vec<&Arc<Timeline>> = requests.iter().collect();
    requests.sort_by_key(|one| one.arrived);
    let mut legs = Vec::new();
    for one in requests {
        let ts = history.unix_micros(one.arrived);
        let total = micros(one.total);
        let mut args = serde_json::to_value(RequestView::new(history, one)).unwrap_or_default();
        if let Some(args) = args.as_object_mut() {
            args.remove("legs");
        }
        let tid = trace.lanes.entry(ROUTER).or_default().take(ts, ts + total);
        trace.within(ROUTER, tid, ts, total, &one.id, "request", args);
        // The parts of a request are within it, one after the other.
        let queued = micros(one.queued).min(total);
        trace.within(ROUTER, tid, ts, queued, "queue", "queue", json!({}));
        if let Some(first) = one.first_byte {
            let first = micros(first).clamp(queued, total);
            let events = json!({"events": one.events, "bytes": one.bytes});
            trace.within(ROUTER, tid, ts + queued, first - queued, "first byte", "wait", json!({}));
            trace.within(ROUTER, tid, ts + first, total - first, "answer", "answer", events);
        }
        for leg in one.legs.list() {
            legs.push((ts + micros(leg.start), one, leg));
        }
    }
    legs.sort_by_key(|(ts, ..)| *ts);
    for (ts, one, leg) in legs {
        // A leg that still runs has no length yet.
        let Some(end) = leg.end else { continue };
        let role = leg.role.as_str();
        let pid = trace.pid(&format!("{role} {}", leg.instance));
        let mut args = json!({"request": one.id, "outcome": leg.outcome});
        let told = [
            (
                "first_byte_ms",
                leg.first_byte.map(|time| micros(time) as f64 / 1e3).map(Value::from),
            ),
            ("prompt_tokens", leg.told.prompt_tokens.map(Value::from)),
            ("cached_tokens", leg.told.cached_tokens.map(Value::from)),
            ("blocks", leg.told.blocks.map(Value::from)),
        ];
        for (key, value) in told {
            value.into_iter().for_each(|value| args[key] = value);
        }
        trace.span(pid, ts, micros(end.saturating_sub(leg.start)), &one.id, role, args);
    }
    let mut events = trace.names;
    events.extend(trace.events.iter().filter_map(|event| serde_json::to_value(event).ok()));
    json!({"traceEvents": events, "displayTimeUnit": "ms"})
}

#[cfg(test)]
mod tests {
    use super::super::tests::timeline;
    use super::*;

    /// Checks what the format's document requires of complete events and metadata.
    fn check(trace: &Value) -> Vec<&Value> {
        let events = trace["traceEvents"].as_array().unwrap();
        let mut named = std::collections::HashSet::new();
        let mut spans: HashMap<(u64, u64), Vec<(u64, u64)>> = HashMap::new();
        for event in events {
            let pid = event["pid"].as_u64().unwrap();
            assert!(event["name"].is_string() && event["args"].is_object(), "{event}");
            match event["ph"].as_str().unwrap() {
                "M" => _ = named.insert(pid),
                "X" => {
                    let number =
                        |key: &str| event[key].as_u64().unwrap_or_else(|| panic!("{event}"));
                    assert!(event["cat"].is_string());
                    assert!(number("ts") > 1_600_000_000_000_000, "since 1970: {event}");
                    let span = (number("ts"), number("ts") + number("dur"));
                    spans.entry((pid, number("tid"))).or_default().push(span);
                }
                other => panic!("{other}"),
            }
        }
        for ((pid, _), spans) in &spans {
            assert!(named.contains(pid), "a process without a name");
            for (at, one) in spans.iter().enumerate() {
                for other in &spans[at + 1..] {
                    let apart = one.1 <= other.0 || other.1 <= one.0;
                    let within = (one.0 <= other.0 && other.1 <= one.1)
                        || (other.0 <= one.0 && one.1 <= other.1);
                    assert!(apart || within, "spans of a thread cross: {one:?} {other:?}");
                }
            }
        }
        events.iter().filter(|event| event["ph"] == "X").collect()
    }

    #[test]
    fn a_trace_has_complete_events_that_nest() {
        let history = History::default();
        for count in 0..40 {
            let mut one = timeline(
                &format!("r{count}"),
                Duration::ZERO,
                Duration::from_millis(5 + count * 7 % 30),
            );
            one.legs.end_answers(one.total);
            if count == 3 {
                (one.first_byte, one.queued) = (None, one.total * 2);
            }
            history.add(one);
        }
        let trace = trace(&history, &history.last(usize::MAX));
        let spans = check(&trace);
        let of = |cat: &str| spans.iter().filter(|span| span["cat"] == cat).count();
        assert_eq!([of("request"), of("queue"), of("answer")], [40, 40, 39]);
        assert_eq!([of("prefill"), of("decode")], [40, 40]);
        let names: Vec<&str> = trace["traceEvents"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|event| event["name"] == "process_name")
            .map(|event| event["args"]["name"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["kvx proxy", "prefill p:1", "decode d:1"]);
        let request = spans.iter().find(|span| span["name"] == "r5").unwrap();
        assert_eq!(request["args"]["outcome"], "ok");
        assert_eq!(
            super::trace(&History::default(), &[])["traceEvents"].as_array().unwrap().len(),
            2
        );
    }
}
