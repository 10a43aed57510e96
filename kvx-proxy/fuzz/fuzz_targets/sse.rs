//! A stream of events, as it passes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvx_proxy::fuzz::sse(bytes));
