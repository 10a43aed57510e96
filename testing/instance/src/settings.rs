//! What a test sets, scripts and is told: the words between it and an instance.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Which of vLLM's connectors an instance has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Connector {
    /// NixlConnector: the decode side reads.
    #[default]
    Pull,
    /// NixlPushConnector: the prefill side writes to who has registered.
    Push,
    /// MooncakeConnector: as push, found by a bootstrap server, without parameters in the answer.
    Mooncake,
}

/// How an instance is set up.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Where it serves; 0: any port.
    pub port: u16,
    /// Its connector.
    pub connector: Connector,
    /// The models that it serves; the first is the one it says it is.
    pub models: Vec<String>,
    /// Whether a decode leg keeps its blocks for the next turn and says so.
    pub bidirectional: bool,
    /// Its data parallel ranks.
    pub dp_size: u32,
    /// How long blocks wait for their reader, in milliseconds: `kv_lease_duration`.
    pub lease_ms: u64,
    /// How long a decode leg asks another side again that does not let it in, before it gives up;
    /// vLLM's is 5 s.
    pub handshake_ms: u64,
    /// The key that clients must send.
    pub api_key: Option<String>,
    /// How fast it is.
    pub delays: Delays,
    /// Whether a decode leg fetches blocks at all. Without, the answer comes from the prompt: for
    /// measurements.
    pub fetches: bool,
    /// How many requests it keeps for [`InstanceReport::seen`].
    pub keeps: usize,
    /// Whether it tells of each completion that it begins with.
    pub tells: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            port: 0,
            connector: Connector::Pull,
            models: vec!["m".to_owned()],
            bidirectional: false,
            dp_size: 1,
            lease_ms: 30_000,
            handshake_ms: 300,
            api_key: None,
            delays: Delays::default(),
            fetches: true,
            keeps: 1000,
            tells: false,
        }
    }
}

/// How fast an instance is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Delays {
    /// Milliseconds of a prefill.
    pub prefill_ms: u64,
    /// Milliseconds before each token of a decode.
    pub token_ms: u64,
}

/// Which requests a fault is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Leg {
    /// Prefills for another instance.
    Prefill,
    /// Decodes of what another instance has prefilled.
    Decode,
    /// Requests that it serves alone.
    Alone,
}

/// What goes wrong with a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Fault {
    /// It answers at once with this status and an error in OpenAI's form, and does no work.
    Status(u16),
    /// It takes the request, works, and closes the connection before its first byte.
    CloseFirst,
    /// It takes the request, works, and never answers.
    HangFirst,
    /// A stream that never goes on after so many tokens.
    HangAfter(u32),
    /// A stream that ends after so many tokens, without an end of its body.
    CloseAfter(u32),
    /// A stream that says `error` after so many tokens, as vLLM does, and ends well.
    ErrorAfter(u32),
    /// After so many tokens, a token's bytes come in two pieces with the cut within a character;
    /// then it goes on.
    SplitCharacter(u32),
    /// The same, and then it hangs.
    HangInCharacter(u32),
    /// The same, and then it closes the connection.
    CloseInCharacter(u32),
    /// A prefill's answer is wrong.
    Wrong(WrongAnswer),
}

/// How a prefill's answer is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WrongAnswer {
    /// No `remote_request_id`: stops the engine of who gets it.
    NoRequestId,
    /// Block ids in one flat list: stops the engine of who gets it. What vLLM 0.16 answers.
    FlatBlocks,
    /// Both flags true.
    BothFlags,
    /// Parameters that are no object.
    NoObject,
    /// Status 200 and an error in the body.
    ErrorWith200,
    /// Status 200 and a body that is no JSON.
    NoJson,
    /// Status 200 and an empty body.
    Empty,
    /// Another host than its own, at which nobody listens.
    OtherHost,
    /// A body of 64 MiB.
    Huge,
}

/// A fault for the next requests of a kind.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Script {
    /// For these requests only.
    pub leg: Option<Leg>,
    /// For so many of them.
    pub times: u32,
    /// What goes wrong.
    pub fault: Fault,
}

/// A request as it came.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Seen {
    /// Its method.
    pub method: String,
    /// Its path and query.
    pub path: String,
    /// Its HTTP version, as `HTTP/1.1`.
    pub version: String,
    /// Its headers, names in small letters.
    pub headers: BTreeMap<String, String>,
    /// Its body if that is JSON, else null.
    pub body: Value,
    /// What it was, if it was a completion.
    pub leg: Option<Leg>,
}

/// A completion that an instance begins with, while its router waits for it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Begun {
    /// Its `X-Request-Id`.
    pub id: String,
    /// What it is.
    pub leg: Leg,
    /// When it began, by the [clock](now) of all processes of this machine.
    pub at: Duration,
}

/// The time since this machine has started.
pub fn now() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// What an instance has counted since it started.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct InstanceReport {
    /// Prefills for others that were completed.
    pub prefills: u64,
    /// Decodes that got another's blocks and were completed.
    pub decodes: u64,
    /// Requests that it completed alone.
    pub alone: u64,
    /// Prefills that ended because the router went away: their blocks are free at once.
    pub aborted_prefills: u64,
    /// Decodes and requests alone that ended because the router went away.
    pub aborted_decodes: u64,
    /// Requests that it works on.
    pub running: u64,
    /// Prefills whose blocks were read.
    pub read: u64,
    /// Prefills whose blocks wait for their reader.
    pub pinned: u64,
    /// Prefills whose blocks nobody read before their lease ended.
    pub expired: u64,
    /// Prefills that loaded the blocks of the turn before.
    pub turns_loaded: u64,
    /// Questions to its bootstrap server.
    pub queries: u64,
    /// Looks at its health.
    pub health_looks: u64,
    /// Open connections.
    pub connections: u64,
    /// Requests, the oldest first, at most as many as the settings say.
    pub seen: Vec<Seen>,
}

/// What a test says to an instance, a line each.
#[derive(Serialize, Deserialize)]
pub(crate) enum Command {
    Script(Script),
    ClearScripts,
    Delays(Delays),
    /// The status of `/health`, or none to hang.
    Health(Option<u16>),
    /// Whether it listens.
    Listen(bool),
    Report,
}

/// What an instance says, a line each.
#[derive(Serialize, Deserialize)]
pub(crate) enum Line {
    /// Bootstrap: 0 if there is none.
    Listening {
        port: u16,
        bootstrap: u16,
    },
    Done,
    Report(Box<InstanceReport>),
    Violation(String),
    Begun(Begun),
}
