//! TCP: between hosts, and between processes that share no memory.
//!
//! The modules form layers. Each imports from its own layer and from those above it in this list,
//! never from one below:
//!
//! 1. `error`, `address`, `seal`, `config`: values without state. `limit`: the number of peers'
//!    connections.
//! 2. [`socket`]: system calls, the listener, readiness, and the pieces of memory that one call
//!    moves.
//! 3. [`frames`]: the wire format, the handshake, and the buffers that frames are read from and
//!    written to.
//! 4. [`memory`]: registered regions, blocks as sources and sinks of payload, and completions that
//!    wait until nothing touches their memory any more; `context` and `region` build on it.
//! 5. [`connections`]: one socket with its frames, as a lane of either end.
//! 6. [`links`]: the lanes to one peer, and the transfers and notifications on them.
//! 7. [`machine`]: all links and connections of an agent, served in bounded turns.
//! 8. `link`, `transport`: core's traits on a handle of the machine.

mod address;
mod config;
mod connections;
mod context;
mod error;
mod frames;
pub(crate) mod fuzz;
mod limit;
mod link;
mod links;
mod machine;
mod memory;
mod region;
mod seal;
#[cfg(test)]
mod sim;
mod socket;
mod transport;

pub use transport::Tcp;
