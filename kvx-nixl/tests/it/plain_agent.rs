//! Tests a kvx agent in a process without NIXL with a NIXL agent that has the backend KVX in
//! another, in both directions.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use kvx::connector::nixl::{self, NixlPeer};
use kvx::{Agent, ErrorKind, Memory, Op, Region};
use kvx_testkit::{run_in_own_process, trial};
use kvx_vllm::wire::nixl::{Assembly, Got, NixlBlob, notes};
use libtest_mimic::{Failed, Trial};
use serde_json::{Value, json};

use crate::wheels::{self, Folder, Wheel};

const LIMIT: Duration = Duration::from_secs(10);
const MIB: usize = 1 << 20;
const ROUTES: [&str; 2] = ["SHM", "TCP"];

/// The variable that names the GPU driver: the stand-in.
const DRIVER: &str = "KVX_CUDA_LIB";

type Test = fn(&Setting) -> Result<(), Failed>;
const TESTS: &[(&str, Test)] = &[
    ("kvx_reads_and_writes_memory_of_nixl", kvx_reads_and_writes_memory_of_nixl),
    ("nixl_reads_and_writes_memory_of_kvx", nixl_reads_and_writes_memory_of_kvx),
    ("notifications_of_all_lengths_go_both_ways", notifications_of_all_lengths_go_both_ways),
    ("memory_of_gpus_goes_both_ways", memory_of_gpus_goes_both_ways),
    ("memory_that_is_registered_later_is_usable", memory_that_is_registered_later_is_usable),
    ("a_killed_and_restarted_nixl_is_distinguished", a_killed_and_restarted_nixl_is_distinguished),
    (
        "a_nixl_without_the_backend_is_rejected_with_the_reason",
        a_nixl_without_the_backend_is_rejected_with_the_reason,
    ),
];

/// The environment of a test.
pub(crate) struct Setting {
    wheel: Wheel,
    plugins: Folder,
    borrowed: Folder,
    pub(crate) route: &'static str,
}

/// The NIXL agent in a serve.py.
pub(crate) struct Nixl {
    process: Child,
    commands: ChildStdin,
    answers: Receiver<String>,
}

impl Nixl {
    /// Starts an agent "nixl" with a region of `size` bytes, all of them 0.
    fn new(setting: &Setting, size: usize) -> Result<Nixl, Failed> {
        Self::with_parameters(setting, size, Value::Null)
    }

    /// Starts an agent whose backend has these parameters.
    pub(crate) fn with_parameters(
        setting: &Setting,
        size: usize,
        parameters: Value,
    ) -> Result<Nixl, Failed> {
        let before = [setting.borrowed.0.clone()];
        let mut script =
            setting.wheel.script("serve.py", &setting.plugins.0, &before, setting.route);
        script.env(DRIVER, kvx_stand_in::library());
        let mut process = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let commands = process.stdin.take().ok_or("a pipe")?;
        let lines = BufReader::new(process.stdout.take().ok_or("a pipe")?).lines();
        let (send, answers) = channel();
        std::thread::spawn(move || {
            lines.map_while(Result::ok).try_for_each(|line| send.send(line))
        });
        let mut nixl = Nixl { process, commands, answers };
        nixl.call(json!(["new", "nixl", [size], 0, parameters]))?;
        Ok(nixl)
    }

    pub(crate) fn call(&mut self, command: Value) -> Result<Value, Failed> {
        writeln!(self.commands, "{command}")?;
        let answer =
            self.answers.recv_timeout(LIMIT).map_err(|_| format!("no answer to {command:.200}"))?;
        Ok(serde_json::from_str(&answer)?)
    }

    pub(crate) fn bytes(&mut self, command: Value) -> Result<Vec<u8>, Failed> {
        let answer = self.call(command)?;
        unhex(&answer)
    }

    /// Runs a transfer to its end, and returns whether it succeeded.
    fn moved(
        &mut self,
        op: &str,
        theirs: u64,
        pairs: &[(u64, u64, u64)],
        note: &[u8],
    ) -> Result<(), Failed> {
        for make in ["direct", "prepped"] {
            let state = self.call(json!(["move", op, "kvx", theirs, pairs, hex(note), make]))?;
            if state != "DONE" {
                return Err(format!("{op} ended with {state}").into());
            }
        }
        Ok(())
    }
}

impl Drop for Nixl {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

pub(crate) fn hex(bytes: &[u8]) -> Value {
    json!({"hex": kvx_testkit::hex(bytes)})
}

fn unhex(value: &Value) -> Result<Vec<u8>, Failed> {
    let digits = value["hex"].as_str().ok_or_else(|| format!("no bytes: {value}"))?;
    let pairs = digits
        .as_bytes()
        .chunks(2)
        .map(|pair| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?));
    pairs.collect()
}

/// Returns bytes that depend on their position.
pub(crate) fn content(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (seed + at * 31 + at / 257) as u8).collect()
}

/// Returns pieces of different lengths in random order: local offset, remote offset, length.
fn pieces(count: u64) -> Vec<(u64, u64, u64)> {
    (0..count)
        .map(|at| {
            (
                (at * 7 % count) * 4096,
                (at * 11 % count) * 8192,
                if at % 3 == 0 { 4096 } else { 1000 + at },
            )
        })
        .collect()
}

fn agent(setting: &Setting) -> kvx::Result<Agent> {
    kvx::agent("kvx").backends([setting.route]).build()
}

/// Registers a region of kvx's own memory and one of adopted memory.
fn regions(agent: &Agent) -> kvx::Result<[Region; 2]> {
    let own = agent.register("own", Memory::pool(4 * MIB).build()?)?;
    let foreign = agent.register("foreign", Memory::owned(vec![0; 4 * MIB]))?;
    Ok([own, foreign])
}

fn kvx_reads_and_writes_memory_of_nixl(setting: &Setting) -> Result<(), Failed> {
    let mut nixl = Nixl::new(setting, 4 * MIB)?;
    let agent = agent(setting)?;
    let peer = NixlPeer::connect(&agent, &nixl.bytes(json!(["metadata"]))?)?;
    let base = nixl.call(json!(["at"]))?.as_u64().ok_or("an address")?;
    let at_base = |(local, remote, len)| (local, base + remote, len);
    for (seed, region) in regions(&agent)?.iter().enumerate() {
        let pieces = pieces(300);
        region.copy_in(0, &content(seed, 4 * MIB))?;
        let write = peer.plan(Op::Write, region, pieces.iter().copied().map(at_base))?;
        peer.peer().post(&write)?.wait_blocking(LIMIT)?;
        let theirs = nixl.bytes(json!(["peek", 0, 4 * MIB]))?;
        for &(local, remote, len) in &pieces {
            let mut ours = vec![0; len as usize];
            region.copy_out(local as usize, &mut ours)?;
            assert!(
                theirs[remote as usize..][..ours.len()] == ours,
                "the bytes written at {remote}"
            );
        }
        let fresh = content(seed + 100, MIB);
        nixl.call(json!(["poke", 0, hex(&fresh)]))?;
        region.copy_in(0, &vec![0; 4 * MIB])?;
        let read = peer.plan(
            Op::Read,
            region,
            [(5, base + 77, 500_000), (600_000, base, 70), (0, base + 9, 1)],
        )?;
        peer.peer().post(&read)?.wait_blocking(LIMIT)?;
        for (local, remote, len) in [(5, 77, 500_000), (600_000, 0, 70), (0, 9, 1)] {
            let mut got = vec![0; len];
            region.copy_out(local, &mut got)?;
            assert!(got == fresh[remote..][..len], "the bytes read from {remote}");
        }
    }
    assert_eq!(peer.peer().route().chosen(), Some(setting.route));
    let beyond = peer
        .plan(Op::Read, &regions_one(&agent)?, [(0, base + 4 * MIB as u64 - 1, 2)])
        .unwrap_err();
    assert_eq!(beyond.kind(), ErrorKind::Unregistered, "{beyond}");
    Ok(())
}

fn regions_one(agent: &Agent) -> kvx::Result<Region> {
    agent.register("one", Memory::owned(vec![0; 4096]))
}

fn nixl_reads_and_writes_memory_of_kvx(setting: &Setting) -> Result<(), Failed> {
    let mut nixl = Nixl::new(setting, 4 * MIB)?;
    let agent = agent(setting)?;
    let regions = regions(&agent)?;
    let blob = nixl::blob(&agent, &regions)?;
    assert_eq!(nixl.call(json!(["load", hex(&blob)]))?, "kvx");
    let ours = content(3, 4 * MIB);
    nixl.call(json!(["poke", 0, hex(&content(9, MIB))]))?;
    for region in &regions {
        region.copy_in(0, &ours)?;
        let (theirs, pieces) = (region.memory().address(), pieces(300));
        nixl.moved("READ", theirs, &pieces, b"read")?;
        let got = nixl.bytes(json!(["peek", 0, 4 * MIB]))?;
        for &(local, remote, len) in &pieces {
            let right =
                got[local as usize..][..len as usize] == ours[remote as usize..][..len as usize];
            assert!(right, "the bytes that NIXL read from {remote}");
        }
        nixl.moved("WRITE", theirs, &[(4, 100, 300_000), (0, 0, 3)], b"written")?;
        let mut written = vec![0; 300_000];
        region.copy_out(100, &mut written)?;
        assert!(written == nixl.bytes(json!(["peek", 4, 300_000]))?, "the bytes that NIXL wrote");
    }
    let mut heard = Vec::new();
    while heard.len() < 8 {
        let next = agent.notification(LIMIT).join()?;
        assert_eq!(&*next.from.name, "nixl");
        heard.push(next.bytes.to_vec());
    }
    heard.sort();
    assert_eq!(heard, [vec![b"read".to_vec(); 4], vec![b"written".to_vec(); 4]].concat());
    // Access to a revoked region is an error there, and both agents survive.
    let [own, foreign] = regions;
    let address = own.memory().address();
    own.revoke(LIMIT).wait_blocking(LIMIT)?;
    assert!(nixl.moved("READ", address, &[(0, 0, 4096)], b"").is_err());
    nixl.moved("READ", foreign.memory().address(), &[(0, 0, 4096)], b"")
}

/// Returns the next notification from NIXL, after assembling its parts.
fn hear(agent: &Agent, assembly: &mut Assembly) -> Result<Box<[u8]>, Failed> {
    let end = Instant::now() + LIMIT;
    loop {
        let next = agent.notification(end).join()?;
        match assembly.take(next.from.incarnation, &next.bytes) {
            Got::Whole(bytes) => return Ok(bytes),
            Got::Part => {}
            other => return Err(format!("{other:?}").into()),
        }
    }
}

fn notifications_of_all_lengths_go_both_ways(setting: &Setting) -> Result<(), Failed> {
    let mut nixl = Nixl::new(setting, MIB)?;
    let agent = agent(setting)?;
    let peer = NixlPeer::connect(&agent, &nixl.bytes(json!(["metadata"]))?)?;
    nixl.call(json!(["load", hex(&nixl::blob(&agent, [])?)]))?;
    let marked = [b"\xf8kvx", &content(1, 100)[..]].concat();
    let all: Vec<_> = [0, 1, 1000, 65_535, 65_536, 65_537, 700_000]
        .map(|len| content(5, len))
        .into_iter()
        .chain([marked])
        .collect();
    let mut assembly = Assembly::default();
    for (number, note) in all.iter().enumerate() {
        for part in notes(number as u64, note).ok_or("short enough")? {
            peer.peer().notify(&part, LIMIT).wait_blocking(LIMIT)?;
        }
        let heard = nixl.call(json!(["hear", 1]))?;
        assert_eq!(heard[0][0], "kvx");
        assert!(unhex(&heard[0][1])? == *note, "{} bytes to NIXL", note.len());
        nixl.call(json!(["notify", "kvx", hex(note)]))?;
        assert!(*hear(&agent, &mut assembly)? == **note, "{} bytes from NIXL", note.len());
    }
    assert!(nixl.call(json!(["hear", 1, 0.1]))?.as_array().is_some_and(Vec::is_empty), "once each");
    assert!(agent.try_notification().is_none(), "once each");
    Ok(())
}

fn memory_of_gpus_goes_both_ways(setting: &Setting) -> Result<(), Failed> {
    let mut nixl = Nixl::new(setting, MIB)?;
    let device = kvx::cuda::devices().map_err(|why| why.to_string())?.remove(0);
    let agent = Agent::builder("kvx").backends([setting.route]).device(device.clone());
    let agent = agent.registry(kvx::registry()).build()?;
    let ours = agent.register("ours", device.pool(MIB).build()?)?;
    let more = nixl.call(json!(["more", MIB, 0, 1]))?;
    let theirs = more[1].as_u64().ok_or("an address")?;
    let peer = NixlPeer::connect(&agent, &unhex(&more[0])?)?;
    nixl.call(json!(["load", hex(&nixl::blob(&agent, [&ours])?)]))?;

    let (there, here) = (content(3, 20_000), content(5, 20_000));
    nixl.call(json!(["poke", 100, hex(&there), 1]))?;
    peer.peer()
        .post(&peer.plan(Op::Read, &ours, [(7, theirs + 100, 20_000)])?)?
        .wait_blocking(LIMIT)?;
    let mut got = vec![0; 20_000];
    ours.copy_out(7, &mut got)?;
    assert!(got == there, "the bytes that kvx read");
    ours.copy_in(50_000, &here)?;
    peer.peer()
        .post(&peer.plan(Op::Write, &ours, [(50_000, theirs + 50_000, 20_000)])?)?
        .wait_blocking(LIMIT)?;
    assert!(nixl.bytes(json!(["peek", 50_000, 20_000, 1]))? == here, "the bytes that kvx wrote");

    let address = ours.memory().address();
    for (op, from, to) in [("READ", 50_000, 200_000), ("WRITE", 100, 300_000)] {
        let pair = if op == "READ" { (to, from, 20_000) } else { (from, to, 20_000) };
        let command = json!(["move", op, "kvx", address, [pair], hex(b""), "direct", 1, 0, 1]);
        assert_eq!(nixl.call(command)?, "DONE", "{op}");
    }
    assert!(nixl.bytes(json!(["peek", 200_000, 20_000, 1]))? == here, "the bytes that NIXL read");
    ours.copy_out(300_000, &mut got)?;
    assert!(got == there, "the bytes that NIXL wrote");
    Ok(())
}

fn memory_that_is_registered_later_is_usable(setting: &Setting) -> Result<(), Failed> {
    let mut nixl = Nixl::new(setting, MIB)?;
    let agent = agent(setting)?;
    let mut peer = NixlPeer::connect(&agent, &nixl.bytes(json!(["metadata"]))?)?;
    let more = nixl.call(json!(["more", MIB]))?;
    let later = more[1].as_u64().ok_or("an address")?;
    assert_eq!(peer.place(later, 1).unwrap_err().kind(), ErrorKind::Unregistered);
    for (blob, new) in [(unhex(&more[0])?, 1), (nixl.bytes(json!(["partial", 1]))?, 0)] {
        assert_eq!(peer.update(&blob)?, new);
    }
    nixl.call(json!(["poke", 0, hex(b"later"), 1]))?;
    let ours = regions_one(&agent)?;
    let plan = peer.plan(Op::Read, &ours, [(7, later, 5)])?;
    peer.peer().post(&plan)?.wait_blocking(LIMIT)?;
    let mut got = [0; 5];
    ours.copy_out(7, &mut got)?;
    assert_eq!(&got, b"later");

    // And the other way round.
    nixl.call(json!(["load", hex(&nixl::blob(&agent, [])?)]))?;
    nixl.call(json!(["load", hex(&nixl::blob(&agent, [&ours])?)]))?;
    let second = agent.register("second", Memory::owned(content(1, 8192)))?;
    nixl.call(json!(["load", hex(&nixl::blob(&agent, [&ours, &second])?)]))?;
    nixl.moved("READ", second.memory().address(), &[(0, 0, 8192)], b"")?;
    assert_eq!(nixl.bytes(json!(["peek", 0, 8192]))?, content(1, 8192));
    Ok(())
}

fn a_killed_and_restarted_nixl_is_distinguished(setting: &Setting) -> Result<(), Failed> {
    let mut nixl = Nixl::new(setting, MIB)?;
    let agent = agent(setting)?;
    let mut peer = NixlPeer::connect(&agent, &nixl.bytes(json!(["metadata"]))?)?;
    let base = nixl.call(json!(["at"]))?.as_u64().ok_or("an address")?;
    let ours = regions_one(&agent)?;
    let plan = peer.plan(Op::Read, &ours, [(0, base, 4096)])?;
    peer.peer().post(&plan)?.wait_blocking(LIMIT)?;
    drop(nixl);
    let started = Instant::now();
    let error =
        peer.peer().post(&plan).map(|transfer| transfer.wait_blocking(LIMIT)).and_then(|done| done);
    let kind = error.map(|_| ()).unwrap_err().kind();
    assert!(matches!(kind, ErrorKind::PeerLost | ErrorKind::PeerRestarted), "{kind:?}");
    assert!(started.elapsed() < Duration::from_secs(5), "promptly");

    let mut nixl = Nixl::new(setting, MIB)?;
    let blob = nixl.bytes(json!(["metadata"]))?;
    assert_eq!(peer.update(&blob).unwrap_err().kind(), ErrorKind::PeerRestarted);
    let peer = NixlPeer::connect(&agent, &blob)?;
    let base = nixl.call(json!(["at"]))?.as_u64().ok_or("an address")?;
    peer.peer().post(&peer.plan(Op::Read, &ours, [(0, base, 4096)])?)?.wait_blocking(LIMIT)?;
    Ok(())
}

fn a_nixl_without_the_backend_is_rejected_with_the_reason(setting: &Setting) -> Result<(), Failed> {
    let agent = agent(setting)?;
    let blob = |agent: &str, connections| NixlBlob {
        agent: agent.into(),
        connections,
        sections: Vec::new(),
    };
    let ucx = blob("other", vec![("UCX".into(), vec![1, 2, 3])]);
    let error = NixlPeer::connect(&agent, &ucx.encode()?).unwrap_err();
    assert!(
        error.kind() == ErrorKind::Incompatible
            && error.sentence().contains("no backend KVX, but UCX"),
        "{error}"
    );
    let other = blob("other", vec![("KVX".into(), nixl::introduction(&agent)?)]);
    let error = NixlPeer::connect(&agent, &other.encode()?).unwrap_err();
    assert!(
        error.kind() == ErrorKind::Incompatible
            && error.sentence().contains("introduces itself as kvx"),
        "{error}"
    );
    let odd = blob("other", vec![("KVX".into(), b"odd".to_vec())]);
    assert_eq!(NixlPeer::connect(&agent, &odd.encode()?).unwrap_err().kind(), ErrorKind::Malformed);
    Ok(())
}

/// Returns the environments of this run with their releases, and a skipped test for each missing
/// one. `what` names the tests, `folder` their folders.
pub(crate) fn settings(
    what: &str,
    folder: &str,
) -> (Vec<(&'static str, Arc<Setting>)>, Vec<Trial>) {
    let (mut settings, mut skipped) = (Vec::new(), Vec::new());
    for route in ROUTES {
        let (wheels, missing) = wheels::of_this_run(&format!("{what} {route} and one"));
        skipped.extend(missing);
        for (release, wheel) in wheels {
            let name = format!("{folder}-{release}-{route}");
            let plugins = Folder::of_plugins(&name).expect("a new folder");
            let borrowed = wheels::numpy(&format!("{name}-numpy")).expect("a new folder");
            settings.push((release, Arc::new(Setting { wheel, plugins, borrowed, route })));
        }
    }
    (settings, skipped)
}

pub(crate) fn trials() -> Vec<Trial> {
    let (settings, mut trials) = settings("a kvx agent over", "plain");
    for (release, setting) in settings {
        for (name, test) in TESTS {
            let setting = Arc::clone(&setting);
            let route = setting.route.to_lowercase();
            let title = format!("plain_agent::{release}::{route}::{name}");
            trials.push(trial(title.clone(), move || match std::env::var_os(DRIVER) {
                Some(_) => test(&setting),
                None => with_a_stand_in(&title),
            }));
        }
    }
    trials
}

/// Runs the test of this title in a process with the stand-in in place of the GPU driver.
fn with_a_stand_in(title: &str) -> Result<(), Failed> {
    let names = Folder::new(&title.replace("::", "-"))?;
    Ok(run_in_own_process(title, |command| kvx_stand_in::stand_in(command, &[DRIVER], &names.0))?)
}
