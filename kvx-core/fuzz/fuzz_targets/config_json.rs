//! JSON text as `--kv-transfer-config` takes it.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvx_core::config::fuzz::json_text(bytes));
