//! The messages that a rank may send in each stage, and the limit of connections.

use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

use kvx_core::{ErrorKind, Registry};
use kvx_vllm::config::{KvTransferConfig, Surroundings};

use super::super::connector::Connector;
use super::members;
use super::process::ProcessHandle;
use super::remote_rank::RankProcess;
use super::serving::{OF_ONE_ADDRESS, UnprovenCounts};
use kvx_vllm::Version;
use kvx_vllm::engine::{BlockLists, PoolBlocks, WorkerRank};
use kvx_vllm::group::{ToHead, ToRank};
use kvx_vllm::wire::{CompatibilityFactors, NixlAgentMetadata};

const LIMIT: Duration = Duration::from_secs(10);

/// Builds an engine of two ranks that are expected to join.
fn engine(path: &std::path::Path) -> Connector {
    let json = r#"{"kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": "e"}"#;
    let surroundings = Surroundings::default().variable("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1");
    let config = KvTransferConfig::from_json(json, &surroundings).unwrap();
    let mut factors = CompatibilityFactors::new(Version::default(), "a model");
    (factors.num_kv_heads, factors.head_size, factors.num_hidden_layers) = (1, 4, 1);
    let builder =
        Connector::builder(&config, Registry::new(), factors).block_size(16).workers(2, 1);
    let connector = builder.any_port().build_blocking().unwrap();
    drop(connector.group(path, LIMIT));
    connector
}

fn pool(blocks: u32) -> ToHead {
    ToHead::Pool(PoolBlocks { groups: [(0, blocks)].into(), others: blocks })
}

fn metadata() -> ToHead {
    let metadata = NixlAgentMetadata::new("e", Version::default()).encode();
    ToHead::Registered { metadata, host_copies: false }
}

#[test]
fn a_message_of_a_rank_out_of_turn_is_refused() {
    let path = std::env::temp_dir().join(format!("kvx-turns-{}", std::process::id()));
    let connector = engine(&path);
    let shared = connector.shared();
    let [one, other] = [0, 1].map(|tp| WorkerRank { pp: 0, tp });
    let newcomer = RankProcess { process: "process 1".into(), life: None, distant: false };
    let _down = [one, other].map(|rank| members::seat(shared, rank, &newcomer).unwrap());
    let hears = |rank, message| members::take_message(shared, rank, message);
    let refused = |rank, message| {
        let error = hears(rank, message).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
    };
    let check = |block: u32| shared.state.lock().check_blocks(&BlockLists::single([block]), 1);

    // Before any registration.
    refused(one, ToHead::GivesBack);
    refused(one, metadata());
    hears(one, pool(8)).unwrap();
    refused(one, ToHead::GivesBack);
    // Counters may be asked for again, also for another number of blocks while no other rank has
    // some.
    hears(one, pool(9)).unwrap();
    assert_eq!(hears(other, pool(8)).unwrap_err().kind(), ErrorKind::Invalid);
    hears(one, metadata()).unwrap();
    hears(other, pool(9)).unwrap();
    hears(other, metadata()).unwrap();
    refused(other, pool(9));
    assert_eq!(hears(other, metadata()).unwrap_err().kind(), ErrorKind::Invalid);
    check(8).unwrap();

    // A second time.
    hears(one, ToHead::GivesBack).unwrap();
    refused(one, ToHead::GivesBack);
    refused(one, metadata());
    assert!(check(8).unwrap_err().to_string().contains("pp 0 tp 0"));
    // The other rank still has its caches.
    assert_eq!(hears(one, pool(7)).unwrap_err().kind(), ErrorKind::Invalid);
    hears(other, ToHead::GivesBack).unwrap();
    hears(one, pool(7)).unwrap();
    hears(one, metadata()).unwrap();
    check(6).unwrap_err();
    hears(other, pool(7)).unwrap();
    hears(other, metadata()).unwrap();
    check(6).unwrap();
    assert_eq!(check(8).unwrap_err().kind(), ErrorKind::OutOfBounds);

    // A lost rank cannot give caches back.
    members::lose(shared, one, "a test", true);
    assert_eq!(hears(one, ToHead::GivesBack).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(hears(one, pool(7)).unwrap_err().kind(), ErrorKind::Closed);
    members::lose(shared, other, "a test", true);
    connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
}

#[test]
fn notes_reach_a_rank_that_has_registered() {
    let path = std::env::temp_dir().join(format!("kvx-notes-{}", std::process::id()));
    let connector = engine(&path);
    let shared = connector.shared();
    let [one, other] = [0, 1].map(|tp| WorkerRank { pp: 0, tp });
    let note = |rank, note: &[u8]| connector.rank(rank).unwrap().note(note).map_err(|e| e.kind());
    let newcomer = RankProcess { process: "process 1".into(), life: None, distant: false };
    let mut down = members::seat(shared, one, &newcomer).unwrap();
    assert_eq!(note(one, b"early"), Err(ErrorKind::PeerLost));
    assert_eq!(note(other, b"not here"), Err(ErrorKind::PeerLost));
    members::take_message(shared, one, pool(8)).unwrap();
    members::take_message(shared, one, metadata()).unwrap();
    note(one, b"first").unwrap();
    note(one, &[7; 1 << 20]).unwrap();
    assert_eq!(note(one, &[7; (1 << 20) + 1]), Err(ErrorKind::Exhausted));
    let notes: Vec<_> = std::iter::from_fn(|| down.try_recv().ok())
        .filter_map(|(message, _)| {
            let bytes = message.encode().unwrap();
            match ToRank::decode(&bytes).unwrap() {
                ToRank::Note(note) => Some(note),
                _ => None,
            }
        })
        .collect();
    assert_eq!(notes, [b"first".to_vec(), vec![7; 1 << 20]]);
    members::lose(shared, one, "a test", true);
    assert_eq!(note(one, b"late"), Err(ErrorKind::PeerLost));
    connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
}

#[test]
fn a_rank_that_is_started_again_has_to_restart_its_engine() {
    let path = std::env::temp_dir().join(format!("kvx-again-{}", std::process::id()));
    let connector = engine(&path);
    let shared = connector.shared();
    let rank = WorkerRank { pp: 0, tp: 1 };
    let mut process = std::process::Command::new("true").spawn().unwrap();
    let life = ProcessHandle::open(process.id() as i32);
    assert!(life.is_some());
    let first = RankProcess { process: "process 1".into(), life, distant: false };
    let _down = members::seat(shared, rank, &first).unwrap();
    process.wait().unwrap();

    // The engine has not noticed the end yet, which proves that nothing touches the memory.
    let again = RankProcess { process: "process 2".into(), life: None, distant: false };
    let error = members::seat(shared, rank, &again).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    let words = "rank pp 0 tp 1 (process 1): its process has ended; a lost rank cannot join \
                 again: restart the engine";
    assert!(error.to_string().contains(words), "{error}");
    connector.shutdown(LIMIT).wait_blocking(LIMIT).unwrap();
}

#[test]
fn addresses_of_one_ipv6_network_share_the_limit_of_one_address() {
    let counts = UnprovenCounts::default();
    let from = |address: u128| SocketAddr::from((Ipv6Addr::from_bits(address), 7));
    let one_network = (1..100).map(|last| from(0xfd00 << 112 | last));
    let counted: Vec<_> = one_network.map_while(|from| counts.one_more(from)).collect();
    assert_eq!(counted.len(), OF_ONE_ADDRESS);
    assert!(counts.one_more(from(0xfd01 << 112 | 1)).is_some());
}
