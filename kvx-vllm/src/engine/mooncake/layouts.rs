//! The memory layouts that decode workers have sent, kept for a while under the workers' names for
//! them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use sha2::{Digest, Sha256};

use super::super::remote::RemoteEngine;
use crate::ids::{Address, EngineId, WorkerRank};
use crate::wire::mooncake::PullRequest;

/// The maximum number of named layouts, as in vLLM.
const MAX_LAYOUTS: usize = 1024;
/// The maximum size of the named layouts in bytes.
const MAX_BYTES: usize = 64 << 20;
/// The maximum size of all layouts in bytes, including those that only waiting requests use.
const MAX_IN_USE: usize = 2 * MAX_BYTES;

/// A decode worker to write to, with one layout of its memory.
#[derive(Debug)]
pub struct Target {
    /// The worker's pull, without its requests and without the layout's name.
    pub told: PullRequest,
    pub(super) peer: Arc<RemoteEngine>,
    /// The approximate size in bytes.
    bytes: usize,
    /// The size of all layouts in memory.
    in_use: Arc<AtomicUsize>,
}

impl Drop for Target {
    fn drop(&mut self) {
        self.in_use.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A decode worker, independent of its layout.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct DecodeWorker {
    host: Arc<str>,
    port: u16,
    tp_rank: u32,
}

impl DecodeWorker {
    pub(super) fn of(request: &PullRequest) -> Self {
        DecodeWorker {
            host: request.remote_hostname.as_str().into(),
            port: request.remote_port,
            tp_rank: request.remote_tp_rank,
        }
    }
}

impl Target {
    /// Creates a target from a pull with a layout, and adds its size to `in_use`.
    fn of(request: &PullRequest, in_use: &Arc<AtomicUsize>) -> Self {
        let told = request.of_worker();
        let digest: String =
            Sha256::digest(told.encode()).iter().map(|byte| format!("{byte:02x}")).collect();
        let address =
            Address { host: told.remote_hostname.as_str().into(), port: told.remote_port };
        let peer = RemoteEngine {
            tp_size: told.remote_tp_size,
            pp_size: told.remote_pp_size,
            ..RemoteEngine::new(digest, address)
        };
        let bytes = size_of::<Self>() + layout_bytes(&told);
        in_use.fetch_add(bytes, Ordering::Relaxed);
        Target { peer: Arc::new(peer), bytes, told, in_use: Arc::clone(in_use) }
    }

    /// Returns the worker's rank, as far as its pull contains it.
    pub fn rank(&self) -> WorkerRank {
        WorkerRank { pp: 0, tp: self.told.remote_tp_rank }
    }

    pub(super) fn id(&self) -> &EngineId {
        &self.peer.engine
    }
}

/// Returns the approximate memory of a layout's lists in bytes.
fn layout_bytes(told: &PullRequest) -> usize {
    let addresses = [&told.kv_caches_base_addr, &told.block_lens, &told.kv_block_lens];
    let indices = [
        &told.registered_layer_indices,
        &told.registered_group_indices,
        &told.registered_row_offsets,
    ];
    let (names, shared) = (&told.registered_layer_names, &told.registered_shared_group_ids);
    let numbers = addresses.iter().map(|list| list.len()).sum::<usize>()
        + indices.into_iter().chain(shared).map(Vec::len).sum::<usize>();
    let texts = names.iter().map(String::len).sum::<usize>()
        + told.kvx_metadata.as_ref().map_or(0, Vec::len);
    numbers * size_of::<u64>() + (names.len() + shared.len()) * size_of::<Vec<u8>>() + texts
}

/// The result of looking up a pull's layout.
#[derive(Debug)]
pub(super) enum Found {
    /// The layout is known.
    Known(Arc<Target>),
    /// The layout is new. It replaces the worker's previous layout, if there was another.
    New(Arc<Target>, Option<Arc<Target>>),
    /// The layout is unknown or no longer stored.
    Missing,
    /// The layout is new, but the others already take too much memory.
    Full,
}

/// The layouts by worker and name, least recently used first.
#[derive(Debug, Default)]
pub(super) struct Layouts {
    kept: VecDeque<((DecodeWorker, u64), Arc<Target>)>,
    /// The last layout of each worker.
    last: BTreeMap<DecodeWorker, Arc<Target>>,
    /// The size of the named layouts.
    bytes: usize,
    /// The size of all layouts in memory.
    in_use: Arc<AtomicUsize>,
}

impl Layouts {
    /// Returns the layout that a pull contains or names.
    pub(super) fn find(&mut self, request: &PullRequest) -> Found {
        let brings = !request.kv_caches_base_addr.is_empty();
        let name = (DecodeWorker::of(request), request.layout_id);
        let place = self.kept.iter().position(|(kept, _)| *kept == name).filter(|_| name.1 != 0);
        if !brings {
            let Some((_, target)) = place.and_then(|place| self.kept.remove(place)) else {
                return Found::Missing;
            };
            self.kept.push_back((name, Arc::clone(&target)));
            return Found::Known(target);
        }
        let mut target = Arc::new(Target::of(request, &self.in_use));
        let before = self.last.get(&name.0).cloned();
        let same = before.as_ref().filter(|before| before.id() == target.id());
        if let Some(same) = same {
            target = Arc::clone(same);
        }
        if self.in_use.load(Ordering::Relaxed) > MAX_IN_USE {
            return Found::Full;
        }
        let replaced = before.filter(|before| before.id() != target.id());
        if name.1 == 0 {
            return Found::New(target, replaced);
        }
        if let Some((_, before)) = place.and_then(|place| self.kept.remove(place)) {
            self.bytes -= before.bytes;
        }
        self.bytes += target.bytes;
        self.last.insert(name.0.clone(), Arc::clone(&target));
        self.kept.push_back((name, Arc::clone(&target)));
        while self.kept.len() > MAX_LAYOUTS || (self.bytes > MAX_BYTES && self.kept.len() > 1) {
            let Some(((reader, _), old)) = self.kept.pop_front() else { break };
            self.bytes -= old.bytes;
            if self.last.get(&reader).is_some_and(|last| last.id() == old.id()) {
                self.last.remove(&reader);
            }
        }
        Found::New(target, replaced)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(port: u16, layout_id: u64, bases: &[u64]) -> PullRequest {
        let mut asked = PullRequest::new("10.0.0.2", port, 1, 0);
        (asked.layout_id, asked.kv_caches_base_addr) = (layout_id, bases.to_vec());
        asked
    }

    #[test]
    fn a_layout_is_found_by_its_name_and_only_for_the_worker_that_sent_it() {
        let mut layouts = Layouts::default();
        assert!(matches!(layouts.find(&asked(1, 7, &[])), Found::Missing));
        let Found::New(told, None) = layouts.find(&asked(1, 7, &[4096])) else {
            panic!("a new layout")
        };
        let Found::Known(known) = layouts.find(&asked(1, 7, &[])) else { panic!("a known layout") };
        assert!(Arc::ptr_eq(&told, &known));
        assert!(matches!(layouts.find(&asked(2, 7, &[])), Found::Missing), "another worker");
        assert!(matches!(layouts.find(&asked(1, 9, &[])), Found::Missing), "another name");
    }

    #[test]
    fn a_worker_with_another_layout_has_restarted() {
        let mut layouts = Layouts::default();
        layouts.find(&asked(1, 7, &[4096]));
        let Found::New(_, Some(old)) = layouts.find(&asked(1, 9, &[8192])) else {
            panic!("a replaced layout")
        };
        assert_eq!(old.told.kv_caches_base_addr, [4096]);
        assert!(
            matches!(layouts.find(&asked(1, 11, &[8192])), Found::New(_, None)),
            "the same memory"
        );
    }

    #[test]
    fn a_peer_that_names_no_layout_brings_it_every_time() {
        let mut layouts = Layouts::default();
        assert!(matches!(layouts.find(&asked(1, 0, &[4096])), Found::New(..)));
        assert!(matches!(layouts.find(&asked(1, 0, &[])), Found::Missing));
        assert!(layouts.kept.is_empty() && layouts.last.is_empty());
    }

    // vLLM 61: a prefill keeps 1,024 layouts and evicts the least recently used one
    #[test]
    fn the_layout_that_was_used_longest_ago_goes_and_memory_is_bounded() {
        let mut layouts = Layouts::default();
        for id in 1..=MAX_LAYOUTS as u64 {
            layouts.find(&asked(1, id, &[4096]));
        }
        layouts.find(&asked(1, 1, &[]));
        layouts.find(&asked(1, 5000, &[4096]));
        assert_eq!(layouts.kept.len(), MAX_LAYOUTS);
        assert!(matches!(layouts.find(&asked(1, 1, &[])), Found::Known(_)), "it was used just now");
        assert!(matches!(layouts.find(&asked(1, 2, &[])), Found::Missing));
        for id in 1..200 {
            layouts.find(&asked(2, id, &vec![id; 60_000]));
            assert!(layouts.bytes <= MAX_BYTES, "{}", layouts.bytes);
        }
        assert_eq!(
            layouts.bytes,
            layouts.kept.iter().map(|(_, target)| target.bytes).sum::<usize>()
        );
        assert!(layouts.kept.len() < 200, "the oldest are dropped");
    }

    #[test]
    fn layouts_that_only_waiting_requests_use_are_bounded() {
        let mut layouts = Layouts::default();
        layouts.find(&asked(1, 7, &[4096]));
        let mut large = asked(1, 0, &[1; PullRequest::MAX_ITEMS]);
        large.block_lens = vec![1; PullRequest::MAX_ITEMS];
        large.kv_block_lens = vec![1; PullRequest::MAX_ITEMS];
        let mut waiting = Vec::new();
        let refused = loop {
            large.remote_port += 1;
            match layouts.find(&large) {
                Found::New(target, None) => waiting.push(target),
                other => break other,
            }
        };
        assert!(matches!(refused, Found::Full), "{refused:?}");
        let size: usize = waiting.iter().map(|target| target.bytes).sum();
        assert!(size <= MAX_IN_USE && size > MAX_IN_USE - (2 << 20), "{size} bytes");
        let mut replacing = large.clone();
        (replacing.remote_port, replacing.layout_id) = (1, 7);
        assert!(matches!(layouts.find(&replacing), Found::Full));
        assert!(matches!(layouts.find(&asked(1, 7, &[])), Found::Known(_)), "it is still named");
        waiting.pop();
        assert!(matches!(layouts.find(&large), Found::New(..)), "one of the others has ended");
        drop(waiting);
        assert_eq!(layouts.in_use.load(Ordering::Relaxed), layouts.bytes);
    }
}
