//! Moves two blocks between two processes, with tokio: a prefill server owns the KV pool, and a
//! decode server reads from it.
//!
//! `cargo run --example two_processes` starts the second process itself. The metadata has a few
//! hundred bytes. It travels through a pipe here; a fleet sends it over HTTP, through etcd, or in a
//! file.

use std::process::Stdio;
use std::time::Duration;

use kvx::{Grid, Memory, Plan};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Every wait has a deadline.
const SOON: Duration = Duration::from_secs(10);
/// 256 blocks of 64 KiB. Both pools use this grid.
const BLOCKS: Grid = Grid::packed(64 << 10, 256);
const POOL: usize = 256 * (64 << 10);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result {
    match std::env::args().nth(1).as_deref() {
        Some("decode") => decode().await,
        _ => prefill().await,
    }
}

async fn prefill() -> Result {
    let agent = kvx::agent("prefill-0").build()?;
    let pool = agent.register("kv", Memory::pool(POOL).build()?)?;
    for block in [200, 17_usize] {
        pool.copy_in(block * (64 << 10), format!("keys and values of block {block}").as_bytes())?;
    }

    let mut decode = tokio::process::Command::new(std::env::current_exe()?);
    let mut decode = decode.arg("decode").stdin(Stdio::piped()).kill_on_drop(true).spawn()?;
    let mut pipe = decode.stdin.take().ok_or("the child has no standard input")?;
    pipe.write_all(&agent.metadata()?).await?;
    drop(pipe); // end of input: the metadata is complete

    // The notification arrives after the data has been read, so the blocks may be reused from here
    // on.
    let done = agent.notification(SOON).await?;
    println!("{} has {}", done.from.name, String::from_utf8_lossy(&done.bytes));
    assert_eq!(*done.bytes, *b"request 7");

    let status = tokio::time::timeout(SOON, decode.wait()).await??;
    assert!(status.success(), "decode: {status}");
    pool.revoke(SOON).await?; // from here on no peer can access the memory
    Ok(agent.shutdown(SOON).await?)
}

async fn decode() -> Result {
    let mut metadata = Vec::new();
    tokio::time::timeout(SOON, tokio::io::stdin().read_to_end(&mut metadata)).await??;

    let agent = kvx::agent("decode-0").build()?;
    let cache = agent.register("cache", Memory::pool(POOL).build()?)?;
    let prefill = agent.connect(&metadata)?;
    let (ours, theirs) = (cache.grid(BLOCKS)?, prefill.region("kv")?.grid(BLOCKS)?);
    // Read block 200 into block 3, and block 17 into block 9.
    let plan = Plan::read(ours.blocks([3, 9]), theirs.blocks([200, 17]))?;
    let report =
        prefill.transfer(&plan).deadline(SOON).notify("request 7").post_wait().await?.await?;
    println!("{} bytes over {} in {:?}", report.bytes, report.backend, report.transfer_time);

    let mut got = [0; 27];
    cache.copy_out(9 * (64 << 10), &mut got)?;
    assert_eq!(&got, b"keys and values of block 17");
    Ok(agent.shutdown(SOON).await?)
}
