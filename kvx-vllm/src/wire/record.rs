//! Messages that are maps with known keys. Order, absence and unknown keys survive decoding and
//! encoding.

use std::cell::Cell;

use crate::msgpack::{MsgpackReader, MsgpackWriter, Result};

/// The most keys in a map with known keys.
const MAX_KEYS: usize = 256;
/// The most bytes of memory that the lists and texts of a map take, however few bytes encode them.
const MAX_KEPT: usize = 64 << 20;

/// The keys of a map as it was read: their order, the known ones that were present, and the unknown
/// ones with their values.
///
/// Two shapes are equal if they have the same unknown keys: the rest does not affect a message's
/// meaning.
#[derive(Clone, Debug, Default)]
pub(in crate::wire) struct Shape {
    slots: Vec<ShapeKey>,
}

#[derive(Clone, Debug)]
enum ShapeKey {
    Known(&'static str),
    Unknown { key: String, value: Vec<u8> },
}

impl Shape {
    /// Creates a shape with these known keys, in this order.
    pub(in crate::wire) fn of(keys: impl IntoIterator<Item = &'static str>) -> Self {
        Shape { slots: keys.into_iter().map(ShapeKey::Known).collect() }
    }

    fn has(&self, known: &str) -> bool {
        self.slots.iter().any(|slot| matches!(slot, ShapeKey::Known(key) if *key == known))
    }

    /// Returns the unknown keys, with their values as msgpack.
    pub(in crate::wire) fn unknown(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.slots.iter().filter_map(|slot| match slot {
            ShapeKey::Known(_) => None,
            ShapeKey::Unknown { key, value } => Some((key.as_str(), value.as_slice())),
        })
    }
}

impl PartialEq for Shape {
    fn eq(&self, other: &Self) -> bool {
        self.unknown().eq(other.unknown())
    }
}

impl Eq for Shape {}

/// The fields of a map that is being decoded.
pub(in crate::wire) struct RecordFields<'a> {
    what: &'static str,
    values: Vec<(&'static str, &'a [u8])>,
    shape: Shape,
    /// The bytes of memory that lists and texts may still take.
    budget: Cell<usize>,
}

impl<'a> RecordFields<'a> {
    /// Reads a map of at most `max` bytes with nothing after it. Keys that are not in `known` are
    /// kept unchanged.
    pub(in crate::wire) fn read(
        what: &'static str,
        bytes: &'a [u8],
        max: usize,
        known: &[&'static str],
    ) -> Result<Self> {
        let mut reader = MsgpackReader::new(what, bytes, max)?;
        let (values, shape, budget) = (Vec::new(), Shape::default(), Cell::new(MAX_KEPT));
        let mut fields = RecordFields { what, values, shape, budget };
        for _ in 0..reader.map(MAX_KEYS)? {
            let key = reader.text()?;
            let value = reader.skip()?;
            let known = known.iter().find(|known| **known == key);
            if known.map_or_else(
                || fields.shape.unknown().any(|(other, _)| other == key),
                |known| fields.shape.has(known),
            ) {
                return Err(reader.malformed(format_args!("duplicate key {key:?}")));
            }
            fields.shape.slots.push(match known {
                Some(known) => {
                    fields.values.push((known, value));
                    ShapeKey::Known(known)
                }
                None => ShapeKey::Unknown { key: key.to_owned(), value: value.to_owned() },
            });
        }
        reader.end()?;
        Ok(fields)
    }

    /// Reads the field if it is present.
    pub(in crate::wire) fn optional<T>(
        &self,
        key: &'static str,
        read: impl FnOnce(&mut MsgpackReader<'a>) -> Result<T>,
    ) -> Result<Option<T>> {
        let Some((_, bytes)) = self.values.iter().find(|(known, _)| *known == key) else {
            return Ok(None);
        };
        let mut reader = MsgpackReader::field(self.what, key, bytes).with_budget(self.budget.get());
        let value = read(&mut reader)?;
        self.budget.set(reader.budget());
        Ok(Some(value))
    }

    /// Reads the field, which must be present.
    pub(in crate::wire) fn required<T>(
        &self,
        key: &'static str,
        read: impl FnOnce(&mut MsgpackReader<'a>) -> Result<T>,
    ) -> Result<T> {
        let absent =
            || MsgpackReader::field(self.what, key, &[]).malformed("this required key is absent");
        self.optional(key, read)?.ok_or_else(absent)
    }

    /// Reads the field, which must be present if `needed`.
    pub(in crate::wire) fn required_if<T>(
        &self,
        needed: bool,
        key: &'static str,
        read: impl FnOnce(&mut MsgpackReader<'a>) -> Result<T>,
    ) -> Result<Option<T>> {
        if needed { self.required(key, read).map(Some) } else { self.optional(key, read) }
    }

    /// Reads the field if it is present and not nil.
    pub(in crate::wire) fn nullable<T>(
        &self,
        key: &'static str,
        read: impl FnOnce(&mut MsgpackReader<'a>) -> Result<T>,
    ) -> Result<Option<T>> {
        Ok(self.optional(key, |reader| reader.optional(read))?.flatten())
    }

    /// Returns whether a known key is present.
    pub(in crate::wire) fn has(&self, key: &str) -> bool {
        self.shape.has(key)
    }

    /// Returns whether an unknown key is present.
    pub(in crate::wire) fn has_unknown(&self, key: &str) -> bool {
        self.shape.unknown().any(|(unknown, _)| unknown == key)
    }

    /// Reads the field if it is present. An absent one has the default value of its type.
    pub(in crate::wire) fn or_default<T: Default>(
        &self,
        key: &'static str,
        read: impl FnOnce(&mut MsgpackReader<'a>) -> Result<T>,
    ) -> Result<T> {
        Ok(self.optional(key, read)?.unwrap_or_default())
    }

    /// Returns the shape of the map.
    pub(in crate::wire) fn shape(self) -> Shape {
        self.shape
    }
}

/// A message that is a map with known keys.
pub(in crate::wire) trait Record {
    /// The known keys in the order of a new message.
    const KEYS: &'static [&'static str];

    /// Returns the shape with which the message was read or will be written.
    fn shape(&self) -> &Shape;

    /// Returns whether the field may be omitted from a message whose shape does not name it.
    fn is_default(&self, key: &str) -> bool;

    /// Writes the value of a known key.
    fn write(&self, key: &str, writer: &mut MsgpackWriter);

    /// Encodes the message: the keys of its shape, then other known keys whose values are not the
    /// default.
    fn encode_map(&self) -> Vec<u8> {
        let shape = self.shape();
        let further: Vec<_> =
            Self::KEYS.iter().filter(|key| !shape.has(key) && !self.is_default(key)).collect();
        let mut writer = MsgpackWriter::default();
        writer.map(shape.slots.len() + further.len());
        for slot in &shape.slots {
            match slot {
                ShapeKey::Known(key) => {
                    writer.text(key);
                    self.write(key, &mut writer);
                }
                ShapeKey::Unknown { key, value } => {
                    writer.text(key);
                    writer.raw(value);
                }
            }
        }
        for key in further {
            writer.text(key);
            self.write(key, &mut writer);
        }
        writer.into_bytes()
    }
}

/// Compares two values of one type.
pub(in crate::wire) fn is_equal<T: PartialEq>(one: &T, other: &T) -> bool {
    one == other
}

/// Implements [`Record`] for a message by a table of its keys: the field of each, and the value
/// with which a message may omit it. The value may refer to other fields of the `$message`.
macro_rules! record {
    ($Message:ident as $message:ident: $($key:expr => $field:ident $(or $default:expr)?,)*) => {
        impl $crate::wire::record::Record for $Message {
            const KEYS: &'static [&'static str] = &[$($key),*];

            fn shape(&self) -> &$crate::wire::record::Shape {
                &self.shape
            }

            fn is_default(&self, key: &str) -> bool {
                let $message = self;
                $($(if key == $key {
                    return $crate::wire::record::is_equal(&$message.$field, &$default);
                })?)*
                false
            }

            fn write(&self, key: &str, writer: &mut $crate::msgpack::MsgpackWriter) {
                use $crate::msgpack::MsgpackValue as _;
                $(if key == $key {
                    return self.$field.write_to(writer);
                })*
                unreachable!("{key} is not a key of this message")
            }
        }
    };
}

pub(in crate::wire) use record;
