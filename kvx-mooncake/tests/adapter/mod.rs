//! The adapter over Mooncake's wheel, as `cargo xtask peers mooncake` builds it below the target directory.

use std::path::PathBuf;

use kvx_core::Registry;
use kvx_mooncake::Mooncake;

const ADAPTER: &str = "peers/mooncake/libkvx_mooncake_adapter.so";

/// The adapter, if it is there: this program lies below the target directory as well.
pub(crate) fn adapter() -> Option<PathBuf> {
    let program = std::env::current_exe().expect("a program knows where it lies");
    program.ancestors().map(|folder| folder.join(ADAPTER)).find(|file| file.exists())
}

/// MOONCAKE alone, over the adapter unless `KVX_MOONCAKE_LIB` names another library.
pub(crate) fn registry(_: &str) -> Registry {
    let mut registry = Registry::new();
    registry.add(Mooncake::new().or_files(adapter())).expect("one name");
    registry
}
