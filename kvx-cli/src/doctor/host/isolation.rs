//! Containers, namespaces, and what processes may do to each other.

use std::path::Path;

use super::super::finding::Finding;
use super::system::{read, variable};

/// The bit of the capability `CAP_SYS_PTRACE`.
const SYS_PTRACE: u32 = 19;

pub(super) fn examine() -> Vec<Finding> {
    let status = read("/proc/self/status").unwrap_or_default();
    vec![
        other_memory(read("/proc/sys/kernel/yama/ptrace_scope").as_deref(), may_trace(&status)),
        container(is_container()),
    ]
}

/// Returns whether this process may look into others, whatever Yama says.
fn may_trace(status: &str) -> bool {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    effective.is_some_and(|bits| bits >> SYS_PTRACE & 1 == 1)
}

fn other_memory(scope: Option<&str>, may_trace: bool) -> Finding {
    let topic = "memory of other processes";
    match scope {
        None | Some("0") => Finding::ok(topic, "SHM may read it, for processes of one user"),
        Some("1" | "2") if may_trace => {
            Finding::ok(topic, "SHM may read it: this process has CAP_SYS_PTRACE")
        }
        Some(scope) => Finding::warning(topic, format!("kernel.yama.ptrace_scope is {scope}"))
            .because(
                "SHM cannot read memory that an engine has adopted, such as vLLM's: such blocks \
                 take TCP on one host (kvx's own pools are not affected)",
            )
            .cure(
                "`sysctl kernel.yama.ptrace_scope=0` on the host, or give the engines \
                 CAP_SYS_PTRACE",
            ),
    }
}

fn is_container() -> bool {
    variable("KUBERNETES_SERVICE_HOST").is_some()
        || ["/.dockerenv", "/run/.containerenv"].iter().any(|mark| Path::new(mark).exists())
        || read("/proc/1/environ").is_some_and(|environ| environ.contains("container="))
}

fn container(is_container: bool) -> Finding {
    let space = |name: &str| {
        let link = std::fs::read_link(format!("/proc/self/ns/{name}")).ok()?;
        Some(link.to_string_lossy().split(['[', ']']).nth(1)?.to_owned())
    };
    let spaces = ["net", "pid", "ipc"]
        .map(|name| format!("{name} {}", space(name).unwrap_or_else(|| "unknown".to_owned())));
    let what = format!("namespaces: {}", spaces.join(", "));
    match is_container {
        true => Finding::note("container", format!("this is one; {what}")).because(
            "SHM reaches engines that share the network namespace (one pod, `hostNetwork`, \
             `--network=container:...`), and adopted memory also needs one process namespace \
             (`hostPID`, `shareProcessNamespace`); compare the numbers in both containers",
        ),
        false => Finding::ok("container", format!("this is none; {what}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::finding::Level;
    use super::*;

    #[test]
    fn yama_is_a_warning_unless_the_process_may_trace() {
        assert_eq!(other_memory(None, false).level, Level::Ok);
        assert_eq!(other_memory(Some("0"), false).level, Level::Ok);
        assert_eq!(other_memory(Some("1"), true).level, Level::Ok);
        for (scope, may_trace) in [("1", false), ("2", false), ("3", true)] {
            assert_eq!(other_memory(Some(scope), may_trace).level, Level::Warning, "{scope}");
        }
        assert!(may_trace("Name:\tkvx\nCapEff:\t0000000000080000\n"));
        assert!(!may_trace("CapEff:\t0000000000000000"));
    }

    #[test]
    fn a_container_says_what_shm_needs() {
        let inside = container(true);
        assert_eq!(inside.level, Level::Note);
        assert!(inside.what.contains("net 4"), "{inside:?}");
        assert!(inside.why.unwrap().contains("hostNetwork"));
        assert_eq!(container(false).level, Level::Ok);
    }
}
