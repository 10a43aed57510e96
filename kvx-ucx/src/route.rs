//! Reads the lanes of an endpoint, and derives its capabilities from them.
//!
//! Versions since 1.14 report the transports of the lanes as attributes. What UCX uses a lane for
//! is only in its printed description; where that is not understood, each lane counts as used for
//! everything.

use std::fmt::{self, Write as _};

use kvx_core::{Capabilities, PerOp};

use crate::ffi::{self, Endpoint, LaneTransport, Library, Version};
use crate::protocols;

/// Transports over which UCX accesses the peer's memory without the peer's CPU. Over others,
/// including tcp, it sends messages that the peer's worker answers.
const DIRECT: &[&str] = &["cma", "cuda_ipc", "dc", "gdr_copy", "knem", "rc", "rocm_ipc", "xpmem"];
/// The first version whose gets and puts use the `rma_bw` lanes; before, these lanes are only for
/// rendezvous.
const BANDWIDTH_LANES: Version = Version::new(1, 20, 0);
/// UCX transports whose messages go through queues in shared memory.
pub(crate) const SHARED_QUEUES: &[&str] = &["posix", "sysv", "xpmem"];
/// The risk of these queues: a killed sender can leave an unfinished message in the queue for ever.
/// Seen with 1.13.1, which also moves data through them, and with 1.22.0.
pub(crate) const KILLED_AMID: &str = "a process that is killed while it sends a message through shared memory can stop the receiver's UCX from receiving from any peer (rare since 1.20; older versions also move data that way); the backend SHM does not have this problem";

/// Returns the route's text about an endpoint, and its capabilities. `worker` is the worker's
/// output with the protocols that UCX has chosen, or empty.
///
/// # Safety
/// As for [`Endpoint::printed`].
pub(crate) unsafe fn describe(
    endpoint: &Endpoint,
    peer: Version,
    worker: &str,
    declared: &Capabilities,
) -> (String, Capabilities) {
    // SAFETY: guaranteed by the caller.
    let printed = unsafe { endpoint.printed() };
    let ours = ffi::LIBRARY.opened().map_or(peer, Library::version);
    // SAFETY: guaranteed by the caller.
    let lanes = lanes_of(unsafe { endpoint.transports(ours) }, &printed);
    let mut sentence = sentence(ours, peer, &lanes);
    let chosen = protocols::chosen(&printed, worker);
    if !chosen.is_empty() {
        write!(sentence, "; protocols: {chosen}").expect("a string takes all");
    }
    (sentence, promise(ours, &lanes, declared))
}

/// Returns whether gets or puts use UCX's tcp, for data or for requests.
///
/// # Safety
/// As for [`Endpoint::printed`].
pub(crate) unsafe fn is_over_tcp(endpoint: &Endpoint) -> bool {
    // SAFETY: guaranteed by the caller.
    let printed = unsafe { endpoint.printed() };
    let ours = ffi::LIBRARY.opened().map_or(BANDWIDTH_LANES, Library::version);
    // SAFETY: guaranteed by the caller.
    over_tcp(ours, &lanes_of(unsafe { endpoint.transports(ours) }, &printed))
}

/// Returns the lanes that an endpoint reports, or those that are printed if it reports none.
fn lanes_of(reported: Option<Vec<LaneTransport>>, printed: &str) -> Vec<UcxLane<'_>> {
    let mut printed: Vec<UcxLane<'_>> = printed.lines().filter_map(UcxLane::read).collect();
    let Some(reported) = reported else { return printed };
    let reported = reported.into_iter().enumerate();
    let lane = |(number, LaneTransport { transport, device }): (usize, LaneTransport)| {
        let is_same = |lane: &UcxLane<'_>| lane.number == number && lane.transport == transport;
        let at = printed.iter().position(is_same);
        let uses = at.and_then(|at| printed.swap_remove(at).uses);
        UcxLane { number, transport, device, uses }
    };
    reported.map(lane).collect()
}

fn over_tcp(version: Version, lanes: &[UcxLane<'_>]) -> bool {
    let asks = |lane: &UcxLane<'_>| lane.is_used_for("am") || lane.moves_memory(version);
    !is_direct(version, lanes) && lanes.iter().any(|lane| lane.transport == "tcp" && asks(lane))
}

/// A lane of an endpoint.
#[derive(Debug, PartialEq, Eq)]
struct UcxLane<'a> {
    number: usize,
    transport: String,
    device: String,
    /// `None` if unknown.
    uses: Option<Vec<&'a str>>,
}

impl<'a> UcxLane<'a> {
    /// Parses `lane[2]:  5:cma/memory.0 md[4] -> md[4]/cma/sysdev[255] rma_bw#0`.
    fn read(line: &'a str) -> Option<UcxLane<'a>> {
        let (number, rest) =
            line.trim_start_matches(['#', ' ']).strip_prefix("lane[")?.split_once("]:")?;
        let number = number.parse().ok()?;
        let (resource, rest) = rest.trim_start().split_once(' ')?;
        let (transport, device) = resource.split_once(':')?.1.split_once('/')?;
        let device = device.rsplit_once('.').map_or(device, |(device, _)| device);
        let uses = rest.split_once("->").map_or("", |(_, there)| there).split_whitespace();
        let known = ["am", "am_bw", "amo", "keepalive", "rma", "rma_bw", "wireup"];
        let uses = uses.map(|word| word.split_once('#').map_or(word, |(word, _)| word));
        let (transport, device) = (transport.to_owned(), device.to_owned());
        let uses = uses.filter(|word| known.contains(word)).collect();
        Some(UcxLane { number, transport, device, uses: Some(uses) })
    }

    fn is_used_for(&self, what: &str) -> bool {
        self.uses.as_ref().is_none_or(|uses| uses.contains(&what))
    }

    fn moves_memory(&self, version: Version) -> bool {
        self.is_used_for("rma") || version >= BANDWIDTH_LANES && self.is_used_for("rma_bw")
    }

    fn queues_messages(&self) -> bool {
        SHARED_QUEUES.contains(&&*self.transport) && self.is_used_for("am")
    }

    fn is_direct(&self) -> bool {
        // rc_mlx5, dc_mlx5 and rc_verbs are variants of rc and dc.
        let family = self.transport.split('_').next().unwrap_or_default();
        DIRECT.contains(&&*self.transport) || matches!(family, "rc" | "dc")
    }
}

impl fmt::Display for UcxLane<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.transport, self.device)?;
        match self.uses.as_deref() {
            None => write!(f, " (for unknown purposes)"),
            Some([]) => Ok(()),
            Some(uses) => write!(f, " ({})", uses.join(" ")),
        }
    }
}

/// Returns whether gets and puts need no CPU of the peer: all that move memory are of that kind.
fn is_direct(version: Version, lanes: &[UcxLane<'_>]) -> bool {
    let mut moving = lanes.iter().filter(|lane| lane.moves_memory(version)).peekable();
    moving.peek().is_some() && moving.all(UcxLane::is_direct)
}

fn promise(version: Version, lanes: &[UcxLane<'_>], declared: &Capabilities) -> Capabilities {
    if !is_direct(version, lanes) {
        return declared.clone();
    }
    Capabilities {
        target_cpu: PerOp::NEITHER,
        settles_without_peer: PerOp::BOTH,
        ..declared.clone()
    }
}

fn sentence(ours: Version, peer: Version, lanes: &[UcxLane<'_>]) -> String {
    let shown: Vec<String> = lanes.iter().map(UcxLane::to_string).collect();
    let moving: Vec<&str> =
        lanes.iter().filter(|lane| lane.moves_memory(ours)).map(|lane| &*lane.transport).collect();
    let how = match (is_direct(ours, lanes), moving.first()) {
        (true, Some(transport)) => format!("gets and puts by {transport} without the peer's CPU"),
        (false, Some(transport)) => {
            format!("puts by {transport}, gets by messages that the peer answers")
        }
        (_, None) => "gets and puts by messages that the peer answers".to_owned(),
    };
    let versions =
        if ours == peer { format!("UCX {ours}") } else { format!("UCX {ours} to {peer}") };
    let queued = lanes.iter().any(UcxLane::queues_messages);
    let warning = if queued { format!("; {KILLED_AMID}") } else { String::new() };
    format!("{versions}, lanes {}; {how}{warning}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Version = Version::new(1, 13, 1);
    const NEW: Version = Version::new(1, 22, 0);

    const SHARED: &str = "#
#               peer: <no debug data>
#                 lane[0]:  3:sysv/memory.0 md[2]           -> md[2]/sysv/sysdev[255] seg 4294967295 am keepalive
#                 lane[1]:  4:posix/memory.0 md[3]          -> md[3]/posix/sysdev[255] seg 4294967295
#                 lane[2]:  5:cma/memory.0 md[4]            -> md[4]/cma/sysdev[255] seg 4294967295 rma_bw#0
#";
    const TCP: &str = "#                 lane[0]:  1:tcp/lo.0 md[0] -> md[0]/tcp/sysdev[255] rma_bw#0 am keepalive wireup";
    const CARD: &str =
        "#   lane[0]:  7:rc_mlx5/mlx5_0:1.0 md[4] -> md[4]/ib/sysdev[3] rma_bw#0 am am_bw#0";

    fn lanes(printed: &str) -> Vec<UcxLane<'_>> {
        printed.lines().filter_map(UcxLane::read).collect()
    }

    #[test]
    fn lanes_are_read_as_ucx_prints_them() {
        let shown: Vec<String> = lanes(SHARED).iter().map(UcxLane::to_string).collect();
        assert_eq!(shown, ["sysv/memory (am keepalive)", "posix/memory", "cma/memory (rma_bw)"]);
        assert_eq!(lanes(CARD)[0].to_string(), "rc_mlx5/mlx5_0:1 (rma_bw am am_bw)");
        assert!(lanes("lane[0]: what is this\nlane[\nlane[1]:x/y").is_empty());
    }

    #[test]
    fn a_link_needs_the_peers_cpu_unless_every_lane_that_moves_memory_does_without() {
        assert!(is_direct(NEW, &lanes(SHARED)) && is_direct(NEW, &lanes(CARD)));
        assert!(!is_direct(NEW, &lanes(TCP)) && !is_direct(NEW, &[]));
        assert!(!is_direct(OLD, &lanes(SHARED)), "before 1.20 these lanes are for rendezvous");
        assert!(!is_direct(NEW, &lanes(&format!("{CARD}\n{TCP}"))), "one rail of two");
        assert!(is_direct(
            OLD,
            &lanes("#  lane[0]:  7:rc_verbs/mlx4_0:1.0 md[4] -> md[4]/ib/sysdev[3] rma am")
        ));
    }

    #[test]
    fn reported_transports_count_and_the_printed_text_adds_their_uses() {
        let reported = |names: &[(&str, &str)]| {
            let named = |(transport, device): &(&str, &str)| LaneTransport {
                transport: (*transport).to_owned(),
                device: (*device).to_owned(),
            };
            Some(names.iter().map(named).collect::<Vec<_>>())
        };
        let shared = || reported(&[("sysv", "memory"), ("posix", "memory"), ("cma", "memory")]);
        assert_eq!(lanes_of(shared(), SHARED), lanes(SHARED));
        assert_eq!(lanes_of(None, SHARED), lanes(SHARED), "versions before 1.14");

        // A version that prints its lanes in another way.
        for printed in ["", "lane 0 = tcp", "lane[0]:  1:sysv/memory.0 -> am"] {
            let tcp = lanes_of(reported(&[("tcp", "eth0")]), printed);
            assert_eq!(tcp[0].to_string(), "tcp/eth0 (for unknown purposes)");
            assert!(over_tcp(NEW, &tcp), "tcp is refused unless its use is known to be harmless");
            let shared = lanes_of(shared(), "");
            assert!(!is_direct(NEW, &shared), "nothing is promised");
        }
        let card = lanes_of(reported(&[("rc_mlx5", "mlx5_0:1")]), "");
        assert!(is_direct(NEW, &card), "the only lane needs no CPU, whatever it is for");
    }

    #[test]
    fn tcp_counts_where_memory_depends_on_it() {
        assert!(over_tcp(NEW, &lanes(TCP)) && over_tcp(OLD, &lanes(TCP)));
        let beside = TCP.replace("rma_bw#0 ", "");
        assert!(!over_tcp(NEW, &lanes(&format!("{CARD}\n{beside}"))), "messages alone");
        assert!(!over_tcp(NEW, &lanes(SHARED)) && !over_tcp(OLD, &lanes(SHARED)));
    }

    #[test]
    fn the_route_tells_versions_lanes_and_how_memory_moves() {
        let text = sentence(NEW, OLD, &lanes(SHARED));
        assert!(
            text.starts_with("UCX 1.22.0 to 1.13.1, lanes sysv/memory (am keepalive), "),
            "{text}"
        );
        let how = format!("gets and puts by cma without the peer's CPU; {KILLED_AMID}");
        assert!(text.ends_with(&how), "{text}");
        let text = sentence(OLD, OLD, &lanes(SHARED));
        assert!(
            text.ends_with(&format!(
                "gets and puts by messages that the peer answers; {KILLED_AMID}"
            )),
            "{text}"
        );
        let text = sentence(NEW, NEW, &lanes(TCP));
        assert!(text.ends_with("puts by tcp, gets by messages that the peer answers"), "{text}");
    }
}
