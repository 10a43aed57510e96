//! Tests transfers, notifications and revocations as futures under tokio.

use std::time::Duration;

use kvx::{Grid, Memory, Plan, Result};
use kvx_testkit::test;

const WAIT: Duration = Duration::from_secs(10);

async fn two_agents() -> Result<()> {
    let agent = |name| kvx::agent(name).build();
    let (prefill, decode) = (agent("tokio-prefill")?, agent("tokio-decode")?);
    let pool = prefill.register("kv", Memory::pool(1 << 20).build()?)?;
    let cache = decode.register("kv", Memory::pool(1 << 20).build()?)?;
    pool.copy_in(7 * 4096, b"block 7")?;
    let peer = decode.connect(&prefill.metadata()?)?;
    peer.ready(WAIT).await?;
    let grid = Grid::packed(4096, 256);
    let plan =
        Plan::read(cache.grid(grid)?.blocks([0]), peer.region("kv")?.grid(grid)?.blocks([7]))?;
    let receiver = prefill.clone();
    let received = tokio::spawn(async move { receiver.notification(WAIT).await });
    let report = peer.transfer(&plan).notify(*b"done").post_wait().await?.await?;
    assert_eq!(report.bytes, 4096);
    let notification = received.await.expect("the task ended")?;
    assert_eq!((&*notification.bytes, &*notification.from.name), (&b"done"[..], "tokio-decode"));
    let mut block = [0; 7];
    cache.copy_out(0, &mut block)?;
    assert_eq!(&block, b"block 7");
    let slow = decode.notification(Duration::from_millis(20)).await;
    assert_eq!(slow.expect_err("nobody sends").kind(), kvx::ErrorKind::TimedOut);
    pool.revoke(WAIT).await?;
    decode.shutdown(WAIT).await?;
    prefill.shutdown(WAIT).await
}

#[test]
fn everything_can_be_awaited_on_one_thread() -> Result<()> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(async {
        tokio::time::timeout(WAIT, two_agents()).await.expect("it ends in time")
    })
}

#[test]
fn everything_can_be_awaited_on_several_threads() -> Result<()> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build();
    runtime
        .expect("a runtime")
        .block_on(async { tokio::spawn(two_agents()).await.expect("the task ended") })
}
