//! Blocks that wait for a peer: their leases and the messages that renew them.

use std::time::Duration;

use kvx_core::{ErrorKind, Secret};
use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::config::{BlockRelease, LeaseTime};
use kvx_vllm::engine::{ConsumerRule, Kept, Outcome, ParamsTrust, Settings, Status};
use kvx_vllm::params::{TransferMode, TransferParams};
use kvx_vllm::wire::EngineNotification;

use super::rig::{Rig, at, beats, plan, prefilled, settings};

fn freed(request: &str) -> Outcome {
    Outcome::Free { request: request.into(), kept: Kept::Request }
}

fn leased(seconds: u64) -> Settings {
    Settings {
        release: BlockRelease::Lease(LeaseTime { duration: Duration::from_secs(seconds) }),
        ..settings("p")
    }
}

// vLLM 33: a prefill's blocks stay until they are fetched, and an abort does not free them
#[test]
fn blocks_of_a_prefill_stay_until_they_are_fetched() {
    let mut prefill = Rig::new(settings("p"));
    prefill.prefill(0.0, "p-r", 40);
    assert!(prefill.scheduler.has_pending_block_frees());
    assert!(!prefill.ends(1.0, "p-r", Status::Aborted, 40).delay_free, "it has already ended");
    assert_eq!(prefill.outcomes(1.0), [], "an abort does not free blocks that a peer reads");
    prefill.notified(2.0, "d/0", b"p-r:1");
    assert_eq!(prefill.outcomes(2.0), [freed("p-r")]);
    assert_eq!(prefill.outcomes(3.0), []);
    assert!(prefill.scheduler.is_empty() && prefill.worker.is_empty());
}

#[test]
fn completions_for_withdrawn_blocks_are_late() {
    let mut prefill = Rig::new(settings("p"));
    prefill.prefill(0.0, "p-r", 40);
    assert!(prefill.scheduler.withdraw(&"p-r".into()));
    assert!(!prefill.scheduler.withdraw(&"p-r".into()), "once");
    prefill.step(1.0);
    assert!(prefill.scheduler.is_empty() && prefill.worker.is_empty());
    prefill.notified(2.0, "d/0", b"p-r:1");
    assert_eq!(prefill.outcomes(2.0), []);
    assert_eq!(prefill.metric("vllm:nixl_num_notifications_after_expiry"), 1.0);
}

#[test]
fn the_name_of_withdrawn_blocks_may_be_reused_before_the_next_step() {
    let mut prefill = Rig::new(settings("p"));
    prefill.prefill(0.0, "r", 40);
    assert!(prefill.scheduler.withdraw(&"r".into()));
    prefill.arrive(1.0, "r", 40, &TransferParams::ask_prefill());
    prefill.allocate(1.0, "r", 100, 0);
    assert!(prefill.ends(1.0, "r", Status::LengthCapped, 40).delay_free);
    prefill.step(1.0);
    prefill.notified(2.0, "d/0", b"r:1");
    assert_eq!(prefill.outcomes(2.0), [freed("r")]);
    // Blocks that are withdrawn before the worker knows of them leave no trace there.
    prefill.arrive(3.0, "s", 40, &TransferParams::ask_prefill());
    prefill.allocate(3.0, "s", 100, 0);
    prefill.ends(3.0, "s", Status::LengthCapped, 40);
    assert!(prefill.scheduler.withdraw(&"s".into()));
    prefill.step(3.0);
    assert!(prefill.worker.is_empty());
}

#[test]
fn requests_that_fill_no_block_need_no_step() {
    let mut decode = Rig::new(settings("d"));
    let (loads, ends) = ("loads".into(), "ends".into());
    decode.arrive(0.0, "ends", 40, &prefilled("p", "p-ends", 40));
    decode.load(0.0, "loads", 40, &prefilled("p", "p-loads", 40));
    decode.ends(0.0, "ends", Status::Aborted, 0);
    let ready = decode.scheduler.take_ready(at(0.0), None);
    let told: Vec<_> =
        ready.receive.iter().map(|order| (&order.request, order.local.len())).collect();
    assert_eq!(told, [(&ends, 0)], "the notification that its blocks are not needed");
    assert_eq!(ready.heartbeats[0].requests, ["p-loads".into()]);
    assert!(decode.scheduler.take_ready(at(0.0), None).is_empty());
    let ready = decode.scheduler.take_ready(at(0.0), Some(&loads));
    assert_eq!((ready.receive.len(), &ready.receive[0].request), (1, &loads));
    assert!(
        decode.scheduler.build_connector_meta(at(0.0)).is_empty(),
        "notifications are not repeated"
    );
}

// vLLM 33: a prompt shorter than a block keeps one block
#[test]
fn a_prefill_of_less_than_a_block_keeps_one() {
    let mut prefill = Rig::new(settings("p"));
    assert_eq!(prefill.prefill(0.0, "p-r", 3).remote_block_ids, Some(vec![vec![100]]));
    prefill.notified(1.0, "d/0", b"p-r:1");
    assert_eq!(prefill.outcomes(1.0), [freed("p-r")]);
}

// vLLM 33: only prefills that end as LENGTH_CAPPED or STOPPED publish their blocks
#[test]
fn only_normal_ends_publish() {
    for (status, publishes) in [
        (Status::LengthCapped, true),
        (Status::Stopped, true),
        (Status::Aborted, false),
        (Status::Failed, false),
    ] {
        let mut prefill = Rig::new(settings("p"));
        prefill.arrive(0.0, "p-r", 40, &TransferParams::ask_prefill());
        let finished = prefill.ends(0.0, "p-r", status, 40);
        assert_eq!(
            (finished.delay_free, finished.params.is_some()),
            (publishes, publishes),
            "{status:?}"
        );
    }
}

// vLLM 35: blocks that nobody fetches are free when their lease of 6 s ends
#[test]
fn blocks_that_nobody_fetches_are_free_when_the_lease_ends() {
    let mut prefill = Rig::new(leased(6));
    prefill.prefill(0.0, "p-r", 40);
    assert_eq!(prefill.outcomes(5.99), []);
    assert_eq!(prefill.outcomes(6.0), [freed("p-r")], "the lease has ended at that moment");
    assert_eq!(prefill.metric("vllm:nixl_num_kv_expired_reqs"), 1.0);
    let [line] = &prefill.log[..] else { panic!("{:?}", prefill.log) };
    assert!(line.contains("request p-r") && line.contains("kv_lease_duration"), "{line}");
    assert_eq!(
        prefill.metric("vllm:nixl_num_failed_transfers"),
        0.0,
        "an expired lease is not a failure"
    );
    assert_eq!(prefill.outcomes(60.0), []);
    assert_eq!(prefill.worker.next_deadline(), None);
}

// vLLM 36: a lease's deadline is converted to the worker's clock
#[test]
fn a_deadline_is_moved_to_the_workers_clock() {
    let mut prefill = Rig::new(leased(30));
    prefill.arrive(1000.0, "p-r", 40, &TransferParams::ask_prefill());
    prefill.ends(1000.0, "p-r", Status::LengthCapped, 40);
    // One second passes before the message is built, when the worker's clock shows 5 s.
    let meta = prefill.scheduler.build_connector_meta(at(1001.0));
    prefill.worker.start_load_kv(at(5.0), meta);
    assert_eq!(prefill.worker.next_deadline(), Some(at(34.0)));
}

// vLLM 37: a heartbeat extends a lease to the later of both ends; a lease that ends now has expired
#[test]
fn a_heartbeat_extends_by_two_thirds_and_never_shortens() {
    let mut prefill = Rig::new(leased(30));
    prefill.prefill(0.0, "p-r", 40);
    prefill.notified(2.0, "d/0", b"HB:p-r");
    assert_eq!(prefill.worker.next_deadline(), Some(at(30.0)), "2 + 20 is earlier");
    prefill.notified(25.0, "d/0", b"HB:unknown,p-r");
    assert_eq!(prefill.worker.next_deadline(), Some(at(45.0)));
    assert_eq!(prefill.outcomes(44.0), []);
    assert_eq!(prefill.last.unknown_requests, 1);
    assert_eq!(prefill.outcomes(45.0), [freed("p-r")]);
}

// vLLM 37: the expiry scan continues past a renewed lease at the head of the queue
#[test]
fn the_reaper_looks_past_a_renewed_request() {
    let mut prefill = Rig::new(leased(30));
    prefill.prefill(0.0, "first", 40);
    prefill.prefill(1.0, "second", 40);
    prefill.notified(20.0, "d/0", b"HB:first");
    assert_eq!(prefill.outcomes(31.0), [freed("second")]);
    assert_eq!(prefill.outcomes(40.0), [freed("first")]);
}

// vLLM 37: heartbeats are grouped by engine, sent at most once per sixth of the lease, and end one
//     request at a time
#[test]
fn heartbeats_begin_with_the_request_and_go_to_its_engine_every_sixth_of_a_lease() {
    let mut decode = Rig::new(settings("d"));
    decode.arrive(0.0, "a", 40, &prefilled("p", "p-a", 40));
    decode.arrive(0.0, "b", 40, &prefilled("p", "p-b", 40));
    decode.arrive(0.0, "c", 40, &prefilled("q", "q-c", 40));
    let meta = decode.scheduler.build_connector_meta(at(0.0));
    let by_engine: Vec<_> = meta
        .heartbeats
        .iter()
        .map(|beat| {
            (
                beat.peer.engine.as_str(),
                beat.requests.iter().map(|id| id.as_str()).collect::<Vec<_>>(),
            )
        })
        .collect();
    assert_eq!(by_engine, [("p", vec!["p-a", "p-b"]), ("q", vec!["q-c"])]);
    assert!(decode.scheduler.build_connector_meta(at(4.9)).heartbeats.is_empty());
    assert_eq!(decode.scheduler.build_connector_meta(at(5.0)).heartbeats.len(), 2);
    // One of the two ends, then the other.
    decode.ends(6.0, "a", Status::Aborted, 0);
    assert_eq!(
        decode.scheduler.build_connector_meta(at(10.0)).heartbeats[0].requests,
        ["p-b".into()]
    );
    decode.ends(11.0, "b", Status::Aborted, 0);
    let meta = decode.scheduler.build_connector_meta(at(15.0));
    assert_eq!(
        meta.heartbeats.iter().map(|beat| beat.peer.engine.as_str()).collect::<Vec<_>>(),
        ["q"]
    );
}

// vLLM 37: heartbeats of a request end with its load
#[test]
fn heartbeats_end_with_the_load() {
    let mut decode = Rig::new(settings("d"));
    let read = decode.load_to_read(0.0, "r", 40, &prefilled("p", "p-r", 40));
    assert_eq!(
        decode.scheduler.build_connector_meta(at(5.0)).heartbeats.len(),
        1,
        "while it loads"
    );
    decode.read_done(6.0, &read);
    decode.outcomes(6.0);
    assert!(decode.scheduler.build_connector_meta(at(20.0)).heartbeats.is_empty());
    assert_eq!(decode.scheduler.next_deadline(at(20.0)), None);
}

#[test]
fn heartbeats_continue_while_another_request_loads_the_same_blocks() {
    let mut decode = Rig::new(settings("d"));
    let params = prefilled("p", "p-r", 40);
    let read = decode.load_to_read(0.0, "first", 40, &params);
    decode.arrive(0.0, "second", 40, &params);
    decode.read_done(1.0, &read);
    decode.outcomes(1.0);
    decode.ends(2.0, "first", Status::Stopped, 40);
    let meta = decode.scheduler.build_connector_meta(at(20.0));
    let beats: Vec<_> = meta.heartbeats.iter().map(|beat| &beat.requests[..]).collect();
    assert_eq!(beats, [["p-r".into()]]);
}

// vLLM 37: one heartbeat with 5,000 request names, as vLLM sends it, renews all their leases
#[test]
fn one_heartbeat_of_a_vllm_renews_five_thousand_leases() {
    let mut prefill = Rig::new(leased(30));
    let name = |number: u32| format!("cmpl-7f9c2ba4-5d1e-4a3b-9c8d-{number:012}-0-0000abcd");
    for number in 0..5_000 {
        let id = name(number);
        prefill.arrive(0.0, &id, 16, &TransferParams::ask_prefill());
        prefill.allocate(0.0, &id, 100, 0);
        assert!(prefill.ends(0.0, &id, Status::LengthCapped, 16).delay_free);
    }
    prefill.step(0.0);
    let names: Vec<_> = (0..5_000).map(name).collect();
    let beat = format!("HB:{}", names.join(","));
    assert!(beat.len() > 4 * (64 << 10), "longer than a notification between kvx agents");
    prefill.notified(25.0, "d/0", beat.as_bytes());
    assert_eq!(prefill.outcomes(44.0), []);
    assert_eq!(prefill.outcomes(45.0).len(), 5_000);
}

// vLLM 37: a prefill leg sends no heartbeats
#[test]
fn a_prefill_leg_sends_no_heartbeat() {
    let mut prefill = Rig::new(settings("p"));
    prefill.arrive(0.0, "p-r", 40, &TransferParams::ask_prefill());
    assert!(prefill.scheduler.build_connector_meta(at(0.0)).heartbeats.is_empty());
}

// vLLM 37: the first heartbeat to an engine connects to it
#[test]
fn the_first_heartbeat_connects_and_is_sent_when_connected() {
    let mut decode = Rig::new(settings("d"));
    decode.arrive(0.0, "a", 40, &prefilled("p", "p-a", 40));
    decode.arrive(0.0, "b", 40, &prefilled("p", "p,b", 40));
    let connection = decode.step_to_handshake(0.0);
    let mut latent = plan();
    latent.told = vec![(kvx_vllm::engine::WorkerRank { pp: 0, tp: 1 }, 1)];
    let told = beats(&decode.connected(1.0, connection, latent));
    // A name with a comma would be read as two names.
    assert_eq!(told, [(0, "HB:p-a".to_owned()), (1, "HB:p-a".to_owned())]);
    assert_eq!(beats(&decode.step(5.0)).len(), 2, "later ones are sent at once");
}

#[test]
fn an_engine_of_the_old_kind_keeps_blocks_a_fixed_time_and_sends_no_heartbeats() {
    let fixed = BlockRelease::After(Duration::from_secs(480));
    let mut prefill = Rig::new(Settings { release: fixed, ..settings("p") });
    prefill.prefill(0.0, "p-r", 40);
    prefill.notified(470.0, "d/0", b"HB:p-r");
    assert_eq!(prefill.outcomes(479.0), []);
    assert_eq!(prefill.outcomes(480.0), [freed("p-r")]);
    let mut decode = Rig::new(Settings { heartbeat: None, ..settings("d") });
    decode.arrive(0.0, "r", 40, &prefilled("p", "p-r", 40));
    assert!(decode.scheduler.build_connector_meta(at(0.0)).heartbeats.is_empty());
    assert_eq!(kvx_vllm::engine::release_of(Version::V0_21), fixed);
    assert!(matches!(kvx_vllm::engine::release_of(Version::V0_22), BlockRelease::Lease(_)));
}

#[test]
fn a_prefill_rank_waits_for_as_many_consumers_as_are_written() {
    let mut prefill = Rig::new(settings("p"));
    prefill.prefill(0.0, "p-r", 40);
    prefill.notified(1.0, "d/0", b"p-r:2");
    prefill.notified(1.0, "d/0", b"p-r:2");
    assert_eq!(prefill.outcomes(1.0), [], "the same consumer counts once");
    prefill.notified(2.0, "d/1", b"p-r:2");
    assert_eq!(prefill.outcomes(2.0), [freed("p-r")]);
}

#[test]
fn the_older_count_is_the_decodes_ranks() {
    assert_eq!(ConsumerRule::of(Version::V0_28), ConsumerRule::DecodeRanks);
    assert_eq!(ConsumerRule::of(Version::V0_29), ConsumerRule::Readers);
    // (decode ranks, prefill ranks, readers of one prefill rank)
    for (d, p, readers) in [(1, 1, 1), (4, 2, 2), (2, 4, 1), (8, 1, 8)] {
        let old = ConsumerRule::DecodeRanks;
        assert_eq!(old.written(readers, d), d);
        assert_eq!(old.expected(d, p), readers);
        assert_eq!(
            ConsumerRule::Readers.expected(ConsumerRule::Readers.written(readers, d), p),
            readers
        );
    }
    let mut prefill =
        Rig::new(Settings { consumers: ConsumerRule::DecodeRanks, tp_size: 2, ..settings("p") });
    prefill.prefill(0.0, "p-r", 40);
    prefill.notified(1.0, "d/0", b"p-r:4");
    assert_eq!(prefill.outcomes(1.0), []);
    prefill.notified(1.0, "d/1", b"p-r:4");
    assert_eq!(prefill.outcomes(1.0), [freed("p-r")]);
}

#[test]
fn a_completion_may_overtake_the_workers_send_order() {
    let mut prefill = Rig::new(settings("p"));
    prefill.arrive(0.0, "p-r", 40, &TransferParams::ask_prefill());
    prefill.allocate(0.0, "p-r", 100, 0);
    prefill.step(0.0);
    prefill.ends(1.0, "p-r", Status::LengthCapped, 40);
    prefill.notified(1.0, "d/0", b"p-r:1");
    assert_eq!(prefill.outcomes(1.0), []);
    prefill.step(1.5);
    assert_eq!(prefill.outcomes(1.5), [freed("p-r")]);
}

/// A rank in another process learns of a publication by a message, which a peer's completion may
/// overtake.
#[test]
fn a_completion_may_overtake_the_publication_itself() {
    let mut prefill = Rig::new(settings("p"));
    prefill.worker.accept_early_completions();
    prefill.notified(0.5, "d/0", b"p-r:1");
    assert_eq!(prefill.outcomes(0.5), []);
    prefill.prefill(1.0, "p-r", 40);
    assert_eq!(prefill.outcomes(1.0), [freed("p-r")]);
    assert_eq!(prefill.metric("vllm:nixl_num_notifications_after_expiry"), 0.0);
}

/// Only a worker in another process learns of a publication after peers may have read it.
#[test]
fn a_completion_overtakes_no_publication_in_the_engines_own_process() {
    let mut prefill = Rig::new(settings("p"));
    prefill.notified(0.5, "d/0", b"p-r:1");
    prefill.prefill(1.0, "p-r", 40);
    assert_eq!(prefill.outcomes(1.0), []);
    assert_eq!(prefill.metric("vllm:nixl_num_notifications_after_expiry"), 1.0);
}

#[test]
fn a_late_completion_ends_no_later_lease_of_the_same_name() {
    let mut prefill = Rig::new(leased(6));
    prefill.worker.accept_early_completions();
    prefill.prefill(0.0, "p-r", 40);
    assert_eq!(prefill.outcomes(6.0), [freed("p-r")]);
    prefill.notified(6.5, "d/0", b"p-r:1");
    prefill.prefill(7.0, "p-r", 40);
    assert_eq!(prefill.outcomes(7.0), []);
}

#[test]
fn a_repeated_completion_of_a_request_that_ended_early_is_late() {
    let mut prefill = Rig::new(settings("p"));
    prefill.worker.accept_early_completions();
    prefill.notified(0.5, "d/0", b"p-r:1");
    prefill.prefill(1.0, "p-r", 40);
    assert_eq!(prefill.outcomes(1.0), [freed("p-r")]);
    prefill.notified(1.5, "d/0", b"p-r:1");
    prefill.prefill(2.0, "p-r", 40);
    assert_eq!(prefill.outcomes(2.0), []);
}

/// The names of nonexistent requests take little memory, however long and many they are.
#[test]
fn early_completions_of_long_names_are_not_remembered() {
    let mut prefill = Rig::new(settings("p"));
    prefill.worker.accept_early_completions();
    let long = "r".repeat(257);
    prefill.notified(0.5, "d/0", format!("{long}:1").as_bytes());
    prefill.prefill(1.0, &long, 40);
    assert_eq!(prefill.outcomes(1.0), []);
    for number in 0..65 {
        prefill.notified(2.0, "d/0", format!("p-{number}:1").as_bytes());
    }
    prefill.prefill(2.1, "p-0", 40);
    assert_eq!(prefill.outcomes(2.1), [], "65 others arrived after it");
    prefill.prefill(2.1, "p-64", 40);
    assert_eq!(prefill.outcomes(2.1), [freed("p-64")]);
}

/// An older request may have had the same name.
#[test]
fn a_completion_that_is_seconds_early_is_ignored() {
    let mut prefill = Rig::new(settings("p"));
    prefill.worker.accept_early_completions();
    prefill.notified(0.0, "d/0", b"p-r:1");
    prefill.prefill(2.5, "p-r", 40);
    assert_eq!(prefill.outcomes(2.5), []);
}

// vLLM 38: a completion that arrives after its lease has expired is counted
#[test]
fn a_completion_after_the_lease_is_counted() {
    let mut prefill = Rig::new(leased(6));
    prefill.prefill(0.0, "p-r", 40);
    prefill.outcomes(6.0);
    prefill.notified(7.0, "d/0", b"p-r:1");
    assert_eq!(prefill.outcomes(7.0), []);
    assert_eq!(prefill.metric("vllm:nixl_num_notifications_after_expiry"), 1.0);
}

#[test]
fn invalid_notifications_change_nothing() {
    let mut prefill = Rig::new(settings("p"));
    prefill.prefill(0.0, "p-r", 40);
    for wrong in [
        &b""[..],
        b"p-r",
        b"p-r:",
        b"p-r:0",
        b"p-r:-1",
        b"HB:",
        b"PUSH_REG:",
        b"PUSH_REG:\x80",
        b"\xff:1",
    ] {
        assert!(prefill.try_notified(1.0, "d/0", wrong).is_err(), "{wrong:?}");
    }
    assert_eq!(prefill.outcomes(1.0), []);
    prefill.notified(2.0, "d/0", b"p-r:1");
    assert_eq!(prefill.outcomes(2.0), [freed("p-r")]);
}

fn trust(byte: u8) -> ParamsTrust {
    ParamsTrust::new::<String>(Some(&Secret::from_bytes([byte; Secret::LEN])), [])
}

/// Returns a release by a router with this secret.
fn release(secret: u8, engine: &str, request: &str) -> Vec<u8> {
    let proof = trust(secret).sign_release(engine, request, Duration::from_secs(60)).unwrap();
    EngineNotification::release(request, proof).unwrap().encode()
}

#[test]
fn a_release_with_the_fleets_secret_frees_blocks_once() {
    let mut prefill = Rig::new(Settings { trust: trust(1), ..settings("p") });
    prefill.prefill(0.0, "p-r", 40);
    prefill.notified(1.0, "router", &release(1, "p", "p-r"));
    assert_eq!(prefill.outcomes(1.0), [freed("p-r")]);
    prefill.notified(2.0, "router", &release(1, "p", "p-r"));
    assert_eq!(prefill.outcomes(2.0), []);
    // No decode has read these blocks, so a release that is late means no harm.
    assert_eq!(prefill.metric("vllm:nixl_num_notifications_after_expiry"), 0.0);
    assert!(prefill.scheduler.is_empty() && prefill.worker.is_empty());
}

#[test]
fn a_release_before_the_worker_knows_the_end_of_the_prefill_counts() {
    let mut prefill = Rig::new(Settings { trust: trust(1), ..settings("p") });
    prefill.arrive(0.0, "p-r", 40, &TransferParams::ask_prefill());
    prefill.allocate(0.0, "p-r", 100, 0);
    prefill.step(0.0);
    assert!(prefill.ends(1.0, "p-r", Status::LengthCapped, 40).delay_free);
    prefill.notified(1.0, "router", &release(1, "p", "p-r"));
    prefill.step(1.0);
    assert_eq!(prefill.outcomes(1.0), [freed("p-r")]);
}

#[test]
fn releases_without_the_fleets_secret_are_refused() {
    for (secret, engine, by) in [(Some(1), "p", 2), (Some(1), "other", 1), (None, "p", 1)] {
        let trust = secret.map(trust).unwrap_or_default();
        let mut prefill = Rig::new(Settings { trust, ..settings("p") });
        prefill.prefill(0.0, "p-r", 40);
        let refused = prefill.try_notified(1.0, "router", &release(by, engine, "p-r"));
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Authentication, "{secret:?} {engine}");
        assert_eq!(prefill.outcomes(1.0), [], "{secret:?} {engine}");
        prefill.notified(2.0, "d/0", b"p-r:1");
        assert_eq!(prefill.outcomes(2.0), [freed("p-r")]);
    }
}

#[test]
fn a_fleet_without_a_secret_releases_without_proof() {
    let unproven = EngineNotification::release("p-r", "").unwrap().encode();
    let mut prefill = Rig::new(settings("p"));
    prefill.prefill(0.0, "p-r", 40);
    prefill.notified(1.0, "router", &unproven);
    assert_eq!(prefill.outcomes(1.0), [freed("p-r")]);
    prefill.notified(2.0, "router", &unproven);
    assert_eq!(prefill.metric("vllm:nixl_num_notifications_after_expiry"), 0.0);
    let mut guarded = Rig::new(Settings { trust: trust(1), ..settings("p") });
    guarded.prefill(0.0, "p-r", 40);
    let refused = guarded.try_notified(1.0, "router", &unproven);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Authentication);
    assert_eq!(guarded.outcomes(1.0), []);
}

#[test]
fn a_release_does_not_free_blocks_that_a_decode_wants() {
    for is_ready in [true, false] {
        let mut prefill = Rig::new(settings("p"));
        prefill.arrive(0.0, "p-r", 40, &TransferParams::ask_prefill());
        prefill.allocate(0.0, "p-r", 100, 0);
        prefill.step(0.0);
        assert!(prefill.ends(1.0, "p-r", Status::LengthCapped, 40).delay_free);
        if is_ready {
            prefill.step(1.0);
        }
        prefill.notified(2.0, "d/0", b"HB:p-r");
        let release = EngineNotification::release("p-r", "").unwrap().encode();
        let refused = prefill.try_notified(3.0, "router", &release);
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::PermissionDenied, "{is_ready}");
        prefill.step(3.0);
        assert_eq!(prefill.outcomes(3.0), [], "the decode may read: {is_ready}");
        prefill.notified(4.0, "d/0", b"p-r:1");
        assert_eq!(prefill.outcomes(4.0), [freed("p-r")], "{is_ready}");
    }
}

#[test]
fn a_release_does_not_free_blocks_that_one_of_several_decode_ranks_has_read() {
    let mut prefill = Rig::new(Settings { trust: trust(1), ..settings("p") });
    prefill.prefill(0.0, "p-r", 40);
    prefill.notified(1.0, "d/0", b"p-r:2");
    let refused = prefill.try_notified(2.0, "router", &release(1, "p", "p-r"));
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::PermissionDenied);
    assert_eq!(prefill.outcomes(2.0), [], "the other rank may read");
    prefill.notified(3.0, "d/1", b"p-r:2");
    assert_eq!(prefill.outcomes(3.0), [freed("p-r")]);
}

#[test]
fn pushed_blocks_are_not_released() {
    let mode = TransferMode::Push;
    let mut prefill = Rig::new(Settings { trust: trust(1), mode, ..settings("p") });
    let refused = prefill.try_notified(1.0, "router", &release(1, "p", "p-r"));
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unsupported);
}
