//! The adapter over Mooncake's wheel, as `cargo xtask peers mooncake` builds it in the target
//! directory.

use std::path::PathBuf;

use kvx_core::Registry;
use kvx_mooncake::Mooncake;

const ADAPTER: &str = "peers/mooncake/libkvx_mooncake_adapter.so";

/// Returns the adapter if it is built: this program is in the target directory as well.
pub(crate) fn adapter() -> Option<PathBuf> {
    let program = std::env::current_exe().expect("the program's path is known");
    program.ancestors().map(|folder| folder.join(ADAPTER)).find(|file| file.exists())
}

/// Returns the adapter, or skips the test.
#[allow(dead_code, reason = "each test program uses its part")]
pub(crate) fn or_skip(test: &str) -> Option<PathBuf> {
    let found = adapter();
    if found.is_none() {
        let why = "Mooncake's wheel and the adapter are not installed";
        kvx_testkit::skip(test, why, "cargo xtask peers mooncake");
    }
    found
}

/// Returns a registry with MOONCAKE alone, over the adapter unless `KVX_MOONCAKE_LIB` names another
/// library.
pub(crate) fn registry(_: &str) -> Registry {
    let mut registry = Registry::new();
    registry.add(Mooncake::new().or_files(adapter())).expect("one name");
    registry
}
