//! A peer that takes no reads, and the proofs of writes to another peer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_backend::fabric::{EndpointId, Event, Fabric, FlushCompletion, JobId, Parts, attacker};
use kvx_core::backend::{RegionKey, RemoteSpec};
use kvx_core::{Memory, MemoryKind, Options, RegionId};

use super::LibfabricFabric;
use crate::config::Config;
use crate::factory;
use crate::ffi::{self, PeerNumber, Range, RemoteRange};
use crate::providers::{self, DeliveryProof};

const PATIENCE: Duration = Duration::from_secs(10);
const LEN: u64 = 4096;

fn endpoint(number: u64) -> EndpointId {
    EndpointId::from_number(number)
}

/// Opens endpoints on which reads prove writes. Errors: why there are none on this machine.
fn open() -> Result<Parts<LibfabricFabric>, String> {
    let library = ffi::LIBRARY.open().map_err(|why| why.to_string())?;
    let options = r#"{"libfabric": {"provider": "tcp;ofi_rxm", "domain": ["lo"]}}"#;
    let context = attacker::context(Options::parse(options).unwrap());
    let chosen = providers::choose(library, &Config::read(&context.options).unwrap(), false)
        .map_err(|why| why.to_string())?;
    Ok(factory::build(&context, library, &chosen, DeliveryProof::ReadBack, |_| ()).unwrap())
}

/// Notes that a job has written a byte, and asks for its proof.
fn prove(fabric: &mut LibfabricFabric, job: usize, peer: EndpointId, remote: RemoteRange) {
    let (job, nothing) = (JobId::from_number(job), std::ptr::null_mut());
    let piece = Range { local: nothing, len: 1, descriptor: nothing.cast(), remote };
    fabric.read_backs.note_written(job, 0, &[piece]);
    assert!(matches!(fabric.flush(peer, job), Ok(FlushCompletion::Later)));
}

#[test]
fn a_peer_whose_window_is_full_delays_no_proof_of_writes_to_others() {
    let test = "a_peer_whose_window_is_full_delays_no_proof_of_writes_to_others";
    let [near, full, free] = match [open(), open(), open()] {
        [Ok(near), Ok(full), Ok(free)] => [near, full, free],
        [Err(why), ..] | [_, Err(why), _] | [.., Err(why)] => {
            return kvx_testkit::skip(test, &why, "cargo xtask test --install on Debian 12");
        }
    };
    let (mut near, mut far) = (near.fabric, free.fabric);
    let identity = attacker::context(Options::new()).agent;
    for (number, address) in [(1, &full.address), (2, &free.address)] {
        near.connect(endpoint(number), &identity, &address().unwrap()).unwrap();
    }
    let memory = Arc::new(Memory::owned(vec![0; LEN as usize]));
    let (_local, export) = free.registrar.register(RegionId(1), &memory).unwrap();
    let (key, kind) = (RegionKey([0; 16]), MemoryKind::Host);
    let region = RemoteSpec { id: RegionId(1), key, len: LEN, kind, export: &export };
    let key = near.unpack(endpoint(2), &region).unwrap().key(0);
    let at = near.peer_of(endpoint(2)).unwrap();
    let peer = near.peers.peer_number(at, 0, 0, &near.rails[0]).unwrap();
    let written = RemoteRange { peer, address: key.base + LEN - 1, key: key.key };
    let unreached = RemoteRange { peer: PeerNumber::none(), address: 0, key: 0 };

    let stopped = near.peer_of(endpoint(1)).unwrap();
    near.rail(0).fill_window(stopped);
    prove(&mut near, 1, endpoint(1), unreached);
    prove(&mut near, 2, endpoint(2), written);
    prove(&mut near, 3, endpoint(1), unreached);
    assert!(near.retry.is_some());
    let until = Instant::now() + PATIENCE;
    let mut events = Vec::new();
    while !events.iter().any(|event| matches!(event, Event::Flushed { .. })) {
        assert!(Instant::now() < until, "the proof of the write waits for another peer");
        near.poll(&mut events);
        far.poll(&mut Vec::new());
    }
    let flushed = events.iter().find_map(|event| match event {
        Event::Flushed { job, result } => Some((job.number(), result.is_ok())),
        _ => None,
    });
    assert_eq!(flushed, Some((2, true)));
    let waiting = std::iter::from_fn(|| near.read_backs.next()).map(|read| read.job.number());
    assert!(waiting.eq([1, 3]), "those that wait keep their order");
}
