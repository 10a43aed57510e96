//! Shared memory between processes of one host and one user.
//!
//! No process writes into memory of another: the initiator of a read copies from the owner's memory
//! into its own, and the target's thread pulls a write. [`messages`] describes the protocol.
//!
//! The modules form layers, from the lowest to the highest; a module imports only from earlier
//! ones:
//!
//! 1. values: `error`, `config`, `host`, `address`, [`messages`];
//! 2. memory and copying: `memory`, `copy`, `completion`, `copy_threads`;
//! 3. sockets and connections: `socket`, `window`, `shared_link`, `writes`, `lent`, `connection`;
//! 4. transfers: `inline`, `flights`, `work`; memory of devices: `openings`;
//! 5. the machine: `machine`, and its parts in `handshake`, `grants`, `reads`, `pulls`,
//!    `flight_turns`, `opening_turns`, `notices` and `disconnect`;
//! 6. the handles and the thread: `progress`, `endpoint`, `link`, `transport`.

mod address;
mod completion;
mod config;
mod connection;
mod copy;
mod copy_threads;
mod disconnect;
mod endpoint;
mod error;
mod flight_turns;
mod flights;
pub(crate) mod fuzz;
mod grants;
mod handshake;
mod host;
#[cfg(test)]
mod hostile;
mod inline;
mod lent;
mod link;
mod machine;
mod memory;
mod messages;
mod notices;
mod opening_turns;
mod openings;
#[cfg(test)]
mod pair;
mod progress;
mod pulls;
mod reads;
mod shared_link;
mod socket;
mod transport;
mod window;
mod work;
mod writes;

pub use transport::Shm;
