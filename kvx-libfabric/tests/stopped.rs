//! A stopped process is reached over shared memory, however much is moved past it: more than any queue of it has room for.

use std::time::Duration;

use kvx_core::{Grid, Memory, Op, Options, Plan, Registry};
use kvx_testkit::{Check, Mode, Setup, byte_at, run, serve_if_asked, skip};

const SHARED: &str = r#"{"libfabric": {"provider": "shm"}}"#;
const PATIENCE: Duration = Duration::from_secs(10);
const BLOCK: u64 = 64;
const BLOCKS: u32 = 3000;
const BYTES: usize = BLOCK as usize * BLOCKS as usize;

fn registry(_: &str) -> Registry {
    let mut registry = Registry::new();
    registry.add(kvx_libfabric::Libfabric).expect("one name");
    registry
}

fn main() -> Check {
    serve_if_asked(registry);
    let options = Options::parse(SHARED)?;
    match registry("").require("LIBFABRIC", &options) {
        Ok(_) => run(a_stopped_process_is_read_and_written()),
        Err(why) => {
            skip("stopped", &why.to_string(), "cargo xtask test --install on Debian 12");
            Ok(())
        }
    }
}

async fn a_stopped_process_is_read_and_written() -> Check {
    let setup =
        Setup { options: SHARED.to_owned(), ..Setup::new(registry, "", "LIBFABRIC", Mode::TwoProcesses) };
    let mut pair = setup.pair()?;
    let near = pair.near.register("near", Memory::owned(vec![0; BYTES]))?;
    let far = pair.far_region("far", BYTES, 7)?;
    let peer = pair.connect().await?;
    let grid = Grid::packed(BLOCK, BLOCKS);
    let plan = |op| {
        let all = (0..BLOCKS).rev();
        let remote = peer.region("far")?.grid(grid)?.blocks(all.clone().collect::<Vec<_>>());
        Plan::of(op, [(near.grid(grid)?.blocks(all.collect::<Vec<_>>()), remote)])
    };
    let (read, write) = (plan(Op::Read)?, plan(Op::Write)?);
    // The keys are fetched while it runs.
    peer.transfer(&read).deadline(PATIENCE).post()?.await?;
    near.copy_in(0, &vec![0; BYTES])?;

    pair.far.process()?.stop()?;
    peer.transfer(&read).deadline(PATIENCE).post()?.await?;
    let mut came = vec![0; BYTES];
    near.copy_out(0, &mut came)?;
    assert!(came.iter().enumerate().all(|(at, byte)| *byte == byte_at(7, at as u64)), "what was read");
    came.reverse();
    near.copy_in(0, &came)?;
    peer.transfer(&write).deadline(PATIENCE).post()?.await?;
    pair.far.process()?.go_on()?;
    assert!(pair.far.copy_out(far, 0, BYTES)? == came, "what was written");

    // Its queue gets empty again: messages pass.
    peer.notify(b"here", PATIENCE).await?;
    Ok(())
}
