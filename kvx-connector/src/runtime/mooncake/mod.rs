//! The MooncakeConnector's side of the runtime: a bootstrap server, a ROUTER for each worker of a
//! prefill, questions of a decode, and writes into what it grants.
//!
//! Before vLLM 0.16 there is no bootstrap server: a worker's port follows from its rank, and REQ
//! sockets ask it.
//!
//! Toward kvx all of kvx's backends carry the blocks: a decode tells how its agent is reached, and
//! for each request a region that is written to by a key of its own, whose end is the end of all
//! writes. Toward a plain Mooncake agent, as vLLM's workers are, `MOONCAKE` carries them, by
//! address.
//!
//! Layers, lowest to highest: `http`, `proof`, `client`, `bootstrap`; `askers`, `idle_clients`,
//! `route`, `channels` and `state`, which the connector holds; `connect`, `pull`, `announce` and
//! `channel`, which do what the workers ask for.

mod announce;
mod askers;
mod bootstrap;
mod channel;
mod channels;
mod client;
mod connect;
mod http;
mod idle_clients;
mod proof;
mod pull;
mod route;
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
