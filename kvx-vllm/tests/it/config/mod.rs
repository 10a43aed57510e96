//! The integration tests of the configuration.

mod arguments;
mod environment;
mod fuzz;
mod properties;
mod report;
mod transfer_config;

/// The command of the guide's example that selects LIBFABRIC.
const LIBFABRIC_COMMAND: [&str; 9] = [
    "vllm",
    "serve",
    "MODEL",
    "--kv-transfer-config.kv_connector",
    "NixlConnector",
    "--kv-transfer-config.kv_role",
    "kv_both",
    "--kv-transfer-config.kv_connector_extra_config.backends+",
    "LIBFABRIC",
];
