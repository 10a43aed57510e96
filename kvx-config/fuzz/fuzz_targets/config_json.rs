//! JSON text as `--kv-transfer-config` takes it.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvx_config::fuzz::json_text(bytes));
