//! An answer on the side channel.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvx_connector::wire::fuzz::handshake_payload(bytes));
