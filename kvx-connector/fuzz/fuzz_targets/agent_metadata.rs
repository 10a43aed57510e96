//! One worker's metadata, in every dialect.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvx_connector::wire::fuzz::agent_metadata(bytes));
