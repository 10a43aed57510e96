//! The integration tests of the configuration.

mod arguments;
mod environment;
mod fuzz;
mod properties;
mod report;
mod transfer_config;
