//! Messages of the protocol: what is written, and what is read of any bytes.

mod fuzz;
mod handshake;
mod notifications;
mod steps;
