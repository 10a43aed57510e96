//! Runs the conformance suite over Mooncake's TCP, except for gaps of its engine: every clause, in
//! one process and in two.

use kvx_testkit::{Gap, GapRate, Suite};

const TCP: Suite = Suite {
    options: r#"{"mooncake": {"mooncake_protocol": "tcp"}}"#,
    gaps: &[Gap {
        clause: "P9",
        reason: "an engine that was written to while it had no descriptor takes no write afterwards: with \
                 descriptors again they ended `TimedOut` in 5 of 5 runs of 0.3.13 (what heals it was not looked for)",
        rate: GapRate::Mostly,
    }],
    ..Suite::over("MOONCAKE")
};

pub(crate) fn suites() -> [Suite; 4] {
    let namespace = Suite { label: "MOONCAKE-namespace", ..TCP }.in_another_namespace();
    let user = Suite { label: "MOONCAKE-user", ..TCP }.as_another_user();
    let hosts = Suite {
        label: "MOONCAKE-hosts",
        options: r#"{"mooncake": {"mooncake_protocol": "tcp", "host": "{address}"}}"#,
        ..TCP
    };
    [TCP, namespace, user, hosts.on_two_hosts()]
}
