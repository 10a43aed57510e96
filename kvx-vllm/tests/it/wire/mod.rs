//! Messages of the protocol: encoding, and decoding of arbitrary bytes.

mod fuzz;
mod handshake;
mod memory;
mod notifications;
mod steps;
