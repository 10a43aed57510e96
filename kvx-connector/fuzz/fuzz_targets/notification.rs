//! A notification between engines.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvx_connector::wire::fuzz::notification(bytes));
