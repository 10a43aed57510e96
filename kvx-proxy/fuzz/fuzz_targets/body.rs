//! The body of a completion.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvx_proxy::fuzz::body(bytes));
