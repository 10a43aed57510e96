//! M: metadata.

use std::sync::Arc;

use kvx_core::backend::Metadata;
use kvx_core::{Agent, ErrorKind, Grid, Memory, Op, Peer, Place as _, Plan};

use super::clause::{Breaker, Clause, Execution, clauses};
use super::traffic::{Traffic, altered_region};
use crate::chaos::Fault;
use crate::check::{CUT_OFF, Check, Failure, ensure, ensure_kind};
use crate::setup::Setup;
use crate::unique::unique;

pub(super) const CLAUSES: &[Clause] = clauses!(
    M1 regions_added_later_can_be_used, Both, [Breaker::Core("no-update")];
    M2 older_metadata_changes_nothing, Both, [Breaker::Core("stale-metadata")];
    M3 malformed_metadata_is_refused, OneProcess, [Breaker::Core("trust-lengths")];
    M4 unknown_sections_are_skipped_unless_critical, OneProcess, [Breaker::Core("critical")];
    M5 metadata_grows_with_regions_only, OneProcess, [Breaker::Chaos(Fault::FatExport)];
);

const LEN: usize = 256 << 10;

/// M1: a region added later can be used over the same handle, and work in flight is not disturbed.
pub async fn regions_added_later_can_be_used(setup: &Setup) -> Check {
    let mut pair = setup.pair()?;
    let early = Traffic::new(&mut pair, "early", 4 << 20)?;
    let peer = pair.connect().await?;
    early.works(&mut pair.far, &peer, "before").await?;
    let seed = early.fill_far(&mut pair.far)?;
    let flying = (0..4)
        .map(|_| early.post(Op::Read, &peer, CUT_OFF))
        .collect::<kvx_core::Result<Vec<_>>>()?;

    let late = Traffic::new(&mut pair, "late", LEN)?;
    ensure_kind!(peer.region("late"), Unregistered);
    let newer = pair.far.metadata()?;
    ensure!(peer.update(&newer)?, "newer metadata was not accepted as newer");
    late.works(&mut pair.far, &peer, "a region that was added later").await?;
    for transfer in flying {
        transfer.await?;
    }
    early.check_near(seed, "reads in flight during the update")?;

    // Connecting again has the same effect: it returns the same handle.
    let later = Traffic::new(&mut pair, "later", LEN)?;
    let same = pair.near.connect(&pair.far.metadata()?)?;
    later.works(&mut pair.far, &same, "a region that a second connect added").await?;
    later.works(&mut pair.far, &peer, "that region over the first handle").await?;
    early.works(&mut pair.far, &peer, "the early region, after the updates").await
}

/// M2: an older generation replaces nothing.
pub async fn older_metadata_changes_nothing(setup: &Setup) -> Check {
    let mut pair = setup.pair()?;
    let early = Traffic::new(&mut pair, "early", LEN)?;
    let older = pair.far.metadata()?;
    let late = Traffic::new(&mut pair, "late", LEN)?;
    let newer = pair.far.metadata()?;
    let generation = |bytes: &[u8]| Metadata::decode(bytes).map(|metadata| metadata.generation);
    ensure!(
        generation(&newer)? > generation(&older)?,
        "another region did not increase the generation"
    );
    let peer = pair.connect().await?;
    for (what, bytes) in [("older", &older), ("equal", &newer), ("older", &older)] {
        ensure!(!peer.update(bytes)?, "{what} metadata was accepted as newer");
        late.works(&mut pair.far, &peer, &format!("after an update with {what} metadata")).await?;
        let same = pair.near.connect(bytes)?;
        late.works(&mut pair.far, &same, &format!("after a connect with {what} metadata")).await?;
        early
            .works(&mut pair.far, &same, &format!("the early region, after {what} metadata"))
            .await?;
    }
    Ok(())
}

/// Returns whether a result is the rejection of malformed metadata.
fn refused<T>(result: &kvx_core::Result<T>, what: &str) -> Result<bool, Failure> {
    match result {
        Err(error) if !matches!(error.kind(), ErrorKind::Malformed | ErrorKind::Incompatible) => {
            Err(Failure::new(format!("{what}: expected Malformed or Incompatible, got {error:?}")))
        }
        Err(error) if error.sentence().is_empty() => {
            Err(Failure::new(format!("{what}: an error without a message")))
        }
        other => Ok(other.is_err()),
    }
}

/// Offers altered metadata to an agent that has a peer: every call rejects it, or it is valid
/// metadata.
fn offer(agent: &Agent, peer: &Peer, bytes: &[u8], what: &str) -> Check {
    // Metadata that can be decoded is not connected to: a changed address may belong to another
    // machine.
    if refused(&Metadata::decode(bytes), what)? {
        ensure!(
            refused(&agent.connect(bytes), what)?,
            "{what}: connect accepted metadata that cannot be decoded"
        );
        ensure!(
            refused(&peer.update(bytes), what)?,
            "{what}: update accepted metadata that cannot be decoded"
        );
    }
    Ok(())
}

/// M3: malformed metadata is rejected with a typed error, and has no other effect.
pub async fn malformed_metadata_is_refused(setup: &Setup) -> Check {
    let mut pair = setup.pair()?;
    let blocks = Traffic::new(&mut pair, "kv", LEN)?;
    let peer = pair.connect().await?;
    blocks.works(&mut pair.far, &peer, "before").await?;
    let metadata = pair.far.metadata()?;
    let (ours, theirs) = (blocks.fill_near()?, blocks.fill_far(&mut pair.far)?);

    for len in 0..metadata.len() {
        ensure_kind!(pair.near.connect(&metadata[..len]), Malformed);
        ensure_kind!(peer.update(&metadata[..len]), Malformed);
    }
    ensure_kind!(pair.near.connect([&metadata[..], &[0]].concat()), Malformed);
    ensure_kind!(pair.near.connect(vec![0; (64 << 20) + 1]), Malformed);
    for at in 0..metadata.len() {
        for change in [0x01, 0x80, 0xff] {
            let mut bytes = metadata.clone();
            bytes[at] ^= change;
            offer(&pair.near, &peer, &bytes, &format!("byte {at} changed by {change:#x}"))?;
        }
    }
    let random = crate::pattern::bytes(Traffic::seed(), 0, 64 << 10);
    for len in [1, 3, 12, 100, random.len()] {
        offer(&pair.near, &peer, &random[..len], "random bytes")?;
        let after_the_header = [&metadata[..12], &random[..len]].concat();
        offer(&pair.near, &peer, &after_the_header, "a header and random bytes")?;
    }
    ensure!(
        peer.region("kv")?.len() == LEN as u64,
        "malformed metadata changed the regions of the peer"
    );

    // A backend's own part, which core cannot check, is rejected by the backend, or understood.
    let address = Metadata::decode(&metadata)?.backends[0].1.clone();
    let lengths = (0..address.len()).step_by((address.len() / 24).max(1));
    let mut addresses: Vec<Vec<u8>> = lengths.map(|len| address[..len].to_vec()).collect();
    addresses.extend([
        vec![0; 64],
        vec![0; 64 << 10],
        vec![0xff; 64 << 10],
        [&address[..], &[0; 9]].concat(),
    ]);
    let mut bad = Vec::new();
    for address in addresses {
        let mut described = Metadata::decode(&metadata)?;
        described.backends[0].1 = address;
        bad.push(described.encode()?);
    }
    for export in [vec![], vec![0xff; 3], vec![0; 4096]] {
        bad.push(altered_region(&metadata, "kv", |region| {
            region.exports.iter_mut().for_each(|(_, bytes)| bytes.clone_from(&export));
        })?);
    }
    let stranger = setup.agent(&unique("stranger"))?;
    let near = stranger.register("kv", setup.memory(LEN, 1)?)?;
    let local = Traffic { name: "kv".into(), near, far: blocks.far };
    for metadata in bad {
        let untouched = local.fill_near()?;
        // The handle is dropped at the end of the round, so the next round gets a new one.
        let connected = stranger.connect(&metadata)?;
        match local.run(Op::Read, &connected, CUT_OFF / 2).await {
            Ok(()) => local.check_near(theirs, "a peer whose altered metadata was understood")?,
            Err(_) => local.check_near(untouched, "a peer whose metadata is malformed")?,
        }
    }
    blocks.check_near(ours, "after malformed metadata")?;
    blocks.check_far(&mut pair.far, theirs, "after malformed metadata")?;
    blocks.works(&mut pair.far, &peer, "after malformed metadata").await
}

/// Returns the metadata with another section.
fn with_section(metadata: &[u8], tag: u16, value: &[u8]) -> Vec<u8> {
    let section = [&tag.to_le_bytes()[..], &(value.len() as u32).to_le_bytes(), value].concat();
    let mut bytes = [metadata, &section].concat();
    let total = (bytes.len() as u32).to_le_bytes();
    bytes[8..12].copy_from_slice(&total);
    bytes
}

/// Returns the metadata with another range of supported versions.
fn with_versions(metadata: &[u8], oldest: u16, newest: u16) -> Vec<u8> {
    let mut bytes = metadata.to_vec();
    bytes[4..6].copy_from_slice(&oldest.to_le_bytes());
    bytes[6..8].copy_from_slice(&newest.to_le_bytes());
    bytes
}

/// M4: unknown sections are skipped, unless they are critical.
pub async fn unknown_sections_are_skipped_unless_critical(setup: &Setup) -> Check {
    const CRITICAL: u16 = 0x8000;
    let mut pair = setup.pair()?;
    let blocks = Traffic::new(&mut pair, "kv", LEN)?;
    let metadata = pair.far.metadata()?;
    for (tag, value) in [(0x77, &b"news"[..]), (0x7fff, b""), (0x77, &[0xff; 70_000])] {
        let newer = with_section(&metadata, tag, value);
        let stranger = setup.agent(&unique("near"))?;
        let near = stranger.register("kv", setup.memory(LEN, 1)?)?;
        let local = Traffic { name: "kv".into(), near, far: blocks.far };
        local
            .works(
                &mut pair.far,
                &stranger.connect(&newer)?,
                "a peer whose metadata has an unknown section",
            )
            .await?;
        ensure_kind!(
            stranger.connect(with_section(&metadata, tag | CRITICAL, value)),
            Incompatible
        );
    }
    let own = u16::from_le_bytes([metadata[6], metadata[7]]);
    let later = with_versions(&metadata, own + 1, own + 3);
    ensure_kind!(pair.near.connect(&later), Incompatible);
    ensure_kind!(pair.near.connect(with_versions(&metadata, 0, 0)), Incompatible);
    let peer = pair.near.connect(with_versions(&metadata, 0, own + 3))?;
    ensure_kind!(peer.update(&later), Incompatible);
    blocks.works(&mut pair.far, &peer, "a peer that also supports later versions").await
}

/// M5: metadata grows by a little for each region, and by nothing else.
pub async fn metadata_grows_with_regions_only(setup: &Setup) -> Check {
    const PER_REGION: usize = 512;
    let agent = setup.agent(&unique("near"))?;
    let size = || Ok::<_, Failure>(agent.metadata()?.len());
    let empty = size()?;
    let small = agent.register("kv.0", setup.memory(4096, 1)?)?;
    let one = size()?;
    ensure!(one - empty <= PER_REGION, "a region adds {} bytes to the metadata", one - empty);
    let large = agent.register("kv.1", Memory::owned(vec![0; 64 << 20]))?;
    let two = size()?;
    ensure!(two - one <= PER_REGION, "a region of 64 MiB adds {} bytes to the metadata", two - one);
    let more = (2..130)
        .map(|number| agent.register(&format!("kv.{number}"), Memory::owned(vec![0; 4096])))
        .collect::<kvx_core::Result<Vec<_>>>()?;
    let many = size()?;
    let each = (many - two) / more.len();
    ensure!(each <= PER_REGION, "each of {} regions adds {each} bytes to the metadata", more.len());

    // Grids, plans, peers and transfers add nothing.
    let others = (0..4).map(|_| setup.agent(&unique("other"))).collect::<Result<Vec<_>, _>>()?;
    let memory = Arc::new(setup.memory(4096, 2)?);
    for other in &others {
        let _region = other.register("kv", Arc::clone(&memory))?;
        let peer = agent.connect(&other.metadata()?)?;
        for _ in 0..10 {
            let (local, remote) = (
                small.grid(Grid::packed(16, 256))?,
                peer.region("kv")?.grid(Grid::packed(16, 256))?,
            );
            peer.post(&Plan::read(local.blocks(0..256), remote.blocks(0..256))?)?.await?;
        }
    }
    ensure!(
        size()? == many,
        "transfers with peers changed the metadata from {many} to {} bytes",
        size()?
    );
    let _ = (large, others);
    Ok(())
}
