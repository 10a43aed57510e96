//! Every element of a KV cache arrives at its place, between engines of any ranks, heads, blocks
//! and layouts.

use kvx_core::{ErrorKind, Op};
use kvx_testkit::test;
use kvx_vllm::ids::WorkerRank;
use kvx_vllm::mapping::{Geometry, Heads, KvLayout, PeerMap, handshake_ranks};

use super::cluster::{Engine, Model, Rank, Request, Style, carry_out, options, remote};
use crate::random::Random;

fn model(heads: Heads) -> Model {
    Model { heads, layers: vec![0; 3], groups: 1, draft: None, style: Style::Together }
}

fn stage_layers(model: &Model, stage: u32, stages: u32) -> Vec<usize> {
    let count = model.layers.len();
    (0..count).filter(|layer| layer * stages as usize / count == stage as usize).collect()
}

/// Returns all ranks of a producer, filled with a request.
fn producer(
    engine: &Engine,
    model: &Model,
    stages: u32,
    request: &Request,
) -> Vec<(WorkerRank, Rank)> {
    let mut ranks = Vec::new();
    for tp in 0..engine.tp {
        for pp in 0..stages {
            let mut rank = engine.rank(model, tp, pp, stages).unwrap();
            rank.fill(
                model,
                &stage_layers(model, pp, stages),
                &request.producer_lists,
                request.tokens,
            );
            ranks.push((WorkerRank { pp, tp }, rank));
        }
    }
    ranks
}

/// Returns the map of one rank that reads, from the metadata of its handshake ranks.
fn reading(
    own: &Rank,
    consumer: &Engine,
    producer: &Engine,
    model: &Model,
    stages: u32,
    ranks: &[(WorkerRank, Rank)],
    permute: bool,
) -> kvx_core::Result<PeerMap> {
    let known = handshake_ranks(own.tp, producer.tp, 1)?;
    let told: Vec<(WorkerRank, Geometry)> = ranks
        .iter()
        .filter(|(rank, _)| known.contains(&rank.tp))
        .map(|(rank, there)| (*rank, there.geometry().clone()))
        .collect();
    assert_eq!(consumer.tp, own.tp.size());
    PeerMap::new(
        Op::Read,
        &own.caches,
        own.tp,
        &remote(producer, stages, &told),
        &options(model, permute),
    )
}

/// Pulls a request into every rank of the consumer and checks each element. Returns the first
/// rejection.
fn pull(
    consumer: &Engine,
    producer_engine: &Engine,
    model: &Model,
    stages: u32,
    permute: bool,
    request: &Request,
) -> kvx_core::Result<()> {
    let mut ranks = producer(producer_engine, model, stages, request);
    let layers: Vec<usize> = (0..model.layers.len()).collect();
    let mut told = vec![0; ranks.len()];
    let mut consumers = 0;
    for rank in 0..consumer.tp {
        let mut own = consumer.rank(model, rank, 0, 1).unwrap();
        let map = reading(&own, consumer, producer_engine, model, stages, &ranks, permute)?;
        consumers = map.consumers();
        let moves = request.moves(&map)?;
        carry_out(&map, &moves, &mut own, &mut ranks);
        own.finish(&map, &moves);
        let cached = request.cached as u32 * consumer.logical_tokens();
        let end = request.consumer_lists[0].len() as u32 * consumer.logical_tokens();
        own.check(
            model,
            &layers,
            &request.consumer_lists,
            cached.min(request.tokens)..request.tokens,
        );
        // The part after the last moved unit is zero; inside the unit are the producer's bytes.
        let moved = request.tokens.next_multiple_of(producer_engine.block_tokens).min(end);
        if moves.blocks > 0 {
            own.check_zero(model, &layers, &request.consumer_lists, moved..end);
        }
        own.check_untouched(model, &layers, &request.consumer_lists, cached..end);
        let at = |source: usize| {
            ranks.iter().position(|(rank, _)| *rank == map.sources()[source].rank()).unwrap()
        };
        for source in
            moves.ranks.iter().map(|rank| rank.source).chain(moves.notify_only.iter().copied())
        {
            told[at(source)] += 1;
        }
    }
    assert!(
        told.iter().all(|count| *count == consumers),
        "each producer rank gets {told:?} of {consumers} notifications"
    );
    Ok(())
}

/// Pushes a request from every rank of the producer and checks each element at the consumer.
fn push(
    consumer: &Engine,
    producer_engine: &Engine,
    model: &Model,
    stages: u32,
    request: &Request,
) -> kvx_core::Result<()> {
    let mut consumers: Vec<(WorkerRank, Rank)> = (0..consumer.tp)
        .map(|tp| (WorkerRank { pp: 0, tp }, consumer.rank(model, tp, 0, 1).unwrap()))
        .collect();
    let mut told = vec![0; consumers.len()];
    for (_, mut own) in producer(producer_engine, model, stages, request) {
        let known = handshake_ranks(own.tp, consumer.tp, 1)?;
        let told_to: Vec<(WorkerRank, Geometry)> = consumers
            .iter()
            .filter(|(rank, _)| known.contains(&rank.tp))
            .map(|(rank, there)| (*rank, there.geometry().clone()))
            .collect();
        let map = PeerMap::new(
            Op::Write,
            &own.caches,
            own.tp,
            &remote(consumer, 1, &told_to),
            &options(model, false),
        )?;
        assert!(map.finishing().is_none());
        let moves = request.moves(&map)?;
        carry_out(&map, &moves, &mut own, &mut consumers);
        for source in
            moves.ranks.iter().map(|rank| rank.source).chain(moves.notify_only.iter().copied())
        {
            told[map.sources()[source].rank().tp as usize] += 1;
        }
    }
    let layers: Vec<usize> = (0..model.layers.len()).collect();
    let cached = request.cached as u32 * consumer.logical_tokens();
    for (_, rank) in &consumers {
        rank.check(
            model,
            &layers,
            &request.consumer_lists,
            cached.min(request.tokens)..request.tokens,
        );
        let end = request.consumer_lists[0].len() as u32 * consumer.logical_tokens();
        rank.check_untouched(model, &layers, &request.consumer_lists, cached..end);
    }
    let expected = stages * (producer_engine.tp / consumer.tp).max(1);
    assert!(
        told.iter().all(|count| *count == expected),
        "each consumer rank gets {told:?} of {expected} notifications"
    );
    Ok(())
}

fn request(random: &mut Random, consumer: &Engine, producer: &Engine, model: &Model) -> Request {
    let most = (consumer.blocks * consumer.logical_tokens())
        .min(producer.blocks * producer.logical_tokens());
    // In a pool that groups share, the groups have distinct blocks.
    let tokens = 1 + random.below(u64::from(most / model.groups as u32)) as u32;
    let lists = |random: &mut Random, engine: &Engine| {
        let each = tokens.div_ceil(engine.logical_tokens()) as usize;
        let all = random.distinct(each * model.groups, engine.blocks);
        all.chunks(each).map(<[u32]>::to_vec).collect::<Vec<_>>()
    };
    let consumer_lists = lists(random, consumer);
    let cached = random.below(consumer_lists[0].len() as u64 + 1) as usize;
    Request {
        producer_lists: lists(random, producer),
        cached: if random.below(2) == 0 { 0 } else { cached },
        consumer_lists,
        tokens,
        told: true,
    }
}

/// Returns whether the rules allow this pair. Exactly the pairs that must be rejected are rejected.
fn allowed(consumer: &Engine, producer: &Engine, model: &Model, permute: bool) -> bool {
    let mut all = (0..model.layers.len()).map(|layer| model.heads_of(layer));
    let layouts = consumer.layout == producer.layout
        || (permute
            && model.groups == 1
            && (consumer.layout, producer.layout) == (KvLayout::Lbnhc, KvLayout::Lbhnc));
    let ratio = consumer.block_tokens / producer.block_tokens;
    let fits = |heads: Heads| match heads {
        Heads::Replicated => true,
        Heads::Sharded(count) => {
            let slices = heads.per_rank(consumer.tp) != heads.per_rank(producer.tp);
            let more = producer.tp > consumer.tp;
            layouts
                && !(more && (ratio > 1 || producer.tp > count))
                && (!slices || producer.layout.has_contiguous_heads())
        }
    };
    consumer.block_tokens.is_multiple_of(producer.block_tokens) && all.all(fits)
}

// vLLM 11: a prompt shorter than a block moves one block (the byte-exact runs start at one token)
// vLLM 15: every byte arrives with TP pairs (1,1) (2,1) (4,2) (4,4) and all others up to 8
// vLLM 43: every byte arrives with split local blocks, and with any offsets and lengths
// vLLM 47: MLA: a producer that writes reaches every consumer rank, and completion counts include
//     pipeline stages
#[test]
fn every_element_arrives_between_engines_of_any_shape() {
    let (mut pulled, mut pushed, mut refused) = (0, 0, 0);
    for seed in 0..3000 {
        let mut random = Random(seed);
        let random = &mut random;
        let sizes: Vec<u32> = vec![1, 2, 4, 8];
        let heads = match random.below(4) {
            0 => Heads::Replicated,
            _ => Heads::Sharded(random.one_of(&[1, 2, 4, 8])),
        };
        let groups = random.one_of(&[1, 1, 2]);
        let count = 2 + random.below(3) as usize;
        let mut model = model(heads);
        model.groups = groups;
        model.layers = (0..count).map(|layer| (layer % groups) as u32).collect();
        model.style =
            random.one_of(&[Style::Together, Style::Together, Style::Apart, Style::Halves]);
        if heads == Heads::Replicated && random.below(3) == 0 {
            model.draft = Some((count - 1, Heads::Sharded(8)));
        }
        let make = |random: &mut Random| {
            let alike = model.draft.is_none() && model.style != Style::Apart;
            Engine {
                tp: random.one_of(&sizes),
                layout: random.one_of(&[KvLayout::Lbhnc, KvLayout::Lbhnc, KvLayout::Lbnhc]),
                block_tokens: random.one_of(&[2, 4, 8]),
                kernel_per_logical: random.one_of(&[1, 1, 2, 3]),
                blocks: 12,
                padding: random.one_of(&[0, 0, 24]),
                rows: alike && groups == 1 && random.below(4) == 0,
                shared_pool: alike && random.below(3) == 0 && groups > 1 && count == groups,
            }
        };
        let (consumer, producer) = (make(random), {
            let mut producer = make(random);
            if random.below(2) == 0 {
                producer.layout = KvLayout::Lbhnc;
            }
            producer
        });
        let producer = Engine { shared_pool: consumer.shared_pool, ..producer };
        let consumer = match random.below(2) {
            0 => Engine { layout: producer.layout, ..consumer },
            _ => consumer,
        };
        let stages = if model.style == Style::Apart || producer.shared_pool {
            1
        } else {
            random.one_of(&[1, 1, 2])
        };
        let permute = random.below(2) == 0;
        let request = request(random, &consumer, &producer, &model);
        let what =
            format!("seed {seed}: {consumer:?} from {producer:?} in {stages} stages of {model:?}");
        match pull(&consumer, &producer, &model, stages, permute, &request) {
            Ok(()) => {
                assert!(allowed(&consumer, &producer, &model, permute), "{what}");
                pulled += 1;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Incompatible, "{what}: {error}");
                assert!(!allowed(&consumer, &producer, &model, permute), "{what}: {error}");
                refused += 1;
            }
        }
        let producer = Engine { block_tokens: consumer.block_tokens, ..producer };
        let allowed = allowed(&consumer, &producer, &model, false);
        let request = self::request(random, &consumer, &producer, &model);
        match push(&consumer, &producer, &model, stages, &request) {
            Ok(()) => {
                assert!(allowed, "{what}");
                pushed += 1;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Incompatible, "{what}: {error}");
                assert!(!allowed, "{what}: {error}");
            }
        }
    }
    assert!(
        pulled > 800 && pushed > 800 && refused > 300,
        "{pulled} pulled, {pushed} pushed, {refused} refused"
    );
}
