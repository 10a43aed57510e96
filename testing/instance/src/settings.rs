//! The settings, scripts and reports that a test exchanges with an instance.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The vLLM connector of an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Connector {
    /// NixlConnector: the decode reads.
    #[default]
    Pull,
    /// NixlPushConnector: the prefill writes to decodes that have registered.
    Push,
    /// MooncakeConnector: the prefill writes; a bootstrap server lists it, and its answers have no
    /// parameters.
    Mooncake,
}

/// The settings of an instance.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// The port; 0 for any.
    pub port: u16,
    /// The connector.
    pub connector: Connector,
    /// The names of its models, the primary one first.
    pub models: Vec<String>,
    /// Makes decodes keep their blocks for the next turn, and return parameters for them.
    pub bidirectional: bool,
    /// The number of data-parallel ranks.
    pub dp_size: u32,
    /// The time that blocks wait for their reader, in milliseconds: `kv_lease_duration`.
    pub lease_ms: u64,
    /// The time for which a decode retries the handshake, in milliseconds; vLLM's is 5 s.
    pub handshake_ms: u64,
    /// The key that clients must send.
    pub api_key: Option<String>,
    /// The speed of the instance.
    pub delays: Delays,
    /// Makes decodes fetch blocks. If false, the answer comes from the prompt, for measurements.
    pub fetches: bool,
    /// The number of requests to keep for [`InstanceReport::seen`].
    pub keeps: usize,
    /// Reports each completion that it begins.
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

/// The speed of an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Delays {
    /// Milliseconds per prefill.
    pub prefill_ms: u64,
    /// Milliseconds before each token of a decode.
    pub token_ms: u64,
}

/// The kind of a request that a fault applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Leg {
    /// Prefills for another instance.
    Prefill,
    /// Decodes of prompts that another instance has prefilled.
    Decode,
    /// Requests that the instance serves alone.
    Alone,
}

/// The failure of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Fault {
    /// The instance answers at once with this status and an error in OpenAI's form, and does no
    /// work.
    Status(u16),
    /// The instance accepts the request, works, and closes the connection before the first byte.
    CloseFirst,
    /// The instance accepts the request, works, and never answers.
    HangFirst,
    /// The stream hangs after this number of tokens.
    HangAfter(u32),
    /// The stream ends after this number of tokens, without the end of its body.
    CloseAfter(u32),
    /// The stream sends `error` after this number of tokens, as vLLM does, and ends properly.
    ErrorAfter(u32),
    /// After this number of tokens, the bytes of a token are sent in two pieces, divided within a
    /// character; then the stream continues.
    SplitCharacter(u32),
    /// The token is divided likewise, and then the stream hangs.
    HangInCharacter(u32),
    /// The token is divided likewise, and then the connection closes.
    CloseInCharacter(u32),
    /// The answer to a prefill is wrong.
    Wrong(WrongAnswer),
}

/// A wrong answer to a prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WrongAnswer {
    /// Without `remote_request_id`, which stops the receiver's engine.
    NoRequestId,
    /// With block ids in one flat list, as vLLM 0.16 answers, which stops the receiver's engine.
    FlatBlocks,
    /// With both flags true.
    BothFlags,
    /// With parameters that are not an object.
    NoObject,
    /// With status 200 and an error in the body.
    ErrorWith200,
    /// With status 200 and a body that is not JSON.
    NoJson,
    /// With status 200 and an empty body.
    Empty,
    /// With the address of another host, at which no process listens.
    OtherHost,
    /// With a body of 64 MiB.
    Huge,
}

/// A fault for the next requests of a kind.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Script {
    /// The kind of the requests; `None` for all.
    pub leg: Option<Leg>,
    /// The number of requests that fail.
    pub times: u32,
    /// The fault.
    pub fault: Fault,
}

/// A request as it arrived.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Seen {
    /// Its method.
    pub method: String,
    /// Its path and query.
    pub path: String,
    /// Its HTTP version, such as `HTTP/1.1`.
    pub version: String,
    /// Its headers, with lower-case names.
    pub headers: BTreeMap<String, String>,
    /// Its body if that is JSON, else null.
    pub body: Value,
    /// Its kind, if it was a completion.
    pub leg: Option<Leg>,
}

/// A completion that an instance has begun, while its router waits.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Begun {
    /// Its `X-Request-Id`.
    pub id: String,
    /// Its kind.
    pub leg: Leg,
    /// The time when it began, by the [clock](now) that all processes of this machine share.
    pub at: Duration,
}

/// Returns the time since this machine started.
pub fn now() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// The counts of an instance since it started.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct InstanceReport {
    /// Completed prefills for other instances.
    pub prefills: u64,
    /// Completed decodes with another instance's blocks.
    pub decodes: u64,
    /// Completed requests that it served alone.
    pub alone: u64,
    /// Prefills that ended because the router disconnected; their blocks are free at once.
    pub aborted_prefills: u64,
    /// Decodes and requests served alone that ended because the router disconnected.
    pub aborted_decodes: u64,
    /// Running requests.
    pub running: u64,
    /// Prefills whose blocks were read.
    pub read: u64,
    /// Prefills whose blocks wait for their reader.
    pub pinned: u64,
    /// Prefills whose blocks were not read before their lease ended.
    pub expired: u64,
    /// Prefills that loaded the blocks of the previous turn.
    pub turns_loaded: u64,
    /// Requests to its bootstrap server.
    pub queries: u64,
    /// Requests to `/health`.
    pub health_looks: u64,
    /// Open connections.
    pub connections: u64,
    /// Requests, the oldest first, at most as many as the settings allow.
    pub seen: Vec<Seen>,
}

/// A command of a test to an instance, one per line.
#[derive(Serialize, Deserialize)]
pub(crate) enum Command {
    Script(Script),
    ClearScripts,
    Delays(Delays),
    /// The status of `/health`, or `None` to hang.
    Health(Option<u16>),
    /// True to listen.
    Listen(bool),
    Report,
}

/// A message of an instance, one per line.
#[derive(Serialize, Deserialize)]
pub(crate) enum Line {
    /// `bootstrap` is 0 if there is no bootstrap server.
    Listening {
        port: u16,
        bootstrap: u16,
    },
    Done,
    Report(Box<InstanceReport>),
    Violation(String),
    Begun(Begun),
}
