//! Tests the publisher with subscribers that read its bytes.

use std::net::SocketAddr;
use std::time::Duration;

use kvx_proxy::server::zmtp::{Budget, Command, EventConnection, Input, MessageLimits, SocketType};
use kvx_testkit::free_port;
use kvx_vllm::events::{EventBatch, ReplayAnswer, publication, replay_answer, replay_request};
use tokio::net::TcpStream;

use super::*;

const LIMIT: Duration = Duration::from_secs(10);

/// Connects a socket to a publisher's socket.
async fn connect(port: u16, kind: SocketType) -> EventConnection {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let limits = MessageLimits { frames: 4, bytes: 1 << 20 };
    let stream = TcpStream::connect(address).await.unwrap();
    EventConnection::open(stream, kind, limits, &Budget::new(4 << 20), LIMIT).await.unwrap()
}

async fn message(connection: &mut EventConnection) -> Vec<Vec<u8>> {
    match tokio::time::timeout(LIMIT, connection.next()).await.unwrap().unwrap() {
        Some(Input::Message(message)) => message.frames().to_vec(),
        other => panic!("{other:?}"),
    }
}

/// Subscribes to a topic, and returns once the publisher has taken that.
async fn subscribe(port: u16, topic: &str) -> EventConnection {
    let mut connection = connect(port, SocketType::Sub).await;
    let subscription = [&b"\x01"[..], topic.as_bytes()].concat();
    connection.send(&[subscription], LIMIT).await.unwrap();
    let ping = Command::Ping { context: b"p".to_vec() };
    connection.command(&ping, LIMIT).await.unwrap();
    match tokio::time::timeout(LIMIT, connection.next()).await.unwrap().unwrap() {
        Some(Input::Command(Command::Pong { context })) => assert_eq!(context, b"p"),
        other => panic!("{other:?}"),
    }
    connection
}

/// Returns the numbers and the batches of a replay.
async fn replay(port: u16, from: u64) -> Vec<(u64, EventBatch)> {
    let mut connection = connect(port, SocketType::Dealer).await;
    connection.send(&replay_request(from), LIMIT).await.unwrap();
    let mut all = Vec::new();
    loop {
        let frames = message(&mut connection).await;
        match replay_answer(&frames).unwrap() {
            ReplayAnswer::End => return all,
            ReplayAnswer::Publication(one) => {
                all.push((one.sequence, EventBatch::decode(one.batch).unwrap()));
            }
        }
    }
}

fn hash(number: u8) -> [u8; 32] {
    [number; 32]
}

/// Publishes a block of two tokens after another.
fn store(publisher: &CachePublisher, number: u8, parent: Option<u8>) {
    let mut changes = CacheChanges::default();
    let tokens = [u32::from(number), 7];
    changes.stored(&hash(number), parent.map(hash).as_ref(), &tokens);
    publisher.publish(changes.take());
}

fn remove(publisher: &CachePublisher, number: u8) {
    let mut changes = CacheChanges::default();
    changes.removed(&hash(number));
    publisher.publish(changes.take());
}

async fn start(steps: usize) -> (CachePublisher, [u16; 2], tokio::task::JoinSet<()>) {
    let port = free_port(2).unwrap();
    let ports = [port, port + 1];
    let json = format!(
        r#"{{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:{}",
            "replay_endpoint": "tcp://127.0.0.1:{}", "topic": "kv@here", "buffer_steps": {steps}}}"#,
        ports[0], ports[1]
    );
    let config = EventsConfig::from_json(&json).unwrap();
    let publisher = CachePublisher::new(0, config.buffer_steps);
    let tasks = listen(&publisher, &config, 0).await.unwrap();
    (publisher, ports, tasks)
}

/// Returns the first numbers of the stored blocks' tokens, in their order.
fn blocks(batches: &[(u64, EventBatch)]) -> Vec<u32> {
    let events = batches.iter().flat_map(|(_, batch)| &batch.events);
    let stored = events.filter_map(|event| match event {
        CacheEvent::Stored(stored) => Some(stored.tokens.chunks(2).map(|two| two[0])),
        _ => None,
    });
    stored.flatten().collect()
}

#[tokio::test]
async fn a_subscriber_gets_each_batch_of_its_topic() {
    let (publisher, [port, _], _tasks) = start(100).await;
    store(&publisher, 1, None);
    let mut all = subscribe(port, "").await;
    let mut some = subscribe(port, "kv@").await;
    let mut none = subscribe(port, "kv@there").await;
    store(&publisher, 2, Some(1));
    remove(&publisher, 1);
    for connection in [&mut all, &mut some] {
        for number in 1..3u64 {
            let frames = message(connection).await;
            let got = publication(&frames).unwrap();
            assert_eq!((&frames[0][..], got.sequence), (&b"kv@here"[..], number));
            let batch = EventBatch::decode(got.batch).unwrap();
            assert_eq!((batch.events.len(), batch.rank), (1, Some(0)));
        }
    }
    none.command(&Command::Ping { context: Vec::new() }, LIMIT).await.unwrap();
    let next = tokio::time::timeout(LIMIT, none.next()).await.unwrap().unwrap();
    assert!(matches!(next, Some(Input::Command(Command::Pong { .. }))), "{next:?}");
}

#[tokio::test]
async fn a_replay_has_all_kept_batches_from_a_number_on() {
    let (publisher, [_, port], _tasks) = start(100).await;
    assert_eq!(replay(port, 0).await, []);
    (0..5).for_each(|number| store(&publisher, number, number.checked_sub(1)));
    let numbers = |all: &[(u64, EventBatch)]| all.iter().map(|(at, _)| *at).collect::<Vec<_>>();
    let all = replay(port, 0).await;
    assert_eq!((numbers(&all), blocks(&all)), ((0..5).collect(), (0..5).collect()));
    assert_eq!(numbers(&replay(port, 3).await), [3, 4]);
    assert_eq!(numbers(&replay(port, 5).await), [0u64; 0]);
}

#[tokio::test]
async fn a_replay_of_lost_batches_is_a_snapshot_with_parents_first() {
    let (publisher, [_, port], _tasks) = start(3).await;
    (0..20).for_each(|number| store(&publisher, number, number.checked_sub(1)));
    // Stored again, after its children.
    remove(&publisher, 4);
    store(&publisher, 4, Some(3));
    remove(&publisher, 19);
    let all = replay(port, 0).await;
    assert_eq!(all[0].0, 22, "the number of the last batch");
    assert_eq!(all[0].1.events[0], CacheEvent::Cleared);
    assert_eq!(blocks(&all), (0..19).collect::<Vec<_>>());
    let latest = replay(port, 21).await;
    assert_eq!((latest.len(), blocks(&latest)), (2, vec![4]), "these are kept");
}

#[tokio::test]
async fn a_subscriber_that_does_not_read_delays_nobody() {
    let (publisher, [port, _], _tasks) = start(64).await;
    let _stuck = subscribe(port, "").await;
    let mut quick = subscribe(port, "").await;
    let tokens: Vec<u32> = (0..100_000).collect();
    // Far more than sockets buffer.
    for number in 0..200u8 {
        let mut changes = CacheChanges::default();
        changes.stored(&hash(number), None, &tokens);
        publisher.publish(changes.take());
        let frames = message(&mut quick).await;
        assert_eq!(publication(&frames).unwrap().sequence, u64::from(number));
    }
}

#[tokio::test]
async fn readers_share_snapshots_and_few_are_in_memory() {
    let publisher = CachePublisher::new(0, 3);
    let mut snapshots = Vec::new();
    for round in 0..SNAPSHOTS as u8 {
        // No earlier snapshot is followed by all batches in the log.
        (0..9).for_each(|number| store(&publisher, 10 * round + number, None));
        let snapshot = publisher.snapshot().await.unwrap();
        store(&publisher, 10 * round + 9, None);
        let same = publisher.snapshot().await.unwrap();
        assert!(Arc::ptr_eq(&snapshot, &same), "the log has the batch after it");
        assert!(snapshots.iter().all(|earlier| !Arc::ptr_eq(earlier, &snapshot)));
        snapshots.push(snapshot);
    }
    (100..109).for_each(|number| store(&publisher, number, None));
    let wait = Duration::from_millis(100);
    assert!(tokio::time::timeout(wait, publisher.snapshot()).await.is_err(), "all are in use");
    snapshots.remove(0);
    let next = tokio::time::timeout(LIMIT, publisher.snapshot()).await.unwrap().unwrap();
    assert_eq!(blocks(&decoded(&next)).len(), 10 * SNAPSHOTS + 9);
}

fn decoded(snapshot: &Snapshot) -> Vec<(u64, EventBatch)> {
    let batches = snapshot.batches.iter();
    batches.map(|(number, batch)| (*number, EventBatch::decode(batch).unwrap())).collect()
}

#[tokio::test]
async fn the_engine_does_not_wait_for_a_snapshot() {
    let publisher = CachePublisher::new(0, 1);
    store(&publisher, 1, None);
    // As while one is encoded.
    let encoding = publisher.0.cached.lock().unwrap();
    let (done, is_done) = std::sync::mpsc::channel();
    let engine = publisher.clone();
    std::thread::spawn(move || {
        store(&engine, 2, Some(1));
        remove(&engine, 2);
        store(&engine, 3, Some(1));
        done.send(())
    });
    is_done.recv_timeout(LIMIT).expect("the engine waits");
    drop(encoding);
    let snapshot = publisher.snapshot().await.unwrap();
    assert_eq!((snapshot.next, blocks(&decoded(&snapshot))), (4, vec![1, 3]));
}

#[test]
fn configurations_of_vllm_are_read() {
    let config = EventsConfig::from_json(r#"{"enable_kv_cache_events": true}"#).unwrap();
    assert!(config.is_on());
    assert_eq!(config.endpoint, "tcp://127.0.0.1:5557", "loopback unless told otherwise");
    let off = [r#"{}"#, r#"{"enable_kv_cache_events": true, "publisher": "null"}"#];
    for off in off {
        assert!(!EventsConfig::from_json(off).unwrap().is_on(), "{off}");
    }
}
