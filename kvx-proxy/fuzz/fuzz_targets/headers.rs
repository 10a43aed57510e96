//! A client's headers.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvx_proxy::fuzz::headers(bytes));
