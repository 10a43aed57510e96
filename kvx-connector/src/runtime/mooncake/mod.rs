//! The MooncakeConnector's part of the runtime: a bootstrap server, a ROUTER for each worker of a
//! prefill, the questions of a decode, and writes into the memory that it grants.
//!
//! The protocol before vLLM 0.16 has no bootstrap server. A worker's port follows from its rank,
//! and REQ sockets ask it.
//!
//! Between kvx engines any backend of kvx carries the blocks. The decode sends its agent's metadata
//! and, for each request, a region with a separate key. Revoking that region ends all writes. To a
//! plain Mooncake agent, as in vLLM's workers, the backend `MOONCAKE` writes by address.
//!
//! Layers, lowest to highest: `http`, `client`, `bootstrap`; `session`, `prefill_connection`;
//! `askers`, `idle_clients`, `route`, `channels` and `state`, which the connector holds; `connect`,
//! `pull`, `announce` and `channel`, which do what the workers ask for.

mod announce;
mod askers;
mod bootstrap;
mod channel;
mod channels;
mod client;
mod connect;
mod http;
mod idle_clients;
mod prefill_connection;
mod pull;
mod route;
mod session;
mod state;
#[cfg(test)]
mod tests;

pub(super) use self::announce::{announce, own_request};
pub(super) use self::channel::serve;
pub(super) use self::channels::{Channels, Listeners};
pub(super) use self::connect::connect_decode;
pub(super) use self::http::{MAX_HEAD as MAX_HTTP_HEAD, head_len as http_head_len};
pub(super) use self::pull::{Question, pull, query};
pub(super) use self::route::RoutePairs;
pub(super) use self::state::MooncakeState;
