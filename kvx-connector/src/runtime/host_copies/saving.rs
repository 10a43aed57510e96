//! Blocks that were computed on the device: into the copies, before anybody hears of them.

use std::collections::HashMap;
use std::sync::Arc;

use kvx_core::Deadline;

use super::super::rank::Registered;
use super::super::slot::Slot;
use super::super::state::{Shared, State};
use super::{LIMIT, When};
use crate::engine::{BlockLists, Ending, RequestId, Unsaved, WorkerRank};

/// Requests of which blocks were saved before they end, each under a number that no other ever has, with how many whole
/// blocks were ordered.
#[derive(Default)]
pub(in crate::runtime) struct Saving {
    numbers: HashMap<RequestId, (u64, u32)>,
    last: u64,
}

impl Saving {
    /// The number of a request, and how many whole blocks were ordered before, of which there are so many now.
    fn number(&mut self, request: &RequestId, whole: u32) -> (u64, u32) {
        if let Some((number, ordered)) = self.numbers.get_mut(request) {
            return (*number, std::mem::replace(ordered, whole.max(*ordered)));
        }
        self.last += 1;
        self.numbers.insert(request.clone(), (self.last, whole));
        (self.last, 0)
    }

    /// What was saved of it counts no more.
    pub(in crate::runtime) fn forget(&mut self, request: &RequestId) {
        self.numbers.remove(request);
    }
}

impl Shared {
    /// The engine says that these tokens of a request are computed.
    pub(in crate::runtime) fn computed(
        self: &Arc<Self>,
        request: &RequestId,
        blocks: &BlockLists,
        tokens: u32,
    ) {
        let settings = &self.setup.settings;
        let mut state = self.state.lock();
        if state.is_closing()
            || !state.has_host_copies()
            || !state.scheduler.may_publish(request)
            || state.check_blocks(blocks, settings.groups.len()).is_err()
        {
            return;
        }
        let whole = tokens / settings.block_size.max(1);
        let (of, ordered) = state.saving.number(request, whole);
        // The list of a window may begin anywhere: its blocks have no place, and are saved at the end.
        let groups =
            (0..).zip(blocks.groups()).zip(&settings.groups).filter(|(_, window)| window.is_none());
        let unsaved: Vec<_> = groups
            .flat_map(|((group, list), _)| {
                let new = (ordered..whole).zip(list.iter().skip(ordered as usize));
                new.map(move |(place, block)| Unsaved { group, block: *block, place })
            })
            .collect();
        // Nobody waits: a request that ends has copied again what has failed.
        drop(self.save(&mut state, of, &unsaved, When::Early));
    }

    /// The engine says that blocks of a request go to others.
    pub(in crate::runtime) fn preempted(&self, request: &RequestId) {
        self.state.lock().saving.forget(request);
    }

    /// Has the blocks of a request that ends copied to the host, if they are to be published. Waits. False: they are
    /// not there, and nobody may hear of them.
    pub(in crate::runtime) fn save_the_rest(
        self: &Arc<Self>,
        request: &RequestId,
        ending: &Ending,
    ) -> bool {
        let saving = {
            let mut state = self.state.lock();
            let (of, _) = state.saving.number(request, 0);
            let groups = self.setup.settings.groups.len();
            if !state.has_host_copies()
                || ending.blocks.is_empty()
                || !state.scheduler.would_publish(request, ending.status)
                || state.check_blocks(&ending.blocks, groups).is_err()
            {
                return true;
            }
            let windows = &self.setup.settings.groups;
            let lists = (0..).zip(ending.blocks.groups()).zip(windows);
            let unsaved = lists.flat_map(|((group, list), window)| {
                let place = |place| if window.is_none() { place } else { u32::MAX };
                (0..).zip(list.iter()).map(move |(at, block)| Unsaved {
                    group,
                    block: *block,
                    place: place(at),
                })
            });
            // Whole blocks that peers may read already are there.
            let published = state.published.as_ref().filter(|_| windows[..] == [None]);
            let is_new =
                |unsaved: &Unsaved| published.is_none_or(|all| !all.has_whole(unsaved.block));
            let unsaved: Vec<_> = unsaved.filter(is_new).collect();
            self.save(&mut state, of, &unsaved, When::AtItsEnd)
        };
        let deadline = Deadline::from(LIMIT);
        let mut all = true;
        for saved in saving {
            let why = match saved.wait(deadline) {
                Some(Ok(())) => continue,
                Some(Err(why)) => why,
                None => format!("this was not done within {LIMIT:?}"),
            };
            tracing::error!(%request, why, "blocks were not copied to the host: nobody hears of them");
            all = false;
        }
        all
    }

    /// Has blocks copied to the host on all workers, wherever they are.
    fn save(
        self: &Arc<Self>,
        state: &mut State,
        of: u64,
        blocks: &[Unsaved],
        when: When,
    ) -> Vec<Arc<Slot<Result<(), String>>>> {
        let mut saving = Vec::new();
        if blocks.is_empty() {
            return saving;
        }
        for (rank, held) in &mut state.ranks {
            if let Some(away) = held.worker.away_mut() {
                saving.extend(away.save(of, blocks, when));
            } else if let Some(own) = &held.registered {
                let slot = Slot::new();
                let done = Arc::clone(&slot);
                self.save_here(*rank, own, (of, blocks.to_vec(), when), move |result| {
                    done.set(result)
                });
                saving.push(slot);
            }
        }
        saving
    }

    /// The same on a worker of this process. In the order of what the worker is told.
    pub(in crate::runtime) fn save_here(
        self: &Arc<Self>,
        rank: WorkerRank,
        own: &Arc<Registered>,
        (of, blocks, when): (u64, Vec<Unsaved>, When),
        done: impl FnOnce(Result<(), String>) + Send + 'static,
    ) {
        let Some(copies) = &own.host_copies else { return done(Ok(())) };
        copies.order(of, &blocks);
        let (shared, own) = (Arc::clone(self), Arc::clone(own));
        self.runtime.spawn_blocking(move || {
            let result =
                shared.with_caches(rank, &own, |own| own.copies()?.save(of, &blocks, when));
            done(result.map_err(|error| error.to_string()));
        });
    }
}

impl State {
    /// Whether peers see copies of the caches of any worker.
    fn has_host_copies(&self) -> bool {
        self.ranks.values().any(|held| match held.worker.away() {
            Some(away) => away.has_host_copies(),
            None => held.registered.as_ref().is_some_and(|own| own.host_copies.is_some()),
        })
    }
}
