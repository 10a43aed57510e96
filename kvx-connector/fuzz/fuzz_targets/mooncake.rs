//! The MooncakeConnector's two messages.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvx_connector::wire::fuzz::mooncake(bytes));
