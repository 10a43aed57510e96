//! The MooncakeConnector's half of a worker: a decode asks for blocks, a prefill writes them.
//!
//! Both legs of a request come at once, and a transfer's name is all that they share. The decode worker finds the
//! prefill's workers by a bootstrap server ([`MooncakeAction::Query`]), and asks each that holds a part of its blocks
//! ([`MooncakeAction::Ask`]). The prefill worker keeps what it is asked for until the request has been computed, writes
//! it into the decode's memory ([`MooncakeAction::Write`]), and answers.
//!
//! The scheduler's half is the one [`Scheduler`](super::Scheduler), told of requests by
//! [`on_new_transfer`](super::Scheduler::on_new_transfer); messages, outcomes and the aggregator are the same too.
//!
//! Before vLLM 0.16 ([`Bootstrap::Without`]) a decode comes after its prefill, which has answered where it listens, and
//! asks its worker of the same rank. Only that and the question differ: [`older_asked_for`], [`older_answered_with`].
//!
//! [`older_asked_for`]: MooncakeWorker::older_asked_for
//! [`older_answered_with`]: MooncakeWorker::older_answered_with
//!
//! What differs from vLLM's own, and why:
//!
//! - a prefill that ends without its blocks says so at once to who waits for them, and to who asks later;
//! - what waits is a record, bounded in number and bytes, and holds no worker;
//! - a decode that gives up takes its blocks back only when nobody writes into them any more: every worker that was
//!   asked has said so, or they were fenced off;
//! - a question names the engine that it is for, and a kvx worker of another engine refuses it.

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
