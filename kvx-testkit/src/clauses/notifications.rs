//! N: notifications.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvx_core::{Completion, ErrorKind, Op, Peer, Revocation};

use super::clause::{Breaker, Clause, Execution, clauses};
use super::traffic::{GRACE, OPS, Traffic, altered_region, now, promised_by, stays, until};
use crate::chaos::Fault;
use crate::check::{CUT_OFF, Check, Failure, ensure, ensure_kind};
use crate::far::ReceivedNotification;
use crate::pattern::bytes;
use crate::setup::{AgentPair, Mode, Setup};
use crate::stopwatch::Stopwatch;
use crate::unique::unique;

pub(super) const CLAUSES: &[Clause] = clauses!(
    N1 notifications_arrive_after_their_data, Both, [Breaker::Chaos(Fault::NotifyEarly), Breaker::Core("early-notify")];
    N2 notifications_are_bytes, Both, [Breaker::Chaos(Fault::TruncateAtNul)];
    N3 notifications_arrive_once, Both, [
        Breaker::Core("twice"), Breaker::Chaos(Fault::DuplicateNotification), Breaker::Chaos(Fault::DropNotification),
    ];
    N4 notifications_name_their_sender, Both, [Breaker::Core("sender")];
    N5 a_full_queue_holds_senders_back, Both, [Breaker::Core("inbox"), Breaker::Chaos(Fault::DropOnFull)];
    N6 a_failed_transfer_notifies_nobody, Both, [Breaker::Core("notify-anyway")];
    N7 expect_counts_different_senders, Both, [Breaker::Core("expect"), Breaker::Core("sender")];
    N8 expect_takes_what_it_counts, Both, [Breaker::Core("expect-keeps")];
    N9 waiting_notifications_are_bounded, Both, [Breaker::Core("inbox"), Breaker::Chaos(Fault::DropOnFull)];
    N10 a_waiting_notification_is_not_overtaken, Both, [Breaker::Core("inbox"), Breaker::Chaos(Fault::DropOnFull)];
);

/// How long a clause checks that something does not arrive.
const LOOK: Duration = Duration::from_millis(150);

/// Encodes a number as a notification.
fn numbered(number: u32) -> [u8; 4] {
    number.to_le_bytes()
}

/// Returns the numbers of notifications, each with how often it arrived.
fn numbers(taken: &[ReceivedNotification]) -> Result<BTreeMap<u32, usize>, Failure> {
    let mut counts = BTreeMap::new();
    for sent in taken {
        let bytes = sent.bytes.as_slice().try_into();
        let bytes = bytes.map_err(|_| {
            Failure::new(format!("a notification that was not sent: {:?}", sent.bytes))
        })?;
        *counts.entry(u32::from_le_bytes(bytes)).or_default() += 1;
    }
    Ok(counts)
}

/// Fails unless exactly the numbers `wanted` arrived, each once.
fn each_once(counts: &BTreeMap<u32, usize>, wanted: impl Iterator<Item = u32>) -> Check {
    let twice = counts.iter().find(|(_, count)| **count != 1);
    ensure!(twice.is_none(), "a notification arrived more than once: {twice:?}");
    let wanted: BTreeSet<u32> = wanted.collect();
    let is: BTreeSet<u32> = counts.keys().copied().collect();
    let missing: Vec<_> = wanted.difference(&is).take(5).collect();
    ensure!(missing.is_empty(), "notifications are missing, such as {missing:?}");
    let foreign: Vec<_> = is.difference(&wanted).take(5).collect();
    ensure!(foreign.is_empty(), "notifications arrived that must not, such as {foreign:?}");
    Ok(())
}

async fn all(completions: impl IntoIterator<Item = Completion<()>>) -> kvx_core::Result<()> {
    for completion in completions {
        completion.await?;
    }
    Ok(())
}

/// N1: when the notification arrives, the data can be read. Nothing polls for it, and the transfer
/// resolves when the notification has arrived.
pub async fn notifications_arrive_after_their_data(setup: &Setup) -> Check {
    let mut pair = setup.pair()?;
    let blocks = Traffic::new(&mut pair, "kv", 4 << 20)?;
    let peer = pair.connect().await?;
    for round in 0..8_u32 {
        let op = OPS[round as usize % 2];
        let seed = match op {
            Op::Read => blocks.fill_far(&mut pair.far)?,
            Op::Write => blocks.fill_near()?,
        };
        let plan = blocks.plan(op, &peer)?;
        let transfer = peer.transfer(&plan).deadline(CUT_OFF).notify(numbered(round)).post()?;
        // This thread waits at the far end, so nothing polls the transfer.
        let sent = pair.far.take(CUT_OFF)??;
        ensure!(
            sent.bytes == numbered(round),
            "the notification of {op} {round} contains {:?}",
            sent.bytes
        );
        match op {
            Op::Read => blocks.check_near(seed, "when the notification of a read had arrived")?,
            Op::Write => blocks.check_far(
                &mut pair.far,
                seed,
                "when the notification of a write had arrived",
            )?,
        }
        transfer.await?;
    }

    let narrow = Setup { inbox: (1, 1 << 20), ..setup.clone() };
    let mut pair = narrow.pair()?;
    let blocks = Traffic::new(&mut pair, "kv", 64 << 10)?;
    let peer = pair.connect().await?;
    peer.notify(numbered(0), CUT_OFF).await?;
    let mut held = peer
        .transfer(&blocks.plan(Op::Write, &peer)?)
        .deadline(CUT_OFF)
        .notify(numbered(1))
        .post()?;
    stays("the transfer waits until the peer's agent has its notification", LOOK, || {
        Ok(now(&mut held).is_none())
    })?;
    let taken = pair.far.take_many(0, 2, CUT_OFF)?;
    each_once(&numbers(&taken)?, 0..2)?;
    held.await?;
    Ok(())
}

/// N2: any bytes, up to 64 KiB, arrive unchanged; longer notifications are rejected.
pub async fn notifications_are_bytes(setup: &Setup) -> Check {
    const MOST: usize = 64 << 10;
    let mut pair = setup.pair()?;
    let blocks = Traffic::new(&mut pair, "kv", 64 << 10)?;
    let peer = pair.connect().await?;
    let contents: [Vec<u8>; 7] = [
        vec![],
        vec![0],
        b"a\0b\0\0c".to_vec(),
        (0..=255).collect(),
        vec![0; 4096],
        bytes(1, 0, MOST - 1),
        bytes(2, 0, MOST),
    ];
    for content in &contents {
        peer.notify(content, CUT_OFF).await?;
        let sent = pair.far.take(CUT_OFF)??;
        ensure!(
            sent.bytes == *content,
            "{} bytes were sent, {} other bytes arrived",
            content.len(),
            sent.bytes.len()
        );
        let plan = blocks.plan(Op::Read, &peer)?;
        peer.transfer(&plan).deadline(CUT_OFF).notify(content.clone()).post()?.await?;
        let sent = pair.far.take(CUT_OFF)??;
        ensure!(
            sent.bytes == *content,
            "with a transfer {} bytes were sent, other bytes arrived",
            content.len()
        );
    }
    let too_long = bytes(3, 0, MOST + 1);
    ensure_kind!(peer.notify(&too_long, CUT_OFF).await, Invalid);
    let seed = blocks.fill_near()?;
    ensure_kind!(peer.transfer(&blocks.plan(Op::Read, &peer)?).notify(too_long).post(), Invalid);
    blocks.check_near(seed, "after a rejected transfer")?;
    let heard = pair.far.take_many(0, 1, LOOK)?;
    ensure!(heard.is_empty(), "a rejected notification arrived");
    Ok(())
}

/// N3: each notification arrives once.
pub async fn notifications_arrive_once(setup: &Setup) -> Check {
    const COUNT: u32 = 2000;
    let mut pair = setup.pair()?;
    let blocks = Traffic::new(&mut pair, "kv", 16 << 10)?;
    let peer = pair.connect().await?;
    let plan = blocks.plan(Op::Read, &peer)?;
    let (mut alone, mut transfers) = (Vec::new(), Vec::new());
    for number in 0..COUNT {
        match number % 10 {
            0 => transfers
                .push(peer.transfer(&plan).deadline(CUT_OFF).notify(numbered(number)).post()?),
            _ => alone.push(peer.notify(numbered(number), CUT_OFF)),
        }
    }
    let mut taken = pair.far.take_many(0, COUNT as usize, CUT_OFF)?;
    taken.extend(pair.far.take_many(0, COUNT as usize, LOOK)?);
    each_once(&numbers(&taken)?, 0..COUNT)?;
    all(alone).await?;
    for transfer in transfers {
        transfer.await?;
    }
    Ok(())
}

/// N4: many senders, to which the receiver has never connected, are distinguished by name and
/// incarnation.
pub async fn notifications_name_their_sender(setup: &Setup) -> Check {
    const EACH: u32 = 20;
    let mut pair = setup.pair()?;
    let metadata = pair.far.metadata()?;
    let twin = unique("twin");
    let mut agents = vec![pair.near.clone()];
    for sender in 0..6 {
        // Two of them share a name, so only their incarnations differ.
        agents.push(setup.agent(&if sender < 2 { twin.clone() } else { unique("sender") })?);
    }
    let mut peers = Vec::new();
    for agent in &agents {
        peers.push(agent.connect(&metadata)?);
    }
    let mut sending = Vec::new();
    for number in 0..EACH {
        for (sender, peer) in peers.iter().enumerate() {
            sending.push(peer.notify(numbered(sender as u32 * EACH + number), CUT_OFF));
        }
    }
    let taken = pair.far.take_many(0, sending.len(), CUT_OFF)?;
    all(sending).await?;
    each_once(&numbers(&taken)?, 0..agents.len() as u32 * EACH)?;
    for sent in &taken {
        let number =
            numbers(std::slice::from_ref(sent))?.keys().next().copied().unwrap_or_default();
        let sender = agents[(number / EACH) as usize].identity();
        ensure!(
            sent.name == *sender.name,
            "a notification of {} arrived as one of {}",
            sender.name,
            sent.name
        );
        ensure!(
            sent.incarnation == sender.incarnation.0,
            "a notification of {sender:?} has another incarnation"
        );
    }
    // The other direction.
    let back = pair.connect_back()?;
    pair.far.notify(back, b"back", CUT_OFF)??;
    let sent = pair.near.notification(CUT_OFF).await?;
    ensure!(
        sent.from == *peers[0].identity(),
        "{:?} sent a notification, which arrived as one of {:?}",
        peers[0].identity(),
        sent.from
    );
    Ok(())
}

/// N5: a full queue makes senders wait, and loses nothing.
pub async fn a_full_queue_holds_senders_back(setup: &Setup) -> Check {
    const SENT: u32 = 60;
    // Limited by number, and by bytes: two of 24 KiB fit into 64 KiB.
    for (inbox, len, fit) in [((16, 1 << 20), 4, 16), ((4096, 64 << 10), 24 << 10, 2)] {
        let narrow = Setup { inbox, ..setup.clone() };
        let mut pair = narrow.pair()?;
        let blocks = Traffic::new(&mut pair, "kv", 64 << 10)?;
        let peer = pair.connect().await?;
        let second = setup.agent(&unique("near"))?.connect(&pair.far.metadata()?)?;
        let content = |number: u32| [&numbered(number), &vec![7; len - 4][..]].concat();
        let mut waiting = Vec::new();
        for number in 0..SENT {
            let sender = if number % 3 == 0 { &second } else { &peer };
            waiting.push(sender.notify(content(number), CUT_OFF));
        }
        let mut arrived = 0;
        let mut more = |waiting: &mut Vec<Completion<()>>| {
            let before = waiting.len();
            let mut failed = Ok(());
            waiting.retain_mut(|sending| match now(sending) {
                None => true,
                Some(result) => {
                    if let Err(error) = result {
                        failed = Err(Failure::from(error));
                    }
                    false
                }
            });
            arrived += before - waiting.len();
            failed.map(|()| arrived)
        };
        until("what fits into the queue arrives", CUT_OFF, || Ok(more(&mut waiting)? >= fit))?;
        let bounded = || Ok(more(&mut waiting)? <= fit);
        stays(&format!("senders wait while the queue holds {fit}"), LOOK, bounded)?;
        let mut taken = pair.far.take_many(0, SENT as usize, CUT_OFF)?;
        taken.extend(pair.far.take_many(0, 1, LOOK)?);
        let short = taken.iter().find(|sent| sent.bytes.len() != len);
        ensure!(
            short.is_none(),
            "a notification of {len} bytes arrived with {:?}",
            short.map(|sent| sent.bytes.len())
        );
        taken.iter_mut().for_each(|sent| sent.bytes.truncate(4));
        each_once(&numbers(&taken)?, 0..SENT)?;
        all(waiting).await?;
        blocks.works(&mut pair.far, &peer, "after the queue was full").await?;
    }
    Ok(())
}

/// N6: the notification of a transfer that failed, was cancelled or timed out before its data
/// arrived never arrives.
pub async fn a_failed_transfer_notifies_nobody(setup: &Setup) -> Check {
    let capabilities = setup.capabilities()?;
    let mut pair = setup.pair()?;
    let blocks = Traffic::new(&mut pair, "kv", 2 << 20)?;
    let others = Traffic::new(&mut pair, "others", 64 << 10)?;
    let peer = pair.connect().await?;
    let metadata = pair.far.metadata()?;
    let mut number = 0;
    let mut allowed = BTreeSet::new();
    let mut may_come = BTreeSet::new();
    let mut next = || {
        number += 1;
        number
    };

    // Rejected by the owner.
    let forged = altered_region(&metadata, "kv", |region| region.key.0[0] ^= 0xff)?;
    let stranger = setup.agent(&unique("near"))?;
    let near = stranger.register("kv", setup.memory(2 << 20, 1)?)?;
    let local = Traffic { name: "kv".into(), near, far: blocks.far };
    let forger = stranger.connect(&forged)?;
    for op in OPS {
        let plan = local.plan(op, &forger)?;
        let result =
            forger.transfer(&plan).deadline(CUT_OFF).notify(numbered(next())).post()?.await;
        ensure_kind!(result, WrongKey);
    }

    // Cancelled. A transfer that was faster than the cancel notifies; one whose data had all
    // arrived may do both.
    let mut settled = Vec::new();
    for round in 0..20 {
        let this = next();
        let plan = blocks.plan(OPS[round % 2], &peer)?;
        let transfer = peer.transfer(&plan).deadline(CUT_OFF).notify(numbered(this)).post()?;
        transfer.cancel();
        settled.push(transfer.settled());
        match transfer.await {
            Ok(_) => drop(allowed.insert(this)),
            Err(error) => {
                if error.report().is_some_and(|report| report.bytes == plan.size().bytes) {
                    may_come.insert(this);
                }
                ensure_kind!(Err::<(), _>(error), Cancelled);
            }
        }
    }

    // Timed out with a stopped peer.
    if setup.mode == Mode::TwoProcesses {
        let needs = promised_by(&peer)?.target_cpu;
        for op in OPS.into_iter().filter(|op| needs.of(*op)) {
            let plan = blocks.plan(op, &peer)?;
            pair.far.process()?.stop()?;
            let transfer = peer.transfer(&plan).deadline(LOOK).notify(numbered(next())).post()?;
            settled.push(transfer.settled());
            let result = transfer.await;
            pair.far.process()?.go_on()?;
            ensure_kind!(result, TimedOut);
        }
    }
    // Timed out or cancelled when the data had arrived, and the stopped peer had not acknowledged
    // the notification.
    let promised = promised_by(&peer)?;
    let reads_alone =
        !promised.target_cpu.of(Op::Read) && promised.settles_without_peer.of(Op::Read);
    if setup.mode == Mode::TwoProcesses && reads_alone {
        others.works(&mut pair.far, &peer, "before the stop").await?; // the owner grants the region
        for cancel in [false, true] {
            let this = next();
            let seed = others.fill_far(&mut pair.far)?;
            let plan = others.plan(Op::Read, &peer)?;
            pair.far.process()?.stop()?;
            let deadline = if cancel { CUT_OFF } else { LOOK };
            let transfer = peer.transfer(&plan).deadline(deadline).notify(numbered(this)).post()?;
            let result = if cancel {
                transfer.settled().wait_blocking(CUT_OFF)?;
                let asked = Stopwatch::start()?;
                transfer.cancel();
                let result = transfer.await;
                let took = asked.read();
                ensure!(
                    took.within(GRACE),
                    "a cancel during a notification took effect after {took}"
                );
                result
            } else {
                transfer.await
            };
            pair.far.process()?.go_on()?;
            if let Err(error) = result {
                let moved = error.report().map(|report| report.bytes);
                ensure!(
                    moved == Some(plan.size().bytes),
                    "the data had arrived, but the error reports {moved:?}"
                );
                let wanted = if cancel { ErrorKind::Cancelled } else { ErrorKind::TimedOut };
                ensure!(error.kind() == wanted, "expected {wanted:?}, got {error:?}");
            }
            others.check_near(seed, "a read whose notification was not acknowledged")?;
            allowed.insert(this);
        }
    }
    all(settled).await?;
    others.works(&mut pair.far, &peer, "after transfers that were cancelled or timed out").await?;

    // Revoked before the post.
    if capabilities.revocation != Revocation::Never {
        pair.far.revoke(blocks.far, CUT_OFF)??;
        for op in OPS {
            let plan = blocks.plan(op, &peer)?;
            let result =
                peer.transfer(&plan).deadline(CUT_OFF).notify(numbered(next())).post()?.await;
            ensure_kind!(result, Revoked);
        }
    }

    let mut taken = pair.far.take_many(0, allowed.len(), CUT_OFF)?;
    taken.extend(pair.far.take_many(0, 100, LOOK)?);
    let came = numbers(&taken)?;
    allowed.extend(may_come.into_iter().filter(|number| came.contains_key(number)));
    each_once(&came, allowed.into_iter())
}

/// Builds agents at the far end that can notify the near one. Returns the numbers of their peers
/// there.
fn senders(setup: &Setup, pair: &mut AgentPair, names: &[&str]) -> Result<Vec<usize>, Failure> {
    let metadata = pair.near.metadata()?;
    names
        .iter()
        .map(|name| {
            let agent = setup.far_agent(&mut pair.far, name)?;
            pair.far.connect(agent, &metadata)
        })
        .collect()
}

/// N7: `wait_for_senders` counts senders, each once, before the call or after it.
pub async fn expect_counts_different_senders(setup: &Setup) -> Check {
    let mut pair = setup.pair()?;
    let (twin, other) = (unique("twin"), unique("other"));
    let from = senders(setup, &mut pair, &[&twin, &twin, &other])?;

    // After the call.
    let mut three = pair.near.wait_for_senders(b"go", 3, CUT_OFF);
    for (sender, content) in [(0, &b"go"[..]), (0, b"go"), (0, b"gone"), (1, b"g"), (1, b"go")] {
        pair.far.notify(from[sender], content, CUT_OFF)??;
        ensure!(now(&mut three).is_none(), "two senders counted as three");
    }
    pair.far.notify(from[2], b"go", CUT_OFF)??;
    let met = three.await?;
    let names: Vec<_> = met.iter().map(|identity| identity.name.to_string()).collect();
    ensure!(
        names == [twin.clone(), twin.clone(), other.clone()],
        "the senders are named {names:?}"
    );
    ensure!(
        met[0].incarnation != met[1].incarnation,
        "two agents of one name have the same incarnation"
    );

    // Before the call. One notification of the first sender is left over from above.
    for sender in [1, 2] {
        pair.far.notify(from[sender], b"go", CUT_OFF)??;
    }
    let met = pair.near.wait_for_senders(b"go", 3, CUT_OFF).wait_blocking(GRACE)?;
    ensure!(
        met.iter().collect::<std::collections::HashSet<_>>().len() == 3,
        "{met:?} counted as three"
    );

    // Not enough senders.
    for _ in 0..3 {
        pair.far.notify(from[0], b"late", CUT_OFF)??;
    }
    let begun = Stopwatch::start()?;
    ensure_kind!(pair.near.wait_for_senders(b"late", 2, LOOK).await, TimedOut);
    let took = begun.read();
    ensure!(
        took.reaches(LOOK) && took.within(LOOK + GRACE),
        "a wait of {LOOK:?} timed out after {took}"
    );

    // An agent that notifies itself is a sender like any other.
    let own: Peer = pair.near.connect(&pair.near.metadata()?)?;
    let both = pair.near.wait_for_senders(b"all", 2, CUT_OFF);
    own.notify(b"all", CUT_OFF).await?;
    pair.far.notify(from[1], b"all", CUT_OFF)??;
    both.await?;
    Ok(())
}

/// N8: a notification that a `wait_for_senders` has counted leaves the queue, and no other does.
pub async fn expect_takes_what_it_counts(setup: &Setup) -> Check {
    let mut pair = setup.pair()?;
    let from = senders(setup, &mut pair, &[&unique("one"), &unique("two")])?;
    let mut send = |sender: usize, content: &[u8]| -> Check {
        Ok(pair.far.notify(from[sender], content, CUT_OFF)??)
    };
    let near = &pair.near;
    let left = || {
        let mut contents: Vec<_> =
            std::iter::from_fn(|| near.try_notification()).map(|left| left.bytes).collect();
        contents.sort();
        contents
    };

    // From the queue.
    for (sender, content) in [(0, &b"a"[..]), (0, b"a"), (0, b"b"), (1, b"a"), (1, b"c")] {
        send(sender, content)?;
    }
    near.wait_for_senders(b"a", 2, CUT_OFF).await?;
    near.wait_for_senders(b"a", 1, CUT_OFF).await?;
    ensure_kind!(near.wait_for_senders(b"a", 1, LOOK).await, TimedOut);
    let rest = left();
    ensure!(
        *rest == [Box::from(*b"b"), Box::from(*b"c")],
        "the queue should hold b and c, it holds {rest:?}"
    );

    // As they arrive: two calls that wait for the same bytes share nothing.
    let (mut first, mut second) =
        (near.wait_for_senders(b"x", 1, CUT_OFF), near.wait_for_senders(b"x", 1, CUT_OFF));
    send(0, b"y")?;
    send(0, b"x")?;
    let ended = [now(&mut first).is_some(), now(&mut second).is_some()];
    ensure!(
        ended != [true, true],
        "two waited for the same bytes, and one notification ended both"
    );
    ensure!(ended != [false, false], "an expected notification ended no wait");
    send(1, b"x")?;
    for (waiting, has_ended) in [(first, ended[0]), (second, ended[1])] {
        if !has_ended {
            waiting.await?;
        }
    }
    let rest = left();
    ensure!(*rest == [Box::from(*b"y")], "the queue should hold y, it holds {rest:?}");
    ensure!(
        near.notification(Duration::ZERO)
            .await
            .is_err_and(|error| error.kind() == ErrorKind::TimedOut),
        "the queue holds more"
    );
    Ok(())
}

/// N9: notifications that a peer does not accept wait, up to 64 MiB. Further ones are rejected, and
/// those that wait arrive when the peer accepts them.
pub async fn waiting_notifications_are_bounded(setup: &Setup) -> Check {
    const LEN: usize = 64 << 10;
    const MOST: usize = 64 << 20;
    /// More than can wait, including those in flight.
    const TRIED: usize = (MOST + (8 << 20)) / LEN;
    let narrow = Setup { inbox: (1, 1 << 20), ..setup.clone() };
    let mut pair = narrow.pair()?;
    let peer = pair.connect().await?;
    let mut sending = Vec::new();
    for number in 0..TRIED {
        let content = [&numbered(number as u32), &vec![7; LEN - 4][..]].concat();
        sending.push((number, peer.notify(&content, CUT_OFF)));
    }
    let mut refused = Vec::new();
    until("a notification above the limit is rejected", CUT_OFF, || {
        sending.retain_mut(|(number, sending)| match now(sending) {
            Some(Err(error)) => {
                refused.push((*number, error));
                false
            }
            ended => ended.is_none(),
        });
        Ok(!refused.is_empty())
    })?;
    let (first, error) = refused.swap_remove(0);
    ensure_kind!(Err::<(), _>(error), Exhausted);
    ensure!(first * LEN >= MOST - (1 << 20), "only {first} of {LEN} bytes each may wait");
    let taken = pair.far.take_many(0, 20, CUT_OFF)?;
    let heads: Vec<_> = taken
        .into_iter()
        .map(|sent| ReceivedNotification {
            bytes: sent.bytes.into_iter().take(4).collect(),
            ..sent
        })
        .collect();
    let counts = numbers(&heads)?;
    ensure!(counts.len() == 20, "20 of those that waited should have arrived, not {counts:?}");
    each_once(&counts, counts.keys().copied())
}

/// N10: a notification that waits for space is not overtaken by a later one of the same sender that
/// would fit.
pub async fn a_waiting_notification_is_not_overtaken(setup: &Setup) -> Check {
    const LARGE: usize = 40 << 10;
    let narrow = Setup { inbox: (100, 64 << 10), ..setup.clone() };
    let mut pair = narrow.pair()?;
    let peer = pair.connect().await?;
    let contents = [bytes(1, 0, LARGE), bytes(2, 0, LARGE), b"small".to_vec()];
    peer.notify(&contents[0], CUT_OFF).await?;
    let mut later: Vec<_> =
        contents[1..].iter().map(|content| peer.notify(content, CUT_OFF)).collect();
    stays("a small notification waits behind a large one", LOOK, || {
        Ok(later.iter_mut().all(|sending| now(sending).is_none()))
    })?;
    let taken = pair.far.take_many(0, 3, CUT_OFF)?;
    let contents: Vec<_> = contents.iter().collect();
    ensure!(
        taken.iter().map(|sent| &sent.bytes).eq(contents),
        "a notification that waited was overtaken"
    );
    all(later).await?;
    Ok(())
}
