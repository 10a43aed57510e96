//! S: safety against mistakes and against hostile peers.

use kvx_core::backend::{Admission, AdmissionTerms, Metadata};
use kvx_core::{ErrorKind, Grid, Isolation, Op, Peer, Place as _, Plan, RegionId};

use super::clause::{Breaker, Clause, Execution, clauses};
use super::traffic::{GRACE, OPS, Traffic, altered_region, promised_by};
use crate::backing::Backing;
use crate::check::{CUT_OFF, Check, Failure, ensure, ensure_kind};
use crate::far::FarEnd;
use crate::pattern::{bytes, checksum, fill};
use crate::setup::{AgentPair, Setup};
use crate::unique::unique;

pub(super) const CLAUSES: &[Clause] = clauses!(
    S1 ranges_outside_a_region_are_refused, Both, [Breaker::Core("bounds")];
    S2 a_wrong_key_moves_nothing, Both, [Breaker::Core("any-key")];
    S3 an_unregistered_region_is_refused, Both, [Breaker::Core("unregistered")];
    S4 a_hostile_peer_is_kept_out_as_declared, Both, [Breaker::Core("bounds")];
    S5 memory_that_peers_may_only_read_is_not_written, Both, [Breaker::Core("read-only")];
    S6 a_stranger_gets_no_link, OneProcess, [Breaker::Core("any-invitation")];
);

const LEN: usize = 256 << 10;
const COUNT: u32 = (LEN / 4096) as u32;

/// S1: ranges outside a region are rejected before anything is sent.
pub async fn ranges_outside_a_region_are_refused(setup: &Setup) -> Check {
    let mut pair = setup.pair()?;
    let blocks = Traffic::new(&mut pair, "kv", LEN)?;
    let peer = pair.connect().await?;
    blocks.works(&mut pair.far, &peer, "at first").await?;
    let (ours, theirs) = (blocks.fill_near()?, blocks.fill_far(&mut pair.far)?);
    let remote = peer.region("kv")?;
    let fits = Grid::packed(4096, COUNT);
    let outside = [
        ("one block too many", Grid { count: COUNT + 1, ..fits }),
        ("a base beyond the end", fits.at(4096)),
        ("a base one byte too far", Grid { count: COUNT - 1, ..fits }.at(4097)),
        ("a block longer than the region", Grid::packed(LEN as u64 + 1, 1)),
        ("a stride too wide", Grid { stride: 4097, ..fits }),
        ("a base that overflows", fits.at(u64::MAX - 4096)),
        ("a stride that overflows", Grid { stride: u64::MAX / 2, count: 3, ..fits }),
        ("a product that wraps round to the region", Grid { stride: 1 << 63, count: 3, ..fits }),
        ("a length that overflows", Grid { base: 8, stride: u64::MAX, length: u64::MAX, count: 1 }),
    ];
    for (what, grid) in outside {
        let kinds = [blocks.near.grid(grid).err(), remote.grid(grid).err()]
            .map(|error| error.map(|error| error.kind()));
        ensure!(
            kinds == [Some(ErrorKind::OutOfBounds); 2],
            "{what}: expected OutOfBounds, locally and remotely, got {kinds:?}"
        );
    }
    let (local, remote) = (blocks.near.grid(fits)?, remote.grid(fits)?);
    for beyond in [COUNT, COUNT + 1, u32::MAX] {
        for op in OPS {
            let plan = |local_index: u32, remote_index: u32| {
                Plan::of(op, [(local.blocks([0, local_index]), remote.blocks([1, remote_index]))])
            };
            ensure_kind!(plan(beyond, 2), OutOfBounds);
            ensure_kind!(plan(2, beyond), OutOfBounds);
        }
    }
    for op in OPS {
        let range = [(local.blocks(COUNT - 1..COUNT + 1), remote.blocks(0..2))];
        ensure_kind!(Plan::of(op, range), OutOfBounds);
    }
    blocks.check_near(ours, "after rejected plans")?;
    blocks.check_far(&mut pair.far, theirs, "after rejected plans")?;
    blocks.works(&mut pair.far, &peer, "after rejected plans").await
}

/// An agent that posts to a region as altered metadata describes it.
struct Stranger {
    blocks: Traffic,
    peer: Peer,
}

impl Stranger {
    /// Builds a separate agent, with a region like `like`, that connects with `metadata`.
    fn new(setup: &Setup, metadata: &[u8], like: &Traffic) -> Result<Self, Failure> {
        let agent = setup.agent(&unique("stranger"))?;
        let near = agent.register(&like.name, setup.memory(like.near.len() as usize, 1)?)?;
        let blocks = Traffic { name: like.name.clone(), near, far: like.far };
        Ok(Stranger { blocks, peer: agent.connect(metadata)? })
    }

    /// Posts all blocks in both directions. Fails unless both are rejected with `kind` and move
    /// nothing.
    async fn is_refused(&self, far: &mut FarEnd, kind: ErrorKind, what: &str) -> Check {
        for op in OPS {
            let (ours, theirs) = (self.blocks.fill_near()?, self.blocks.fill_far(far)?);
            let result = self.blocks.run(op, &self.peer, CUT_OFF).await;
            let is = result.as_ref().err().map(kvx_core::Error::kind);
            ensure!(is == Some(kind), "{op} with {what}: expected {kind:?}, got {result:?}");
            self.blocks.check_near(ours, &format!("after a {op} with {what}"))?;
            self.blocks.check_far(far, theirs, &format!("after a {op} with {what}"))?;
        }
        Ok(())
    }
}

/// Registers two regions at each end, so that one can be rejected while the other one works over
/// the same link.
async fn two_regions(setup: &Setup) -> Result<(AgentPair, Traffic, Traffic, Peer), Failure> {
    let mut pair = setup.pair()?;
    let (forged, untouched) =
        (Traffic::new(&mut pair, "forged", LEN)?, Traffic::new(&mut pair, "untouched", LEN)?);
    let peer = pair.connect().await?;
    forged.works(&mut pair.far, &peer, "at first").await?;
    untouched.works(&mut pair.far, &peer, "at first").await?;
    Ok((pair, forged, untouched, peer))
}

/// S2: a wrong key is rejected, and everything else continues.
pub async fn a_wrong_key_moves_nothing(setup: &Setup) -> Check {
    let (mut pair, forged, untouched, peer) = two_regions(setup).await?;
    let metadata = pair.far.metadata()?;
    for (byte, what) in
        [(0, "a key whose first byte is wrong"), (15, "a key whose last byte is wrong")]
    {
        let wrong = altered_region(&metadata, "forged", |region| region.key.0[byte] ^= 0xff)?;
        let stranger = Stranger::new(setup, &wrong, &forged)?;
        stranger.is_refused(&mut pair.far, ErrorKind::WrongKey, what).await?;
        // Then the right key over the same link.
        let near = stranger.blocks.near.clone();
        let right = Traffic { name: "untouched".into(), near, far: untouched.far };
        right
            .works(&mut pair.far, &stranger.peer, "the right key, after a wrong one on the link")
            .await?;
        stranger.is_refused(&mut pair.far, ErrorKind::WrongKey, what).await?;
    }
    // The key of another region of the same owner is a wrong key, too.
    let other = Metadata::decode(&metadata)?;
    let key =
        other.regions.iter().find(|region| *region.name == *"untouched").map(|region| region.key);
    let swapped =
        altered_region(&metadata, "forged", |region| region.key = key.unwrap_or(region.key))?;
    let stranger = Stranger::new(setup, &swapped, &forged)?;
    stranger.is_refused(&mut pair.far, ErrorKind::WrongKey, "the key of another region").await?;
    forged.works(&mut pair.far, &peer, "after strangers with wrong keys").await?;
    untouched.works(&mut pair.far, &peer, "after strangers with wrong keys").await
}

/// S3: a region that does not exist is rejected, by the initiator or by the owner.
pub async fn an_unregistered_region_is_refused(setup: &Setup) -> Check {
    let (mut pair, forged, untouched, peer) = two_regions(setup).await?;
    ensure_kind!(peer.region("nobody's"), Unregistered);
    let metadata = pair.far.metadata()?;
    for (number, what) in
        [(1 << 40, "a number that was never given"), (u64::MAX, "the largest number")]
    {
        let wrong = altered_region(&metadata, "forged", |region| region.id = RegionId(number))?;
        let stranger = Stranger::new(setup, &wrong, &forged)?;
        stranger.is_refused(&mut pair.far, ErrorKind::Unregistered, what).await?;
        let near = stranger.blocks.near.clone();
        let right = Traffic { name: "untouched".into(), near, far: untouched.far };
        right
            .works(&mut pair.far, &stranger.peer, "an existing region, after a missing one")
            .await?;
    }
    forged.works(&mut pair.far, &peer, "after strangers with wrong numbers").await?;
    untouched.works(&mut pair.far, &peer, "after strangers with wrong numbers").await
}

/// S4: a peer that claims more than a region contains gets an error. It neither changes nor reads
/// the bytes next to the region.
pub async fn a_hostile_peer_is_kept_out_as_declared(setup: &Setup) -> Check {
    // A cooperative backend is not tested: its declaration is the warning.
    let isolation = setup.capabilities()?.isolation;
    let asserted = |op: &Op| isolation.of(*op) != Isolation::Cooperative;
    let mut pair = setup.pair()?;
    let region = pair.far.register_neighbours(["short", "secret"], LEN, setup.far)?;
    let secret = region + 1;
    let untouched = Traffic::new(&mut pair, "untouched", LEN)?;
    let peer = pair.connect().await?;
    let metadata = pair.far.metadata()?;
    let longer = altered_region(&metadata, "short", |region| region.len = 2 * LEN as u64)?;
    let endless = altered_region(&metadata, "short", |region| region.len = u64::MAX)?;
    let all = Grid::packed(4096, 2 * COUNT);
    // Within the claimed range: the last block of the region together with the first one after it;
    // only blocks after it; a block far beyond any mapping.
    let attacks = [
        (
            "the block after the region",
            &longer,
            Grid { count: COUNT + 1, ..all },
            vec![COUNT - 1, COUNT],
        ),
        ("all that is not the region", &longer, all, (COUNT..2 * COUNT).collect()),
        ("a block across the end", &longer, Grid { count: COUNT, ..all }.at(2048), vec![COUNT - 1]),
        ("a block far away", &endless, all.at(1 << 44), vec![0]),
        (
            "a block at the end of numbers",
            &endless,
            Grid::packed(4096, 1).at(u64::MAX - 8192),
            vec![0],
        ),
    ];
    // A peer that may touch everything by declaration gains nothing from a lie.
    let ops: Vec<Op> = OPS.into_iter().filter(asserted).collect();
    for (what, metadata, grid, blocks) in attacks.into_iter().filter(|_| !ops.is_empty()) {
        let agent = setup.agent(&unique("stranger"))?;
        let near = agent.register("near", setup.memory(LEN, 1)?)?;
        let hostile = agent.connect(metadata)?;
        let own = Grid::packed(4096, COUNT);
        for op in ops.iter().copied() {
            let (ours, theirs, beyond) = (Traffic::seed(), Traffic::seed(), Traffic::seed());
            fill(near.memory(), ours)?;
            pair.far.fill(region, theirs)?;
            pair.far.fill(secret, beyond)?;
            let local = near.grid(own)?.blocks(0..blocks.len() as u32);
            let remote = hostile.region("short")?.grid(grid)?.blocks(blocks.clone());
            let result = hostile
                .transfer(&Plan::of(op, [(local, remote)])?)
                .deadline(CUT_OFF / 4)
                .post()?
                .await;
            ensure!(result.is_err(), "a {op} of {what} succeeded");
            let unread = checksum(&bytes(beyond, 0, LEN));
            ensure!(
                pair.far.sum(secret)? == unread,
                "a {op} of {what} changed the bytes next to the region"
            );
            if op == Op::Read {
                let told = bytes(beyond, 0, 4096);
                let mut content = vec![0; LEN];
                near.copy_out(0, &mut content)?;
                ensure!(
                    !content.windows(64).any(|seen| *seen == told[..64]),
                    "a read of {what} returned a secret"
                );
            }
        }
        let served = untouched.run(Op::Read, &peer, CUT_OFF / 4).await;
        ensure!(served.is_ok(), "the owner stopped serving after an attack, {what}: {served:?}");
        untouched.works(&mut pair.far, &peer, &format!("after an attack: {what}")).await?;
    }
    untouched.works(&mut pair.far, &peer, "at the end").await
}

/// S5: shared memory can be read, and can be the source of writes; writes to it are rejected.
pub async fn memory_that_peers_may_only_read_is_not_written(setup: &Setup) -> Check {
    const SHARED: u64 = 2;
    // Only host memory is shared like this, and some backends do not reach both kinds over one
    // link.
    let setup = &Setup { near: Backing::Owned, far: Backing::Owned, device: None, ..setup.clone() };
    let mut pair = setup.pair()?;
    let far = pair.far.register("shared", LEN, Backing::Shared, Some(SHARED))?;
    let shared = Traffic { name: "shared".into(), near: pair.near_region("shared", LEN, 1)?, far };
    let open = Traffic::new(&mut pair, "open", LEN)?;
    let peer = pair.connect().await?;
    shared.run(Op::Read, &peer, CUT_OFF).await?;
    shared.check_near(SHARED, "a read of shared memory")?;
    shared.fill_near()?;
    ensure_kind!(shared.plan(Op::Write, &peer), PermissionDenied);

    let ours = pair.near.register("ours", Backing::Shared.memory(LEN, Some(3), None)?)?;
    ensure_kind!(ours.copy_in(0, b"new"), PermissionDenied);
    let grid = Grid::packed(4096, COUNT);
    let theirs = peer.region("open")?.grid(grid)?;
    ensure_kind!(Plan::read(ours.grid(grid)?.blocks([0]), theirs.blocks([0])), PermissionDenied);
    let plan = Plan::write(ours.grid(grid)?.blocks(0..COUNT), theirs.blocks(0..COUNT))?;
    peer.transfer(&plan).deadline(CUT_OFF).post()?.await?;
    open.check_far(&mut pair.far, 3, "a write from shared memory")?;

    if promised_by(&peer)?.isolation.write == Isolation::Cooperative {
        let route = peer.route().to_string();
        ensure!(
            route.contains("read-only memory"),
            "the route does not mention the lack of protection of shared memory: {route}"
        );
    } else {
        // The owner rejects a peer that treats the region as ordinary memory.
        let lie =
            altered_region(&pair.far.metadata()?, "shared", |region| region.read_only = false)?;
        let stranger = Stranger::new(setup, &lie, &shared)?;
        let result = stranger.blocks.run(Op::Write, &stranger.peer, CUT_OFF).await;
        ensure!(
            result.is_err(),
            "a write to shared memory succeeded, by a peer that ignores that it is read-only"
        );
    }
    shared.check_far(&mut pair.far, SHARED, "after rejected writes")?;
    open.works(&mut pair.far, &peer, "after rejected writes").await
}

/// S6: peers without the invitation and the secret get no link.
pub async fn a_stranger_gets_no_link(setup: &Setup) -> Check {
    let answers = setup.admission()? == Admission::Proven;
    for secret in [None, Some([3; 32])] {
        let setup =
            &secret.map_or_else(|| Ok(setup.clone()), |secret| setup.with_secret(secret))?;
        let mut pair = setup.pair()?;
        let blocks = Traffic::new(&mut pair, "kv", LEN)?;
        let peer = pair.connect().await?;
        blocks.works(&mut pair.far, &peer, "at first").await?;
        let route = peer.route().to_string();
        ensure!(
            says_whom_it_trusts(&route, setup.admission()?),
            "the route does not say which peers are trusted: {route}"
        );
        let metadata = pair.far.metadata()?;
        // The metadata of another agent always contains that agent's invitation.
        let other = Metadata::decode(&setup.agent(&unique("other"))?.metadata()?)?.invited;
        // Two invented senders, which know everything about the agent except its invitation.
        let both = pair.near.wait_for_senders(b"go", 2, CUT_OFF * 2);
        let to_near = with_invitation(&pair.near.metadata()?, other)?;
        let impatient = Setup { peer_timeout: CUT_OFF / 10, ..setup.clone() };
        let invented = [0; 2]
            .map(|_| Ok::<_, Failure>(impatient.agent(&unique("invented"))?.connect(&to_near)?));
        let invited_by = |invited| with_invitation(&metadata, invited);
        let mut strangers = vec![(
            "another invitation",
            setup.clone(),
            invited_by(other)?,
            ErrorKind::PeerRestarted,
        )];
        if secret.is_some() {
            let hidden = Metadata::decode(&metadata)?.invited;
            let hidden =
                invited_by(hidden.map(|invited| AdmissionTerms { with_secret: false, ..invited }))?;
            let (another, none) =
                (setup.with_secret([4; 32])?, Setup { secret: None, ..setup.clone() });
            strangers.push((
                "another secret",
                another,
                metadata.clone(),
                ErrorKind::Authentication,
            ));
            strangers.push((
                "no secret",
                none.clone(),
                metadata.clone(),
                ErrorKind::Authentication,
            ));
            strangers.push((
                "no secret, and metadata that asks for none",
                none,
                hidden,
                ErrorKind::Authentication,
            ));
        }
        let (ours, theirs) = (blocks.fill_near()?, blocks.fill_far(&mut pair.far)?);
        let mut waiting = Vec::new();
        for (what, its, metadata, kind) in strangers {
            let its = Setup { peer_timeout: CUT_OFF / 10, ..its };
            let stranger = Stranger::new(&its, &metadata, &blocks)?;
            let transfers = OPS.map(|op| stranger.blocks.post(op, &stranger.peer, CUT_OFF));
            waiting.push((what, kind, stranger, transfers));
        }
        for (what, kind, stranger, transfers) in waiting {
            let hides = what.ends_with("asks for none");
            let ready = stranger.peer.ready(CUT_OFF).await;
            let is = ready.as_ref().err().map(kvx_core::Error::kind);
            let excused = !answers && is == Some(ErrorKind::PeerLost)
                || hides && is == Some(ErrorKind::PeerRestarted);
            ensure!(is == Some(kind) || excused, "with {what}: expected {kind:?}, got {ready:?}");
            for transfer in transfers.into_iter().flatten() {
                ensure!(transfer.await.is_err(), "with {what} a transfer succeeded");
            }
            let sent = stranger.peer.notify(b"from a stranger", CUT_OFF).await;
            ensure!(sent.is_err(), "with {what} a notification was accepted");
        }
        for peer in invented {
            ensure!(
                peer?.notify(b"go", CUT_OFF).await.is_err(),
                "a notification of an uninvited sender was accepted"
            );
        }
        let invited = [pair.near.clone(), setup.agent(&unique("invited"))?];
        for agent in &invited {
            agent.connect(pair.near.metadata()?)?.notify(b"go", CUT_OFF).await?;
        }
        let met = both.await?;
        let counts = invited.iter().all(|agent| met.contains(agent.identity()));
        ensure!(counts && met.len() == 2, "senders without an invitation were counted: {met:?}");
        blocks.check_near(ours, "after strangers")?;
        blocks.check_far(&mut pair.far, theirs, "after strangers")?;
        let heard = pair.far.take_many(0, 1, GRACE)?;
        ensure!(heard.is_empty(), "a stranger's notification arrived: {heard:?}");
        blocks.works(&mut pair.far, &peer, "after strangers").await?;
    }
    Ok(())
}

fn with_invitation(metadata: &[u8], invited: Option<AdmissionTerms>) -> Result<Vec<u8>, Failure> {
    Ok(Metadata { invited, ..Metadata::decode(metadata)? }.encode()?)
}

/// Returns whether a route describes the backend's admission class.
fn says_whom_it_trusts(route: &str, admission: Admission) -> bool {
    match admission {
        Admission::Proven => !route.contains("trusted with"),
        Admission::Keys => route.contains("authenticated peers are trusted with"),
        Admission::Open => route.contains("all who can reach the library are trusted with"),
    }
}
