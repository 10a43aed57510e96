//! P: unresolved page faults in the memory of a program.

use std::time::Duration;

use kvx_core::{ErrorKind, HungPageScope, Op, Peer, Transfer};

use super::clause::{Breaker, Clause, Execution, clauses};
use super::traffic::{GRACE, OPS, Traffic, promised_by};
use crate::backing::Backing;
use crate::chaos::Fault;
use crate::check::{CUT_OFF, Check, Failure, ensure};
use crate::far::HungPage;
use crate::setup::{AgentPair, Setup};
use crate::skip::skip;
use crate::stopwatch::Stopwatch;
use crate::unique::unique;

pub(super) const CLAUSES: &[Clause] = clauses!(
    P12 a_page_that_does_not_come_holds_up_what_is_declared, TwoProcesses, [Breaker::Chaos(Fault::OneQueue)];
);

/// The length of the regions: more than is copied on the thread that posts.
const LEN: usize = 512 << 10;
/// The deadline of work that waits for the page.
const DEADLINE: Duration = Duration::from_millis(500);
/// The time limit for serving others meanwhile.
const SERVED: Duration = Duration::from_secs(1);

/// How often the link may be lost before one must stay.
const AGAIN: usize = 10;

/// How long a shutdown still waits for its transports after its deadline, and they for their peers.
const LAST_PATIENCE: Duration = Duration::from_millis(500);

/// Connects once more. The loss of a link that was blocked may be noticed only then.
async fn connect_anew(pair: &mut AgentPair, traffic: &Traffic) -> Result<Peer, Failure> {
    let mut peer = pair.connect().await?;
    for _ in 0..AGAIN {
        match traffic.run(Op::Read, &peer, SERVED).await {
            Err(error) if error.kind() == ErrorKind::PeerLost => peer = pair.connect().await?,
            result => return result.map(|_| peer).map_err(Failure::from),
        }
    }
    Err(Failure::new("the link is lost every time"))
}

/// P12: an unresolved page fault blocks no more than is declared, on either side; once it is
/// resolved, work continues.
pub async fn a_page_that_does_not_come_holds_up_what_is_declared(setup: &Setup) -> Check {
    if let Some(why) = HungPage::refused() {
        skip(
            "P12 a_page_that_does_not_come_holds_up_what_is_declared",
            &why,
            "run the tests as root",
        );
        return Ok(());
    }
    // With a pool, each end has its own pages.
    let setup = &Setup { near: Backing::Owned, far: Backing::Owned, ..setup.clone() };
    let mut pair = setup.pair()?;
    // The effect of a write that timed out on the peer's region, and its time, are not specified,
    // so each round uses another region.
    let mut regions = Vec::new();
    for name in ["read there", "write there", "read here", "write here"] {
        regions.push(Traffic::new(&mut pair, name, LEN)?);
    }
    let well = Traffic::new(&mut pair, "afterwards", LEN)?;
    let peer = pair.connect().await?;
    // Some links do not reach such memory at all.
    if let Err(error) = well.run(Op::Read, &peer, SERVED).await
        && error.kind() == ErrorKind::Unsupported
    {
        let why = format!("the link reaches only pools [cannot run here]: {error}");
        skip("P12 a_page_that_does_not_come_holds_up_what_is_declared", &why, "none");
        return Ok(());
    }
    let promised = promised_by(&peer)?.hung_page;
    // A third process, which the near agent reaches, and a third agent here, which reaches the far
    // one.
    let mut far = setup.far()?;
    setup.far_agent(&mut far, &unique("third"))?;
    let mut to_third = AgentPair { near: pair.near.clone(), far, setup: setup.clone() };
    let blocks = Traffic::new(&mut to_third, "kv", LEN)?;
    let well_there = Traffic::new(&mut to_third, "afterwards there", LEN)?;
    let third = to_third.connect().await?;
    let other = setup.agent(&unique("other"))?;
    let near = other.register("others", setup.memory(LEN, 1)?)?;
    let others =
        Traffic { name: "others".to_owned(), near, far: pair.far_region("others", LEN, 2)? };
    let back = other.connect(&pair.far.metadata()?)?;
    blocks.works(&mut to_third.far, &third, "before").await?;
    others.works(&mut pair.far, &back, "before").await?;

    for (number, needed) in regions.iter().enumerate() {
        let here = number >= 2;
        let op = OPS[number % 2];
        // Links that were blocked may have been lost.
        let (peer, third) = (connect_anew(&mut pair, needed).await?, to_third.connect().await?);
        let back = other.connect(&pair.far.metadata()?)?;
        back.ready(CUT_OFF).await?;
        let what = format!("a {op} with a hung page {}", if here { "here" } else { "there" });
        needed.works(&mut pair.far, &peer, &what).await?;
        let hung = if here {
            Some(HungPage::of(needed.near.memory())?)
        } else {
            pair.far.hang_page(Some(needed.far))?;
            None
        };
        let posted = Stopwatch::start()?;
        let transfers = (0..4).map(|_| needed.post(op, &peer, DEADLINE));
        let transfers = transfers.collect::<kvx_core::Result<Vec<_>>>()?;
        let settled: Vec<_> = transfers.iter().map(Transfer::settled).collect();
        // Transfers that can be served are served while the others wait.
        let meanwhile =
            OPS.map(|op| (blocks.post(op, &third, SERVED), others.post(op, &back, SERVED)));
        let mut served = Vec::new();
        for result in meanwhile.into_iter().flat_map(|(third, back)| [third, back]) {
            served.push(match result {
                Ok(transfer) => transfer.await.map(drop),
                Err(error) => Err(error),
            });
        }
        for transfer in transfers {
            match transfer.await.map_err(|error| error.kind()) {
                Ok(_) if promised == HungPageScope::None => {}
                Err(ErrorKind::TimedOut | ErrorKind::PeerLost)
                    if promised != HungPageScope::None => {}
                result => return Err(Failure::new(format!("{what}: {result:?}"))),
            }
        }
        let took = posted.read();
        ensure!(took.within(SERVED + GRACE), "{what} ended after {took}");
        for (number, result) in served.into_iter().enumerate() {
            match result.map_err(|error| (error.kind(), error)) {
                Ok(()) => {}
                Err((ErrorKind::TimedOut | ErrorKind::PeerLost, _))
                    if promised == HungPageScope::Agent => {}
                Err((_, error)) => {
                    return Err(Failure::new(format!(
                        "{what}: transfer {number} of others: {error:?}"
                    )));
                }
            }
        }
        drop(hung);
        if !here {
            pair.far.hang_page(None)?;
        }
        for settled in settled {
            settled.wait_blocking(CUT_OFF)?;
        }
    }
    let (peer, third) = (connect_anew(&mut pair, &well).await?, to_third.connect().await?);
    well.works(&mut pair.far, &peer, "afterwards").await?;
    // Not `blocks`, because a write that timed out may still arrive there.
    well_there.works(&mut to_third.far, &third, "afterwards").await?;

    let hung = HungPage::of(well.near.memory())?;
    let held_up = well.run(Op::Read, &peer, DEADLINE).await;
    ensure!(
        held_up.is_ok() == (promised == HungPageScope::None),
        "a read into a hung page: {held_up:?}"
    );
    let begun = Stopwatch::start()?;
    let ended = pair.near.shutdown(SERVED).await; // the error says what may still be touched
    let took = begun.read();
    ensure!(
        took.within(SERVED + LAST_PATIENCE),
        "a shutdown during an unresolved page fault took {took}: {ended:?}"
    );
    drop(hung);
    Ok(())
}
