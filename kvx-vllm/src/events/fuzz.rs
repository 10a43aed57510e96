//! The entry point of the fuzz target and the bounded fuzz test.

use super::{CacheEvent, EventBatch, publication, replay_answer};

/// The targets, by the names of their corpora.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[("cache_events", events)];

/// Reads the bytes as a batch, and the pieces between `0xfe` bytes as frames. A batch that was read
/// encodes to bytes with the same meaning.
pub fn events(bytes: &[u8]) {
    let frames: Vec<Vec<u8>> = bytes.split(|byte| *byte == 0xfe).map(<[u8]>::to_vec).collect();
    let _ = (publication(&frames), replay_answer(&frames));
    let Ok(mut batch) = EventBatch::decode(bytes) else { return };
    batch.unknown = 0;
    for event in &mut batch.events {
        if let CacheEvent::Stored(stored) = event {
            if let Some(blocks) = stored.plain_blocks() {
                let mut count = 0;
                for (_, tokens) in blocks {
                    assert_eq!(tokens.len(), stored.block_size as usize);
                    count += 1;
                }
                assert_eq!(count, stored.hashes.len());
            }
            // Not encoded.
            stored.extra_keys.fill(false);
            stored.has_salt = false;
        }
    }
    let written = batch.encode();
    match EventBatch::decode(&written) {
        // NaN is not equal to itself.
        Ok(again) => assert_eq!(again.encode(), written),
        Err(error) => panic!("{batch:?} was decoded once, but not again: {error}"),
    }
}
