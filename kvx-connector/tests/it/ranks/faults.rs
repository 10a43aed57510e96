//! Engines whose ranks fail: every load has an outcome in time, and no wrong byte.

use std::time::{Duration, Instant};

use kvx_connector::{LoadError, Released};
use kvx_core::{Completion, Error, ErrorKind};
use kvx_testkit::{Child, skip};
use kvx_vllm::engine::LoadFailure;

use super::fleet::{Fleet, heard, path, rank, rank_of};
use super::rank::VARIABLE;
use crate::runtime::rig::{BLOCK, BLOCKS, LIMIT};

/// Tests of moves, which run over each backend.
pub(crate) const WITH_LOADS: &[(&str, fn(&str))] = &[
    (
        "a_rank_that_stands_still_a_while_costs_no_more",
        a_rank_that_stands_still_a_while_costs_no_more,
    ),
    (
        "a_stopped_prefill_rank_costs_loads_their_deadline",
        a_stopped_prefill_rank_costs_loads_their_deadline,
    ),
];

/// Tests of ranks whose death can be seen, over each backend.
pub(crate) const OF_ONE_HOST: &[(&str, fn(&str))] =
    &[("a_rank_that_is_killed_in_mid_load_fails_it", a_rank_that_is_killed_in_mid_load_fails_it)];

pub(crate) const CASES: &[(&str, fn(&str))] = &[
    ("a_killed_rank_ends_the_loads_of_its_engine", a_killed_rank_ends_the_loads_of_its_engine),
    ("a_stopped_rank_costs_its_deadline_and_blocks", a_stopped_rank_costs_its_deadline_and_blocks),
    (
        "a_reader_notices_reuse_while_a_rank_is_stopped",
        a_reader_notices_reuse_while_a_rank_is_stopped,
    ),
    ("a_killed_prefill_rank_withholds_what_it_had", a_killed_prefill_rank_withholds_what_it_had),
    ("a_rank_that_is_started_twice_ends_the_loads", a_rank_that_is_started_twice_ends_the_loads),
    ("a_rank_that_does_not_exist_is_refused", a_rank_that_does_not_exist_is_refused),
    ("a_rank_that_never_comes_is_named_in_time", a_rank_that_never_comes_is_named_in_time),
    ("a_shutdown_before_all_have_come_says_so", a_shutdown_before_all_have_come_says_so),
    ("a_rank_that_does_not_register_is_named", a_rank_that_does_not_register_is_named),
    ("a_rank_with_other_blocks_is_refused", a_rank_with_other_blocks_is_refused),
    ("a_rank_that_leaves_is_missed", a_rank_that_leaves_is_missed),
    ("ranks_end_when_their_engine_is_gone", ranks_end_when_their_engine_is_gone),
    ("a_path_in_use_is_refused_and_left_alone", a_path_in_use_is_refused_and_left_alone),
    ("settings_for_one_process_are_refused", settings_for_one_process_are_refused),
    ("a_process_of_another_user_is_refused", a_process_of_another_user_is_refused),
    ("nonsense_at_the_socket_ends_nothing", nonsense_at_the_socket_ends_nothing),
];

/// Waits until a load reports that a rank is lost.
pub(crate) fn lost(
    decode: &Fleet,
    params: &kvx_vllm::params::TransferParams,
    within: Duration,
) -> String {
    let until = Instant::now() + within;
    for number in 0.. {
        let error = decode.fetch(&format!("look{number}"), params, &[9], LIMIT).join().err();
        match error.map(|error| error.failure) {
            Some(LoadFailure::Rank(why) | LoadFailure::Refused(why)) => return why,
            other => assert!(Instant::now() < until, "no rank is lost: {other:?}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    unreachable!("it counts without end")
}

fn ended(whole: Completion<()>) -> Error {
    whole.wait_blocking(LIMIT).unwrap_err()
}

fn a_killed_rank_ends_the_loads_of_its_engine(backend: &str) {
    let (mut prefill, mut decode) =
        (Fleet::new("prefill", backend, 2), Fleet::new("decode", backend, 2));
    prefill.compute(1, &[5], BLOCK);
    let (lease, params) = prefill.publish("p", &[5], BLOCK).unwrap();
    decode.ranks[1].kill().unwrap_or_else(|why| panic!("{why}"));
    let why = lost(&decode, &params, LIMIT);
    assert!(why.contains("rank pp 0 tp 1") && why.contains("its process has ended"), "{why}");
    assert!(why.contains(&decode.ranks[1].pid().to_string()), "{why}");
    // A restarted rank learns why its rank was lost (a load may report it first), and what to do.
    let of_the_rank = &why[why.find("rank pp").unwrap()..];
    let said = heard(&rank(&decode.path, 1, 2));
    assert!(
        said.contains(of_the_rank) && said.contains("restart the engine with all its ranks"),
        "{said}"
    );
    // The prefill's blocks are free when their lease ends, at the latest.
    assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Expired);
    prefill.end();
    // The killed process and its accesses are gone: nothing touches a block any more.
    decode.connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
}

/// Kills this rank of a decode in the middle of a load. Returns both fleets and the failure.
pub(crate) fn killed_in_mid_load(backend: &str, rank: usize) -> (Fleet, Fleet, LoadError) {
    let (mut prefill, mut decode) =
        (Fleet::new("prefill", backend, 1), Fleet::new("decode", backend, 2));
    prefill.compute(1, &[5], BLOCK);
    let (_lease, params) = prefill.publish("p", &[5], BLOCK).unwrap();
    // The rank is stopped, so the load is still open when it is killed.
    decode.ranks[rank].stop().unwrap_or_else(|why| panic!("{why}"));
    let fetch = decode.fetch("d", &params, &[1], LIMIT);
    let fetch = fetch.wait_blocking(Duration::from_millis(200)).expect_err("a rank stands still");
    decode.ranks[rank].kill().unwrap_or_else(|why| panic!("{why}"));
    let error = fetch.join().unwrap_err();
    let LoadFailure::Rank(why) = &error.failure else { panic!("{error:?}") };
    assert!(why.contains(&format!("rank pp 0 tp {rank}")), "{why}");
    assert_eq!(error.invalid, [1]);
    (prefill, decode, error)
}

// vLLM 24, 39: a rank that is killed fails its load in progress and all later loads
fn a_rank_that_is_killed_in_mid_load_fails_it(backend: &str) {
    let (prefill, decode, error) = killed_in_mid_load(backend, 0);
    assert!(error.held.is_empty(), "the killed process touches nothing any more");
    prefill.end();
    decode.connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
}

// vLLM 24, 33: a load with a stopped rank fails at its deadline and loses its blocks
fn a_stopped_rank_costs_its_deadline_and_blocks(backend: &str) {
    let (mut prefill, mut decode) =
        (Fleet::new("prefill", backend, 1), Fleet::new("decode", backend, 2));
    prefill.compute(1, &[5], BLOCK);
    let (_lease, params) = prefill.publish("p", &[5], BLOCK).unwrap();
    decode.ranks[1].stop().unwrap_or_else(|why| panic!("{why}"));
    let began = Instant::now();
    let error = decode.fetch("d", &params, &[1], Duration::from_secs(1)).join().unwrap_err();
    assert_eq!(error.failure, LoadFailure::Deadline);
    assert!(began.elapsed() < LIMIT / 2, "{:?}", began.elapsed());
    assert!(!error.held.is_empty(), "the rank may still write to the block");
    // The rank may still write when it continues.
    assert_eq!(error.held.wait_blocking(Duration::from_secs(15)).unwrap(), Released::Lost);
    let why = lost(&decode, &params, LIMIT);
    assert!(why.contains("rank pp 0 tp 1") && why.contains("it was silent for"), "{why}");
    let error = decode.connector.shutdown(Duration::from_secs(1)).wait_blocking(LIMIT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StillShared, "{error}");
    // The rank ends when it continues.
    decode.ranks[1].go_on().unwrap_or_else(|why| panic!("{why}"));
    decode.ranks[1].say("ended").unwrap_or_else(|why| panic!("{why}"));
    let said = heard(&decode.ranks[1]);
    assert!(said.contains("given this rank up"), "{said}");
    prefill.end();
}

fn a_rank_that_stands_still_a_while_costs_no_more(backend: &str) {
    let (mut prefill, mut decode) =
        (Fleet::new("prefill", backend, 2), Fleet::new("decode", backend, 2));
    prefill.compute(1, &[5], BLOCK);
    let (lease, params) = prefill.publish("p", &[5], BLOCK).unwrap();
    decode.ranks[1].stop().unwrap_or_else(|why| panic!("{why}"));
    let fetch = decode.fetch("d", &params, &[1], LIMIT);
    let fetch = fetch.wait_blocking(Duration::from_secs(2)).expect_err("a rank stands still");
    decode.ranks[1].go_on().unwrap_or_else(|why| panic!("{why}"));
    fetch.join().unwrap();
    assert_eq!(decode.wrong(1, &[1], 0..BLOCK), 0);
    assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Fetched);
    prefill.end();
    decode.end();
}

fn a_stopped_prefill_rank_costs_loads_their_deadline(backend: &str) {
    let (mut prefill, mut decode) =
        (Fleet::new("prefill", backend, 2), Fleet::new("decode", backend, 1));
    prefill.compute(1, &[5], BLOCK);
    let (_lease, params) = prefill.publish("p", &[5], BLOCK).unwrap();
    prefill.ranks[1].stop().unwrap_or_else(|why| panic!("{why}"));
    let began = Instant::now();
    let error = decode.fetch("d", &params, &[1], Duration::from_secs(1)).join().unwrap_err();
    assert!(began.elapsed() < LIMIT / 2, "{:?}: {error}", began.elapsed());
    prefill.ranks[1].go_on().unwrap_or_else(|why| panic!("{why}"));
    assert_eq!(error.held.wait_blocking(LIMIT).unwrap(), Released::Free);
    prefill.compute(2, &[6], BLOCK);
    let (_lease, params) = prefill.publish("q", &[6], BLOCK).unwrap();
    decode.fetch("e", &params, &[1], LIMIT).join().unwrap();
    assert_eq!(decode.wrong(2, &[1], 0..BLOCK), 0);
    prefill.end();
    decode.end();
}

// vLLM 30: a reader detects reused blocks even while the prefill's rank is stopped
fn a_reader_notices_reuse_while_a_rank_is_stopped(backend: &str) {
    let (mut prefill, decode) =
        (Fleet::new("prefill", backend, 1), Fleet::new("decode", backend, 1));
    prefill.compute(1, &[5], BLOCK);
    let (_first, params) = prefill.publish("p1", &[4], BLOCK).unwrap();
    decode.fetch("d1", &params, &[1], LIMIT).join().unwrap();
    let (lease, params) = prefill.publish("p2", &[5], BLOCK).unwrap();
    prefill.ranks[0].stop().unwrap_or_else(|why| panic!("{why}"));
    // The engine takes the block back, without any help of the rank.
    drop(lease);
    let error = decode.fetch("d2", &params, &[2], Duration::from_secs(3)).join().unwrap_err();
    assert_eq!(error.failure, LoadFailure::Stale);
    prefill.ranks[0].go_on().unwrap_or_else(|why| panic!("{why}"));
    prefill.end();
    decode.end();
}

fn a_killed_prefill_rank_withholds_what_it_had(backend: &str) {
    let (mut prefill, decode) =
        (Fleet::new("prefill", backend, 2), Fleet::new("decode", backend, 1));
    prefill.compute(1, &[5], BLOCK);
    let (lease, params) = prefill.publish("p", &[5], BLOCK).unwrap();
    prefill.ranks[0].kill().unwrap_or_else(|why| panic!("{why}"));
    let began = Instant::now();
    let error = decode.fetch("d", &params, &[1], LIMIT).join().unwrap_err();
    assert!(began.elapsed() < LIMIT + Duration::from_secs(1));
    assert!(
        !matches!(error.failure, LoadFailure::Rank(_)),
        "the other engine's rank is lost: {error}"
    );
    // The other rank keeps the blocks for its lease.
    assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Expired);
    let error = prefill.publish("q", &[6], BLOCK).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("a rank of this engine is missing"), "{error}");
    prefill.connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
    decode.end();
}

fn a_rank_that_is_started_twice_ends_the_loads(backend: &str) {
    let (mut prefill, decode) =
        (Fleet::new("prefill", backend, 1), Fleet::new("decode", backend, 2));
    prefill.compute(1, &[5], BLOCK);
    let (_lease, params) = prefill.publish("p", &[5], BLOCK).unwrap();
    let twice = rank(&decode.path, 1, 2);
    let said = heard(&twice);
    assert!(said.contains("rank pp 0 tp 1") && said.contains("start each rank once"), "{said}");
    let why = lost(&decode, &params, LIMIT);
    for pid in [twice.pid(), decode.ranks[1].pid()] {
        assert!(why.contains("rank pp 0 tp 1") && why.contains(&pid.to_string()), "{why}");
    }
    prefill.end();
}

fn a_rank_that_does_not_exist_is_refused(backend: &str) {
    let (decode, whole) = Fleet::awaiting("decode", backend, 2, LIMIT);
    let wrong = rank(&decode.path, 2, 4);
    let said = heard(&wrong);
    assert!(said.contains("rank pp 0 tp 2") && said.contains("built for 1 x 2 workers"), "{said}");
    let error = ended(whole);
    assert!(
        error.kind() == ErrorKind::Invalid && error.to_string().contains("rank pp 0 tp 2"),
        "{error}"
    );
}

fn a_shutdown_before_all_have_come_says_so(backend: &str) {
    let (decode, whole) = Fleet::awaiting("decode", backend, 2, Duration::from_secs(60));
    // There was no process that could touch anything.
    decode.connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
    let error = ended(whole);
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert!(!decode.path.exists(), "the socket goes with the connector");
}

fn a_rank_that_never_comes_is_named_in_time(backend: &str) {
    let mut prefill = Fleet::new("prefill", backend, 1);
    prefill.compute(1, &[5], BLOCK);
    let (_lease, params) = prefill.publish("p", &[5], BLOCK).unwrap();
    let (mut decode, whole) = Fleet::awaiting("decode", backend, 2, Duration::from_secs(2));
    decode.ranks.push(rank(&decode.path, 0, 2));
    assert_eq!(heard(&decode.ranks[0]), "ready");
    // Until then loads are refused, and the error says why.
    let early = decode.fetch("early", &params, &[1], LIMIT).join().unwrap_err();
    assert!(early.to_string().contains("rank pp 0 tp 1 has not joined"), "{early}");
    let error = ended(whole);
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(
        error.to_string().contains("rank pp 0 tp 1")
            && error.to_string().contains("by the deadline"),
        "{error}"
    );
    assert!(lost(&decode, &params, LIMIT).contains("rank pp 0 tp 1"));
    // The rank joins too late.
    let late = rank(&decode.path, 1, 2);
    let said = heard(&late);
    assert!(said.contains("rank pp 0 tp 1: it had not joined"), "{said}");
    prefill.end();
}

fn a_rank_that_does_not_register_is_named(backend: &str) {
    let (mut decode, whole) = Fleet::awaiting("decode", backend, 2, Duration::from_secs(3));
    decode.ranks = vec![rank(&decode.path, 0, 2), rank_of(&decode.path, 1, 2, 0)];
    assert_eq!([heard(&decode.ranks[0]), heard(&decode.ranks[1])], ["ready", "joined"]);
    let error = ended(whole);
    let named = format!("rank pp 0 tp 1 (process {})", decode.ranks[1].pid());
    assert!(error.kind() == ErrorKind::TimedOut && error.to_string().contains(&named), "{error}");
}

fn a_rank_with_other_blocks_is_refused(backend: &str) {
    let (mut decode, whole) = Fleet::awaiting("decode", backend, 2, LIMIT);
    decode.ranks.push(rank(&decode.path, 0, 2));
    assert_eq!(heard(&decode.ranks[0]), "ready");
    let said = heard(&rank_of(&decode.path, 1, 2, BLOCKS / 2));
    assert!(
        said.contains("rank pp 0 tp 1 has 32 logical blocks, another rank of this engine 64"),
        "{said}"
    );
    let error = ended(whole);
    assert!(error.to_string().contains("rank pp 0 tp 1"), "{error}");
}

fn a_rank_that_leaves_is_missed(backend: &str) {
    let (mut prefill, mut decode) =
        (Fleet::new("prefill", backend, 1), Fleet::new("decode", backend, 2));
    prefill.compute(1, &[5], BLOCK);
    let (_lease, params) = prefill.publish("p", &[5], BLOCK).unwrap();
    decode.ranks[0].say("leave").unwrap_or_else(|why| panic!("{why}"));
    assert_eq!(heard(&decode.ranks[0]), "Ok(())");
    let why = lost(&decode, &params, LIMIT);
    assert!(why.contains("rank pp 0 tp 0") && why.contains("it has left the engine"), "{why}");
    decode.connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
    prefill.end();
}

/// The engine runs in its own process here.
fn ranks_end_when_their_engine_is_gone(_: &str) {
    let path = path("killed");
    let mut engine = Child::start_self(VARIABLE, &path.display().to_string()).unwrap();
    let mut rank = rank(&path, 0, 1);
    assert_eq!([heard(&engine), heard(&rank)], ["whole", "ready"]);
    engine.kill().unwrap_or_else(|why| panic!("{why}"));
    rank.say("ended").unwrap_or_else(|why| panic!("{why}"));
    let said = heard(&rank);
    assert!(said.contains("the engine's process is gone"), "{said}");
    // A new engine replaces the socket that the old one has left behind.
    let mut next = Child::start_self(VARIABLE, &path.display().to_string()).unwrap();
    let rank = super::fleet::rank(&path, 0, 1);
    assert_eq!([heard(&next), heard(&rank)], ["whole", "ready"]);
    next.kill().unwrap_or_else(|why| panic!("{why}"));
    std::fs::remove_file(path).unwrap();
}

fn a_path_in_use_is_refused_and_left_alone(backend: &str) {
    let taken = path("taken");
    std::fs::write(&taken, "somebody's").unwrap();
    let connector = crate::runtime::rig::builder("engine", &super::fleet::extra(backend))
        .build_blocking()
        .unwrap();
    let error = ended(connector.group(&taken, LIMIT));
    assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
    assert_eq!(std::fs::read_to_string(&taken).unwrap(), "somebody's");
    std::fs::remove_file(&taken).unwrap();
    let (other, _whole) = Fleet::awaiting("other", backend, 1, LIMIT);
    let error = ended(connector.group(&other.path, LIMIT));
    assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
    // Neither attempt affects it.
    let _whole = connector.group(&taken, LIMIT);
    assert_eq!(heard(&rank(&taken, 0, 1)), "ready");
}

fn settings_for_one_process_are_refused(_: &str) {
    let connector =
        crate::runtime::rig::Engine::mooncake_builder("engine", "{}").build_blocking().unwrap();
    let error = ended(connector.group(path("refused"), LIMIT));
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

fn a_process_of_another_user_is_refused(backend: &str) {
    use std::io::Read as _;
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::process::CommandExt as _;
    let (decode, _whole) = Fleet::awaiting("decode", backend, 1, LIMIT);
    if !rustix::process::geteuid().is_root() {
        return skip(
            "a_process_of_another_user_is_refused",
            "a process of another user is started by root only",
            "run the tests as root",
        );
    }
    std::fs::set_permissions(&decode.path, std::fs::Permissions::from_mode(0o777)).unwrap();
    let script = "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\n\
                  sys.stdout.buffer.write(s.recv(4096))";
    let mut stranger = std::process::Command::new("python3");
    stranger.args(["-c", script]).arg(&decode.path).uid(65534).stdout(std::process::Stdio::piped());
    let mut stranger = stranger.spawn().unwrap();
    kvx_testkit::kill_after(&stranger, LIMIT);
    let mut said = Vec::new();
    stranger.stdout.take().unwrap().read_to_end(&mut said).unwrap();
    stranger.wait().unwrap();
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("runs as user 65534, this one as user 0"), "{said}");
    // The engine still works.
    let rank = rank(&decode.path, 0, 1);
    assert_eq!(heard(&rank), "ready");
}

fn nonsense_at_the_socket_ends_nothing(backend: &str) {
    use std::io::{Read as _, Write as _};
    let (decode, whole) = Fleet::awaiting("decode", backend, 1, LIMIT);
    for nonsense in
        [&b"\xff\xff\xff\xff"[..], b"\0\0\0\x01\x09", b"\0\0\0\0", b"GET / HTTP/1.1\r\n\r\n"]
    {
        let mut socket = std::os::unix::net::UnixStream::connect(&decode.path).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket.write_all(nonsense).unwrap();
        let mut said = Vec::new();
        socket.read_to_end(&mut said).unwrap();
        assert!(
            String::from_utf8_lossy(&said).contains("malformed") || !said.is_empty(),
            "{said:?}"
        );
    }
    let rank = rank(&decode.path, 0, 1);
    assert_eq!(heard(&rank), "ready");
    whole.wait_blocking(LIMIT).unwrap();
}
