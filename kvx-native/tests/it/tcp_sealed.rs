//! Attackers on the path between two agents: what they learn, and the effect of altered bytes.

use crate::tcp_pair;
use crate::tcp_pair::relay::{Alteration, Relay};
use crate::tcp_pair::{CUT_OFF, Pair, agent_with, pattern};
use kvx_core::{Agent, Grid, Memory, Plan, Region};
use kvx_testkit::test;

/// The number of bytes that are read and written.
const LEN: usize = 64;
const WORD: &[u8] = b"the word";

/// An owner behind a relay, with one region to read and another to write.
struct Owner {
    relay: Relay,
    agent: Agent,
    _source: Region,
    target: Region,
    bytes: Vec<u8>,
}

/// The result of a dialogue of a read, a write and a notification.
struct Dialogue {
    read: bool,
    wrote: bool,
    notified: bool,
}

impl Owner {
    fn new(seal: &str) -> Self {
        Self::with(&format!(r#""seal": "{seal}""#))
    }

    /// Creates an owner with these options of TCP, and a secret.
    fn with(options: &str) -> Self {
        let relay = Relay::new();
        let agent = agent_with("the owner", &relay.options(options), Some(3));
        let bytes = pattern(LEN, 5);
        let source = agent.register("source", Memory::owned(bytes.clone())).unwrap();
        let target = agent.register("target", Memory::owned(vec![0; LEN])).unwrap();
        Owner { relay, agent, _source: source, target, bytes }
    }

    /// Runs a dialogue with a reader, which calls `ready` once it is connected. Checks that
    /// successful operations have the right result; `payload` includes their payload in that check.
    fn speak(&self, payload: bool, ready: impl FnOnce()) -> Dialogue {
        // The reader leaves the seal to the owner.
        let reader =
            agent_with("the reader", r#"{"tcp": {"seal": "none", "connections": 1}}"#, Some(3));
        let written = pattern(LEN, 6);
        let (to, from) = (Memory::owned(vec![0; LEN]), Memory::owned(written.clone()));
        let (to, from) =
            (reader.register("to", to).unwrap(), reader.register("from", from).unwrap());
        let peer = reader.connect(self.agent.metadata().unwrap()).unwrap();
        peer.ready(CUT_OFF).wait_blocking(CUT_OFF).unwrap();
        ready();
        let grid = Grid::packed(LEN as u64, 1);
        let whole = |region: &Region| region.grid(grid).unwrap().blocks([0]);
        let theirs = |name| peer.region(name).unwrap().grid(grid).unwrap().blocks([0]);
        let done = |plan: Plan| {
            peer.post(&plan).and_then(|transfer| transfer.wait_blocking(CUT_OFF)).is_ok()
        };
        let read = done(Plan::read(whole(&to), theirs("source")).unwrap());
        let wrote = done(Plan::write(whole(&from), theirs("target")).unwrap());
        let notified = peer.notify(WORD, CUT_OFF).wait_blocking(CUT_OFF).is_ok();
        assert!(
            !read || !payload || Pair::all(&to) == self.bytes,
            "a successful read has wrong bytes"
        );
        assert!(
            !wrote || !payload || Pair::all(&self.target) == written,
            "a successful write has wrong bytes"
        );
        let heard: Vec<_> = std::iter::from_fn(|| self.agent.try_notification()).collect();
        assert!(
            heard.iter().all(|notice| *notice.bytes == *WORD && &*notice.from.name == "the reader")
        );
        assert!(!notified || heard.len() == 1);
        Dialogue { read, wrote, notified }
    }

    /// Returns the bytes in each direction on the last dialogue's small lane.
    fn passed(&self) -> [usize; 2] {
        let small = |lanes: Vec<Vec<u8>>| lanes[lanes.len() - 2].len();
        [small(self.relay.recorded()), small(self.relay.answered())]
    }

    /// Alters each byte after the handshake. Returns how many dialogues still succeeded, by
    /// direction.
    fn well_when_altered(&self, payload: bool) -> [usize; 2] {
        let mut begun = [0; 2];
        let good = self.speak(true, || begun = self.passed());
        assert!(good.read && good.wrote && good.notified);
        let passed = self.passed();
        [0, 1].map(|direction| {
            let well = (begun[direction]..passed[direction]).filter(|at| {
                self.relay.alter(Alteration { to_owner: direction == 0, at: *at });
                let Dialogue { read, wrote, notified } = self.speak(payload, || {});
                read && wrote && notified
            });
            well.count()
        })
    }
}

#[test]
fn no_altered_byte_is_accepted_if_everything_is_sealed() {
    assert_eq!(Owner::new("all").well_when_altered(true), [0, 0]);
}

#[test]
fn a_relay_on_loopback_alters_nothing_unnoticed_with_a_secret() {
    assert_eq!(Owner::with("").well_when_altered(true), [0, 0]);
}

#[test]
fn no_altered_byte_but_payload_is_accepted_if_control_is_sealed() {
    // The bytes that are written, and those that are read.
    assert_eq!(Owner::new("control").well_when_altered(false), [LEN, LEN]);
}

#[test]
fn an_eavesdropper_learns_no_name_and_no_sealed_key_or_payload() {
    for (seal, payload_shows, control_shows) in
        [("all", false, false), ("control", true, false), ("none", true, true)]
    {
        let owner = Owner::new(seal);
        let said = owner.speak(true, || {});
        assert!(said.read && said.wrote && said.notified);
        let heard = [owner.relay.recorded(), owner.relay.answered()].concat().concat();
        let shows = |bytes: &[u8]| heard.windows(bytes.len()).any(|heard| heard == bytes);
        let (_, key) = tcp_pair::raw::key_of(&owner.agent, "source");
        assert!(!shows(b"the reader") && !shows(b"the owner"), "{seal}");
        assert_eq!(
            (shows(&owner.bytes), shows(&pattern(LEN, 6))),
            (payload_shows, payload_shows),
            "{seal}"
        );
        assert_eq!((shows(WORD), shows(&key.0)), (control_shows, control_shows), "{seal}");
    }
}

#[test]
fn many_pieces_are_moved_in_both_directions_with_every_seal() {
    const ALL: usize = 8 << 20;
    for seal in ["none", "control", "all"] {
        let options = format!(r#"{{"tcp": {{"seal": "{seal}"}}}}"#);
        let pair = Pair::of(
            agent_with("owner", &options, None),
            agent_with("reader", &options, None),
            ALL,
        );
        let said = pair.peer.route().to_string();
        let words = match seal {
            "none" => "nothing is sealed",
            "control" => "control is sealed, payload is not",
            _ => "everything is sealed",
        };
        assert!(said.contains(words), "{said}");
        for block in [48, 4096, 100_000] {
            let count = (ALL / block) as u32;
            let grid = Grid::packed(block as u64, count);
            let (from, to) = (tcp_pair::shuffled(count, 3), tcp_pair::shuffled(count, 4));
            pair.ours.copy_in(0, &vec![0; ALL]).unwrap();
            pair.theirs.copy_in(0, &pair.bytes).unwrap();
            pair.peer
                .post(&pair.read(grid, from.clone(), to.clone()))
                .unwrap()
                .wait_blocking(CUT_OFF)
                .unwrap();
            let got = Pair::all(&pair.ours);
            let part = |bytes: &[u8], index: u32| bytes[index as usize * block..][..block].to_vec();
            assert!(
                from.iter().zip(&to).all(|(from, to)| part(&got, *to) == part(&pair.bytes, *from))
            );
            pair.theirs.copy_in(0, &vec![0; ALL]).unwrap();
            pair.peer.post(&pair.write(grid, to, from)).unwrap().wait_blocking(CUT_OFF).unwrap();
            let back = Pair::all(&pair.theirs);
            let whole = count as usize * block;
            assert!(back[..whole] == pair.bytes[..whole], "{seal}, blocks of {block} bytes");
        }
    }
}
