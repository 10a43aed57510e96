//! Tests the subscription to a publisher that the test plays.

use kvx_vllm::events::{
    BlockHash, BlockRemoved, BlockStored, CacheEvent, EventBatch, replay_end, replay_request,
};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::*;
use crate::fleet::knowledge::{KnowledgeLevel, PromptParts};
use crate::fleet::tokens::PromptTokens;
use crate::log::AccessLogger;
use crate::recording::writer::Recorder;
use crate::relay::core::LiveSetup;
use crate::setup::{AccessLog, Setup};

const LIMIT: Duration = Duration::from_secs(20);

/// A publisher, and a router that subscribes to it.
struct Scene {
    core: Arc<Core>,
    batches: TcpListener,
    replays: TcpListener,
    subscribing: JoinHandle<()>,
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.subscribing.abort();
    }
}

async fn accept(listener: &TcpListener, kind: SocketType) -> EventConnection {
    let (stream, _) = timeout(LIMIT, listener.accept()).await.expect("it connects").unwrap();
    EventConnection::open(stream, kind, MESSAGE, &Budget::new(MEMORY), LIMIT).await.unwrap()
}

/// Returns the batch in which a block of two tokens follows another.
fn stored(number: u32) -> Vec<CacheEvent> {
    vec![CacheEvent::Stored(Box::new(BlockStored {
        hashes: vec![BlockHash(number.into())],
        parent: number.checked_sub(1).map(|parent| BlockHash(parent.into())),
        tokens: vec![number, 7],
        block_size: 2,
        ..BlockStored::default()
    }))]
}

fn removed(number: u64) -> Vec<CacheEvent> {
    let hashes = vec![BlockHash(number)];
    vec![CacheEvent::Removed(Box::new(BlockRemoved { hashes, ..BlockRemoved::default() }))]
}

fn encoded(events: Vec<CacheEvent>) -> Vec<u8> {
    EventBatch { events, ..EventBatch::default() }.encode()
}

/// A publisher with one subscriber. Dropping it closes the connection.
struct Publisher {
    orders: UnboundedSender<Order>,
    task: JoinHandle<()>,
}

enum Order {
    Publish(u64, Vec<u8>),
    Ping(oneshot::Sender<()>),
    Hang,
}

impl Publisher {
    fn start(mut connection: EventConnection) -> Self {
        let (orders, mut received) = unbounded_channel();
        let serve = async move {
            let mut pinged = None;
            loop {
                tokio::select! {
                    order = received.recv() => match order {
                        None => return,
                        Some(Order::Publish(number, batch)) => {
                            let frames = [Vec::new(), number.to_be_bytes().to_vec(), batch];
                            connection.send(&frames, LIMIT).await.unwrap();
                        }
                        Some(Order::Ping(answered)) => {
                            pinged = Some(answered);
                            let ping = Command::Ping { context: Vec::new() };
                            connection.command(&ping, LIMIT).await.unwrap();
                        }
                        Some(Order::Hang) => std::future::pending().await,
                    },
                    input = connection.next() => match input {
                        Ok(Some(Input::Command(Command::Ping { context }))) => {
                            let pong = Command::Pong { context };
                            connection.command(&pong, LIMIT).await.unwrap();
                        }
                        Ok(Some(Input::Command(Command::Pong { .. }))) => {
                            pinged.take().map(|answered| answered.send(()));
                        }
                        Ok(Some(_)) => {}
                        Ok(None) | Err(_) => return,
                    },
                }
            }
        };
        Publisher { orders, task: tokio::spawn(serve) }
    }

    fn order(&self, order: Order) {
        assert!(self.orders.send(order).is_ok(), "the router has closed the connection");
    }

    fn publish(&self, number: u64, events: Vec<CacheEvent>) {
        self.order(Order::Publish(number, encoded(events)));
    }

    /// Waits until the router has read everything.
    async fn until_read(&self) {
        let (answered, answer) = oneshot::channel();
        self.order(Order::Ping(answered));
        timeout(LIMIT, answer).await.expect("the router reads its subscription").unwrap();
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Scene {
    /// Starts a router whose instance has events, with a replay or without.
    async fn new(has_replay: bool) -> Scene {
        let [batches, replays] =
            [TcpListener::bind("127.0.0.1:0").await, TcpListener::bind("127.0.0.1:0").await]
                .map(std::io::Result::unwrap);
        let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
        let replay = match has_replay {
            true => format!(", events_replay = 'tcp://*:{}'", port(&replays)),
            false => String::new(),
        };
        let setup = format!(
            "[[pool]]\ndecode = [{{ url = 'http://127.0.0.1:1', events = 'tcp://*:{}'{replay} }}]",
            port(&batches)
        );
        let live = LiveSetup::new(Setup::from_toml(&setup).unwrap(), None).unwrap();
        let access = AccessLogger::open(&AccessLog::Off, Box::new(std::io::sink())).unwrap();
        let core = Arc::new(Core::new(live, access, Recorder::off()).0);
        let subscribing = tokio::spawn(subscribe(Arc::clone(&core)));
        Scene { core, batches, replays, subscribing }
    }

    fn state(&self) -> Arc<State> {
        Arc::clone(&self.core.live().fleet.decode[0].state)
    }

    /// Accepts the subscription.
    async fn subscriber(&self) -> Publisher {
        let mut connection = accept(&self.batches, SocketType::Pub).await;
        match timeout(LIMIT, connection.next()).await.unwrap().unwrap() {
            Some(Input::Message(message)) => assert_eq!(message.frames(), [b"\x01"]),
            other => panic!("{other:?}"),
        }
        Publisher::start(connection)
    }

    /// Answers a request for a replay of all batches with these.
    async fn replays(&self, batches: Vec<(u64, Vec<CacheEvent>)>) {
        self.replays_from(0, batches).await;
    }

    async fn replays_from(&self, from: u64, batches: Vec<(u64, Vec<CacheEvent>)>) {
        let mut connection = self.replays_part_from(from, batches).await;
        connection.send(&replay_end(""), LIMIT).await.unwrap();
    }

    /// Answers a request for a replay from a number on, and does not end it.
    async fn replays_part_from(
        &self,
        from: u64,
        batches: Vec<(u64, Vec<CacheEvent>)>,
    ) -> EventConnection {
        let mut connection = accept(&self.replays, SocketType::Router).await;
        match timeout(LIMIT, connection.next()).await.unwrap().unwrap() {
            Some(Input::Message(message)) => assert_eq!(message.frames(), replay_request(from)),
            other => panic!("{other:?}"),
        }
        for (number, events) in batches {
            let number = number.to_be_bytes().to_vec();
            connection.send(&[vec![], vec![], number, encoded(events)], LIMIT).await.unwrap();
        }
        connection
    }

    /// Waits until the router's knowledge has this level, and this many of the blocks of `stored`.
    async fn until(&self, level: KnowledgeLevel, blocks: u64) {
        let prompt = PromptTokens::new((0..50).flat_map(|number| [number, 7]).collect());
        let parts = PromptParts { chunks: &[], tokens: Some(&prompt) };
        let end = Instant::now() + LIMIT;
        loop {
            let (state, found) = {
                let state = self.state();
                let cache = state.cache();
                (cache.level(), cache.predict(parts).tokens / 2)
            };
            if (state, found) == (level, blocks) {
                return;
            }
            let why = self.state().cache().why.clone();
            assert!(Instant::now() < end, "{state:?} {found}, not {level:?} {blocks}: {why:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn gaps(&self) -> u64 {
        self.state().cache().counts().gaps
    }
}

#[tokio::test]
async fn a_replay_and_what_follows_it_are_exact_knowledge() {
    let scene = Scene::new(true).await;
    let publisher = scene.subscriber().await;
    // Published while the replay is asked for, which has them too.
    publisher.publish(1, stored(1));
    publisher.publish(2, stored(2));
    scene.replays((0..3).map(|number| (number, stored(number as u32))).collect()).await;
    scene.until(KnowledgeLevel::Exact, 3).await;
    publisher.publish(3, stored(3));
    scene.until(KnowledgeLevel::Exact, 4).await;
    publisher.publish(4, removed(3));
    scene.until(KnowledgeLevel::Exact, 3).await;
    assert_eq!(scene.gaps(), 0);
}

#[tokio::test]
async fn an_engine_that_has_published_nothing_has_nothing_cached() {
    let scene = Scene::new(true).await;
    let publisher = scene.subscriber().await;
    scene.replays(Vec::new()).await;
    scene.until(KnowledgeLevel::Exact, 0).await;
    publisher.publish(0, stored(0));
    scene.until(KnowledgeLevel::Exact, 1).await;
}

#[tokio::test]
async fn a_gap_is_replayed() {
    let scene = Scene::new(true).await;
    let publisher = scene.subscriber().await;
    scene.replays(vec![(0, stored(0))]).await;
    scene.until(KnowledgeLevel::Exact, 1).await;
    publisher.publish(4, stored(3));
    // The router asks for the missing batches alone, since an engine does not keep all.
    let missing = [stored(1), stored(2), removed(2), stored(3)];
    scene.replays_from(1, (1..).zip(missing).collect()).await;
    // The last block's parent was removed before it.
    scene.until(KnowledgeLevel::Exact, 2).await;
    assert_eq!(scene.gaps(), 1);
    publisher.publish(5, vec![CacheEvent::Cleared]);
    publisher.publish(6, stored(0));
    scene.until(KnowledgeLevel::Exact, 1).await;
}

#[tokio::test]
async fn a_replay_that_ends_before_the_missing_batches_leaves_no_exact_knowledge() {
    let scene = Scene::new(true).await;
    let publisher = scene.subscriber().await;
    scene.replays(vec![(0, stored(0))]).await;
    scene.until(KnowledgeLevel::Exact, 1).await;
    publisher.publish(4, stored(0));
    scene.replays_from(1, Vec::new()).await;
    scene.until(KnowledgeLevel::Degraded, 1).await;
}

#[tokio::test]
async fn without_a_replay_a_gap_leaves_what_is_published_after_it() {
    let scene = Scene::new(false).await;
    let publisher = scene.subscriber().await;
    scene.until(KnowledgeLevel::Degraded, 0).await;
    // This is the first batch of all, so none is missing.
    publisher.publish(0, stored(0));
    publisher.publish(1, stored(1));
    scene.until(KnowledgeLevel::Exact, 2).await;
    // The lost batch may have removed both.
    publisher.publish(3, stored(2));
    scene.until(KnowledgeLevel::Degraded, 0).await;
    publisher.publish(4, stored(0));
    scene.until(KnowledgeLevel::Degraded, 1).await;
    assert_eq!(scene.gaps(), 1);
    publisher.publish(5, vec![CacheEvent::Cleared]);
    scene.until(KnowledgeLevel::Exact, 0).await;
}

#[tokio::test]
async fn a_replay_that_has_lost_the_beginning_is_incomplete_and_a_snapshot_is_not() {
    let scene = Scene::new(true).await;
    let publisher = scene.subscriber().await;
    scene.replays(vec![(7, stored(0)), (8, stored(1))]).await;
    scene.until(KnowledgeLevel::Degraded, 2).await;
    drop(publisher);
    let _publisher = scene.subscriber().await;
    let snapshot = [vec![CacheEvent::Cleared], stored(0), stored(1), stored(2)].concat();
    scene.replays(vec![(9, snapshot)]).await;
    scene.until(KnowledgeLevel::Exact, 3).await;
}

#[tokio::test]
async fn a_restart_under_the_same_name_leaves_no_credit() {
    let scene = Scene::new(true).await;
    let publisher = scene.subscriber().await;
    scene.replays(vec![(0, stored(0)), (1, stored(1))]).await;
    scene.until(KnowledgeLevel::Exact, 2).await;
    publisher.publish(2, stored(2));
    scene.until(KnowledgeLevel::Exact, 3).await;
    // Its numbers begin again, without the end of the connection.
    publisher.publish(0, stored(0));
    scene.until(KnowledgeLevel::History, 0).await;
    let _publisher = scene.subscriber().await;
    scene.replays(vec![(0, stored(0))]).await;
    scene.until(KnowledgeLevel::Exact, 1).await;
}

#[tokio::test]
async fn a_restart_behind_a_forwarder_leaves_no_credit() {
    let scene = Scene::new(true).await;
    let publisher = scene.subscriber().await;
    scene.replays(vec![(0, stored(0)), (1, stored(1))]).await;
    scene.until(KnowledgeLevel::Exact, 2).await;
    // At first this may be a batch that the replay has contained.
    let end = Instant::now() + LIMIT;
    while scene.state().cache().level() == KnowledgeLevel::Exact {
        assert!(Instant::now() < end, "the numbers begin again, and nobody sees it");
        let _ = publisher.orders.send(Order::Publish(0, encoded(stored(0))));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    scene.until(KnowledgeLevel::History, 0).await;
}

#[tokio::test]
async fn a_failed_replay_is_repeated() {
    let scene = Scene::new(true).await;
    let publisher = scene.subscriber().await;
    drop(scene.replays_part_from(0, vec![(0, stored(0)), (1, stored(1))]).await);
    scene.until(KnowledgeLevel::Degraded, 0).await;
    publisher.publish(7, stored(0));
    scene.until(KnowledgeLevel::Degraded, 1).await;
    // It continues where the first one has broken off.
    scene.replays_from(2, (2..8).map(|number| (number, stored(number as u32))).collect()).await;
    scene.until(KnowledgeLevel::Exact, 8).await;
    publisher.publish(8, stored(8));
    scene.until(KnowledgeLevel::Exact, 9).await;
}

#[tokio::test]
async fn the_end_of_the_connection_leaves_no_credit() {
    let scene = Scene::new(true).await;
    let publisher = scene.subscriber().await;
    scene.replays(vec![(0, stored(0))]).await;
    scene.until(KnowledgeLevel::Exact, 1).await;
    // The prompt that the router has sent there does not count either.
    let chunks = [1, 2, 3];
    let parts = PromptParts { chunks: &chunks, tokens: None };
    scene.state().cache().sent(parts, std::time::Instant::now());
    assert!(scene.state().cache().predict(parts).tokens > 0);
    drop(publisher);
    scene.until(KnowledgeLevel::History, 0).await;
    assert_eq!(scene.state().cache().predict(parts).tokens, 0);
}

#[tokio::test]
async fn a_publisher_that_hangs_leaves_no_credit_after_its_silence() {
    let scene = Scene::new(true).await;
    let publisher = scene.subscriber().await;
    scene.replays(vec![(0, stored(0))]).await;
    scene.until(KnowledgeLevel::Exact, 1).await;
    publisher.order(Order::Hang);
    scene.until(KnowledgeLevel::History, 0).await;
}

#[tokio::test]
async fn malformed_batches_leave_history() {
    let scene = Scene::new(true).await;
    let publisher = scene.subscriber().await;
    scene.replays(vec![(0, stored(0))]).await;
    scene.until(KnowledgeLevel::Exact, 1).await;
    publisher.order(Order::Publish(1, b"nonsense".to_vec()));
    scene.until(KnowledgeLevel::History, 0).await;
    let why = scene.state().cache().why.clone().unwrap();
    assert!(why.contains("malformed batch of KV events"), "{why}");
}

#[tokio::test]
async fn an_instance_that_is_removed_is_forgotten() {
    let scene = Scene::new(true).await;
    let mut publisher = scene.subscriber().await;
    scene.replays(vec![(0, stored(0))]).await;
    scene.until(KnowledgeLevel::Exact, 1).await;
    let state = scene.state();
    let setup = Setup::from_toml("[[pool]]\ndecode = ['http://127.0.0.1:1']").unwrap();
    scene.core.replace(|| Ok(setup), || ()).await.unwrap();
    assert!(Arc::ptr_eq(&state, &scene.state()), "the instance has lost its events only");
    scene.until(KnowledgeLevel::History, 0).await;
    let closed = timeout(LIMIT, &mut publisher.task).await;
    closed.expect("the router closes the connection").unwrap();
}

#[tokio::test]
async fn the_subscription_is_read_during_a_replay() {
    let scene = Scene::new(true).await;
    let publisher = scene.subscriber().await;
    let mut replay = scene.replays_part_from(0, vec![(0, stored(0))]).await;
    publisher.publish(1, stored(1));
    publisher.publish(2, stored(2));
    publisher.until_read().await;
    scene.until(KnowledgeLevel::History, 0).await;
    replay.send(&replay_end(""), LIMIT).await.unwrap();
    scene.until(KnowledgeLevel::Exact, 3).await;
    assert_eq!(scene.gaps(), 0);
}

#[tokio::test]
async fn batches_beyond_the_bound_during_a_replay_are_a_gap() {
    let scene = Scene::new(true).await;
    let publisher = scene.subscriber().await;
    let mut replay = scene.replays_part_from(0, vec![(0, stored(0))]).await;
    // Blocks in another memory are not counted.
    let large = vec![CacheEvent::Stored(Box::new(BlockStored {
        hashes: vec![BlockHash(99)],
        tokens: vec![u32::MAX; MAX_BATCH / 8],
        block_size: MAX_BATCH as u32 / 8,
        medium: Some("CPU".to_owned()),
        ..BlockStored::default()
    }))];
    (1..5).for_each(|number| publisher.publish(number, large.clone()));
    publisher.until_read().await;
    replay.send(&replay_end(""), LIMIT).await.unwrap();
    scene.until(KnowledgeLevel::Degraded, 0).await;
    // One of them fits.
    scene.replays_from(2, (2..5).zip([1, 2, 3].map(stored)).collect()).await;
    scene.until(KnowledgeLevel::Exact, 4).await;
    assert_eq!(scene.gaps(), 1);
}

#[tokio::test]
async fn a_hole_in_a_replay_is_asked_for_once() {
    let scene = Scene::new(true).await;
    let _publisher = scene.subscriber().await;
    let _dropped =
        scene.replays_part_from(0, [0, 1, 5].map(|at| (at, stored(at as u32))).into()).await;
    scene.replays_from(2, (2..6).map(|at| (at, stored(at as u32))).collect()).await;
    scene.until(KnowledgeLevel::Exact, 6).await;

    let scene = Scene::new(true).await;
    let _publisher = scene.subscriber().await;
    let _dropped = scene.replays_part_from(0, vec![(0, stored(0)), (2, stored(1))]).await;
    // The missing batches may have removed the blocks before them.
    scene.replays_from(1, vec![(1, stored(1)), (3, stored(0))]).await;
    scene.until(KnowledgeLevel::Degraded, 1).await;
}
