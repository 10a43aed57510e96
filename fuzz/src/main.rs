//! Fuzz targets for all bytes that kvx reads from others, run by libFuzzer. `KVX_FUZZ` selects the
//! target.
//!
//! Each crate lists its targets in a hidden module `fuzz` and replays `corpus/` in its tests.
//! `cargo xtask fuzz` builds this program with AddressSanitizer and runs it.
#![no_main]

use std::sync::OnceLock;

/// The targets of each crate: a name, and the function that takes the input.
const TARGETS: &[&[(&str, fn(&[u8]))]] = &[
    kvx_core::fuzz::TARGETS,
    kvx_backend::fuzz::TARGETS,
    kvx_native::fuzz::TARGETS,
    kvx_vllm::events::fuzz::TARGETS,
    kvx_vllm::config::fuzz::TARGETS,
    kvx_vllm::wire::fuzz::TARGETS,
    kvx_vllm::zmtp::fuzz::TARGETS,
    kvx_vllm::group::fuzz::TARGETS,
    kvx_connector::fuzz::TARGETS,
    kvx_gpu::fuzz::TARGETS,
    kvx_proxy::fuzz::TARGETS,
    kvx_paged_llama::fuzz::TARGETS,
];

#[global_allocator]
static ALLOCATOR: kvx_testkit::CountingAllocator = kvx_testkit::CountingAllocator;

static CHOSEN: OnceLock<(&str, fn(&[u8]))> = OnceLock::new();

fn chosen() -> (&'static str, fn(&[u8])) {
    let name = std::env::var("KVX_FUZZ").unwrap_or_default();
    let found = TARGETS.iter().copied().flatten().find(|(known, _)| *known == name);
    match found {
        Some(target) => *target,
        None => {
            eprintln!("KVX_FUZZ={name:?} is not a fuzz target; set it to one of:");
            TARGETS.iter().copied().flatten().for_each(|(known, _)| eprintln!("{known}"));
            std::process::exit(2);
        }
    }
}

libfuzzer_sys::fuzz_target!(
    init: {
        CHOSEN.get_or_init(chosen);
    },
    |bytes: &[u8]| {
        let (name, target) = *CHOSEN.get_or_init(chosen);
        kvx_testkit::within_limits(name, target, bytes);
    }
);
