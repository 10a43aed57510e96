//! Releases blocks that a prefill instance keeps for a decode leg that was given up.
//!
//! Without this, the prefill keeps them until their lease ends. The router knows earlier that no
//! decode instance will fetch them: no decode leg has reached an instance, or all instances have
//! turned theirs away. Once an instance may have begun a leg, it may read, and the router releases
//! nothing: the instance itself notifies the prefill, or the lease ends.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use hyper::StatusCode;
use hyper_util::client::legacy::connect::CaptureConnection;
use kvx_vllm::Version;
use kvx_vllm::params::{RemoteBlocks, TransferMode, TransferParams};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

/// The most releases that wait or are in progress. Further ones are dropped, and the leases of their
/// blocks end.
const QUEUE: usize = 1024;
/// The part of [`QUEUE`] that one instance can fill.
const INSTANCE_QUEUE: usize = 256;
/// The most releases in progress.
const AT_ONCE: usize = 64;
/// The most releases in progress at one instance: others do not wait for one that is stopped.
const INSTANCE_AT_ONCE: usize = 8;
/// The most instances whose last result is kept.
const INSTANCES: usize = 1024;
/// The time limit of a release, with the wait for its turn.
const LIMIT: Duration = Duration::from_secs(10);
/// The longest id or host, in bytes. With [`QUEUE`] it bounds the memory of waiting releases.
const TEXT: usize = 1024;

/// Blocks that a prefill instance keeps for a decode instance.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KeptBlocks {
    /// The prefill instance, `HOST:PORT`.
    pub instance: String,
    /// The engine that keeps the blocks, and the request's id there. Its lists of blocks are left
    /// out.
    pub remote: RemoteBlocks,
    /// A version whose messages the engine reads.
    pub version: Version,
}

/// Why blocks were not released. Their lease then ends as usual.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReleaseError {
    /// The engine does not take releases from this router, or the router cannot reach such engines.
    Refused(String),
    /// The engine did not answer in time, or the connection failed.
    Failed(String),
}

impl ReleaseError {
    /// The result's name in metrics.
    fn as_str(&self) -> &'static str {
        match self {
            ReleaseError::Refused(_) => "refused",
            ReleaseError::Failed(_) => "failed",
        }
    }
}

impl fmt::Display for ReleaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ReleaseError::Refused(why) | ReleaseError::Failed(why)) = self;
        write!(f, "{}: {why}", self.as_str())
    }
}

impl std::error::Error for ReleaseError {}

/// A release in progress.
pub type ReleaseFuture<'a> = Pin<Box<dyn Future<Output = Result<(), ReleaseError>> + Send + 'a>>;

/// Notifies engines that no decode will fetch blocks.
///
/// The router calls it only for blocks that no decode instance can be reading.
pub trait ReleaseBlocks: fmt::Debug + Send + Sync {
    /// Releases these blocks. The router gives up 10 s after it has queued the release.
    fn release<'a>(&'a self, blocks: &'a KeptBlocks) -> ReleaseFuture<'a>;
}

/// The [`ReleaseBlocks`] of a router. Two of them are equal if they are the same one.
#[derive(Clone, Debug)]
pub struct BlockReleaser(Arc<dyn ReleaseBlocks>);

impl BlockReleaser {
    /// Wraps an implementation.
    pub fn new(releases: impl ReleaseBlocks + 'static) -> Self {
        BlockReleaser(Arc::new(releases))
    }
}

impl PartialEq for BlockReleaser {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// The numbers of releases by result.
#[derive(Debug, Default)]
pub(crate) struct ReleaseCounts([AtomicU64; 4]);

impl ReleaseCounts {
    const RESULTS: [&str; 4] = ["sent", "refused", "failed", "dropped"];

    fn add(&self, result: &str) {
        let at = Self::RESULTS.iter().position(|one| *one == result);
        let count = at.and_then(|at| self.0.get(at));
        debug_assert!(count.is_some(), "{result} is a result");
        count.into_iter().for_each(|count| _ = count.fetch_add(1, Relaxed));
    }

    /// Yields each result and its number.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Self::RESULTS.into_iter().zip(&self.0).map(|(result, count)| (result, count.load(Relaxed)))
    }
}

/// The queue of releases.
#[derive(Debug)]
pub(crate) struct Releases {
    /// Blocks to release, with the times at which the router gives up.
    queue: Option<mpsc::Sender<(KeptBlocks, Instant)>>,
    /// The number of releases that are queued or in progress.
    pending: watch::Sender<usize>,
    counts: Arc<ReleaseCounts>,
    /// The result of the last release at each instance.
    last: Mutex<BTreeMap<String, &'static str>>,
    /// The releaser and the other end of the queue, until [`serve`](Self::serve) takes them.
    unserved: Mutex<Option<(BlockReleaser, mpsc::Receiver<(KeptBlocks, Instant)>)>>,
}

impl Releases {
    /// Creates the queue, which accepts no releases without a releaser.
    pub(crate) fn new(releaser: Option<BlockReleaser>, counts: Arc<ReleaseCounts>) -> Self {
        let (queue, waiting) = mpsc::channel(QUEUE);
        Releases {
            queue: releaser.is_some().then_some(queue),
            pending: watch::Sender::new(0),
            counts,
            last: Mutex::default(),
            unserved: Mutex::new(releaser.map(|releaser| (releaser, waiting))),
        }
    }

    /// Describes for `/status` how orphaned blocks become free: by the end of their lease where the
    /// last release was not sent, and as `by` if that is so at each instance with a release.
    pub(crate) fn status(&self) -> serde_json::Value {
        let by = |is_sent| if is_sent { "notification" } else { "lease" };
        let results: BTreeMap<_, _> = self.counts.iter().collect();
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let instances: BTreeMap<_, _> = last
            .iter()
            .map(|(name, last)| {
                (name, serde_json::json!({"by": by(*last == "sent"), "last": last}))
            })
            .collect();
        let any = last.is_empty() || last.values().any(|last| *last == "sent");
        let by = by(self.queue.is_some() && any);
        serde_json::json!({"by": by, "results": results, "instances": instances})
    }

    /// Records the result of a release.
    fn ended(&self, instance: String, result: &'static str) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.len() >= INSTANCES && !last.contains_key(&instance) {
            last.pop_first();
        }
        last.insert(instance, result);
        self.counts.add(result);
    }

    /// Sends queued releases, and calls `missed` with the reason for each that failed. Returns only
    /// if there is no releaser.
    pub(crate) async fn serve(
        self: Arc<Self>,
        missed: impl Fn(&KeptBlocks, &str) + Clone + Send + 'static,
    ) {
        let unserved = self.unserved.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some((releaser, mut waiting)) = unserved else { return };
        let mut running = JoinSet::new();
        let all = Arc::new(Semaphore::new(AT_ONCE));
        // An instance's semaphore is shared with its releases.
        let mut instances: HashMap<String, Arc<Semaphore>> = HashMap::new();
        while let Some((blocks, until)) = waiting.recv().await {
            while running.try_join_next().is_some() {}
            instances.retain(|_, instance| Arc::strong_count(instance) > 1);
            let instance = instances
                .entry(blocks.instance.clone())
                .or_insert_with(|| Arc::new(Semaphore::new(INSTANCE_AT_ONCE)));
            if Arc::strong_count(instance) > INSTANCE_QUEUE {
                drop(Pending(&self.pending));
                self.counts.add("dropped");
                continue;
            }
            let (instance, all) = (Arc::clone(instance), Arc::clone(&all));
            let (releases, releaser, missed) =
                (Arc::clone(&self), releaser.clone(), missed.clone());
            running.spawn(async move {
                // Counts down also if the implementation panics.
                let _pending = Pending(&releases.pending);
                let release = async {
                    // Errors: nobody closes the semaphores.
                    let _instance_place = instance.acquire().await;
                    let _place = all.acquire().await;
                    releaser.0.release(&blocks).await
                };
                let ended = timeout_at(until, release).await;
                let ended = ended.unwrap_or_else(|_| {
                    Err(ReleaseError::Failed(format!("it took longer than {LIMIT:?}")))
                });
                if let Err(error) = &ended {
                    missed(&blocks, &format!("release of blocks: {error}"));
                }
                let result = ended.as_ref().map_or_else(ReleaseError::as_str, |()| "sent");
                releases.ended(blocks.instance, result);
            });
        }
    }

    /// Waits until no release is queued or in progress, for at most `limit`.
    pub(crate) async fn flush(&self, limit: Duration) {
        let mut pending = self.pending.subscribe();
        // An error: `limit` has passed.
        let _ = timeout(limit, pending.wait_for(|pending| *pending == 0)).await;
    }

    fn add(&self, blocks: KeptBlocks) {
        let Some(queue) = &self.queue else { return };
        // Counted first: the task may end the release at once.
        let is_counted = self.pending.send_if_modified(|pending| {
            let has_place = *pending < QUEUE;
            *pending += usize::from(has_place);
            has_place
        });
        if !is_counted {
            self.counts.add("dropped");
        } else if queue.try_send((blocks, Instant::now() + LIMIT)).is_err() {
            drop(Pending(&self.pending));
            self.counts.add("dropped");
        }
    }
}

/// A release that is queued or in progress.
struct Pending<'a>(&'a watch::Sender<usize>);

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|pending| *pending -= 1);
    }
}

/// The progress of a request on its way to an instance.
#[derive(Clone, Debug, Default)]
pub(crate) struct Delivery(Arc<OnceLock<CaptureConnection>>);

impl Delivery {
    /// Watches a request that is about to be sent.
    pub(crate) fn watch(&self, connection: CaptureConnection) {
        // An error: a leg is sent once.
        let _ = self.0.set(connection);
    }

    /// Returns true if the request was given to a connection, so that the instance may have it.
    fn has_left(&self) -> bool {
        self.0.get().is_some_and(|connection| connection.connection_metadata().is_some())
    }
}

/// Blocks between two legs. Dropping it releases them, unless a decode instance may have begun a
/// leg with them.
#[derive(Debug)]
pub(crate) struct OrphanGuard {
    releases: Arc<Releases>,
    blocks: Option<KeptBlocks>,
    leg: Option<Delivery>,
}

impl OrphanGuard {
    /// Guards the blocks that the parameters of a prefill's answer name, if they can be released.
    pub(crate) fn new(
        releases: &Arc<Releases>,
        instance: &str,
        params: Option<&TransferParams>,
    ) -> Option<Self> {
        releases.queue.as_ref()?;
        let params = params.filter(|params| params.do_remote_prefill)?;
        let mut remote = params.remote_blocks().ok()?;
        let texts = [&remote.engine_id, &remote.request_id, &remote.host];
        if remote.mode != TransferMode::Pull
            || remote.block_count() == 0
            || texts.iter().any(|text| text.len() > TEXT)
        {
            return None;
        }
        remote.block_ids = Vec::new();
        (remote.block_reference, remote.signature) = (None, None);
        let blocks =
            KeptBlocks { instance: instance.to_owned(), remote, version: params.version() };
        Some(OrphanGuard { releases: Arc::clone(releases), blocks: Some(blocks), leg: None })
    }

    /// Records that a decode leg is about to be sent. Its `delivery` tells whether it was.
    pub(crate) fn offer(&mut self, delivery: &Delivery) {
        self.leg = Some(delivery.clone());
    }

    /// Records that the instance has not begun the leg.
    pub(crate) fn take_back(&mut self) {
        self.leg = None;
    }
}

impl Drop for OrphanGuard {
    fn drop(&mut self) {
        if !self.leg.as_ref().is_some_and(Delivery::has_left)
            && let Some(blocks) = self.blocks.take()
        {
            self.releases.add(blocks);
        }
    }
}

/// Returns true if an instance that answers a decode leg so has not begun it, and has not notified
/// the prefill. vLLM and kvx answer these before they read the parameters. Their engines' own
/// rejections (400, 404, 422) notify the prefill.
pub(crate) fn was_turned_away(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::UNAUTHORIZED
            | StatusCode::FORBIDDEN
            | StatusCode::METHOD_NOT_ALLOWED
            | StatusCode::PAYLOAD_TOO_LARGE
            | StatusCode::UNSUPPORTED_MEDIA_TYPE
            | StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Never;

    impl ReleaseBlocks for Never {
        fn release<'a>(&'a self, _: &'a KeptBlocks) -> ReleaseFuture<'a> {
            Box::pin(std::future::pending())
        }
    }

    /// Never ends releases at the instance `stopped`.
    #[derive(Debug)]
    struct OneStopped;

    impl ReleaseBlocks for OneStopped {
        fn release<'a>(&'a self, blocks: &'a KeptBlocks) -> ReleaseFuture<'a> {
            match blocks.instance.as_str() {
                "stopped" => Box::pin(std::future::pending()),
                "refuses" => Box::pin(async { Err(ReleaseError::Refused("no".to_owned())) }),
                _ => Box::pin(async { Ok(()) }),
            }
        }
    }

    fn at(instance: &str) -> KeptBlocks {
        let remote = RemoteBlocks::new("e", "r", "h", 1, Vec::new());
        KeptBlocks { instance: instance.to_owned(), remote, version: Version::default() }
    }

    fn count(releases: &Releases, result: &str) -> u64 {
        let found = releases.counts.iter().find(|(one, _)| *one == result);
        found.expect("a result").1
    }

    #[tokio::test]
    async fn releases_at_other_instances_do_not_wait_for_one_that_is_stopped() {
        let releases = Releases::new(Some(BlockReleaser::new(OneStopped)), Arc::default());
        let releases = Arc::new(releases);
        let status = || releases.status().to_string();
        assert!(status().contains(r#""by":"notification""#), "none has failed: {}", status());
        for _ in 0..INSTANCE_QUEUE + 3 {
            releases.add(at("stopped"));
        }
        releases.add(at("refuses"));
        let serving = tokio::spawn(Arc::clone(&releases).serve(|_, _| ()));
        let until = async |result: &str| {
            let counted = async {
                while count(&releases, result) == 0 {
                    tokio::time::sleep(Duration::from_millis(5)).await; // between polls
                }
            };
            timeout(LIMIT / 2, counted).await.unwrap_or_else(|_| panic!("none is {result}"));
        };
        until("refused").await;
        assert_eq!(count(&releases, "dropped"), 3, "one instance does not fill the queue");
        let status = releases.status();
        assert_eq!(status["by"], "lease");
        let refused = serde_json::json!({"by": "lease", "last": "refused"});
        assert_eq!(status["instances"]["refuses"], refused);
        releases.add(at("works"));
        until("sent").await;
        let status = releases.status();
        assert_eq!(status["by"], "notification");
        let sent = serde_json::json!({"by": "notification", "last": "sent"});
        assert_eq!(status["instances"]["works"], sent);
        assert_eq!(*releases.pending.borrow(), INSTANCE_QUEUE);
        serving.abort();
    }

    #[tokio::test]
    async fn releases_beyond_the_queue_are_dropped_and_counted() {
        let counts = Arc::default();
        let releases = Releases::new(Some(BlockReleaser::new(Never)), Arc::clone(&counts));
        let blocks = at("prefill");
        for _ in 0..QUEUE + 3 {
            releases.add(blocks.clone());
        }
        assert_eq!(counts.iter().find(|(result, _)| *result == "dropped"), Some(("dropped", 3)));
        assert_eq!(*releases.pending.borrow(), QUEUE);
        let began = tokio::time::Instant::now();
        releases.flush(Duration::from_millis(10)).await;
        assert!(began.elapsed() < Duration::from_secs(5), "the wait for them has a limit");
    }
}
