//! `kv_transfer_params` as JSON, and a streamed answer.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvx_connector::wire::fuzz::params(bytes));
