//! Decodes batches.

use super::{BlockHash, BlockRemoved, BlockStored, CacheEvent, EventBatch, MAX_BATCH};
use crate::msgpack::{MsgpackReader, Result};

/// The most events of a batch.
const MAX_EVENTS: usize = 1 << 16;
/// The most fields of an event.
const MAX_FIELDS: usize = 64;
/// The memory of a batch per byte, and in any case.
const MEMORY: (usize, usize) = (24, 4 << 10);
/// The name of a batch in errors.
const WHAT: &str = "batch of KV events";

/// The fields of arrays, by position. Later versions append fields.
const STORED: &[&str] = &[
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
];
const REMOVED: &[&str] = &["block_hashes", "medium", "group_idx", "locality"];

impl EventBatch {
    /// Decodes a batch.
    ///
    /// # Errors
    ///
    /// `Malformed`: the bytes are not a batch, or exceed [`MAX_BATCH`] or its memory.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let budget = MEMORY.0 * bytes.len() + MEMORY.1;
        let mut reader = MsgpackReader::new(WHAT, bytes, MAX_BATCH)?.with_budget(budget);
        let fields = reader.array(MAX_FIELDS)?;
        if fields < 2 {
            return Err(reader.malformed("it has neither time nor events"));
        }
        let mut batch = EventBatch { timestamp: reader.float()?, ..EventBatch::default() };
        let events = reader.array(MAX_EVENTS)?;
        for _ in 0..events {
            match event(&mut reader)? {
                Some(event) => {
                    reader.keep::<CacheEvent>(2)?;
                    batch.events.push(event);
                }
                None => batch.unknown += 1,
            }
        }
        if fields > 2 {
            batch.rank = reader.optional(MsgpackReader::unsigned_32)?;
        }
        for _ in 3..fields {
            reader.skip()?;
        }
        reader.end()?;
        Ok(batch)
    }
}

/// An event's kind, and the values of its known fields.
#[derive(Default)]
struct Fields<'a> {
    tag: Option<&'a str>,
    values: Vec<(&'static str, &'a [u8])>,
}

impl<'a> Fields<'a> {
    /// Reads an array `[tag, fields…]` or a map with a `type`.
    fn read(reader: &mut MsgpackReader<'a>) -> Result<Self> {
        let mut all = Fields::default();
        let mut whole = MsgpackReader::field(WHAT, "event", reader.skip()?);
        let Ok(len) = whole.clone().map(MAX_FIELDS) else {
            let len = whole.array(MAX_FIELDS)?;
            if len == 0 {
                return Err(whole.malformed("it has no tag"));
            }
            let tag = whole.text()?;
            let names = match tag {
                "BlockStored" => STORED,
                "BlockRemoved" => REMOVED,
                _ => &[],
            };
            all.tag = Some(tag);
            for at in 0..len - 1 {
                let value = whole.skip()?;
                all.values.extend(names.get(at).map(|name| (*name, value)));
            }
            return Ok(all);
        };
        whole.map(MAX_FIELDS)?;
        for _ in 0..len {
            let key = whole.text()?;
            if key == "type" {
                all.tag = Some(whole.text()?);
                continue;
            }
            let value = whole.skip()?;
            let known = STORED.iter().chain(["cache_salt"].iter()).find(|known| **known == key);
            all.values.extend(known.map(|name| (*name, value)));
        }
        Ok(all)
    }

    /// Returns a reader of a field that has a value.
    fn get(&self, name: &'static str, budget: usize) -> Option<MsgpackReader<'a>> {
        // As in Python, the last one of several counts.
        let (_, value) = self.values.iter().rfind(|(known, _)| *known == name)?;
        (*value != [0xc0]).then(|| MsgpackReader::field(WHAT, name, value).with_budget(budget))
    }
}

/// Reads an event. Returns `None` for one of an unknown kind.
fn event(reader: &mut MsgpackReader<'_>) -> Result<Option<CacheEvent>> {
    let fields = Fields::read(reader)?;
    Ok(match fields.tag {
        Some("BlockStored") => {
            reader.keep::<BlockStored>(1)?;
            Some(CacheEvent::Stored(Box::new(stored(reader, &fields)?)))
        }
        Some("BlockRemoved") => {
            reader.keep::<BlockRemoved>(1)?;
            Some(CacheEvent::Removed(Box::new(removed(reader, &fields)?)))
        }
        Some("AllBlocksCleared") => Some(CacheEvent::Cleared),
        Some(_) => None,
        None => return Err(reader.malformed("an event has no type")),
    })
}

/// Reads a field with a value, and takes its memory from the batch's.
fn optional<'a, T>(
    reader: &mut MsgpackReader<'_>,
    fields: &Fields<'a>,
    name: &'static str,
    read: impl FnOnce(&mut MsgpackReader<'a>) -> Result<T>,
) -> Result<Option<T>> {
    let Some(mut field) = fields.get(name, reader.budget()) else { return Ok(None) };
    let value = read(&mut field)?;
    field.end()?;
    *reader = reader.clone().with_budget(field.budget());
    Ok(Some(value))
}

fn required<'a, T>(
    reader: &mut MsgpackReader<'_>,
    fields: &Fields<'a>,
    name: &'static str,
    read: impl FnOnce(&mut MsgpackReader<'a>) -> Result<T>,
) -> Result<T> {
    match optional(reader, fields, name, read)? {
        Some(value) => Ok(value),
        None => Err(MsgpackReader::field(WHAT, name, &[]).malformed("it is missing")),
    }
}

fn stored(reader: &mut MsgpackReader<'_>, fields: &Fields<'_>) -> Result<BlockStored> {
    Ok(BlockStored {
        hashes: required(reader, fields, "block_hashes", hashes)?,
        parent: optional(reader, fields, "parent_block_hash", hash)?,
        tokens: required(reader, fields, "token_ids", tokens)?,
        block_size: required(reader, fields, "block_size", MsgpackReader::unsigned_32)?,
        lora_id: optional(reader, fields, "lora_id", MsgpackReader::signed)?,
        medium: optional(reader, fields, "medium", MsgpackReader::owned_text)?,
        lora_name: optional(reader, fields, "lora_name", MsgpackReader::owned_text)?,
        extra_keys: optional(reader, fields, "extra_keys", extra_keys)?.unwrap_or_default(),
        group: optional(reader, fields, "group_idx", MsgpackReader::unsigned_32)?,
        kind: optional(reader, fields, "kv_cache_spec_kind", MsgpackReader::owned_text)?,
        locality: optional(reader, fields, "locality", MsgpackReader::owned_text)?,
        has_salt: optional(reader, fields, "cache_salt", |salt| salt.skip().map(drop))?.is_some(),
    })
}

fn removed(reader: &mut MsgpackReader<'_>, fields: &Fields<'_>) -> Result<BlockRemoved> {
    Ok(BlockRemoved {
        hashes: required(reader, fields, "block_hashes", hashes)?,
        medium: optional(reader, fields, "medium", MsgpackReader::owned_text)?,
        group: optional(reader, fields, "group_idx", MsgpackReader::unsigned_32)?,
        locality: optional(reader, fields, "locality", MsgpackReader::owned_text)?,
    })
}

fn hashes(reader: &mut MsgpackReader<'_>) -> Result<Vec<BlockHash>> {
    reader.list(MAX_BATCH, hash)
}

/// Reads a hash: an unsigned integer (vLLM), a signed one (SGLang), or bytes.
fn hash(reader: &mut MsgpackReader<'_>) -> Result<BlockHash> {
    if let Ok(number) = reader.clone().unsigned() {
        reader.skip()?;
        return Ok(BlockHash(number));
    }
    if let Ok(number) = reader.clone().signed() {
        reader.skip()?;
        return Ok(BlockHash(number as u64));
    }
    let bytes = reader.binary()?;
    match bytes.last_chunk() {
        Some(last) => Ok(BlockHash(u64::from_be_bytes(*last))),
        None => Err(reader.malformed("a hash has fewer than 8 bytes")),
    }
}

/// Reads token ids. Returns none if they are not plain numbers.
fn tokens(reader: &mut MsgpackReader<'_>) -> Result<Vec<u32>> {
    let mut plain = reader.clone();
    let whole = MsgpackReader::field(WHAT, "token_ids", reader.skip()?);
    whole.clone().array(MAX_BATCH)?;
    match plain.list(MAX_BATCH, MsgpackReader::unsigned_32) {
        Ok(tokens) => {
            *reader = plain;
            Ok(tokens)
        }
        Err(_) => Ok(Vec::new()),
    }
}

/// Reads for each block whether it has extra keys.
fn extra_keys(reader: &mut MsgpackReader<'_>) -> Result<Vec<bool>> {
    reader.list(MAX_BATCH, |keys| {
        let value = keys.skip()?;
        Ok(!matches!(value, [0xc0] | [0x90]))
    })
}
