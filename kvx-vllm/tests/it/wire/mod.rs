//! Messages of the protocol: encoding, and decoding of arbitrary bytes.

mod fuzz;
mod handshake;
mod notifications;
mod steps;
