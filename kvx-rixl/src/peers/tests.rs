//! Tests of the table of peers, without NIXL.

use super::*;
use crate::agent_lock::AgentLock;

/// Returns an empty table of an agent without NIXL.
fn nobody() -> Peers {
    let closed = Arc::new(AgentLock::around(None).unwrap());
    Peers::new(c"near".to_owned(), PeerLoader::start("loads".to_owned(), closed).unwrap())
}

#[test]
fn a_dropped_peer_is_loaded_once_more_and_not_for_ever() {
    let (mut peers, mut events) = (nobody(), Vec::new());
    let name = Name::from(c"far");
    peers.begin(name.clone(), Vec::new(), Vec::new(), vec![EndpointId::from_number(1)]);
    peers.by_name.get_mut(&name).unwrap().state = PeerState::Ready;
    peers.note_posted(&name);
    assert!(peers.can_be_asked(&name) && peers.note_dropped(&name, &mut events));
    assert!(matches!(events[..], [Event::Broken { .. }]) && peers.next_load == 2);
    assert!(!peers.can_be_asked(&name), "not before it is loaded");
    peers.by_name.get_mut(&name).unwrap().state = PeerState::Lost { watched: true };
    assert!(peers.can_be_asked(&name) && peers.note_dropped(&name, &mut events));
    assert!(!peers.can_be_asked(&name) && peers.next_load == 2 && events.len() == 1);
}

/// Before 1.5, NIXL drops a peer again for each request whose failure it detects.
#[test]
fn a_peer_is_loaded_again_as_long_as_its_requests_end() {
    for known in [false, true] {
        let (mut peers, mut events) = (nobody(), Vec::new());
        let name = Name::from(c"far");
        peers.begin(name.clone(), Vec::new(), Vec::new(), vec![EndpointId::from_number(1)]);
        peers.by_name.get_mut(&name).unwrap().state = PeerState::Ready;
        (0..3).for_each(|_| peers.note_posted(&name));
        peers.lose(&name, known, &mut events);
        for _ in 0..2 {
            peers.by_name.get_mut(&name).unwrap().state = PeerState::Lost { watched: true };
            peers.note_ended(&name);
            let loads = peers.next_load;
            assert!(peers.note_dropped(&name, &mut events));
            assert!(
                !peers.can_be_asked(&name) && peers.next_load == loads + 1,
                "the others are queried again"
            );
        }
        peers.by_name.get_mut(&name).unwrap().state = PeerState::Lost { watched: true };
        let loads = peers.next_load;
        assert!(peers.note_dropped(&name, &mut events) && !peers.can_be_asked(&name));
        assert_eq!(peers.next_load, loads, "none has ended: not again");
    }
}

#[test]
fn who_moves_bytes_with_a_cpus_help_is_noted_until_it_goes() {
    let mut peers = nobody();
    let endpoints = [1, 2].map(EndpointId::from_number);
    for (endpoint, name) in endpoints.into_iter().zip([c"over-tcp", c"by-the-kernel"]) {
        let name = Name::from(name);
        peers.begin(name.clone(), Vec::new(), Vec::new(), vec![endpoint]);
        peers.endpoints.insert(
            endpoint,
            Endpoint { peer: Some(name), foreign: false, accepted: false, severed: false },
        );
    }
    peers.set_reach(endpoints[1], PerOp::NEITHER);
    assert!(!peers.needs_cpu);
    peers.set_reach(endpoints[0], PerOp::BOTH);
    assert!(peers.needs_cpu);
    peers.set_reach(endpoints[1], PerOp::NEITHER);
    assert!(peers.needs_cpu, "another does not change that");
    peers.disconnect(endpoints[0]);
    assert!(!peers.needs_cpu);
    // A peer that has opened an endpoint may read and write before the trial has ended.
    let third = EndpointId::from_number(3);
    peers.endpoints.insert(
        third,
        Endpoint {
            peer: Some(Name::from(c"comes")),
            foreign: false,
            accepted: true,
            severed: false,
        },
    );
    peers.begin(Name::from(c"comes"), Vec::new(), Vec::new(), vec![third]);
    peers.note_reach();
    assert!(peers.needs_cpu);
    peers.set_reach(third, PerOp::NEITHER);
    assert!(!peers.needs_cpu);
}

#[test]
fn a_peer_that_nixl_still_knows_is_lost_without_being_loaded_again() {
    let mut peers = nobody();
    let (endpoint, name, mut events) = (EndpointId::from_number(1), Name::from(c"far"), Vec::new());
    peers.begin(name.clone(), Vec::new(), Vec::new(), vec![endpoint]);
    peers.endpoints.insert(
        endpoint,
        Endpoint { peer: Some(name.clone()), foreign: false, accepted: false, severed: false },
    );
    peers.by_name.get_mut(&name).unwrap().state = PeerState::Ready;
    assert_eq!(peers.any_memory(&name), None, "nothing of its memory is known");
    let range =
        Range { segment: crate::ffi::MemorySegment::Host, address: 4096, len: 64, device: 0 };
    peers.note_loaded_region(endpoint, &Arc::new(NixlRegion::new(range, Box::default())));
    assert_eq!(peers.any_memory(&name), Some(range));
    peers.note_posted(&name);
    for _ in 0..2 {
        peers.lose(&name, true, &mut events);
        assert!(matches!(events[..], [Event::Broken { .. }]) && peers.access(endpoint).is_err());
        assert!(peers.can_be_asked(&name) && peers.next_load == 1);
    }
}
