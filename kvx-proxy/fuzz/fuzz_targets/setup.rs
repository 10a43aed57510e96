//! A set-up file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvx_proxy::fuzz::setup(bytes));
