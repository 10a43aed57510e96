//! Ranks on two hosts, which are two network namespaces: the engine is on one of them, every second
//! rank on the other. Each trial runs in a process on the first host, which knows how to reach the
//! second.

use std::io::Write as _;
use std::net::TcpStream;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvx_connector::Released;
use kvx_core::{ErrorKind, Secret};
use kvx_testkit::{Check, Hosts, Tier};
use kvx_vllm::engine::{Kept, LoadFailure, Outcome};
use libtest_mimic::Trial;

use super::faults::{killed_in_mid_load, lost};
use super::fleet::{Fleet, OVER_TCP, extra, heard, rank, rank_with};
use super::loads::taken_back_blocks_are_noticed;
use super::{digests, faults, giving_back, loads, pushes};
use crate::runtime::rig::{BLOCK, BLOCKS, LIMIT, builder};

/// The time limit for a trial, with its hosts.
const TRIAL: Duration = Duration::from_secs(60);
/// The time after which a silent rank counts as lost, plus the time to report it.
const MISSED: Duration = Duration::from_secs(12);

/// The variable from which engines and ranks read the secret.
pub(crate) const VARIABLE: &str = "KVX_SECRET_FILE";

const CASES: &[(&str, fn(&str))] = &[
    ("blocks_are_free_when_all_words_are_raised", blocks_are_free_when_all_words_are_raised),
    ("a_rank_that_stands_still_holds_blocks_that_were_taken_back", a_stopped_rank_holds_blocks),
    ("what_a_killed_rank_had_published_is_lost", what_a_killed_rank_had_published_is_lost),
    ("what_a_killed_rank_was_filling_is_lost", what_a_killed_rank_was_filling_is_lost),
    ("a_rank_that_is_cut_off_is_missed", a_rank_that_is_cut_off_is_missed),
    (
        "ranks_with_another_secret_or_none_are_refused",
        ranks_with_another_secret_or_none_are_refused,
    ),
    (
        "a_crowd_of_unauthenticated_peers_keeps_no_rank_out",
        a_crowd_of_unauthenticated_peers_keeps_no_rank_out,
    ),
    ("a_port_has_to_be_named", a_port_has_to_be_named),
];

pub(crate) fn trials() -> Vec<Trial> {
    let all = [
        loads::CASES,
        digests::CASES,
        pushes::CASES,
        giving_back::WITH_LOADS,
        faults::WITH_LOADS,
        CASES,
    ];
    let mut trials: Vec<Trial> =
        all.into_iter().flatten().map(|(name, run)| trial(name, *run)).collect();
    trials.push(kvx_testkit::trial(
        "ranks::an_engine_without_a_secret_has_no_ranks_elsewhere",
        without_a_secret,
    ));
    if Tier::Whole.runs() { trials } else { trials.split_off(trials.len() - 1 - CASES.len()) }
}

fn trial(name: &str, run: fn(&str)) -> Trial {
    let title = format!("ranks::two_hosts::{name}");
    kvx_testkit::trial(title.clone(), move || -> Check {
        if Hosts::way_to_far().is_some() {
            run("TCP");
        } else if Hosts::for_test(&title, 0)?.is_some() {
            Hosts::run_test(&title, TRIAL)?;
        }
        Ok(())
    })
}

/// Restarts this program with a secret, on a host where it has none. Returns the file to remove at
/// the end.
pub(crate) fn secret_of_this_host() -> Option<PathBuf> {
    Hosts::way_to_far()?;
    if let Some(file) = std::env::var_os(VARIABLE) {
        return Some(file.into());
    }
    let file = a_secret("ours");
    let program = std::env::current_exe().unwrap();
    let why = std::process::Command::new(program)
        .args(std::env::args_os().skip(1))
        .env(VARIABLE, file)
        .exec();
    panic!("this program cannot be started again: {why}");
}

pub(crate) fn a_secret(name: &str) -> PathBuf {
    let file = std::env::temp_dir().join(format!("kvx-ranks-{}-{name}.secret", std::process::id()));
    std::fs::remove_file(&file).ok(); // left by an earlier process with this id
    Secret::create(&file).unwrap();
    file
}

fn free(request: &str) -> Vec<Outcome> {
    vec![Outcome::Free { request: request.into(), kept: Kept::Request }]
}

// vLLM 8, 15: engines with several ranks load across two hosts, with every second rank on the other
//     host
fn blocks_are_free_when_all_words_are_raised(backend: &str) {
    taken_back_blocks_are_noticed(backend, |prefill| {
        assert!(prefill.outcomes_ready_blocking(LIMIT));
        assert_eq!(prefill.outcomes(), free("p"));
    });
}

fn a_stopped_rank_holds_blocks(backend: &str) {
    let prefill = Fleet::new("prefill", backend, 2);
    let (lease, _) = prefill.publish("p", &[5], BLOCK).unwrap();
    let (kept, _) = prefill.publish("q", &[5], BLOCK).unwrap();
    prefill.ranks[1].stop().unwrap_or_else(|why| panic!("{why}"));
    // The other request still has the block, so nothing is raised.
    drop(kept);
    assert!(prefill.connector.outcomes_ready_blocking(LIMIT));
    assert_eq!(prefill.connector.outcomes(), free("q"));
    drop(lease);
    assert!(
        !prefill.connector.outcomes_ready_blocking(Duration::from_secs(2)),
        "{:?}",
        prefill.connector.outcomes()
    );
    prefill.ranks[1].go_on().unwrap_or_else(|why| panic!("{why}"));
    assert!(prefill.connector.outcomes_ready_blocking(LIMIT));
    assert_eq!(prefill.connector.outcomes(), free("p"));
    prefill.end();
}

fn what_a_killed_rank_had_published_is_lost(backend: &str) {
    let (mut prefill, decode) =
        (Fleet::new("prefill", backend, 2), Fleet::new("decode", backend, 1));
    prefill.compute(1, &[5], BLOCK);
    let (lease, params) = prefill.publish("p", &[5], BLOCK).unwrap();
    let (taken_back, _) = prefill.publish("q", &[6], BLOCK).unwrap();
    prefill.ranks[1].kill().unwrap_or_else(|why| panic!("{why}"));
    let error = decode.fetch("d", &params, &[1], LIMIT).join().unwrap_err();
    assert!(
        !matches!(error.failure, LoadFailure::Rank(_)),
        "the other engine's rank is lost: {error}"
    );
    let why = lost(&prefill, &params, LIMIT);
    assert!(
        why.contains(&format!("rank pp 0 tp 1 (the process at {}:", Hosts::address(2))),
        "{why}"
    );
    // A killed process cannot be distinguished from one that is cut off and still serves its
    // blocks, so `Free` cannot be proven.
    drop(taken_back);
    assert!(prefill.connector.outcomes_ready_blocking(LIMIT));
    let is_lost = Outcome::Lost { request: "q".into(), kept: Kept::Request };
    assert_eq!(prefill.connector.outcomes(), [is_lost]);
    assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Lost);
    let error =
        prefill.connector.shutdown(Duration::from_secs(2)).wait_blocking(LIMIT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StillShared, "{error}");
    decode.end();
}

fn what_a_killed_rank_was_filling_is_lost(backend: &str) {
    let (prefill, _decode, error) = killed_in_mid_load(backend, 1);
    assert_eq!(error.held.wait_blocking(LIMIT).unwrap(), Released::Lost);
    prefill.end();
}

/// Neither end is notified.
fn a_rank_that_is_cut_off_is_missed(backend: &str) {
    let (mut prefill, mut decode) =
        (Fleet::new("prefill", backend, 1), Fleet::new("decode", backend, 2));
    prefill.compute(1, &[5], BLOCK);
    let (_lease, params) = prefill.publish("p", &[5], BLOCK).unwrap();
    let (lease, _) = prefill.publish("q", &[6], BLOCK).unwrap();
    drop(prefill.connector.outcomes());
    Hosts::cut_off_far(true).unwrap_or_else(|why| panic!("{why}"));
    let began = Instant::now();
    let why = lost(&decode, &params, MISSED);
    assert!(why.contains("rank pp 0 tp 1"), "{why}");
    drop(lease);
    assert!(prefill.connector.outcomes_ready_blocking(MISSED));
    let is_lost = Outcome::Lost { request: "q".into(), kept: Kept::Request };
    assert!(prefill.connector.outcomes().contains(&is_lost), "the rank may still have served it");
    assert!(began.elapsed() < 2 * MISSED, "{:?}", began.elapsed());
    // The ranks notice the silence of the engine too, and end.
    for rank in [&mut prefill.ranks[0], &mut decode.ranks[1]] {
        let until = Instant::now() + MISSED;
        loop {
            rank.say("ended").unwrap_or_else(|why| panic!("{why}"));
            match heard(rank).as_str() {
                "it goes on" => {
                    assert!(
                        Instant::now() < until,
                        "a rank believes in an engine that is not there"
                    )
                }
                said => {
                    break assert!(
                        said.contains("connection is lost") || said.contains("gone"),
                        "{said}"
                    );
                }
            }
        }
    }
    Hosts::cut_off_far(false).unwrap_or_else(|why| panic!("{why}"));
    assert!(!lost(&decode, &params, LIMIT).is_empty(), "there is no way back");
}

fn ranks_with_another_secret_or_none_are_refused(backend: &str) {
    let (decode, whole) = Fleet::awaiting("decode", backend, 1, LIMIT);
    let theirs = a_secret("theirs");
    let other = rank_with(&decode.path, 0, 1, BLOCKS, |command| _ = command.env(VARIABLE, &theirs));
    let said = heard(&other);
    assert!(said.contains("has not proved that it has this fleet's secret"), "{said}");
    let none = rank_with(&decode.path, 0, 1, BLOCKS, |command| _ = command.env_remove(VARIABLE));
    let said = heard(&none);
    assert!(said.contains("this process has none") && said.contains(VARIABLE), "{said}");
    std::fs::remove_file(theirs).unwrap();
    // The engine still works.
    assert_eq!(heard(&rank(&decode.path, 0, 1)), "ready");
    whole.wait_blocking(LIMIT).unwrap();
}

fn a_crowd_of_unauthenticated_peers_keeps_no_rank_out(backend: &str) {
    let (decode, whole) = Fleet::awaiting("decode", backend, 1, LIMIT);
    let address = decode.path.to_str().unwrap().strip_prefix(OVER_TCP).unwrap();
    let mut crowd = Vec::new();
    for at in 0..400 {
        let mut stranger = TcpStream::connect(address).unwrap();
        match at % 4 {
            0 => {}
            1 => stranger
                .write_all(b"GET / HTTP/1.1\r\nHost: somebody\r\nAccept: everything at all\r\n\r\n")
                .unwrap(),
            2 => stranger.write_all(&[at as u8; 47]).unwrap(),
            _ => stranger.write_all(&[0xff; 4096]).unwrap(),
        }
        crowd.push(stranger);
    }
    let began = Instant::now();
    let come = rank(&decode.path, 0, 1);
    assert_eq!(heard(&come), "ready");
    whole.wait_blocking(LIMIT).unwrap();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

fn a_port_has_to_be_named(backend: &str) {
    let connector = builder("engine", &extra(backend)).build_blocking().unwrap();
    let error = connector
        .group_over_tcp(([127, 0, 0, 1], 0).into(), LIMIT)
        .wait_blocking(LIMIT)
        .unwrap_err();
    assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("port"), "{error}");
}

fn without_a_secret() {
    let connector = builder("engine", &extra("TCP")).build_blocking().unwrap();
    let error = connector
        .group_over_tcp(([127, 0, 0, 1], 4711).into(), LIMIT)
        .wait_blocking(LIMIT)
        .unwrap_err();
    assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains(VARIABLE), "{error}");
}
