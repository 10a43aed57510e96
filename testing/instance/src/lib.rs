//! An instance of a prefill/decode fleet without a model, as a process of its own, for tests of
//! routers.
//!
//! It speaks OpenAI's API and vLLM's `kv_transfer_params` (NixlConnector pull and push,
//! MooncakeConnector with its bootstrap server, bidirectional). What stops the engine of a vLLM
//! 0.33 stops it too, and is a *violation*, which the test asks for. A decode instance really
//! fetches the blocks from the prefill instance that its parameters name, and its answer comes from
//! what it has fetched: wrong blocks are a wrong answer. A prefill instance counts the blocks that
//! nobody read. It reads the parameters with code of its own, so that a router is not checked by
//! the parser that it uses itself.
//!
//! The process is the test program again: its `main` begins with [`run_if_asked`].
//! [`Instance::start`] starts one.

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
