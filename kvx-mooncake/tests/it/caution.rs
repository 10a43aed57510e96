//! Tests that each agent logs a warning that the engine accepts everyone, with the address at which
//! it listens.

use std::fmt::{Debug, Write as _};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvx_core::{Agent, Options};
use kvx_testkit::test;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::adapter;

const CUT_OFF: Duration = Duration::from_secs(10);

/// The logged warnings, a line each.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<String>>);

struct Line<'a>(&'a mut String);

impl Visit for Line<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, "{field}={value:?} ").unwrap();
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut said = self.0.lock().unwrap();
        event.record(&mut Line(&mut said));
        said.push('\n');
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test(own_process)]
fn each_agent_warns_that_the_engine_accepts_everyone() {
    const TEST: &str = "each_agent_warns_that_the_engine_accepts_everyone";
    if adapter::or_skip(TEST).is_none() {
        return;
    }
    let said = Warnings::default();
    tracing::subscriber::set_global_default(said.clone()).unwrap();
    let agents = ["decode", "prefill"].map(|name| {
        let options = Options::parse(r#"{"mooncake_protocol": "tcp"}"#).unwrap();
        let builder = Agent::builder(name).backends(["MOONCAKE"]).options(options);
        (name, builder.registry(adapter::registry("")).build().unwrap())
    });
    for (name, agent) in &agents {
        let address = String::from_utf8(agent.foreign_metadata("MOONCAKE").unwrap()).unwrap();
        let lines = said.0.lock().unwrap().clone();
        let of_agent = |line: &&str| line.contains(name) && line.contains(&address);
        let lines: Vec<_> = lines.lines().filter(of_agent).collect();
        assert_eq!(lines.len(), 1, "one line of {name} at {address}: {lines:?}");
        for part in ["all interfaces", "without authentication"] {
            assert!(lines[0].contains(part), "{part} is not in {}", lines[0]);
        }
    }
    for (_, agent) in &agents {
        agent.shutdown(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
    }
}
