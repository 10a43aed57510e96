//! A request on the side channel, in different envelopes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvx_connector::wire::fuzz::handshake_request(bytes));
