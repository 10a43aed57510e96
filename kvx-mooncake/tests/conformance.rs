//! Mooncake over TCP keeps the contract, but for what its engine cannot do: every clause, in one process and in two.

mod adapter;

use std::process::ExitCode;

use kvx_testkit::{Suite, conformance_main};

const TCP: Suite =
    Suite { options: r#"{"mooncake": {"mooncake_protocol": "tcp"}}"#, ..Suite::over("MOONCAKE") };

fn main() -> ExitCode {
    conformance_main(adapter::registry, &[TCP])
}
