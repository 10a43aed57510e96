//! Interactions between the parts of a connector.

use std::sync::{Arc, Barrier};
use std::time::Duration;

use kvx_core::{ErrorKind, Memory, Registry};
use kvx_vllm::config::{KvTransferConfig, Surroundings};

use super::ranks::WorkerAction;
use super::{Connector, Decode, Prefill, Released, dispatch, push, transfer};
use kvx_vllm::Version;
use kvx_vllm::engine::{
    Action, Allocation, Arrival, BlockLists, Ending, Kept, LoadFailure, Outcome, RequestId,
    WorkerRank,
};
use kvx_vllm::mapping::{Caches, Heads, KvLayout, LayerCache};
use kvx_vllm::params::{RemoteBlocks, TransferParams};
use kvx_vllm::wire::{CompatibilityFactors, EngineNotification};

const LIMIT: Duration = Duration::from_secs(10);
const SHORT: Duration = Duration::from_millis(200);
const BLOCKS: u32 = 4;
const TOKENS: u32 = 16;
const BLOCK_LEN: u64 = 1024;

fn connector(workers: u32) -> Connector {
    built("NixlConnector", "e", "TCP", workers)
}

/// Runs a test of a socket on this thread, which must end within `limit`.
pub(super) fn run_within<F: Future>(limit: Duration, test: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let done = runtime.block_on(async { tokio::time::timeout(limit, test).await });
    runtime.shutdown_background();
    done.expect("no test of a socket hangs")
}

pub(super) fn built(connector: &str, engine: &str, backend: &str, workers: u32) -> Connector {
    built_of(connector, engine, &format!(r#""backends": ["{backend}"]"#), workers)
}

/// Starts an engine of one worker, with these entries of `kv_connector_extra_config`.
pub(super) fn built_with(connector: &str, engine: &str, extra: &str) -> Connector {
    built_of(connector, engine, extra, 1)
}

fn built_of(connector: &str, engine: &str, extra: &str, workers: u32) -> Connector {
    let json = format!(
        r#"{{"kv_connector": "{connector}", "kv_role": "kv_both", "engine_id": "{engine}",
             "kv_connector_extra_config": {{{extra}}}}}"#
    );
    let surroundings = Surroundings::default().variable("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1");
    let config = KvTransferConfig::from_json(&json, &surroundings).unwrap();
    let mut registry = Registry::new();
    registry.add(kvx_native::Tcp).unwrap();
    registry.add(kvx_native::Shm).unwrap();
    let factors = CompatibilityFactors::new(Version::default(), "a model");
    let builder = Connector::builder(&config, registry, factors).block_size(16).any_port();
    builder.workers(workers, 1).build_blocking().unwrap()
}

pub(super) fn register(connector: &Connector, tp: u32) -> kvx_core::Result<super::Rank> {
    register_pool(connector, tp, &pool())
}

fn pool() -> Arc<Memory> {
    Arc::new(Memory::pool((u64::from(BLOCKS) * BLOCK_LEN) as usize).build().unwrap())
}

fn register_pool(
    connector: &Connector,
    tp: u32,
    pool: &Arc<Memory>,
) -> kvx_core::Result<super::Rank> {
    let heads = Heads::Sharded(4);
    let layer = LayerCache::packed("layers.0.attn", pool.address(), BLOCKS, BLOCK_LEN, heads);
    let caches = Caches::of_layers(vec![layer], KvLayout::Lbhnc, 16, 1, 0).unwrap();
    connector.rank(WorkerRank { pp: 0, tp }).unwrap().register(caches, [Arc::clone(pool)])
}

#[test]
fn workers_that_register_at_once_share_the_generations() {
    for _ in 0..10 {
        let connector = connector(2);
        let barrier = Barrier::new(2);
        std::thread::scope(|scope| {
            for tp in 0..2 {
                let (connector, barrier) = (&connector, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    register(connector, tp).unwrap();
                });
            }
        });
        let words = |tp| {
            let registered = connector.shared().registered(WorkerRank { pp: 0, tp }).unwrap();
            registered.words.memory().address()
        };
        assert_eq!(words(0), words(1));
        connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
    }
}

#[test]
fn caches_are_given_back_once_nothing_of_them_is_being_finished() {
    let connector = connector(1);
    let at = WorkerRank { pp: 0, tp: 0 };
    let rank = register(&connector, 0).unwrap();
    let registered = connector.shared().registered(at).unwrap();
    let finishing = registered.finishing.blocking_read();
    assert_eq!(
        rank.give_back(SHORT).wait_blocking(LIMIT).unwrap_err().kind(),
        ErrorKind::StillShared
    );
    drop(finishing);
    register(&connector, 0).unwrap();
    rank.give_back(LIMIT).wait_blocking(LIMIT).unwrap();

    register(&connector, 0).unwrap();
    let registered = connector.shared().registered(at).unwrap();
    let finishing = registered.finishing.blocking_read();
    assert_eq!(
        connector.shutdown(SHORT).wait_blocking(LIMIT).unwrap_err().kind(),
        ErrorKind::StillShared
    );
    drop(finishing);
    assert_eq!(register(&connector, 0).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn scratch_memory_without_a_free_slot_is_busy_in_time() {
    let connector = connector(1);
    register(&connector, 0).unwrap();
    let scratch =
        Arc::clone(&connector.shared().registered(WorkerRank { pp: 0, tp: 0 }).unwrap().scratch);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let mut places = Vec::new();
        let busy = loop {
            match scratch.take(SHORT).await {
                Ok(place) => places.push(place),
                Err(error) => break error,
            }
        };
        assert_eq!((busy.kind(), places.len()), (ErrorKind::Busy, 32), "{busy}");
        places.pop();
        scratch.take(SHORT).await.unwrap();
    });
    connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
}

/// Listens without answering. Returns the socket and parameters that name a block there.
fn silent() -> (std::net::TcpListener, TransferParams) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut remote = RemoteBlocks::new("silent", "p-r", "127.0.0.1", port, vec![vec![0]]);
    remote.num_tokens = Some(TOKENS.into());
    (listener, TransferParams::prefilled(remote, Version::default()))
}

fn one(block: u32) -> BlockLists {
    BlockLists::single([block])
}

/// Orders a load in a step that the engine has not started on its worker yet.
fn ordered(connector: &Connector, request: &RequestId, params: &TransferParams) {
    let deadline = Some(connector.time(LIMIT));
    let arrival = Arrival { request, prompt_tokens: TOKENS, params: Some(params), deadline };
    connector.on_new_request(arrival).unwrap();
    let allocation = Allocation { fill: one(1), computed: 0, external: TOKENS };
    connector.update_state_after_alloc(request, allocation).unwrap();
    connector.step();
}

fn freed(request: &RequestId) -> Outcome {
    Outcome::Free { request: request.clone(), kept: Kept::Load }
}

/// Collects outcomes until the connector is idle.
fn heard(connector: &Connector) -> Vec<Outcome> {
    let (mut heard, until) = (Vec::new(), std::time::Instant::now() + LIMIT);
    while heard.is_empty() || !connector.is_idle() {
        assert!(std::time::Instant::now() < until, "{heard:?}");
        connector.outcomes_ready_blocking(SHORT);
        heard.extend(connector.outcomes());
    }
    heard
}

/// Lets the deadlines of all loads pass before their workers have ended them. Returns the number of
/// held blocks and of tasks to wake.
fn late(connector: &Connector) -> (usize, usize) {
    let shared = connector.shared();
    let mut state = shared.state.lock();
    let outcomes = state.scheduler.poll(shared.clock.now() + LIMIT + LIMIT);
    let asleep = outcomes.into_iter().filter_map(|outcome| state.deliver(outcome)).count();
    (state.scheduler.blocks_held(), asleep)
}

#[test]
fn what_was_granted_is_given_back_with_the_caches() {
    let connector = connector(1);
    let rank = register(&connector, 0).unwrap();
    let (_silent, params) = silent();
    let request = RequestId::from("r");
    ordered(&connector, &request, &params);
    let granted = push::grant(connector.shared(), &request).unwrap();
    granted.metadata().unwrap();
    rank.give_back(LIMIT).wait_blocking(LIMIT).unwrap();
    assert_eq!(granted.metadata().unwrap_err().kind(), ErrorKind::Revoked);
    connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
}

#[test]
fn a_load_that_has_ended_keeps_its_outcome_when_it_is_cancelled() {
    let connector = connector(1);
    register(&connector, 0).unwrap();
    let (_silent, params) = silent();
    let request = RequestId::from("r");
    let fetch = Decode::new(&connector).fetch(request.clone(), &params, 0, one(1), LIMIT);
    // The connector's thread cannot interfere here.
    assert_eq!(late(&connector), (1, 0), "no task is asleep that would have to be woken");
    let held = fetch.cancel();
    assert!(!held.is_empty(), "a worker still has its block");
    assert_eq!(held.wait_blocking(LIMIT).unwrap(), Released::Free);
    assert_eq!(connector.outcomes(), []);
    connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
}

#[test]
fn loads_that_are_given_up_as_they_end_free_their_blocks_once() {
    let connector = connector(1);
    register(&connector, 0).unwrap();
    let (_silent, params) = silent();
    for round in 0..200 {
        let request = RequestId::from(format!("r{round}"));
        let limit = Duration::from_micros(20 * round);
        let fetch = Decode::new(&connector).fetch(request.clone(), &params, 0, one(1), limit);
        let until = std::time::Instant::now() + limit;
        while std::time::Instant::now() < until {
            std::hint::spin_loop();
        }
        drop(fetch);
        assert_eq!(heard(&connector), [freed(&request)], "round {round}");
    }
    connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
}

#[test]
fn a_shutdown_that_is_not_proven_loses_all_blocks_for_good() {
    let connector = connector(1);
    let rank = register(&connector, 0).unwrap();
    let (_silent, params) = silent();
    let registered = connector.shared().registered(WorkerRank { pp: 0, tp: 0 }).unwrap();
    let (lease, _) = Prefill::new(&connector).publish("kept", one(0), TOKENS).unwrap();
    let fetch = Decode::new(&connector).fetch("loading", &params, 0, one(1), LIMIT);
    let cancelled = Decode::new(&connector).fetch("cancelled", &params, 0, one(2), LIMIT);
    let finishing = registered.finishing.blocking_read();
    let not_proven = |done: kvx_core::Completion<()>| {
        assert_eq!(done.wait_blocking(LIMIT).unwrap_err().kind(), ErrorKind::StillShared);
    };
    not_proven(connector.shutdown(SHORT));
    drop(finishing);
    let error = fetch.wait_blocking(LIMIT).unwrap().unwrap_err();
    if error.failure == LoadFailure::Transfer("the connector was shut down".into()) {
        assert_eq!((error.held.blocks(), error.invalid), (one(1), vec![1]));
        assert_eq!(error.held.wait_blocking(LIMIT).unwrap(), Released::Lost);
    }
    assert_eq!(lease.wait_blocking(LIMIT).unwrap(), Released::Lost);
    assert_eq!(cancelled.cancel().wait_blocking(LIMIT).unwrap(), Released::Lost);
    // Later calls fail too.
    not_proven(connector.shutdown(LIMIT));
    not_proven(rank.give_back(LIMIT));
    let error = Prefill::new(&connector).publish("late", one(3), TOKENS).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    let late = Decode::new(&connector)
        .fetch("late", &params, 0, one(3), LIMIT)
        .wait_blocking(LIMIT)
        .unwrap();
    assert!(matches!(late.unwrap_err().failure, LoadFailure::Refused(_)));
    assert!(connector.is_idle());
}

#[test]
fn a_shutdown_waits_for_caches_that_are_being_given_back() {
    let connector = connector(1);
    let rank = register(&connector, 0).unwrap();
    let registered = connector.shared().registered(WorkerRank { pp: 0, tp: 0 }).unwrap();
    let finishing = registered.finishing.blocking_read();
    let given_back = rank.give_back(LIMIT);
    let over = connector.shutdown(LIMIT);
    drop(finishing);
    given_back.wait_blocking(LIMIT).unwrap();
    over.wait_blocking(LIMIT).unwrap();
    rank.give_back(LIMIT).wait_blocking(LIMIT).unwrap();
}

/// Blocks the connector's thread until the result is dropped.
fn stand_still(connector: &Connector) -> std::sync::mpsc::Sender<()> {
    let (go_on, wait) = std::sync::mpsc::channel();
    let stands = Arc::new(Barrier::new(2));
    let still = Arc::clone(&stands);
    connector.shared().runtime.spawn(async move {
        still.wait();
        wait.recv().ok();
    });
    stands.wait();
    go_on
}

#[test]
fn a_read_is_cancelled_in_the_turn_in_which_it_begins() {
    let (prefill, decode) = (connector(1), connector(1));
    register(&prefill, 0).unwrap();
    register(&decode, 0).unwrap();
    let publish = |name: &str| Prefill::new(&prefill).publish(name, one(0), TOKENS).unwrap();
    let (_first, params) = publish("first");
    Decode::new(&decode)
        .fetch("first", &params, 0, one(1), LIMIT)
        .wait_blocking(LIMIT)
        .unwrap()
        .unwrap();
    let (_second, params) = publish("second");
    // The connector's thread is blocked, and its turn runs here instead.
    let (go_on, shared) = (stand_still(&decode), decode.shared());
    let fetch = Decode::new(&decode).fetch("second", &params, 0, one(2), LIMIT);
    let held = fetch.cancel();
    let turn = dispatch::take_turn(shared);
    let read = turn.actions.iter().find_map(|(rank, action, _)| match action {
        WorkerAction::Engine(Action::Read(order)) => Some((*rank, order.id)),
        _ => None,
    });
    let (rank, id) = read.expect("the load began before it was cancelled");
    let cancel = shared.cancel_signal(rank, id);
    let mut rung = std::pin::pin!(cancel.notified());
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(rung.as_mut().poll(&mut context).is_ready());
    drop(held);
    drop(go_on);
    for connector in [prefill, decode] {
        connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
    }
}

#[test]
fn an_order_that_no_worker_has_started_is_taken_out_when_it_is_cancelled() {
    let connector = connector(1);
    let rank = register(&connector, 0).unwrap();
    let (_silent, params) = silent();
    let request = RequestId::from("r");
    ordered(&connector, &request, &params);
    assert!(connector.request_finished(&request, Ending::aborted()).delay_free);
    assert_eq!(heard(&connector), [freed(&request)], "though the engine starts nothing");
    rank.start_load_kv();
    assert!(connector.is_idle());
    connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
}

#[test]
fn a_request_that_ends_before_the_engine_has_heard_of_its_held_blocks_keeps_them() {
    let connector = connector(1);
    let rank = register(&connector, 0).unwrap();
    let (_silent, params) = silent();
    let request = RequestId::from("r");
    ordered(&connector, &request, &params);
    rank.start_load_kv();
    assert_eq!(late(&connector).0, 1);
    assert!(connector.request_finished(&request, Ending::aborted()).delay_free);
    assert_eq!(heard(&connector), [freed(&request)]);
    connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
}

/// Publishes a block with these bytes.
fn publish(
    prefill: &Connector,
    pool: &Memory,
    name: &str,
    byte: u8,
) -> (super::Lease, TransferParams) {
    pool.copy_in(0, &[byte; BLOCK_LEN as usize]).unwrap();
    Prefill::new(prefill).publish(name, one(0), TOKENS).unwrap()
}

/// Takes the write that a prefill is about to start when its process stops: it has the registration
/// of a decode.
fn stopped_before_its_write(prefill: &Connector) -> (WorkerRank, kvx_vllm::engine::Move) {
    let (shared, until) = (prefill.shared(), std::time::Instant::now() + LIMIT);
    let first = WorkerRank::default();
    let agent = shared.state.lock().ranks.get(first).unwrap().agent.clone().unwrap().0;
    loop {
        assert!(std::time::Instant::now() < until, "no registration has come");
        while let Some(told) = agent.try_notification() {
            let from = format!("{:?}", told.from);
            let heard = |worker: &mut kvx_vllm::engine::Worker, now| {
                let notification = EngineNotification::decode(&told.bytes).unwrap();
                worker.notified(now, &from, notification).unwrap()
            };
            shared.report_nixl(first, heard);
        }
        for (rank, action, _) in dispatch::take_turn(shared).actions {
            if let WorkerAction::Engine(Action::Write(order)) = action {
                return (rank, order);
            }
        }
        std::thread::yield_now();
    }
}

// vLLM 47: after a decode has fenced a request, a late write changes none of its bytes
#[test]
fn a_write_that_comes_after_the_decode_has_given_up_changes_no_byte() {
    for (backend, late) in [("SHM", false), ("SHM", true), ("TCP", false), ("TCP", true)] {
        let (from, to) = (pool(), pool());
        let prefill = built("NixlPushConnector", "prefill", backend, 1);
        let decode = built("NixlPushConnector", "decode", backend, 1);
        register_pool(&prefill, 0, &from).unwrap();
        register_pool(&decode, 0, &to).unwrap();
        let block = || {
            let mut bytes = [0; BLOCK_LEN as usize];
            to.copy_out(BLOCK_LEN as usize, &mut bytes).unwrap();
            bytes
        };
        let (lease, params) = publish(&prefill, &from, "first", 0xaa);
        Decode::new(&decode)
            .fetch("first", &params, 0, one(1), LIMIT)
            .wait_blocking(LIMIT)
            .unwrap()
            .unwrap();
        assert_eq!((block(), lease.wait_blocking(LIMIT).unwrap()), ([0xaa; _], Released::Fetched));

        let (_lease, params) = publish(&prefill, &from, "second", 0xbb);
        let go_on = stand_still(&prefill);
        let fetch = Decode::new(&decode).fetch("second", &params, 0, one(1), LIMIT);
        let (rank, order) = stopped_before_its_write(&prefill);
        let id = order.id;
        let write = |order| {
            let shared = Arc::clone(prefill.shared());
            let cancel = shared.cancel_signal(rank, id);
            prefill.shared().runtime.spawn(transfer::run(
                shared,
                rank,
                kvx_core::Op::Write,
                order,
                cancel,
            ))
        };
        let waits = tokio::runtime::Builder::new_current_thread().build().unwrap();
        if late {
            let held = fetch.cancel();
            assert_eq!(
                held.wait_blocking(LIMIT).unwrap(),
                Released::Free,
                "{backend}: though the prefill stands still"
            );
            // Another request has the block now.
            to.copy_in(BLOCK_LEN as usize, &[0xcc; BLOCK_LEN as usize]).unwrap();
            drop(go_on);
            waits.block_on(write(order)).unwrap();
            assert_eq!(block(), [0xcc; _], "{backend}");
        } else {
            drop(go_on);
            waits.block_on(write(order)).unwrap();
            fetch.wait_blocking(LIMIT).unwrap().unwrap();
            assert_eq!(block(), [0xbb; _], "{backend}");
        }
        // Both engines still work.
        let (_lease, params) = publish(&prefill, &from, "third", 0xdd);
        Decode::new(&decode)
            .fetch("third", &params, 0, one(1), LIMIT)
            .wait_blocking(LIMIT)
            .unwrap()
            .unwrap();
        assert_eq!(block(), [0xdd; _]);
        for connector in [prefill, decode] {
            connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
        }
    }
}
