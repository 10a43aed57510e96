//! Tests the engine with a peer: loads, failures and leases.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Instant;

use super::*;
use crate::engine::mover::FinishedRequest;
use crate::kv::{BlockLists, Kept, LoadFailure, Outcome, Status, Then};

/// The engine's calls, and the test's responses.
#[derive(Default)]
struct Script {
    offers: usize,
    keeps: bool,
    outcomes: VecDeque<Outcome>,
    /// Request, blocks to fill, computed, external.
    allocated: Vec<(String, Vec<u32>, usize, usize)>,
    ended: Vec<(String, Vec<u32>, usize, Status)>,
    wake: Option<Wake>,
}

#[derive(Clone, Default)]
struct Peer(Arc<Mutex<Script>>);

impl Peer {
    fn tell(&self, outcome: Outcome) {
        let wake = {
            let mut script = self.0.lock().unwrap();
            script.outcomes.push_back(outcome);
            script.wake.clone()
        };
        wake.expect("the engine has started")();
    }

    /// Waits until the engine has made a call.
    fn wait<T>(&self, mut done: impl FnMut(&mut Script) -> Option<T>) -> T {
        let until = Instant::now() + LIMIT;
        loop {
            if let Some(done) = done(&mut self.0.lock().unwrap()) {
                return done;
            }
            assert!(Instant::now() < until, "the engine has not made the expected call");
            std::thread::yield_now();
        }
    }

    fn load(&self) -> (String, Vec<u32>, usize, usize) {
        self.wait(|script| {
            let at = script.allocated.iter().position(|(.., external)| *external > 0)?;
            Some(script.allocated.remove(at))
        })
    }
}

impl Mover for Peer {
    fn on_request(&mut self, _: &str, _: usize, _: Option<&TransferParams>) {}

    fn matched_tokens(&self, _: &str, computed: usize) -> usize {
        self.0.lock().unwrap().offers.saturating_sub(computed)
    }

    fn on_allocated(&mut self, request: &str, fill: &[u32], computed: usize, external: usize) {
        self.0.lock().unwrap().allocated.push((
            request.to_owned(),
            fill.to_vec(),
            computed,
            external,
        ));
    }

    fn step(&mut self) -> Vec<Outcome> {
        self.0.lock().unwrap().outcomes.drain(..).collect()
    }

    fn on_finished(&mut self, ending: FinishedRequest<'_>) -> (bool, Option<TransferParams>) {
        let mut script = self.0.lock().unwrap();
        let ended =
            (ending.request.to_owned(), ending.blocks.to_vec(), ending.computed, ending.status);
        script.ended.push(ended);
        (script.keeps, script.keeps.then(TransferParams::ask_prefill))
    }
}

fn start(limits: &Limits) -> (Running, Memory, Peer) {
    let (memory, peer) = (Memory::new(limits.blocks, limits.block_size), Peer::default());
    let for_engine = peer.clone();
    let running =
        Engine::start(limits.clone(), Box::new(memory.clone()), Arc::new(bytes()), None, |wake| {
            for_engine.0.lock().unwrap().wake = Some(wake);
            Ok(Box::new(for_engine))
        });
    (running.expect("the engine starts"), memory, peer)
}

fn loaded(request: &str, computed: usize) -> Outcome {
    Outcome::Loaded { request: request.into(), computed: computed as u32 }
}

fn failed(request: &str, then: Then, invalid: &[u32], held: &[u32]) -> Outcome {
    Outcome::Failed {
        request: request.into(),
        failure: LoadFailure::Transfer("as the test wants".into()),
        then,
        invalid: invalid.to_vec(),
        held: BlockLists::single(held),
    }
}

#[test]
fn only_the_last_token_of_a_loaded_prompt_is_computed() {
    let (running, memory, peer) = start(&limits(16));
    for (len, external) in [(20u32, 20), (21, 21), (22, 20), (3, 3)] {
        let prompt = prompt(len, len);
        let before = memory.lock().computed;
        peer.0.lock().unwrap().offers = external;
        let name = format!("r{len}");
        let answer = running.engine().submit(request(&name, &prompt, 5));
        let (_, fill, computed, count) = peer.load();
        assert_eq!((computed, count, fill.len()), (0, external, external.div_ceil(4)));
        memory.fill(&fill, &prompt[..external]);
        peer.tell(loaded(&name, external));
        let answer = whole(answer).unwrap();
        assert_eq!((tokens(&answer), answer.cached), (expected(&prompt, 5), external));
        let here = (len as usize - external).max(1) + 4;
        assert_eq!(memory.lock().computed - before, here, "{len}");
    }
}

#[test]
fn cached_blocks_are_not_loaded_and_loaded_blocks_are_cached() {
    let (running, memory, peer) = start(&limits(16));
    let prompt = prompt(1, 22);
    whole(running.engine().submit(request("local", &prompt[..10], 1))).unwrap();
    peer.0.lock().unwrap().offers = 22;
    let answer = running.engine().submit(request("part", &prompt, 2));
    let (_, fill, computed, external) = peer.load();
    assert_eq!((computed, external, fill.len()), (8, 14, 4));
    memory.fill(&fill, &prompt[8..]);
    peer.tell(loaded("part", 22));
    assert_eq!(tokens(&whole(answer).unwrap()), expected(&prompt, 2));
    peer.0.lock().unwrap().offers = 0;
    let again = whole(running.engine().submit(request("again", &prompt, 2))).unwrap();
    assert_eq!((tokens(&again), again.cached), (expected(&prompt, 2), 20));
}

#[test]
fn other_requests_continue_while_one_loads_its_blocks() {
    let (running, memory, peer) = start(&limits(16));
    peer.0.lock().unwrap().offers = 8;
    let waits = running.engine().submit(request("waits", &prompt(1, 8), 2));
    let (_, fill, ..) = peer.load();
    peer.0.lock().unwrap().offers = 0;
    let other = whole(running.engine().submit(request("other", &prompt(2, 8), 6))).unwrap();
    assert_eq!(tokens(&other), expected(&prompt(2, 8), 6));
    memory.fill(&fill, &prompt(1, 8));
    peer.tell(loaded("waits", 8));
    assert_eq!(tokens(&whole(waits).unwrap()), expected(&prompt(1, 8), 2));
}

#[test]
fn a_failed_load_fails_its_request_or_is_recomputed_from_the_first_invalid_block() {
    let (running, memory, peer) = start(&limits(16));
    peer.0.lock().unwrap().offers = 20;
    let prompt = prompt(7, 20);
    let fails = running.engine().submit(request("fails", &prompt, 3));
    let (_, fill, ..) = peer.load();
    peer.tell(failed("fails", Then::Fail, &fill, &[]));
    assert_eq!(whole(fails).unwrap_err().0, "Internal server error");
    peer.wait(|script| {
        script
            .ended
            .iter()
            .any(|(name, .., how)| name == "fails" && *how == Status::Failed)
            .then_some(())
    });

    let goes_on = running.engine().submit(request("goes on", &prompt, 3));
    let (_, fill, ..) = peer.load();
    memory.fill(&fill[..2], &prompt[..8]);
    memory.fill(&fill[3..], &prompt[12..]);
    memory.fill(&fill[2..3], &[1, 1, 1, 1]);
    let before = memory.lock().computed;
    peer.tell(failed("goes on", Then::Recompute { computed: 8 }, &fill[2..3], &[]));
    let answer = whole(goes_on).unwrap();
    assert_eq!((tokens(&answer), answer.cached), (expected(&prompt, 3), 8));
    assert_eq!(memory.lock().computed - before, 12 + 2);
}

#[test]
fn a_loaded_prompt_that_is_preempted_counts_as_computed() {
    let (running, memory, peer) = start(&Limits { requests: 1, ..limits(12) });
    peer.0.lock().unwrap().offers = 20;
    let (loads, grows) = (prompt(5, 22), prompt(6, 3));
    let first = running.engine().submit(request("loads", &loads, 2));
    let (_, fill, ..) = peer.load();
    peer.0.lock().unwrap().offers = 0;
    memory.fill(&fill, &loads[..20]);
    // The only request that may run grows until it needs every block, and so takes the loaded ones.
    let second = running.engine().submit(request("grows", &grows, 45));
    peer.wait(|script| script.allocated.pop());
    peer.tell(loaded("loads", 20));
    assert_eq!(tokens(&whole(second).unwrap()), expected(&grows, 45));
    let answer = whole(first).unwrap();
    assert_eq!((tokens(&answer), answer.cached), (expected(&loads, 2), 0));
}

#[test]
fn blocks_that_a_transfer_may_still_write_to_are_not_reused_until_it_ends() {
    let (running, memory, peer) = start(&limits(16));
    peer.0.lock().unwrap().offers = 20;
    let one = prompt(8, 20);
    let answer = running.engine().submit(request("late", &one, 3));
    let (_, fill, ..) = peer.load();
    peer.0.lock().unwrap().offers = 0;
    peer.tell(failed("late", Then::Recompute { computed: 0 }, &fill, &fill));
    assert_eq!(tokens(&whole(answer).unwrap()), expected(&one, 3));
    // The transfer does write late: only into blocks that no request uses.
    let others: Vec<Answer> = (0..4)
        .map(|at| running.engine().submit(request(&format!("o{at}"), &prompt(20 + at, 20), 20)))
        .collect();
    for _ in 0..50 {
        memory.fill(&fill, &[1; 20]);
        std::thread::yield_now();
    }
    for (at, answer) in (0..).zip(others) {
        assert_eq!(tokens(&whole(answer).unwrap()), expected(&prompt(20 + at, 20), 20));
    }
    // Then they are free: a request of the whole pool runs.
    peer.tell(Outcome::Free { request: "late".into(), kept: Kept::Load });
    let long = prompt(40, 40);
    assert_eq!(
        tokens(&whole(running.engine().submit(request("all", &long, 24))).unwrap()),
        expected(&long, 24)
    );
}

#[test]
fn leased_blocks_keep_their_tokens_until_the_lease_ends() {
    let (running, memory, peer) = start(&limits(16));
    peer.0.lock().unwrap().keeps = true;
    let published = prompt(9, 20);
    let answer = whole(running.engine().submit(request("leased", &published, 1))).unwrap();
    assert!(answer.end.unwrap().transfer.is_some());
    let (_, blocks, computed, status) = peer.wait(|script| script.ended.pop());
    assert_eq!((blocks.len(), computed, status), (5, 20, Status::LengthCapped));
    peer.0.lock().unwrap().keeps = false;
    for seed in 0..20 {
        let prompt = prompt(30 + seed, 24);
        assert_eq!(
            tokens(
                &whole(running.engine().submit(request(&format!("o{seed}"), &prompt, 9))).unwrap()
            ),
            expected(&prompt, 9)
        );
    }
    let held: Vec<u32> = blocks
        .iter()
        .flat_map(|block| memory.lock().slots[*block as usize].clone())
        .flatten()
        .collect();
    assert_eq!(held, published);
    // Other requests may still begin with them.
    assert_eq!(
        whole(running.engine().submit(request("shares", &published, 1))).unwrap().cached,
        16
    );
    peer.tell(Outcome::Free { request: "leased".into(), kept: Kept::Request });
    let long = prompt(77, 60);
    assert_eq!(
        tokens(&whole(running.engine().submit(request("all", &long, 4))).unwrap()),
        expected(&long, 4)
    );
}

#[test]
fn an_abort_during_a_load_keeps_the_blocks_that_a_peer_fills() {
    let (running, _, peer) = start(&limits(16));
    let begins = prompt(3, 24);
    whole(running.engine().submit(request("begins", &begins[..9], 1))).unwrap();
    peer.wait(|script| script.allocated.pop());
    peer.0.lock().unwrap().offers = 20;
    let answer = running.engine().submit(request("gone", &begins, 3));
    let (_, fill, computed, _) = peer.load();
    assert_eq!((fill.len(), computed), (3, 8));
    (peer.0.lock().unwrap().keeps, peer.0.lock().unwrap().offers) = (true, 0);
    drop(answer);
    peer.wait(|script| script.ended.pop().filter(|(.., how)| *how == Status::Aborted));
    peer.0.lock().unwrap().keeps = false;
    // Cached blocks, and blocks that no peer fills yet, are free at once.
    let long = prompt(41, 48);
    assert_eq!(
        tokens(&whole(running.engine().submit(request("rest", &long, 5))).unwrap()),
        expected(&long, 5)
    );
    let waits = running.engine().submit(request("waits", &prompt(42, 60), 4));
    peer.tell(Outcome::Free { request: "gone".into(), kept: Kept::Load });
    assert_eq!(tokens(&whole(waits).unwrap()), expected(&prompt(42, 60), 4));
}

#[test]
fn lost_blocks_are_never_reused() {
    let (running, memory, peer) = start(&Limits { model_len: 40, ..limits(16) });
    peer.0.lock().unwrap().offers = 20;
    let answer = running.engine().submit(request("lost", &prompt(3, 20), 3));
    let (_, fill, ..) = peer.load();
    peer.0.lock().unwrap().offers = 0;
    peer.tell(failed("lost", Then::Fail, &fill, &fill));
    assert!(whole(answer).is_err());
    peer.tell(Outcome::Lost { request: "lost".into(), kept: Kept::Load });
    memory.fill(&fill, &[1; 20]);
    for seed in 0..6 {
        let prompt = prompt(60 + seed, 30);
        assert_eq!(
            tokens(
                &whole(running.engine().submit(request(&format!("o{seed}"), &prompt, 9))).unwrap()
            ),
            expected(&prompt, 9)
        );
    }
    let touched = fill
        .iter()
        .all(|block| memory.lock().slots[*block as usize].iter().all(|slot| *slot == Some(1)));
    assert!(touched, "a lost block was used");
}
