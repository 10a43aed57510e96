//! An instance of a prefill/decode fleet without a model, in a separate process, for tests of
//! routers.
//!
//! It supports OpenAI's API and vLLM's `kv_transfer_params` (NixlConnector pull and push,
//! MooncakeConnector with its bootstrap server, bidirectional). A request that would stop the
//! engine of vLLM 0.33 stops it too, and counts as a *violation*, which the test can query. A
//! decode instance fetches the blocks from the prefill instance that its parameters name, and
//! computes its answer from them: wrong blocks give a wrong answer. A prefill instance counts the
//! blocks that nobody read. It parses the parameters with its own code, so that a router is not
//! tested with its own parser.
//!
//! An instance runs the test program again: its `main` must first call [`run_if_asked`].
//! [`Instance::start`] starts an instance.

#![forbid(unsafe_code)]

mod blocks;
mod call;
mod commands;
mod handle;
mod model;
mod openai;
mod params;
mod serve;
mod settings;
mod state;
mod stream;

pub use commands::run_if_asked;
pub use handle::Instance;
pub use model::{answer_to, count_tokens, piece};
pub use settings::{
    Begun, Connector, Delays, Fault, InstanceReport, Leg, Script, Seen, Settings, WrongAnswer, now,
};
