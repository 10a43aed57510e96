//! The source of the adapter over a wheel's engine. The wheel exports only C++, which a compiler
//! must call.

/// The adapter's source files, in the order of inclusion.
const ADAPTER: [(&str, &str); 3] = [
    ("transfer_engine.h", include_str!("../adapter/transfer_engine.h")),
    ("adapter.h", include_str!("../adapter/adapter.h")),
    ("adapter.cpp", include_str!("../adapter/adapter.cpp")),
];

/// Returns the names of the libraries and their sources. Each is one file of C++17 that includes
/// only system headers.
pub(crate) fn sources() -> [(&'static str, String); 2] {
    let is_ours =
        |line: &str| ADAPTER.iter().any(|(name, _)| line == format!("#include \"{name}\""));
    let lines = ADAPTER.iter().flat_map(|(_, text)| text.lines()).filter(|line| !is_ours(line));
    let adapter = lines.flat_map(|line| [line, "\n"]).collect();
    let etcd = include_str!("../adapter/etcd_stand_in.cpp").to_owned();
    [("libkvx_mooncake_adapter.so", adapter), ("libetcd_wrapper.so", etcd)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sources_include_only_system_headers_and_have_every_function() {
        let [(_, adapter), (_, etcd)] = sources();
        assert!(!adapter.contains("#include \"") && !etcd.contains("#include"));
        for name in ["createTransferEngine", "kvx_mooncake_load", "kvx_mooncake_version"] {
            assert!(adapter.contains(name), "{name}");
        }
    }
}
