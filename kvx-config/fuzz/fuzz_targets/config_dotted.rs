//! A command line, one argument a line.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvx_config::fuzz::dotted(bytes));
