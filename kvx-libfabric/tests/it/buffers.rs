//! Tests that a process with small ofi_rxm buffers and one with default buffers reach each other,
//! and that each reports its risk.

use std::process::Command;

use crate::processes::{self, PATIENCE};
use kvx_core::{Agent, BackendStatus, Grid, Options, Plan, Registry};
use kvx_testkit::{Check, PostSpec, Setup, byte_at, output, test};

const BLOCK: u64 = 4096;
const BLOCKS: u32 = 64;
const BYTES: usize = BLOCK as usize * BLOCKS as usize;
const PROVIDER: &str = "tcp;ofi_rxm";
/// The variables and values that SECURITY.md recommends.
pub(crate) const SIZE: (&str, &str) = ("FI_OFI_RXM_BUFFER_SIZE", "4352");
pub(crate) const LIMIT: (&str, &str) = ("FI_OFI_RXM_EAGER_LIMIT", "16384");
/// Set in a process that prints its warnings and its route, and exits. With the value `BOUNDS` it
/// bounds its buffers.
const REPORT: &str = "KVX_LIBFABRIC_REPORT";
const BOUNDS: &str = "bounds";

/// Prints warnings and route if this process was started for that.
pub(crate) fn report_if_asked() {
    let Ok(kind) = std::env::var(REPORT) else { return };
    if kind == BOUNDS {
        // SAFETY: no other thread has been started yet.
        unsafe { kvx_libfabric::Libfabric::bound_kept_messages() };
    }
    report().expect("it was available before");
    std::process::exit(0);
}

#[test]
fn cautions_about_buffers_are_right() -> Check {
    processes::check("cautions_about_buffers_are_right", PROVIDER, async |setup| {
        cautions_name_what_is_not_set()?;
        small_buffers_and_the_usual_ones_reach_each_other(setup).await
    })
}

/// Prints the warnings and the route.
fn report() -> Check {
    let mut registry = Registry::new();
    registry.add(kvx_libfabric::Libfabric)?;
    let options = Options::parse(&processes::options(PROVIDER))?;
    let (_, status) = registry.status("LIBFABRIC", &options)?;
    let BackendStatus::Available(available) = status else { panic!("it was available before") };
    let agent = Agent::builder("tells")
        .backends(["LIBFABRIC"])
        .options(options)
        .registry(registry.clone())
        .build()?;
    let peer = agent.connect(agent.metadata()?)?;
    peer.ready(PATIENCE).wait_blocking(PATIENCE)?;
    print!("{}\n{}", available.cautions.join("; "), peer.route());
    Ok(())
}

fn cautions_name_what_is_not_set() -> Check {
    for (set, kind, caution) in [
        (&[][..], "", Some("without a bound")),
        (&[SIZE], "", Some("refuses peers")),
        (&[SIZE, LIMIT], "", None),
        (&[], BOUNDS, None),
        (&[SIZE], BOUNDS, Some("refuses peers")), // the user's choice is kept
    ] {
        let mut process = Command::new(std::env::current_exe()?);
        process.env_remove(SIZE.0).env_remove(LIMIT.0).envs(set.iter().copied()).env(REPORT, kind);
        let output = output(&mut process, PATIENCE);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8_lossy(&output.stdout);
        let (cautions, route) = text.split_once('\n').expect("two lines");
        for words in ["without a bound", "refuses peers"] {
            let expected = caution == Some(words);
            assert!(
                cautions.contains(words) == expected && route.contains(words) == expected,
                "{set:?}: {text}"
            );
        }
    }
    Ok(())
}

async fn small_buffers_and_the_usual_ones_reach_each_other(setup: Setup) -> Check {
    let set = [SIZE, LIMIT].map(|(variable, value)| format!("{variable}={value}"));
    let through = std::iter::once("env".to_owned()).chain(set).collect();
    let setup = Setup { through, ..setup };
    let mut pair = setup.pair()?;
    let near = pair.near_region("kv", BYTES, 1)?;
    let far = pair.far_region("kv", BYTES, 2)?;
    let grid = Grid::packed(BLOCK, BLOCKS);
    let backwards = || (0..BLOCKS).rev().collect::<Vec<_>>();

    // From default buffers to small ones,
    let peer = pair.connect().await?;
    let read = Plan::read(
        near.grid(grid)?.blocks(backwards()),
        peer.region("kv")?.grid(grid)?.blocks(backwards()),
    )?;
    peer.transfer(&read).deadline(PATIENCE).post()?.await?;
    let mut came = vec![0; BYTES];
    near.copy_out(0, &mut came)?;
    assert!(
        came.iter().enumerate().all(|(at, byte)| *byte == byte_at(2, at as u64)),
        "what was read"
    );

    // and the other way.
    pair.far.fill(far, 3)?;
    let there = pair.connect_back()?;
    pair.far.post(
        there,
        PostSpec {
            write: true,
            region: far,
            theirs: "kv".to_owned(),
            grid: (BLOCK, BLOCKS),
            local: backwards(),
            remote: backwards(),
            within: PATIENCE,
            notify: Some(b"written".to_vec()),
        },
    )??;
    near.copy_out(0, &mut came)?;
    assert!(
        came.iter().enumerate().all(|(at, byte)| *byte == byte_at(3, at as u64)),
        "what was written"
    );
    Ok(())
}
