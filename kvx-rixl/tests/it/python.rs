//! A NIXL agent in Python that follows commands.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use kvx_testkit::{Child, unhex};
use serde_json::{Value, json};

/// The time limit for an answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// The program; killed when dropped.
pub(crate) struct Python {
    process: Child,
    /// The addresses of its regions.
    pub(crate) at: Vec<u64>,
    pub(crate) metadata: Vec<u8>,
}

impl Python {
    /// Starts an agent with regions of these sizes.
    pub(crate) fn start(python: &Path, name: &str, regions: &[usize]) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/nixl_agent.py");
        let mut command = Command::new(python);
        command.arg(script);
        // The tests themselves check how peers end, so NIXL and UCX need not log it.
        command.envs([("NIXL_LOG_LEVEL", "fatal"), ("UCX_LOG_LEVEL", "fatal")]);
        let process = Child::start(command).expect("the wheel's Python starts");
        let mut agent = Python { process, at: Vec::new(), metadata: Vec::new() };
        let started = agent.ask(json!({"do": "start", "name": name, "regions": regions}));
        agent.metadata = unhex(started["metadata"].as_str().expect("text"));
        agent.at = started["at"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|at| at.as_u64().expect("a number"))
            .collect();
        agent
    }

    /// Registers one more region in it, and gets its new metadata.
    pub(crate) fn registers_more(&mut self, size: usize) {
        let more = self.ask(json!({"do": "more", "size": size}));
        self.metadata = unhex(more["metadata"].as_str().expect("text"));
        self.at.push(more["at"].as_u64().expect("a number"));
    }

    pub(crate) fn tell(&mut self, order: Value) {
        self.process.say(&order.to_string()).expect("the agent listens");
    }

    pub(crate) fn hear(&mut self) -> Value {
        let answer = self.process.hear(PATIENCE).expect("the agent answers");
        serde_json::from_str(&answer).expect("the agent answers in JSON")
    }

    /// Returns its next message, if there is one by now.
    pub(crate) fn heard(&mut self) -> Option<Value> {
        let answer = self.process.heard().expect("the agent runs")?;
        Some(serde_json::from_str(&answer).expect("the agent answers in JSON"))
    }

    pub(crate) fn ask(&mut self, order: Value) -> Value {
        self.tell(order);
        self.hear()
    }

    /// Returns whether blocks of a region have the expected content: to, from, length.
    pub(crate) fn holds(&mut self, region: usize, seed: u64, blocks: &[(u64, u64, u64)]) -> bool {
        self.ask(json!({"do": "check", "region": region, "seed": seed, "blocks": blocks}))["right"]
            == json!(true)
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().expect("it runs");
    }
}
