//! A link in virtual time: random steps by seed, with an end of the link after any of them.
//!
//! Messages are delayed, and lost with the link, but never reordered: every transport delivers them
//! in order. `KVX_SIMULATION_SEED` runs one seed.

use kvx_testkit::Random;

use super::*;

const SEEDS: u64 = 10_000;
const STEPS: u64 = 400;
const REGIONS: u64 = 4;

#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    /// All messages arrive in the end.
    Healthy,
    /// Messages in flight are lost.
    Cut,
    /// Messages that the owner has sent still arrive.
    OwnerKilled,
    /// Messages that the initiator has sent still arrive.
    InitiatorKilled,
    /// The owner keeps the link open but sends nothing more.
    OwnerStopped,
}

fn any_region(random: &mut Random) -> RegionId {
    RegionId(1 + random.below(REGIONS as usize) as u64)
}

struct Run {
    link: Link,
    ends: Vec<Completion<()>>,
    imports: u64,
    /// The time at which the initiator last received a message.
    heard: Instant,
    confirmed: HashSet<RegionId>,
    lost: bool,
}

impl Run {
    fn new() -> Self {
        let mut link = Link::greeted("owner");
        (1..=REGIONS).for_each(|id| link.table.open(RegionId(id), KEY, ()));
        link.room = 0;
        let heard = link.now;
        Run { link, ends: Vec::new(), imports: 0, heard, confirmed: HashSet::new(), lost: false }
    }

    fn step(&mut self, random: &mut Random) {
        let link = &mut self.link;
        match random.below(10) {
            0..3 => _ = self.owner_hears(),
            3..5 => _ = self.initiator_hears(),
            5 => (0..[1, 1, 1, 90][random.below(4)]).for_each(|_| self.notify()),
            6 => {
                link.room += [0, 1, 3, 60][random.below(4)];
                self.unpark();
            }
            7 if link.up => {
                let (import, id) = (self.imports, any_region(random));
                self.imports += 1;
                link.imports.want(import, id);
                link.to_owner.push_back(ControlMessage::Want { import, id, key: KEY }.encode());
            }
            8 if random.below(4) == 0 => self.revoke(any_region(random)),
            9 => self.wait(Duration::from_millis(random.below(1500) as u64)),
            _ => {}
        }
        if self.link.up {
            self.link.send();
        }
        self.hold();
    }

    fn notify(&mut self) {
        let number = self.ends.len() as u32;
        self.ends.push(self.link.notify(number));
    }

    fn owner_hears(&mut self) -> bool {
        let Some(bytes) = self.link.to_owner.pop_front() else { return false };
        self.link.owner(&bytes).unwrap();
        self.acknowledged_has_arrived();
        true
    }

    fn initiator_hears(&mut self) -> bool {
        let Some(bytes) = self.link.to_initiator.pop_front() else { return false };
        self.heard = self.link.now;
        self.link.initiator(&bytes).unwrap();
        true
    }

    /// Lets the owner's agent take the notifications that fit into its queue.
    fn unpark(&mut self) {
        let Link { from_peer, taken, room, to_initiator, .. } = &mut self.link;
        while let Some(notice) = from_peer.deliver_next(|bytes| {
            *room = room.checked_sub(1).ok_or(QueueFull)?;
            taken.push(bytes.to_vec());
            Ok(())
        }) {
            to_initiator.push_back(ControlMessage::Ack { notice }.encode());
        }
        self.acknowledged_has_arrived();
    }

    fn acknowledged_has_arrived(&self) {
        if let Some(bytes) = self.link.to_initiator.back()
            && let ControlMessage::Ack { notice } = ControlMessage::decode(bytes).unwrap()
        {
            assert!(
                self.link.taken.len() as u64 > notice,
                "{notice} is acknowledged but has not arrived"
            );
        }
    }

    fn revoke(&mut self, id: RegionId) {
        let link = &mut self.link;
        if link.table.revoke(id).is_some() {
            let held = link.granted.holds(id);
            link.recalls.begin(id, held.then_some(0).into_iter().collect(), id);
            if held {
                link.to_initiator.push_back(ControlMessage::Recall { id }.encode());
            }
        }
    }

    fn wait(&mut self, time: Duration) {
        let link = &mut self.link;
        link.now += time;
        match link.silence.look(link.now, TIMEOUT) {
            SilenceStatus::Ask(_) if link.up => {
                link.to_owner.push_back(ControlMessage::Ping.encode())
            }
            SilenceStatus::Lost => {
                assert!(link.now >= self.heard + TIMEOUT, "lost too early");
                self.lost = true;
            }
            _ => {}
        }
    }

    /// Checks what must hold after every step.
    fn hold(&mut self) {
        let link = &mut self.link;
        for (at, bytes) in link.taken.iter().enumerate().rev().take(WINDOW) {
            assert_eq!(
                bytes[..],
                (at as u32).to_le_bytes(),
                "notifications arrive once and in order"
            );
        }
        self.confirmed.extend(link.recalls.take_done(|_| false));
        for id in &self.confirmed {
            assert!(!link.granted.holds(*id), "{id} is granted after its recall");
            assert!(link.imports.held().all(|held| held != id), "{id} is used after its recall");
        }
    }

    fn drain(&mut self) {
        for _ in 0..10_000 {
            if self.link.up {
                self.link.send();
            }
            self.unpark();
            let moved = self.owner_hears() | self.initiator_hears();
            self.hold();
            if !moved {
                return;
            }
        }
        panic!("the exchange of messages does not end");
    }

    fn finish(mut self, end: End) {
        self.link.room = usize::MAX / 2;
        match end {
            End::Healthy if !self.lost => {
                self.drain();
                (1..=REGIONS).for_each(|id| self.revoke(RegionId(id)));
                self.drain();
                assert!(self.link.up && self.link.both_up && self.link.granted.is_empty());
                assert_eq!(self.confirmed.len() as u64, REGIONS);
                assert!(!self.link.to_peer.awaits_answer() && !self.link.imports.awaits_answer());
                assert_eq!(self.link.taken.len(), self.ends.len());
                return self
                    .ends
                    .into_iter()
                    .for_each(|end| end.wait_blocking(Duration::ZERO).unwrap());
            }
            End::OwnerKilled => while self.initiator_hears() {},
            End::InitiatorKilled => while self.owner_hears() {},
            End::OwnerStopped if self.link.up && !self.lost => {
                self.notify();
                self.link.send();
                let stopped = self.link.now;
                while !self.lost {
                    assert!(self.link.now <= stopped + 2 * TIMEOUT, "a stopped owner is not lost");
                    self.wait(Silence::step(TIMEOUT));
                }
            }
            _ => {}
        }
        // Both ends give up the link: all its operations end, and none starts again.
        let link = &mut self.link;
        link.to_peer.end().for_each(|done| done.settle(Err(errors::peer_died())));
        link.imports.clear();
        link.from_peer.clear();
        link.granted.clear();
        link.recalls.release(&0, None);
        self.hold();
        (1..=REGIONS).for_each(|id| self.revoke(RegionId(id)));
        self.hold();
        assert_eq!(self.confirmed.len() as u64, REGIONS, "every revocation ends");
        let link = &mut self.link;
        assert!(!link.to_peer.awaits_answer() && link.to_peer.next_to_send().is_none());
        assert!(link.from_peer.deliver_next(|_| Ok(())).is_none());
        for (number, end) in self.ends.into_iter().enumerate() {
            match end.wait_blocking(Duration::ZERO) {
                Ok(()) => assert!(number < link.taken.len(), "{number} has not arrived"),
                Err(why) => assert_eq!(why.kind(), ErrorKind::PeerLost, "{number}"),
            }
        }
    }
}

fn run(seed: u64) {
    let mut random = Random::seeded(seed + 1);
    let kinds = [End::Healthy, End::Cut, End::OwnerKilled, End::InitiatorKilled, End::OwnerStopped];
    let end = kinds[(seed % 5) as usize];
    // Every kind of end is tried after every number of steps.
    let steps = seed / 5 % STEPS;
    let mut run = Run::new();
    for _ in 0..steps {
        if run.lost {
            break;
        }
        run.step(&mut random);
    }
    run.finish(end);
}

#[test]
fn a_link_keeps_its_promises_under_random_steps_and_ends() {
    if let Ok(seed) = std::env::var("KVX_SIMULATION_SEED") {
        return run(seed.parse().unwrap());
    }
    for seed in 0..SEEDS {
        if let Err(panic) = std::panic::catch_unwind(|| run(seed)) {
            eprintln!("the simulation failed: run it with KVX_SIMULATION_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
    }
}
