//! Encodes batches as vLLM does since version 0.24: events are maps.

use super::{BlockHash, BlockRemoved, BlockStored, CacheEvent, EventBatch};
use crate::msgpack::MsgpackWriter;

impl EventBatch {
    /// Encodes the batch. Extra keys cannot be encoded, because a batch does not keep them; blocks
    /// that have some are written without.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = MsgpackWriter::default();
        writer.array(3);
        writer.float(self.timestamp);
        writer.list(&self.events, |writer, event| match event {
            CacheEvent::Stored(event) => stored(writer, event),
            CacheEvent::Removed(event) => removed(writer, event),
            CacheEvent::Cleared => {
                writer.map(1);
                tag(writer, "AllBlocksCleared");
            }
        });
        writer.optional(self.rank.as_ref(), |writer, rank| writer.unsigned((*rank).into()));
        writer.into_bytes()
    }
}

fn tag(writer: &mut MsgpackWriter, name: &str) {
    writer.text("type");
    writer.text(name);
}

fn hashes(writer: &mut MsgpackWriter, hashes: &[BlockHash]) {
    writer.text("block_hashes");
    writer.list(hashes, |writer, hash| writer.unsigned(hash.0));
}

fn text(writer: &mut MsgpackWriter, key: &str, value: Option<&String>) {
    writer.text(key);
    writer.optional(value, |writer, value| writer.text(value));
}

/// Writes the fields that have values, as msgspec leaves out the others.
fn optional(writer: &mut MsgpackWriter, group: Option<u32>, texts: &[(&str, &Option<String>)]) {
    if let Some(group) = group {
        writer.text("group_idx");
        writer.unsigned(group.into());
    }
    for (key, value) in texts {
        if value.is_some() {
            text(writer, key, value.as_ref());
        }
    }
}

fn stored(writer: &mut MsgpackWriter, event: &BlockStored) {
    let BlockStored { extra_keys, group, kind, locality, .. } = event;
    let some = [!extra_keys.is_empty(), group.is_some(), kind.is_some(), locality.is_some()];
    writer.map(8 + some.iter().filter(|some| **some).count());
    tag(writer, "BlockStored");
    hashes(writer, &event.hashes);
    writer.text("parent_block_hash");
    writer.optional(event.parent.as_ref(), |writer, parent| writer.unsigned(parent.0));
    writer.text("token_ids");
    writer.list(&event.tokens, |writer, token| writer.unsigned((*token).into()));
    writer.text("block_size");
    writer.unsigned(event.block_size.into());
    writer.text("lora_id");
    writer.optional(event.lora_id.as_ref(), |writer, id| writer.signed(*id));
    text(writer, "medium", event.medium.as_ref());
    text(writer, "lora_name", event.lora_name.as_ref());
    if !extra_keys.is_empty() {
        writer.text("extra_keys");
        writer.list(extra_keys, |writer, _| writer.nil());
    }
    optional(writer, *group, &[("kv_cache_spec_kind", kind), ("locality", locality)]);
}

fn removed(writer: &mut MsgpackWriter, event: &BlockRemoved) {
    let some = [event.group.is_some(), event.locality.is_some()];
    writer.map(3 + some.iter().filter(|some| **some).count());
    tag(writer, "BlockRemoved");
    hashes(writer, &event.hashes);
    text(writer, "medium", event.medium.as_ref());
    optional(writer, event.group, &[("locality", &event.locality)]);
}
