//! Divides the events of a batch into steps, so that each holds the lock of a cache briefly.

use kvx_vllm::events::{BlockRemoved, BlockStored, CacheEvent};

/// The cost of a step: that of a token is 1, and a step has at most twice as many.
const STEP: usize = 16 << 10;
/// The cost of an event, and of a hash that is looked up.
const HASH: usize = 16;

/// Returns the events in their order, in steps. Long ones are divided.
pub(super) fn steps(events: Vec<CacheEvent>) -> impl Iterator<Item = Vec<CacheEvent>> {
    let mut pieces = events.into_iter().flat_map(pieces);
    std::iter::from_fn(move || {
        let (mut step, mut sum) = (Vec::new(), 0);
        while sum < STEP
            && let Some(event) = pieces.next()
        {
            sum += cost(&event);
            step.push(event);
        }
        (!step.is_empty()).then_some(step)
    })
}

fn cost(event: &CacheEvent) -> usize {
    match event {
        CacheEvent::Stored(stored) => HASH * (1 + stored.hashes.len()) + stored.tokens.len(),
        CacheEvent::Removed(removed) => HASH * (1 + removed.hashes.len()),
        CacheEvent::Cleared => HASH,
    }
}

/// Divides an event into equivalent ones.
fn pieces(event: CacheEvent) -> Vec<CacheEvent> {
    if cost(&event) <= STEP {
        return vec![event];
    }
    match event {
        CacheEvent::Stored(stored) if stored.plain_blocks().is_some() => {
            let size = stored.block_size as usize;
            let blocks = (STEP / (size + HASH)).max(1);
            let parts = stored.hashes.chunks(blocks).zip(stored.tokens.chunks(blocks * size));
            let mut parent = stored.parent;
            parts
                .map(|(hashes, tokens)| {
                    CacheEvent::Stored(Box::new(BlockStored {
                        hashes: hashes.to_vec(),
                        parent: std::mem::replace(&mut parent, hashes.last().copied()),
                        tokens: tokens.to_vec(),
                        block_size: stored.block_size,
                        medium: stored.medium.clone(),
                        group: stored.group,
                        kind: stored.kind.clone(),
                        locality: stored.locality.clone(),
                        // Plain blocks have none of the others.
                        ..BlockStored::default()
                    }))
                })
                .collect()
        }
        CacheEvent::Removed(removed) => {
            let parts = removed.hashes.chunks(STEP / HASH);
            parts
                .map(|hashes| {
                    CacheEvent::Removed(Box::new(BlockRemoved {
                        hashes: hashes.to_vec(),
                        medium: removed.medium.clone(),
                        group: removed.group,
                        locality: removed.locality.clone(),
                    }))
                })
                .collect()
        }
        // Its blocks are only counted.
        other => vec![other],
    }
}

#[cfg(test)]
mod tests {
    use kvx_vllm::events::BlockHash;

    use super::*;
    use crate::fleet::knowledge::index::EventIndex;
    use crate::fleet::tokens::PromptTokens;

    #[test]
    fn long_events_are_divided_into_equivalent_ones() {
        let (blocks, size) = (20_000, 16);
        let hashes: Vec<_> = (1..=blocks).map(BlockHash).collect();
        let tokens: Vec<u32> = (0..blocks as u32 * size).collect();
        let prompt = PromptTokens::new([&tokens[..], &[0]].concat());
        let of = |hashes: &[BlockHash]| BlockRemoved {
            hashes: hashes.to_vec(),
            group: Some(3),
            ..BlockRemoved::default()
        };
        let removed = of(&hashes[5000..]);
        let stored = BlockStored {
            hashes,
            tokens,
            block_size: size,
            group: Some(3),
            kind: Some("full_attention".to_owned()),
            extra_keys: vec![false; blocks as usize],
            ..BlockStored::default()
        };
        let events = [
            CacheEvent::Stored(Box::new(stored)),
            CacheEvent::Cleared,
            CacheEvent::Stored(Box::new(BlockStored {
                hashes: vec![BlockHash(7)],
                tokens: vec![7; STEP],
                block_size: STEP as u32,
                ..BlockStored::default()
            })),
        ];
        let mut index = EventIndex::default();
        let keys = prompt.keys(size);
        let apply = |index: &mut EventIndex, events: Vec<CacheEvent>| {
            for step in steps(events) {
                assert!(step.iter().map(cost).sum::<usize>() <= 2 * STEP + 2 * HASH);
                step.iter().for_each(|event| index.apply(event).unwrap());
            }
        };
        apply(&mut index, events[..1].to_vec());
        let found = keys.blocks.iter().filter(|key| index.contains(**key)).count();
        assert_eq!((index.len(), found, index.orphans), (20_000, 20_000, 0));
        apply(&mut index, vec![CacheEvent::Removed(Box::new(removed))]);
        assert_eq!(index.len(), 5000);
        apply(&mut index, events[1..].to_vec());
        assert_eq!(index.len(), 1);
    }
}
