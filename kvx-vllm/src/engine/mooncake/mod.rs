//! The worker's side of a MooncakeConnector: a decode asks for blocks, and a prefill writes them.
//!
//! Both legs of a request arrive at the same time, and share only the name of the transfer. The
//! decode worker queries a bootstrap server for the prefill's workers ([`MooncakeAction::Query`]).
//! It sends a pull to each worker that holds a part of its blocks ([`MooncakeAction::Ask`]). The
//! prefill worker keeps the pull until it has computed the request. Then it writes the blocks into
//! the decode's memory ([`MooncakeAction::Write`]) and answers.
//!
//! The scheduler's side is the same [`Scheduler`](super::Scheduler), which receives requests by
//! [`on_new_transfer`](super::Scheduler::on_new_transfer). Messages, outcomes and the aggregator
//! are the same too.
//!
//! Before vLLM 0.16 ([`Bootstrap::Without`]) a decode leg follows its prefill leg, whose answer
//! contains the prefill's address. The decode asks the prefill's worker of its own rank. Only this
//! and the pull's form differ: [`older_asked`], [`older_answered`].
//!
//! [`older_asked`]: MooncakeWorker::older_asked
//! [`older_answered`]: MooncakeWorker::older_answered
//!
//! Differences from vLLM's own connector:
//!
//! - a prefill that ends without its blocks reports that at once to waiting and to later decodes;
//! - a waiting pull is a record, bounded in number and bytes, and does not block a worker;
//! - a decode that gives up frees its blocks only when no peer writes into them any more: every
//!   worker that it asked has confirmed that, or the blocks were fenced;
//! - a pull names the engine that it is for, and a kvx worker of another engine rejects it.

mod action;
mod answers;
mod ask;
mod directory;
mod layouts;
mod older;
mod pull;
mod register;
mod serve;
mod settings;
mod transfers;
mod unheard;
mod worker;

pub use self::action::{AskId, MooncakeAction, PullId, QueryId, Unanswered};
pub use self::layouts::Target;
pub(super) use self::older::older_prefill;
pub use self::register::BootstrapRegister;
pub use self::settings::{Bootstrap, Mooncake};
pub use self::worker::MooncakeWorker;
