//! Tests on each version that UCX's variables mean the same in kvx as in UCX: the user's settings
//! override kvx's defaults, and an option overrides both.

use std::time::{Duration, Instant};

use kvx_core::backend::{Factory as _, MAX_NOTIFICATION};
use kvx_core::{Agent, Grid, Memory, Options, Peer, Plan, Region};
use kvx_testkit::test;

use crate::registry;
use crate::versions::{self, Version};

const PATIENCE: Duration = Duration::from_secs(10);
/// For a whole child, whose waits have their own limits.
const LIMIT: Duration = Duration::from_secs(60);
const BLOCK: u64 = 64 << 10;
const BLOCKS: u32 = 16;
/// Set in a child, which prints a report; its value is the options.
const REPORT_OPTIONS: &str = "KVX_UCX_TEST_OPTIONS";

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// The lines that a child prints.
#[derive(Debug)]
struct ChildReport {
    /// `transport/device`, as `kvx backends` shows them.
    devices: Vec<String>,
    /// The route to a peer in the same process after a read and a write, or why there is none.
    route: String,
}

impl ChildReport {
    fn has(&self, transport: &str) -> bool {
        self.devices.iter().any(|device| device.split('/').next() == Some(transport))
    }
}

/// Prints the report of a child and exits, if this process was started for that.
pub(crate) fn report_if_asked() {
    let Ok(options) = std::env::var(REPORT_OPTIONS) else { return };
    let options = Options::parse(&options).unwrap();
    let devices = kvx_ucx::Ucx.available(&options).map(|there| there.devices.join(" "));
    println!("devices {}", devices.unwrap_or_else(|why| why.to_string()));
    let route = route(&options, versions::chosen().expect("a version"));
    println!("route {}", route.unwrap_or_else(|why| format!("none: {why}")));
    std::process::exit(0);
}

fn agent(name: &str, options: &Options) -> Outcome<(Agent, Region)> {
    let agent = Agent::builder(name)
        .backends(["UCX"])
        .options(options.clone())
        .registry(registry(""))
        .build()?;
    let content = name.len() as u8;
    let region =
        agent.register("kv", Memory::owned(vec![content; BLOCK as usize * BLOCKS as usize]))?;
    Ok((agent, region))
}

fn route(options: &Options, version: &Version) -> Outcome<String> {
    let ((near, ours), (distant, theirs)) = (agent("near", options)?, agent("distant", options)?);
    let peer: Peer = near.connect(&distant.metadata()?)?;
    peer.ready(PATIENCE).wait_blocking(PATIENCE)?;
    let grid = Grid::packed(BLOCK, BLOCKS);
    let half = |range| {
        Ok::<_, kvx_core::Error>((ours.grid(grid)?.blocks(range), peer.region("kv")?.grid(grid)?))
    };
    let (local, remote) = half(0..BLOCKS / 2)?;
    peer.post(&Plan::read(local, remote.blocks(0..BLOCKS / 2))?)?.wait_blocking(PATIENCE)?;
    let (local, remote) = half(BLOCKS / 2..BLOCKS)?;
    peer.post(&Plan::write(local, remote.blocks(BLOCKS / 2..BLOCKS))?)?.wait_blocking(PATIENCE)?;
    let ends = |region: &Region| -> Outcome<(u8, u8)> {
        let mut bytes = vec![0; BLOCK as usize * BLOCKS as usize];
        region.copy_out(0, &mut bytes)?;
        Ok((bytes[0], bytes[bytes.len() - 1]))
    };
    assert_eq!((ends(&ours)?, ends(&theirs)?), ((7, 4), (7, 4)), "the bytes are there");
    // kvx sends its messages eagerly whatever the user sets: receivers reject others.
    let long = vec![7; MAX_NOTIFICATION];
    peer.notify(&long, PATIENCE).wait_blocking(PATIENCE)?;
    assert!(*distant.notification(PATIENCE).join()?.bytes == *long, "it came");
    let until = Instant::now() + PATIENCE;
    // 1.13 prints no tables of its choice.
    let complete = |route: &str| {
        version.number < (1, 22) || route.contains("gets: ") && route.contains("puts: ")
    };
    while !complete(&peer.route().to_string()) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    let route = peer.route().to_string();
    near.shutdown(PATIENCE).wait_blocking(PATIENCE)?;
    distant.shutdown(PATIENCE).wait_blocking(PATIENCE)?;
    Ok(route)
}

/// Runs a child with these variables and options. Returns its report and all of its output.
fn run_child(
    version: &Version,
    variables: &[(&str, &str)],
    options: &str,
) -> (ChildReport, String) {
    let mut child = version.command().expect("it is there");
    child.env(REPORT_OPTIONS, options).envs(variables.iter().copied());
    let output = kvx_testkit::output(&mut child, LIMIT);
    let streams =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let said = streams.concat();
    assert!(output.status.success(), "{variables:?} {options}: {said}");
    let line = |word: &str| {
        let line = said.lines().find_map(|line| line.strip_prefix(word));
        line.unwrap_or_else(|| panic!("{variables:?} {options}: {said}")).to_owned()
    };
    let devices = line("devices ").split(' ').map(str::to_owned).collect();
    (ChildReport { devices, route: line("route ") }, said)
}

/// Calls `body` for each version with a function that runs a child on that version.
fn on_each(test: &str, body: impl Fn(&Version, &dyn Fn(&[(&str, &str)], &str) -> ChildReport)) {
    versions::with_each_installed(test, |version| {
        body(version, &|variables, options| run_child(version, variables, options).0);
    });
}

// vLLM guide R1: `UCX_TLS` selects UCX's transports
#[test]
fn transports_are_those_that_ucx_tls_names() {
    on_each("transports_are_those_that_ucx_tls_names", |version, run| {
        for all in [&[][..], &[("UCX_TLS", "all")], &[("UCX_TLS", "^cuda_ipc")]] {
            let report = run(all, "{}");
            assert!(
                report.has("tcp") && report.has("cma") && report.has("sysv"),
                "{all:?}: {report:?}"
            );
            assert!(
                report.route.contains("lanes sysv/memory"),
                "{}, {all:?}: {report:?}",
                version.label
            );
        }
        let listed = run(&[("UCX_TLS", "tcp,self")], "{}");
        assert!(
            listed
                .devices
                .iter()
                .all(|device| device.starts_with("tcp/") || device.starts_with("self/"))
        );
        assert!(
            listed.route.contains("lanes tcp/") && !listed.route.contains("memory"),
            "{listed:?}"
        );
        let others = run(&[("UCX_TLS", "^tcp")], "{}");
        assert!(!others.has("tcp") && others.has("cma"), "{others:?}");
    });
}

// vLLM guide R1: `UCX_NET_DEVICES` selects UCX's network devices
#[test]
fn network_devices_are_those_that_ucx_net_devices_names() {
    on_each("network_devices_are_those_that_ucx_net_devices_names", |_, run| {
        let report = run(&[("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "lo")], "{}");
        assert_eq!(report.devices, ["tcp/lo"]);
        assert!(report.route.contains("lanes tcp/lo ("), "{report:?}");
    });
}

/// With rendezvous on, UCX does not use lanes whose registrations cannot be invalidated, such as
/// cma. Without error handling, shared memory carries no messages between peers that want failure
/// reports.
#[test]
fn what_the_user_sets_wins_over_the_defaults_of_kvx() {
    on_each("what_the_user_sets_wins_over_the_defaults_of_kvx", |version, run| {
        let has_tables = version.number >= (1, 22);
        let rendezvous = run(&[("UCX_RNDV_THRESH", "8k")], "{}");
        let emulates = rendezvous.route.contains("gets: 0..inf software emulation sysv/memory");
        assert_eq!(emulates, has_tables, "{rendezvous:?}");
        let unguarded = run(&[("UCX_MM_ERROR_HANDLING", "n")], "{}");
        assert!(
            !unguarded.route.contains("sysv") && !unguarded.route.contains("posix"),
            "{unguarded:?}"
        );
        if has_tables {
            assert!(
                unguarded.route.contains("lanes tcp/")
                    && unguarded.route.contains("gets and puts by cma")
            );
        } else {
            // Before 1.20, cma is only for rendezvous.
            assert!(
                unguarded.route.starts_with("none: UCX reaches this peer over tcp only"),
                "{unguarded:?}"
            );
        }
    });
}

#[test]
fn an_option_wins_over_the_variable() {
    on_each("an_option_wins_over_the_variable", |version, run| {
        let shared = run(&[("UCX_TLS", "tcp")], r#"{"ucx": {"tls": "sm"}}"#);
        assert!(!shared.has("tcp") && shared.has("sysv"), "{shared:?}");
        assert!(shared.route.contains("lanes sysv/memory"), "{shared:?}");
        let set = run(&[("UCX_RNDV_THRESH", "8k")], r#"{"ucx": {"set": "RNDV_THRESH=inf"}}"#);
        let direct = set.route.contains("gets: 0..inf zero-copy cma/memory");
        assert_eq!(direct, version.number >= (1, 22), "{set:?}");
    });
}

/// Newer versions reject unknown names. Older ones warn about them once they know which settings
/// nothing has used.
#[test]
fn an_unknown_setting_is_reported() {
    versions::with_each_installed("an_unknown_setting_is_reported", |version| {
        let (report, said) = run_child(version, &[], r#"{"ucx": {"set": "NO_SUCH_SETTING=1"}}"#);
        if version.number >= (1, 22) {
            assert!(
                report.route.contains("UCX refuses the setting UCX_NO_SUCH_SETTING=1"),
                "{report:?}"
            );
        } else {
            let warning = said
                .lines()
                .find(|line| line.contains("WARN") && line.contains("NO_SUCH_SETTING=1"));
            assert!(warning.is_some(), "{said}");
        }
    });
}

/// Older versions use other names for some settings; kvx translates them.
#[test]
fn settings_have_the_names_of_their_variables_on_every_version() {
    versions::with_each_installed(
        "settings_have_the_names_of_their_variables_on_every_version",
        |version| {
            let set = r#""TCP_TX_SEG_SIZE=64k", "TCP_RX_SEG_SIZE=64k", "KEEPALIVE_INTERVAL=2s", "MM_ERROR_HANDLING=y", "RNDV_THRESH=inf""#;
            let (report, said) =
                run_child(version, &[], &format!(r#"{{"ucx": {{"set": [{set}]}}}}"#));
            assert!(report.route.contains("lanes sysv/memory"), "{report:?}");
            assert!(!said.contains("WARN"), "{}: {said}", version.label);
        },
    );
}
