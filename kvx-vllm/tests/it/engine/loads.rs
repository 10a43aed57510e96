//! Successful loads: reads, notifications and reports.

use kvx_testkit::test;
use kvx_vllm::Version;
use kvx_vllm::engine::{
    Action, Allocation, Arrival, BlockLists, BlockReference, LoadFailure, NotLoaded, Outcome,
    PeerLane, Status, Time, WorkerRank,
};
use kvx_vllm::mapping::{MemoryType, Units};
use kvx_vllm::params::TransferParams;

use super::rig::{
    BLOCK, Rig, at, blocks, loaded, note_of, notes, pairs, plan, prefilled, reads, remote, settings,
};

// vLLM 10: a step's message holds one load with the blocks of its request
#[test]
fn a_load_orders_its_own_blocks() {
    let mut decode = Rig::new(settings("d"));
    let fill = decode.load(0.0, "r", 40, &prefilled("p", "p-r", 40));
    let meta = decode.scheduler.build_connector_meta(at(0.0));
    let [order] = &meta.receive[..] else { panic!("{meta:?}") };
    assert_eq!(order.request.as_str(), "r");
    assert_eq!(order.local, BlockLists::single(fill));
    assert!(
        decode.scheduler.build_connector_meta(at(0.0)).receive.is_empty(),
        "a message is built once"
    );
}

// vLLM 11: a prompt shorter than a block is loaded as one block
#[test]
fn a_prompt_shorter_than_a_block_is_one_block() {
    let mut decode = Rig::new(settings("d"));
    let read = decode.load_to_read(0.0, "r", 5, &prefilled("p", "p-r", 5));
    assert_eq!(pairs(&read), [(100, 500)]);
    decode.read_done(1.0, &read);
    assert_eq!(decode.outcomes(1.0), [loaded("r", 5)]);
}

#[test]
fn a_cached_prefix_reads_the_end_of_the_remote_list() {
    let mut decode = Rig::new(settings("d"));
    decode.arrive(0.0, "r", 60, &prefilled("p", "p-r", 60));
    assert_eq!(decode.matched(0.0, "r", 32), 28);
    decode.allocate(0.0, "r", 100, 32);
    let connection = decode.step_to_handshake(0.0);
    let reads = reads(&decode.connected(0.0, connection, plan()));
    assert_eq!(pairs(&reads[0]), [(100, 502), (101, 503)]);
}

// vLLM 12: an abort before the allocation of blocks releases the prefill's blocks
#[test]
fn a_request_that_ends_before_it_has_blocks_releases_the_prefill() {
    let mut decode = Rig::new(settings("d"));
    decode.arrive(0.0, "r", 40, &prefilled("p", "p-r", 40));
    assert!(!decode.ends(1.0, "r", Status::Aborted, 0).delay_free);
    let connection = decode.step_to_handshake(1.0);
    let actions = decode.connected(1.1, connection, plan());
    assert!(reads(&actions).is_empty());
    assert_eq!(notes(&actions), [(0, "p-r:1".to_owned())]);
    assert_eq!(decode.outcomes(2.0), []);
    assert!(decode.scheduler.is_empty());
}

#[test]
fn a_prefill_publishes_exactly_the_blocks_of_its_tokens() {
    let mut prefill = Rig::new(settings("p"));
    let params = prefill.prefill(0.0, "p-r", 40);
    let value = params.to_value(Version::default()).unwrap();
    assert_eq!(
        value["remote_block_ids"],
        serde_json::json!([[100, 101, 102]]),
        "nested, with one list for each group"
    );
    assert_eq!(value["remote_request_id"], "p-r");
    assert_eq!(value["remote_num_tokens"], 40);
    assert_eq!(value["do_remote_prefill"], true);
    assert_eq!(value["do_remote_decode"], false);
}

// vLLM 5: the scheduler's parameters carry `tp_size`, `dcp_size` and `transfer_mode`
#[test]
fn a_prefill_says_how_it_is_spread_and_who_moves_the_data() {
    let mut of_ranks = settings("p");
    (of_ranks.tp_size, of_ranks.dcp_size) = (4, 4);
    let value = Rig::new(of_ranks).prefill(0.0, "p-r", 40).to_value(Version::default()).unwrap();
    assert_eq!(
        (&value["tp_size"], &value["dcp_size"], &value["pp_size"]),
        (&4.into(), &4.into(), &1.into())
    );
    assert_eq!(value["transfer_mode"], "pull");
}

// vLLM 13: a prefill exports `remote_num_tokens` and its number of cached tokens
#[test]
fn a_prefill_exports_the_tokens_that_it_found_cached() {
    let mut prefill = Rig::new(settings("p"));
    prefill.arrive(0.0, "p-r", 40, &TransferParams::ask_prefill());
    let ending = kvx_vllm::engine::Ending {
        status: Status::LengthCapped,
        blocks: BlockLists::single(blocks(100, 40)),
        computed: 40,
        cached: Some(32),
        reference: Some(BlockReference { pool: 3, stamp: 4 }),
    };
    let params = prefill.scheduler.request_finished(at(0.0), &"p-r".into(), ending).params.unwrap();
    assert_eq!(params.remote_num_tokens, Some(40));
    assert_eq!(params.remote_prefill_cached_tokens, Some(32));
    assert_eq!(params.kvx_block_reference.unwrap(), "00000000000000030000000000000004");
}

#[test]
fn parameters_that_stop_vllms_engine_are_not_published() {
    let mut prefill = Rig::new(settings("p"));
    prefill.arrive(0.0, "p-r", 40, &TransferParams::ask_prefill());
    let ending = |blocks: BlockLists| kvx_vllm::engine::Ending {
        status: Status::LengthCapped,
        blocks,
        computed: 40,
        cached: None,
        reference: None,
    };
    for wrong in
        [BlockLists::single([1, 2]), BlockLists::default(), BlockLists::new([[1, 2, 3], [4, 5, 6]])]
    {
        prefill.arrive(0.0, "q", 40, &TransferParams::ask_prefill());
        let finished = prefill.scheduler.request_finished(at(0.0), &"q".into(), ending(wrong));
        assert!(
            !finished.delay_free && finished.params.is_none() && finished.withheld.is_some(),
            "{finished:?}"
        );
    }
    // Blocks for future tokens are cut off: the peer pairs lists by their ends.
    let finished = prefill.scheduler.request_finished(
        at(0.0),
        &"p-r".into(),
        ending(BlockLists::single([1, 2, 3, 4])),
    );
    assert_eq!(finished.params.unwrap().remote_block_ids, Some(vec![vec![1, 2, 3]]));
}

#[test]
fn parameters_that_cannot_be_used_are_computed_here() {
    let mut decode = Rig::new(settings("d"));
    let mut arrive = |params: &TransferParams| {
        let request = "r".into();
        let arrival =
            Arrival { request: &request, prompt_tokens: 40, params: Some(params), deadline: None };
        decode.scheduler.on_new_request(at(0.0), arrival)
    };
    let without = |cut: fn(&mut TransferParams)| {
        let mut params = prefilled("p", "p-r", 40);
        cut(&mut params);
        params
    };
    for wrong in [
        without(|params| params.remote_engine_id = None),
        without(|params| params.remote_request_id = None),
        without(|params| params.remote_host = None),
        without(|params| params.remote_port = None),
    ] {
        assert!(matches!(arrive(&wrong), Err(NotLoaded::Params(_))));
    }
    let two = without(|params| params.remote_block_ids = Some(vec![vec![1, 2, 3], vec![4, 5, 6]]));
    assert_eq!(arrive(&two), Err(NotLoaded::TooFewBlocks), "fewer lists than groups");
    assert_eq!(decode.matched(0.0, "r", 0), 0);
    assert!(decode.scheduler.is_empty());
}

#[test]
fn larger_blocks_of_a_prefill_are_counted_when_its_handshake_says_how_large() {
    // 40 tokens: three blocks here, one block of 64 tokens there.
    let mut decode = Rig::new(settings("d"));
    let one = TransferParams::prefilled(remote("p", "p-r", vec![500], 40), Version::default());
    decode.load(0.0, "r", 40, &one);
    let connection = decode.step_to_handshake(0.0);
    let mut larger = plan();
    (larger.units, larger.producer_units) = (Units::new(1, 4, BLOCK).unwrap(), 4);
    let reads = reads(&decode.connected(0.0, connection, larger));
    assert_eq!(pairs(&reads[0]), [(100, 2000), (101, 2001), (102, 2002)]);
    // With blocks of the same size, one block is too few and nothing is read.
    decode.arrive(1.0, "s", 40, &one);
    decode.allocate(1.0, "s", 200, 0);
    let mut other = Rig::new(settings("d"));
    other.load(0.0, "s", 40, &one);
    let connection = other.step_to_handshake(0.0);
    assert!(self::reads(&other.connected(0.0, connection, plan())).is_empty());
    assert!(matches!(&other.outcomes(0.0)[..], [Outcome::Failed { .. }]));
}

#[test]
fn an_engine_may_take_fewer_tokens_than_it_was_offered() {
    let mut decode = Rig::new(settings("d"));
    decode.arrive(0.0, "r", 64, &prefilled("p", "p-r", 64));
    assert_eq!(decode.matched(0.0, "r", 16), 48);
    let allocation =
        Allocation { fill: BlockLists::single([100, 101]), computed: 16, external: 32 };
    decode.scheduler.update_state_after_alloc(at(0.0), &"r".into(), allocation);
    let connection = decode.step_to_handshake(0.0);
    let read = reads(&decode.connected(0.0, connection, plan())).remove(0);
    assert_eq!(pairs(&read), [(100, 501), (101, 502)], "blocks 1 and 2 of the prompt");
    decode.read_done(1.0, &read);
    assert_eq!(decode.outcomes(1.0), [loaded("r", 48)]);
}

#[test]
fn fewer_tokens_with_a_sliding_window_are_refused() {
    let mut decode =
        Rig::new(kvx_vllm::engine::Settings { groups: vec![Some(2)], ..settings("d") });
    let window =
        TransferParams::prefilled(remote("p", "p-r", vec![502, 503], 64), Version::default());
    decode.arrive(0.0, "r", 64, &window);
    assert_eq!(decode.matched(0.0, "r", 0), 64);
    let allocation = Allocation { fill: BlockLists::single([100, 101]), computed: 0, external: 48 };
    decode.scheduler.update_state_after_alloc(at(0.0), &"r".into(), allocation);
    let connection = decode.step_to_handshake(0.0);
    assert!(reads(&decode.connected(0.0, connection, plan())).is_empty());
    assert!(matches!(&decode.outcomes(0.0)[..], [Outcome::Failed { .. }]));
}

// vLLM 45: a prefill leaves the last tokens of the prompt to the decode, as many as configured
#[test]
fn a_prefill_is_told_how_many_tokens_to_leave_to_the_decode() {
    let mut prefill = Rig::new(kvx_vllm::engine::Settings { prefill_backoff: 3, ..settings("p") });
    prefill.arrive(0.0, "long", 40, &TransferParams::ask_prefill());
    prefill.arrive(0.0, "short", 2, &TransferParams::ask_prefill());
    prefill.arrive(0.0, "decode", 40, &prefilled("q", "q-r", 37));
    let cut = |id: &str| prefill.scheduler.prompt_tokens_to_cut(&id.into());
    assert_eq!((cut("long"), cut("short")), (3, 1), "one token remains for the decode side");
    assert_eq!((cut("decode"), cut("unknown")), (0, 0));
}

// vLLM 45: a load whose blocks need reordering is reported after the reordering
#[test]
fn blocks_that_are_reordered_are_loaded_when_that_is_done() {
    let finish = |actions: &[Action]| match actions {
        [Action::Finish { request, lists, .. }] => {
            (request.to_string(), lists.local.iter().collect::<Vec<_>>())
        }
        other => panic!("{other:?}"),
    };
    let mut reordering = plan();
    reordering.finishes = true;
    for result in [Ok(()), Err("no kernel for that".to_owned())] {
        let mut decode = Rig::new(settings("d"));
        decode.load(0.0, "r", 40, &prefilled("p", "p-r", 40));
        let connection = decode.step_to_handshake(0.0);
        let read = reads(&decode.connected(0.0, connection, reordering.clone())).remove(0);
        let actions = decode.read_done(1.0, &read);
        assert_eq!(finish(&actions), ("r".to_owned(), vec![100, 101, 102]));
        assert_eq!(decode.outcomes(1.0), [], "its bytes do not have the engine's layout yet");
        decode.worker.finished(at(2.0), &"r".into(), result.clone());
        let outcomes = decode.outcomes(2.0);
        match result {
            Ok(()) => assert_eq!(outcomes, [loaded("r", 40)]),
            Err(_) => assert!(
                matches!(&outcomes[..], [Outcome::Failed { invalid, .. }] if *invalid == [100, 101, 102]),
                "{outcomes:?}"
            ),
        }
        decode.worker.finished(at(3.0), &"r".into(), Ok(()));
        assert_eq!(decode.outcomes(3.0), [], "once");
    }
    // Cancelled in the meantime: the blocks are free once no write can follow.
    let mut decode = Rig::new(settings("d"));
    decode.load(0.0, "r", 40, &prefilled("p", "p-r", 40));
    let connection = decode.step_to_handshake(0.0);
    let read = reads(&decode.connected(0.0, connection, reordering.clone())).remove(0);
    decode.read_done(1.0, &read);
    assert!(decode.ends(1.0, "r", Status::Aborted, 0).delay_free);
    decode.step(1.0);
    assert_eq!(decode.outcomes(1.0), []);
    decode.worker.finished(at(2.0), &"r".into(), Ok(()));
    assert!(matches!(&decode.outcomes(2.0)[..], [Outcome::Free { .. }]));
}

// vLLM 14: four requests to one engine share a handshake, and each is reported once
// vLLM 17: loads from one engine run concurrently after one handshake
#[test]
fn four_requests_to_one_engine_share_a_handshake_and_each_is_reported_once() {
    let mut decode = Rig::new(settings("d"));
    for request in 0..4 {
        decode.arrive(0.0, &format!("r{request}"), 40, &prefilled("p", &format!("p{request}"), 40));
        decode.allocate(0.0, &format!("r{request}"), 100 + request * 10, 0);
    }
    let connection = decode.step_to_handshake(0.0);
    let moves = reads(&decode.connected(0.5, connection, plan()));
    assert_eq!(moves.len(), 4, "they run concurrently");
    for what in &moves {
        decode.read_done(1.0, what);
        assert_eq!(decode.outcomes(1.0).len(), 1);
    }
    assert_eq!(decode.outcomes(2.0), []);
    // The next request needs no handshake.
    decode.arrive(3.0, "r5", 40, &prefilled("p", "p5", 40));
    decode.allocate(3.0, "r5", 100, 0);
    assert_eq!(reads(&decode.step(3.0)).len(), 1);
}

// vLLM 15: a step does not wait for the handshake, with (decode, prefill) TP sizes of (1,1) (2,1)
//     (4,2) (4,4)
#[test]
fn a_step_never_waits_for_the_handshake() {
    for (d, p) in [(1, 1), (2, 1), (4, 2), (4, 4)] {
        for rank in 0..d {
            let mut decode =
                Rig::ranked(kvx_vllm::engine::Settings { tp_size: d, ..settings("d") }, rank);
            let mut from = remote("p", "p-r", blocks(500, 40), 40);
            from.tp_size = p;
            decode.load(0.0, "r", 40, &TransferParams::prefilled(from, Version::default()));
            let actions = decode.step(0.0);
            let [Action::Handshake { connection, ranks, .. }] = &actions[..] else {
                panic!("{actions:?}")
            };
            assert_eq!(ranks, &[WorkerRank { pp: 0, tp: rank * p / d }]);
            for second in 1..4 {
                assert!(
                    decode
                        .step(second.into())
                        .iter()
                        .all(|action| !matches!(action, Action::Handshake { .. }))
                );
                assert_eq!(decode.outcomes(second.into()), []);
            }
            let mut plan = plan();
            plan.lanes[0].readers = d / p;
            let moves = reads(&decode.connected(4.0, *connection, plan));
            assert_eq!(note_of(&moves[0]).unwrap(), format!("p-r:{}", d / p));
            decode.read_done(5.0, &moves[0]);
            assert_eq!(decode.outcomes(5.0), [loaded("r", 40)]);
        }
    }
}

// vLLM 16: with more prefill ranks than decode ranks, a decode rank reads each of its source ranks
//     once
#[test]
fn a_decode_with_fewer_ranks_reads_every_source_rank_once() {
    let mut decode = Rig::new(settings("d"));
    let mut from = remote("p", "p-r", blocks(500, 40), 40);
    from.tp_size = 2;
    decode.load(0.0, "r", 40, &TransferParams::prefilled(from, Version::default()));
    let actions = decode.step(0.0);
    let [Action::Handshake { connection, ranks, .. }] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!(ranks.iter().map(|rank| rank.tp).collect::<Vec<_>>(), [0, 1]);
    let mut two = plan();
    two.lanes.push(PeerLane { rank: WorkerRank { pp: 0, tp: 1 }, ..two.lanes[0].clone() });
    let moves = reads(&decode.connected(0.0, *connection, two));
    assert_eq!(moves.iter().map(|what| what.part.rank.tp).collect::<Vec<_>>(), [0, 1]);
    assert!(std::sync::Arc::ptr_eq(&moves[0].groups, &moves[1].groups), "one list for all ranks");
    decode.read_done(1.0, &moves[0]);
    assert_eq!(decode.outcomes(1.0), []);
    decode.read_done(2.0, &moves[1]);
    assert_eq!(decode.outcomes(2.0), [loaded("r", 40)]);
}

// vLLM 16: MLA: one prefill rank is read, and the other ranks get notifications
// vLLM 18: a notification names the request as the prefill does
#[test]
fn a_latent_cache_is_read_once_and_the_other_ranks_are_told_by_the_prefills_name_of_the_request() {
    let mut decode = Rig::new(settings("d"));
    decode.load(0.0, "r", 40, &prefilled("p", "p-r", 40));
    let connection = decode.step_to_handshake(0.0);
    let mut latent = plan();
    latent.told = vec![(WorkerRank { pp: 0, tp: 1 }, 1), (WorkerRank { pp: 0, tp: 2 }, 1)];
    let actions = decode.connected(0.0, connection, latent);
    assert_eq!(reads(&actions).len(), 1);
    assert_eq!(notes(&actions), [(1, "p-r:1".to_owned()), (2, "p-r:1".to_owned())]);
}

// vLLM 19: a load without blocks is reported only if it is awaited
#[test]
fn a_load_without_blocks_is_reported_only_if_it_is_awaited() {
    let mut decode = Rig::new(settings("d"));
    // The whole prompt is cached: the load is not awaited, and the prefill side is notified.
    decode.arrive(0.0, "hit", 32, &prefilled("p", "p-hit", 32));
    assert_eq!(decode.matched(0.0, "hit", 32), 0);
    decode.allocate(0.0, "hit", 100, 32);
    // A load whose blocks are all in another group is awaited.
    decode.arrive(0.0, "empty", 32, &prefilled("p", "p-empty", 32));
    let allocation = Allocation { fill: BlockLists::default(), computed: 0, external: 32 };
    decode.scheduler.update_state_after_alloc(at(0.0), &"empty".into(), allocation);
    let connection = decode.step_to_handshake(0.0);
    let told = notes(&decode.connected(0.0, connection, plan()));
    assert_eq!(told, [(0, "p-hit:1".to_owned()), (0, "p-empty:1".to_owned())]);
    assert_eq!(decode.outcomes(1.0), [loaded("empty", 32)]);
}

// vLLM 20: an aborted prefill leaves the worker's batch
#[test]
fn an_aborted_prefill_is_dropped_by_the_worker_and_releases_nothing() {
    let mut prefill = Rig::new(settings("p"));
    prefill.arrive(0.0, "p-r", 40, &TransferParams::ask_prefill());
    prefill.allocate(0.0, "p-r", 100, 0);
    prefill.step(0.0);
    assert!(!prefill.worker.is_empty(), "it is in the batch");
    let finished = prefill.ends(1.0, "p-r", Status::Aborted, 40);
    assert!(!finished.delay_free && finished.params.is_none());
    prefill.step(1.0);
    assert!(prefill.worker.is_empty() && prefill.scheduler.is_empty());
}

// vLLM 34: a second allocation for a request does not load it again, also after a preemption
#[test]
fn a_second_allocation_does_not_load_again() {
    let mut decode = Rig::new(settings("d"));
    let read = decode.load_to_read(0.0, "r", 40, &prefilled("p", "p-r", 40));
    decode.read_done(1.0, &read);
    assert_eq!(decode.outcomes(1.0), [loaded("r", 40)]);
    assert_eq!(decode.matched(2.0, "r", 0), 0, "not even after a preemption");
    decode.allocate(2.0, "r", 200, 0);
    assert!(decode.step(2.0).is_empty());
}

// vLLM 28: a load from two kinds of memory is notified after both parts, and not after a failure
#[test]
fn halves_in_two_kinds_of_memory_are_told_once_after_both() {
    let mut decode = Rig::new(settings("d"));
    decode.load(0.0, "r", 40, &prefilled("p", "p-r", 40));
    let connection = decode.step_to_handshake(0.0);
    let mut mixed = plan();
    let memory = [(MemoryType::Vram, MemoryType::Vram), (MemoryType::Dram, MemoryType::Dram)];
    mixed.lanes[0].memory = memory.to_vec();
    let moves = reads(&decode.connected(0.0, connection, mixed));
    assert_eq!(
        moves.iter().map(|what| (what.part.memory, note_of(what))).collect::<Vec<_>>(),
        memory.map(|memory| (memory, None))
    );
    assert_eq!(notes(&decode.read_done(1.0, &moves[1])), []);
    assert_eq!(notes(&decode.read_done(2.0, &moves[0])), [(0, "p-r:1".to_owned())]);
}

// vLLM 45: a prefill with state-space layers or speculative decoding hands over one token less
#[test]
fn a_prefill_that_hands_over_less_than_the_prompt_leaves_the_rest_to_the_decode() {
    let mut decode = Rig::new(kvx_vllm::engine::Settings { prefill_backoff: 1, ..settings("d") });
    decode.arrive(0.0, "r", 33, &prefilled("p", "p-r", 32));
    assert_eq!(decode.matched(0.0, "r", 0), 32, "the decode side computes one token");
    decode.allocate(0.0, "r", 100, 0);
    let connection = decode.step_to_handshake(0.0);
    assert_eq!(
        pairs(&reads(&decode.connected(0.0, connection, plan()))[0]),
        [(100, 500), (101, 501)]
    );
}

#[test]
fn generations_are_read_after_the_data_and_before_the_notification() {
    let mut decode = Rig::new(settings("d"));
    let mut from = remote("p", "p-r", blocks(500, 40), 40);
    from.block_reference = Some(BlockReference { pool: 7, stamp: 9 }.to_string());
    decode.load(0.0, "r", 40, &TransferParams::prefilled(from, Version::default()));
    let connection = decode.step_to_handshake(0.0);
    let mut checked = plan();
    checked.generations = true;
    let read = reads(&decode.connected(0.0, connection, checked)).remove(0);
    assert_eq!(note_of(&read), None);
    let actions = decode.read_done(1.0, &read);
    let [Action::ReadGenerations { id, blocks, .. }] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!(
        (0..blocks[0].len()).map(|place| blocks[0].at(place)).collect::<Vec<_>>(),
        [500, 501, 502]
    );
    assert_eq!(decode.outcomes(1.0), []);
    decode.worker.generations_read(at(1.0), *id, Ok((7, &[9, 3, 0])));
    assert_eq!(notes(&decode.actions()), [(0, "p-r:1".to_owned())]);
    assert_eq!(decode.outcomes(1.0), [loaded("r", 40)]);
}

// vLLM 30: an error for stale blocks names exactly the invalid blocks
#[test]
fn a_stale_reference_is_refused_with_exactly_the_stale_blocks() {
    let mut from = remote("p", "p-r", blocks(500, 64), 64);
    from.block_reference = Some(BlockReference { pool: 7, stamp: 9 }.to_string());
    let params = TransferParams::prefilled(from, Version::default());
    let recompute = kvx_vllm::config::LoadFailurePolicy::Recompute;
    let mut decode = Rig::new(kvx_vllm::engine::Settings { policy: recompute, ..settings("d") });
    decode.load(0.0, "r", 64, &params);
    let connection = decode.step_to_handshake(0.0);
    let mut checked = plan();
    checked.generations = true;
    let read = reads(&decode.connected(0.0, connection, checked)).remove(0);
    decode.read_done(1.0, &read);
    decode.worker.generations_read(at(1.0), read.id, Ok((7, &[9, 9, 10, 9])));
    assert!(notes(&decode.actions()).is_empty(), "those blocks belong to another request");
    let outcomes = decode.outcomes(1.0);
    let [Outcome::Failed { then, invalid, .. }] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert_eq!(invalid, &[102]);
    assert_eq!(*then, kvx_vllm::engine::Then::Recompute { computed: 2 * BLOCK });
    assert_eq!(decode.last.invalid_block_ids(), [102]);
}

#[test]
fn blocks_are_checked_against_digests_last_and_only_wrong_ones_are_rejected() {
    let mut from = remote("p", "p-r", blocks(500, 40), 40);
    from.block_reference = Some(BlockReference { pool: 7, stamp: 9 }.to_string());
    let params = TransferParams::prefilled(from, Version::default());
    for wrong in [vec![], vec![101]] {
        let mut decode = Rig::new(settings("d"));
        decode.load(0.0, "r", 40, &params);
        let connection = decode.step_to_handshake(0.0);
        let mut checked = plan();
        (checked.generations, checked.digests) = (true, true);
        let read = reads(&decode.connected(0.0, connection, checked)).remove(0);
        decode.read_done(1.0, &read);
        decode.worker.generations_read(at(1.0), read.id, Ok((7, &[9, 3, 0])));
        let actions = decode.actions();
        let [Action::CheckDigests { id, blocks, .. }] = &actions[..] else { panic!("{actions:?}") };
        assert_eq!((blocks.pool, &blocks.words[..]), (7, &[(500, 9), (501, 3), (502, 0)][..]));
        assert_eq!((blocks.part, blocks.groups.len()), (read.part, 1));
        decode.worker.generations_read(at(1.0), read.id, Ok((7, &[9, 3, 0])));
        assert_eq!(
            (decode.actions().len(), decode.outcomes(1.0)),
            (0, vec![]),
            "it has already been reported"
        );
        decode.worker.digests_checked(at(1.0), *id, Ok(wrong.clone()));
        if wrong.is_empty() {
            assert_eq!(notes(&decode.actions()), [(0, "p-r:1".to_owned())]);
            assert_eq!(decode.outcomes(1.0), [loaded("r", 40)]);
        } else {
            assert_eq!(notes(&decode.actions()), []);
            let outcomes = decode.outcomes(1.0);
            let [Outcome::Failed { failure, invalid, .. }] = &outcomes[..] else {
                panic!("{outcomes:?}")
            };
            assert_eq!((failure, &invalid[..]), (&LoadFailure::Corrupt, &[101][..]));
        }
    }
}

#[test]
fn an_engine_reports_the_time_of_its_next_duty() {
    let mut decode = Rig::new(settings("d"));
    assert_eq!(decode.scheduler.next_deadline(at(0.0)), None);
    decode.arrive(0.0, "r", 40, &prefilled("p", "p-r", 40));
    assert_eq!(
        decode.scheduler.next_deadline(at(0.0)),
        Some(at(0.0)),
        "the first heartbeat is due"
    );
    decode.step(0.0);
    let next: Option<Time> = decode.scheduler.next_deadline(at(0.0));
    assert_eq!(next, Some(at(5.0)));
}
