//! The bars of `cargo xtask limits`, as data: what is run, and what of it must hold.

/// Something to run; each line of its output is a JSON object.
pub(crate) struct Run {
    /// How the bars name it.
    pub(crate) name: &'static str,
    /// What runs, with these arguments separated by single spaces.
    pub(crate) program: Program,
}

/// What a [`Run`] runs.
pub(crate) enum Program {
    /// `kvx bench --json` of the release build, with these arguments.
    Bench(&'static str),
    /// The same, with `kvx bench-beside` of the second ones beside it.
    Beside(&'static str, &'static str),
    /// A benchmark with `--bars`, by package, which features may follow, and name.
    Costs(&'static str, &'static str),
    /// The same, of the facade with its connector.
    Loads(&'static str),
    /// The same over RIXL, beside NIXL's Python.
    LoadsOverRixl(&'static str),
    /// The same of the MooncakeConnector, over Mooncake's wheel.
    LoadsOverMooncake(&'static str),
    /// kvx-nixl/benches/beside_ucx.py: the backend KVX through NIXL's Python API.
    InNixl(&'static str),
}

/// One figure that must hold.
pub(crate) struct Bar {
    /// What it is, for people.
    pub(crate) what: &'static str,
    /// The run that it comes from.
    pub(crate) run: &'static str,
    /// How it is found in that run's lines.
    pub(crate) figure: Figure,
    /// What is asked of it.
    pub(crate) asked: Asked,
}

/// How a figure comes out of the lines of a run. `at` chooses lines: words of the form `field=value`.
pub(crate) enum Figure {
    /// A field of the one line; a dot leads into an object.
    Field { at: &'static str, field: &'static str },
    /// The largest of some fields of the one line.
    Largest { at: &'static str, fields: &'static [&'static str] },
    /// A field of one line by a field of another.
    Quotient { at: &'static str, field: &'static str, by_at: &'static str, by: &'static str },
    /// Nanoseconds that a block costs beyond what it costs the limit.
    BeyondTheCopy { at: &'static str },
    /// How many times longer small reads take beside bulk ones than alone; or, if that is less, their 99th percentile
    /// in fifths of what bare connections get.
    BesideBulkOrBare { at: &'static str },
}

/// What is asked of a figure.
#[derive(Clone, Copy)]
pub(crate) enum Asked {
    AtLeast(f64),
    AtMost(f64),
    /// Nothing: it stands beside another.
    Nothing,
}

use Asked::{AtLeast, AtMost, Nothing};
use Figure::{BesideBulkOrBare, BeyondTheCopy, Field, Largest, Quotient};

/// Everything that is run, in this order, five times over. Those over RIXL, in NIXL and over MOONCAKE are left out
/// where the wheels are not installed.
pub(crate) const RUNS: &[Run] = &[
    Run { name: "costs", program: Program::Costs("kvx-transfer", "costs") },
    Run { name: "requests", program: Program::Costs("kvx-connector", "requests") },
    Run { name: "digests", program: Program::Costs("kvx-connector --features runtime", "digests") },
    Run { name: "ranks", program: Program::Costs("kvx-connector --features runtime", "ranks") },
    Run { name: "loads", program: Program::Loads("loads") },
    Run { name: "RIXL loads", program: Program::LoadsOverRixl("loads") },
    Run { name: "MOONCAKE loads", program: Program::LoadsOverMooncake("loads") },
    Run { name: "choice", program: Program::Costs("kvx-proxy", "choice") },
    Run { name: "proxy", program: Program::Costs("kvx-cli", "proxy") },
    Run { name: "step", program: Program::Costs("kvx-paged-llama", "step") },
    Run { name: "serve", program: Program::Costs("kvx-cli", "serve") },
    bench("SHM 4K", "--backend SHM --block 4K --count 1,1024,8192 --memory kvx,foreign"),
    bench("SHM 64K", "--backend SHM --block 64K --count 1024 --memory kvx,foreign"),
    bench("SHM 1M", "--backend SHM --block 1M --count 64 --memory kvx,foreign"),
    Run {
        name: "SHM adjacent",
        program: Program::Beside(
            "--backend SHM --block 4K --count 8192 --pattern adjacent --seconds 2",
            "--block 64K --count 512 --pattern scattered",
        ),
    },
    bench("SHM 16K", "--backend SHM --block 16K --count 4096"),
    bench("TCP one", "--backend TCP --block 4K --count 1 --op read --wait block,async"),
    bench("TCP 4K", "--backend TCP --block 4K --count 8192"),
    bench("TCP 64K", "--backend TCP --block 64K --count 1024"),
    bench("TCP 1M", "--backend TCP --block 1M --count 64"),
    bench("TCP sealed", r#"--backend TCP --block 64K --count 1024 --options {"tcp":{"seal":"all"}}"#),
    bench("100,000", "--backend SHM,TCP --block 4K --count 100000"),
    bench("idle", "--backend SHM,TCP --idle 10"),
    bench("readers", "--backend TCP --readers 64 --seconds 4"),
    bench("bulk", "--backend SHM,TCP --beside-bulk 4G --seconds 5"),
    bench("RIXL 64M", "--backend RIXL --block 64K --count 1024"),
    bench("RIXL idle", "--backend RIXL --idle 10"),
    bench("RIXL notices", "--backend RIXL --notices-beside 64M --seconds 3"),
    in_nixl("in NIXL SHM", "shm"),
    in_nixl("in NIXL TCP", "tcp"),
    in_nixl("in NIXL idle", "idle"),
    in_nixl("in NIXL metadata", "metadata"),
];

const fn in_nixl(name: &'static str, what: &'static str) -> Run {
    Run { name, program: Program::InNixl(what) }
}

const fn bench(name: &'static str, arguments: &'static str) -> Run {
    Run { name, program: Program::Bench(arguments) }
}

/// A part of the limit, in the rounds of one point.
const fn ratio(what: &'static str, run: &'static str, at: &'static str, least: f64) -> Bar {
    Bar { what, run, figure: Field { at, field: "ratio" }, asked: AtLeast(least) }
}

const fn cost(what: &'static str, at: &'static str, most: f64) -> Bar {
    Bar { what, run: "costs", figure: Field { at, field: "value" }, asked: AtMost(most) }
}

/// How many times faster than NIXL's own UCX.
const fn of_ucx(what: &'static str, run: &'static str, at: &'static str, least: f64) -> Bar {
    Bar { what, run, figure: Field { at, field: "times" }, asked: AtLeast(least) }
}

const fn proxy(what: &'static str, at: &'static str, asked: Asked) -> Bar {
    Bar { what, run: "proxy", figure: Field { at, field: "value" }, asked }
}

const fn load(what: &'static str, at: &'static str, asked: Asked) -> Bar {
    Bar { what, run: "loads", figure: Field { at, field: "value" }, asked }
}

const fn load_over_rixl(what: &'static str, at: &'static str, asked: Asked) -> Bar {
    Bar { what, run: "RIXL loads", figure: Field { at, field: "value" }, asked }
}

const fn load_over_mooncake(what: &'static str, at: &'static str, asked: Asked) -> Bar {
    Bar { what, run: "MOONCAKE loads", figure: Field { at, field: "value" }, asked }
}

const fn choice(what: &'static str, at: &'static str) -> Bar {
    Bar { what, run: "choice", figure: Field { at, field: "value" }, asked: AtMost(5.0) }
}

/// Of a long prompt beyond the prefill, 1.3 times a bare transfer of the blocks, and one step of the decode; of a short
/// one beyond that of a single server.
const fn first_token(what: &'static str, at: &'static str) -> Bar {
    Bar { what, run: "serve", figure: Field { at, field: "beyond_ms" }, asked: AtMost(10.0) }
}

/// Every bar, in the order of the table.
pub(crate) const BARS: &[Bar] = &[
    ratio("SHM read 4K x1024, kvx memory, of memcpy", "SHM 4K", "op=read count=1024 memory=kvx", 0.85),
    ratio("SHM read 4K x8192, kvx memory, of memcpy", "SHM 4K", "op=read count=8192 memory=kvx", 0.85),
    ratio("SHM read 64K x1024, kvx memory, of memcpy", "SHM 64K", "op=read count=1024 memory=kvx", 0.9),
    ratio("SHM read 1M x64, kvx memory, of memcpy", "SHM 1M", "op=read memory=kvx", 0.9),
    ratio("SHM write 4K x1024, kvx memory, of memcpy", "SHM 4K", "op=write count=1024 memory=kvx", 0.85),
    ratio("SHM write 4K x8192, kvx memory, of memcpy", "SHM 4K", "op=write count=8192 memory=kvx", 0.85),
    ratio("SHM write 64K x1024, kvx memory, of memcpy", "SHM 64K", "op=write count=1024 memory=kvx", 0.9),
    ratio("SHM write 1M x64, kvx memory, of memcpy", "SHM 1M", "op=write memory=kvx", 0.9),
    ratio("SHM read 4K x1024, foreign memory, of readv", "SHM 4K", "op=read count=1024 memory=foreign", 0.85),
    ratio("SHM read 4K x8192, foreign memory, of readv", "SHM 4K", "op=read count=8192 memory=foreign", 0.85),
    ratio(
        "SHM read 64K x1024, foreign memory, of readv",
        "SHM 64K",
        "op=read count=1024 memory=foreign",
        0.9,
    ),
    ratio("SHM read 1M x64, foreign memory, of readv", "SHM 1M", "op=read memory=foreign", 0.9),
    ratio(
        "SHM write 4K x1024, foreign memory, of readv",
        "SHM 4K",
        "op=write count=1024 memory=foreign",
        0.85,
    ),
    ratio(
        "SHM write 4K x8192, foreign memory, of readv",
        "SHM 4K",
        "op=write count=8192 memory=foreign",
        0.85,
    ),
    ratio(
        "SHM write 64K x1024, foreign memory, of readv",
        "SHM 64K",
        "op=write count=1024 memory=foreign",
        0.9,
    ),
    ratio("SHM write 1M x64, foreign memory, of readv", "SHM 1M", "op=write memory=foreign", 0.9),
    Bar {
        what: "SHM read 4K x8192 adjacent, of 64K x512 scattered",
        run: "SHM adjacent",
        figure: Field { at: "op=read", field: "beside_ratio" },
        asked: AtLeast(1.0),
    },
    Bar {
        what: "SHM write 4K x8192 adjacent, of 64K x512 scattered",
        run: "SHM adjacent",
        figure: Field { at: "op=write", field: "beside_ratio" },
        asked: AtLeast(1.0),
    },
    Bar {
        what: "SHM one 4K read by wait, kvx memory, times a bare process_vm_readv",
        run: "SHM 4K",
        figure: Quotient {
            at: "op=read count=1 memory=kvx",
            field: "p50_us",
            by_at: "op=read count=1 memory=foreign",
            by: "limit_p50_us",
        },
        asked: AtMost(2.0),
    },
    Bar {
        what: "SHM one 4K read by wait, foreign memory, times a bare process_vm_readv",
        run: "SHM 4K",
        figure: Quotient {
            at: "op=read count=1 memory=foreign",
            field: "p50_us",
            by_at: "op=read count=1 memory=foreign",
            by: "limit_p50_us",
        },
        asked: AtMost(2.0),
    },
    Bar {
        what: "SHM read 16K x4096, ns a block beyond the copy",
        run: "SHM 16K",
        figure: BeyondTheCopy { at: "op=read" },
        asked: AtMost(330.0),
    },
    Bar {
        what: "SHM write 16K x4096, ns a block beyond the copy",
        run: "SHM 16K",
        figure: BeyondTheCopy { at: "op=write" },
        asked: AtMost(330.0),
    },
    ratio("TCP read 4K x8192, of sockets", "TCP 4K", "op=read", 0.7),
    ratio("TCP read 64K x1024, of sockets", "TCP 64K", "op=read", 0.9),
    ratio("TCP read 1M x64, of sockets", "TCP 1M", "op=read", 0.9),
    ratio("TCP write 4K x8192, of sockets", "TCP 4K", "op=write", 0.7),
    ratio("TCP write 64K x1024, of sockets", "TCP 64K", "op=write", 0.9),
    ratio("TCP write 1M x64, of sockets", "TCP 1M", "op=write", 0.9),
    ratio("TCP sealed read 64K x1024, of sealed sockets", "TCP sealed", "op=read", 0.8),
    ratio("TCP sealed write 64K x1024, of sealed sockets", "TCP sealed", "op=write", 0.8),
    Bar {
        what: "TCP one 4K read by wait, times a bare request and reply",
        run: "TCP one",
        figure: Quotient { at: "wait=block", field: "p50_us", by_at: "wait=block", by: "limit_p50_us" },
        asked: AtMost(1.3),
    },
    Bar {
        what: "TCP one 4K read by .await, times a bare request and reply",
        run: "TCP one",
        figure: Quotient { at: "wait=async", field: "p50_us", by_at: "wait=async", by: "limit_p50_us" },
        asked: Nothing,
    },
    Bar {
        what: "SHM 4K reads beside 4 GiB, p99 in times of alone",
        run: "bulk",
        figure: Field { at: "backend=SHM", field: "small.times" },
        asked: AtMost(5.0),
    },
    Bar {
        what: "TCP 4K reads beside 4 GiB, p99 in times of alone, or in fifths of bare connections'",
        run: "bulk",
        figure: BesideBulkOrBare { at: "backend=TCP" },
        asked: AtMost(5.0),
    },
    Bar {
        what: "TCP with 64 readers, the slowest of the mean",
        run: "readers",
        figure: Field { at: "", field: "least_of_mean" },
        asked: AtLeast(0.5),
    },
    Bar {
        what: "SHM idle for 10 s, ms of CPU of a process",
        run: "idle",
        figure: Largest { at: "backend=SHM", fields: &["cpu_ms", "target_cpu_ms"] },
        asked: AtMost(10.0),
    },
    Bar {
        what: "TCP idle for 10 s, ms of CPU of a process",
        run: "idle",
        figure: Largest { at: "backend=TCP", fields: &["cpu_ms", "target_cpu_ms"] },
        asked: AtMost(10.0),
    },
    Bar {
        what: "RIXL idle for 10 s, ms of CPU of a process",
        run: "RIXL idle",
        figure: Largest { at: "", fields: &["cpu_ms", "target_cpu_ms"] },
        asked: AtMost(100.0),
    },
    Bar {
        what: "post of 64 MiB, RIXL read, us",
        run: "RIXL 64M",
        figure: Field { at: "op=read", field: "post_p50_us" },
        asked: AtMost(100.0),
    },
    Bar {
        what: "post of 64 MiB, RIXL write, us",
        run: "RIXL 64M",
        figure: Field { at: "op=write", field: "post_p50_us" },
        asked: AtMost(100.0),
    },
    Bar {
        what: "RIXL notification after quiet, us",
        run: "RIXL notices",
        figure: Field { at: "", field: "alone.p50_us" },
        asked: AtMost(2000.0),
    },
    Bar {
        what: "RIXL notification beside reads of 64 MiB, us",
        run: "RIXL notices",
        figure: Field { at: "", field: "beside.p50_us" },
        asked: AtMost(1000.0),
    },
    of_ucx("KVX in NIXL, SHM, 4K x1, times UCX", "in NIXL SHM", "block=4096 count=1", 0.8),
    of_ucx("KVX in NIXL, SHM, 4K x64, times UCX", "in NIXL SHM", "block=4096 count=64", 2.0),
    of_ucx("KVX in NIXL, SHM, 4K x1024, times UCX", "in NIXL SHM", "block=4096 count=1024", 3.0),
    of_ucx("KVX in NIXL, SHM, 4K x8192, times UCX", "in NIXL SHM", "block=4096 count=8192", 2.0),
    of_ucx("KVX in NIXL, SHM, 64K x1024, times UCX", "in NIXL SHM", "block=65536 count=1024", 0.9),
    of_ucx("KVX in NIXL, SHM, 1M x64, times UCX", "in NIXL SHM", "block=1048576 count=64", 0.9),
    Bar {
        what: "KVX in NIXL, SHM, 4K x8192, of bare process_vm_readv",
        run: "in NIXL SHM",
        figure: Field { at: "block=4096 count=8192", field: "of_readv" },
        asked: AtLeast(0.9),
    },
    Bar {
        what: "bare process_vm_readv beside it, 4K x8192, times UCX in NIXL",
        run: "in NIXL SHM",
        figure: Field { at: "block=4096 count=8192", field: "readv_of_ucx" },
        asked: Nothing,
    },
    Bar {
        what: "KVX in NIXL, SHM, 4K x8192 with the making of the request, times UCX",
        run: "in NIXL SHM",
        figure: Field { at: "block=4096 count=8192", field: "with_prepare" },
        asked: Nothing,
    },
    of_ucx("KVX in NIXL, TCP, 4K x1024, times UCX", "in NIXL TCP", "block=4096 count=1024", 3.0),
    of_ucx("KVX in NIXL, TCP, 64K x1024, times UCX", "in NIXL TCP", "block=65536 count=1024", 2.0),
    Bar {
        what: "KVX in NIXL, SHM, the slowest post, us",
        run: "in NIXL SHM",
        figure: Field { at: "what=post", field: "slowest_p50_us" },
        asked: AtMost(100.0),
    },
    Bar {
        what: "KVX in NIXL, TCP, the slowest post, us",
        run: "in NIXL TCP",
        figure: Field { at: "what=post", field: "slowest_p50_us" },
        asked: AtMost(100.0),
    },
    Bar {
        what: "KVX in NIXL, idle with NIXL's defaults, percent of a core",
        run: "in NIXL idle",
        figure: Field { at: "", field: "kvx_percent" },
        asked: AtMost(1.0),
    },
    Bar {
        what: "KVX in NIXL, metadata of 16 agents x 128 regions, times UCX's",
        run: "in NIXL metadata",
        figure: Field { at: "", field: "of_ucx" },
        asked: AtMost(1.0),
    },
    cost("plan of 100,000 scattered blocks, us", "cost=plan_us", 1000.0),
    Bar {
        what: "post of 100,000 blocks, SHM read, us",
        run: "100,000",
        figure: Field { at: "backend=SHM op=read", field: "post_p50_us" },
        asked: AtMost(100.0),
    },
    Bar {
        what: "post of 100,000 blocks, SHM write, us",
        run: "100,000",
        figure: Field { at: "backend=SHM op=write", field: "post_p50_us" },
        asked: AtMost(100.0),
    },
    Bar {
        what: "post of 100,000 blocks, TCP read, us",
        run: "100,000",
        figure: Field { at: "backend=TCP op=read", field: "post_p50_us" },
        asked: AtMost(100.0),
    },
    Bar {
        what: "post of 100,000 blocks, TCP write, us",
        run: "100,000",
        figure: Field { at: "backend=TCP op=write", field: "post_p50_us" },
        asked: AtMost(100.0),
    },
    cost("expansion of scattered blocks, ns a block", "cost=expansion_ns", 5.0),
    cost("expansion and merging of runs of 16, ns a block", "cost=merging_ns", 5.0),
    cost("allocations in the expansion of 200,000 blocks", "cost=expansion_allocations", 0.0),
    cost("a ticket's life, ns", "cost=ticket_ns", 200.0),
    cost("metadata of 64 regions of 100,000 blocks, bytes", "cost=metadata_bytes", 8192.0),
    Bar {
        what: "connector: both engines' work on a request of 60 layers x 2,000 blocks, us",
        run: "requests",
        figure: Field { at: "cost=request_us", field: "value" },
        asked: AtMost(50.0),
    },
    Bar {
        what: "connector: what digests add to publishing 64 MiB, of hashing alone",
        run: "digests",
        figure: Field { at: "cost=digests_publishing", field: "value" },
        asked: AtMost(1.05),
    },
    Bar {
        what: "connector: what digests add to loading 64 MiB, of hashing alone",
        run: "digests",
        figure: Field { at: "cost=digests_loading", field: "value" },
        asked: AtMost(1.05),
    },
    Bar {
        what: "connector: a step with 16 joined ranks, us for each rank more",
        run: "ranks",
        figure: Field { at: "cost=rank_us", field: "value" },
        asked: AtMost(50.0),
    },
    load("connector: a load of 64 MiB over SHM, times a bare transfer", "cost=load_shm", AtMost(1.05)),
    load("connector: a load of 64 MiB over TCP, times a bare transfer", "cost=load_tcp", AtMost(1.05)),
    load("connector: one block over SHM, us beyond a bare transfer", "cost=one_block_us_shm", AtMost(300.0)),
    load("connector: one block over TCP, us beyond a bare transfer", "cost=one_block_us_tcp", AtMost(300.0)),
    load("connector: 64 loads of 32 MiB over SHM, of bare transfers", "cost=loads_shm", AtLeast(0.9)),
    load("connector: 64 loads of 32 MiB over TCP, of bare transfers", "cost=loads_tcp", AtLeast(0.9)),
    load(
        "connector: two workers of 64 MiB to one over SHM, of bare transfers",
        "cost=joined_shm",
        AtLeast(0.9),
    ),
    load(
        "connector: two workers of 64 MiB to one over TCP, of bare transfers",
        "cost=joined_tcp",
        AtLeast(0.9),
    ),
    load("connector: a queued request, bytes beside its blocks", "cost=queued_request_bytes", AtMost(2048.0)),
    load("connector: idle for 10 s with 16 peers over SHM, ms of CPU", "cost=idle_ms_shm", AtMost(10.0)),
    load("a bare agent, idle for 10 s with 16 peers over SHM, ms of CPU", "cost=bare_idle_ms_shm", Nothing),
    load("connector: idle for 10 s with 16 peers over TCP, ms of CPU", "cost=idle_ms_tcp", AtMost(10.0)),
    load("a bare agent, idle for 10 s with 16 peers over TCP, ms of CPU", "cost=bare_idle_ms_tcp", Nothing),
    load_over_rixl(
        "connector: idle for 10 s with 16 peers over RIXL, ms of CPU",
        "cost=idle_ms_rixl",
        AtMost(100.0),
    ),
    load_over_rixl(
        "a bare agent, idle for 10 s with 16 peers over RIXL, ms of CPU",
        "cost=bare_idle_ms_rixl",
        Nothing,
    ),
    load_over_rixl(
        "connector: handshake and load of 64 MiB over RIXL, of NIXL's Python",
        "cost=first_rixl",
        AtLeast(0.95),
    ),
    load_over_rixl(
        "connector: the next load of 64 MiB over RIXL, of NIXL's Python",
        "cost=next_rixl",
        AtLeast(0.95),
    ),
    load_over_mooncake(
        "MooncakeConnector: a push of 64 MiB over MOONCAKE, times a bare write",
        "cost=load_mooncake",
        AtMost(1.11),
    ),
    load_over_mooncake(
        "MooncakeConnector: 64 pushes of 32 MiB over MOONCAKE, of bare writes",
        "cost=loads_mooncake",
        AtLeast(0.9),
    ),
    load_over_mooncake(
        "MooncakeConnector: one block over MOONCAKE, us beyond a bare write",
        "cost=one_block_us_mooncake",
        AtMost(300.0),
    ),
    load(
        "connector: heartbeats of 10,000 requests, percent of a core",
        "cost=heartbeats_percent",
        AtMost(1.0),
    ),
    proxy("200 streams of 128 tokens, p50 of bare hyper's", "cost=proxy_p50_of_bare", AtMost(1.5)),
    proxy("200 streams of 128 tokens, p99 of bare hyper's", "cost=proxy_p99_of_bare", AtMost(2.0)),
    proxy(
        "200 streams of 128 tokens, requests a second of bare hyper's",
        "cost=proxy_rate_of_bare",
        AtLeast(0.8),
    ),
    proxy("idle with 16 instances, percent of a core", "cost=proxy_idle_percent", AtMost(0.5)),
    choice("choice among 256 instances by tokens, us", "choice=least-tokens"),
    choice("choice among 256 instances in turn, us", "choice=round-robin"),
    choice("choice among 256 instances by prefix, us", "choice=prefix"),
    ratio("decode of one sequence, of a bare read of the weights", "step", "what=decode", 0.3),
    ratio("prefill, of the bare kernel", "step", "what=prefill", 0.3),
    first_token("first token of 2,000 apart over SHM, ms beyond its parts", "tokens=2000 backend=SHM"),
    first_token("first token of 2,000 apart over TCP, ms beyond its parts", "tokens=2000 backend=TCP"),
    first_token("first token of 30 through a router over SHM, ms beyond one server", "tokens=30 backend=SHM"),
    first_token("first token of 30 through a router over TCP, ms beyond one server", "tokens=30 backend=TCP"),
    Bar {
        what: "kvx demo, s until its first answer is there",
        run: "serve",
        figure: Field { at: "what=demo", field: "first_answer_s" },
        asked: AtMost(20.0),
    },
];
