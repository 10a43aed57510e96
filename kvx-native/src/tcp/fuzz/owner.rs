//! Fuzz target: an owner with an authenticated peer, which sends what a script says.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvx_core::RegionId;
use kvx_core::backend::wire::Reader;
use kvx_core::backend::{RegionKey, RegionSpec};

use super::{FuzzStep, LANES, Lanes, WatchedMemory, next, who};
use crate::tcp::connections::connection::{Conn, Role};
use crate::tcp::connections::lane::Effect;
use crate::tcp::connections::serve::ServedLane;
use crate::tcp::frames::{Frame, Header};
use crate::tcp::memory::regions::ServedRegion;
use crate::tcp::seal::Seal;

/// The link of the lanes.
pub(super) const LINK: [u8; 16] = [8; 16];
/// The length of region 1. Region `n` has the id `n`, `n` times this length, and a key of bytes
/// `n`.
const LEN: usize = 4096;
const REGIONS: u64 = 3;

/// Runs a script.
pub(crate) fn owner(bytes: &[u8]) {
    Seal::NAMED.into_iter().for_each(|(_, seal)| run(bytes, seal));
}

fn run(bytes: &[u8], seal: Seal) {
    let mut lanes = Lanes::new(seal, |key, lane| {
        Role::Served(Box::new(ServedLane::new(key, who(3), (LINK, lane), None)))
    });
    let mut regions: Vec<(Arc<ServedRegion>, WatchedMemory)> = (1..=REGIONS)
        .map(|number| {
            let watched = WatchedMemory::new(number as usize * LEN);
            let (id, key) = (RegionId(number), RegionKey([number as u8; 16]));
            let spec = RegionSpec { id, key, memory: Arc::clone(&watched.memory) };
            (lanes.scope.context.regions.add(spec, None), watched)
        })
        .collect();
    let mut answers = [Answers::default(), Answers::default()];
    let mut script = Reader::new("script", bytes);
    while let Some(step) = next(&mut script) {
        lanes.take(&step);
        match step {
            FuzzStep::Own(0, region) => {
                let (served, watched) = &mut regions[usize::from(region) % REGIONS as usize];
                revoke(&mut lanes, served);
                watched.keep();
            }
            FuzzStep::Own(1, is_full) => set_room(&mut lanes, is_full & 1 == 0),
            _ => {}
        }
        if go_on(&mut lanes, &mut answers).is_err() {
            break;
        }
        regions.iter().for_each(|(_, watched)| watched.check());
    }
    lanes.end();
}

/// Runs all lanes until nothing moves. Returns an error if the link has ended.
fn go_on(lanes: &mut Lanes, answers: &mut [Answers; LANES]) -> Result<(), ()> {
    let mut moves = true;
    while moves {
        moves = false;
        for (key, answers) in answers.iter_mut().enumerate() {
            let moved = lanes.turn(key, |header| answers.note(header)).map_err(drop)?;
            moves |= moved;
            take_effects(lanes)?;
            let described = lanes.conns.iter().map(|(_, conn)| match &conn.role {
                Role::Served(lane) => lane.described(),
                _ => 0,
            });
            assert_eq!(lanes.scope.described, described.sum::<usize>());
        }
    }
    Ok(())
}

/// Executes the machine's part beyond one lane. Returns an error if the link has ended.
pub(super) fn take_effects(lanes: &mut Lanes) -> Result<(), ()> {
    for effect in std::mem::take(&mut lanes.scope.effects) {
        let Effect::Cancelled { link: LINK, lane, id } = effect else {
            panic!("an owner does not report {effect:?}")
        };
        let Some(conn) = lanes.conns.get_mut(usize::from(lane)) else { continue };
        let Conn { role: Role::Served(lane), input, output, .. } = conn else { continue };
        lane.cancel(id, input, output, &mut lanes.scope).map_err(drop)?;
    }
    Ok(())
}

/// Revokes a region and asks its lanes to release it.
pub(super) fn revoke(lanes: &mut Lanes, served: &ServedRegion) {
    lanes.scope.context.regions.remove(served);
    for (_, conn) in lanes.conns.iter_mut() {
        let Conn { role: Role::Served(lane), input, output, .. } = conn else { continue };
        lane.revoke(served.id, input, output, &mut lanes.scope);
    }
}

/// Sets whether the agent has space for notifications.
pub(super) fn set_room(lanes: &mut Lanes, has_room: bool) {
    lanes.inbox.0.store(!has_room, Ordering::Relaxed);
    for (_, conn) in lanes.conns.iter_mut() {
        let Conn { role: Role::Served(lane), output, .. } = conn else { continue };
        lane.resume(output, &lanes.scope.context);
    }
}

/// The answers to each request, with the END as the last one.
#[derive(Default)]
struct Answers(HashMap<u64, bool>);

impl Answers {
    fn note(&mut self, header: Header) {
        let ended = self.0.entry(header.id).or_default();
        match header.frame {
            Frame::Data => assert!(!*ended, "DATA after the END of {}", header.id),
            Frame::End => assert!(!std::mem::replace(ended, true), "{} ends twice", header.id),
            Frame::Ack | Frame::Alive => {}
            other => panic!("an owner does not send {other:?}"),
        }
    }
}
