//! Reads values from a message.

use super::Result;
use crate::{DecodeError, DecodeErrorKind};

/// The deepest nesting of values that is read. The deepest known message has four levels.
const MAX_DEPTH: usize = 16;
/// The approximate bytes that an allocator adds to an allocation.
const ALLOCATION: usize = 16;

/// A reader of a message's values, each checked against the bytes that remain.
#[derive(Clone, Debug)]
pub struct MsgpackReader<'a> {
    what: &'static str,
    field: Option<&'static str>,
    left: &'a [u8],
    /// The bytes of memory that lists and texts may still take.
    budget: usize,
}

/// The head of a value: a scalar or byte string with its content, or the number of items that
/// follow.
enum Head<'a> {
    Nil,
    Bool,
    Unsigned(u64),
    Negative(i64),
    Float(f64),
    Text(&'a [u8]),
    Binary(&'a [u8]),
    Array(usize),
    Map(usize),
}

impl Head<'_> {
    fn name(&self) -> &'static str {
        match self {
            Head::Nil => "nil",
            Head::Bool => "a boolean",
            Head::Unsigned(_) | Head::Negative(_) => "an integer",
            Head::Float(_) => "a float",
            Head::Text(_) => "a string",
            Head::Binary(_) => "bytes",
            Head::Array(_) => "an array",
            Head::Map(_) => "a map",
        }
    }
}

impl<'a> MsgpackReader<'a> {
    /// Starts reading a message of at most `max` bytes. Errors call it `what`.
    pub fn new(what: &'static str, bytes: &'a [u8], max: usize) -> Result<Self> {
        let reader = MsgpackReader { what, field: None, left: bytes, budget: usize::MAX };
        if bytes.len() > max {
            return Err(
                reader.malformed(format_args!("{} bytes exceed the limit of {max}", bytes.len()))
            );
        }
        Ok(reader)
    }

    /// Starts reading a value that was skipped before. Errors call it the field `field` of `what`.
    pub fn field(what: &'static str, field: &'static str, bytes: &'a [u8]) -> Self {
        MsgpackReader { what, field: Some(field), left: bytes, budget: usize::MAX }
    }

    /// Limits the memory of the lists and texts that are read from now on, however few bytes encode
    /// them.
    pub(crate) fn with_budget(self, budget: usize) -> Self {
        MsgpackReader { budget, ..self }
    }

    /// Returns the memory that is left of the limit of [`with_budget`](Self::with_budget).
    pub(crate) fn budget(&self) -> usize {
        self.budget
    }

    /// Counts the memory of `count` values before it is allocated.
    pub(crate) fn keep<T>(&mut self, count: usize) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let bytes = count.saturating_mul(size_of::<T>()).saturating_add(ALLOCATION);
        match self.budget.checked_sub(bytes) {
            Some(left) => {
                self.budget = left;
                Ok(())
            }
            None => Err(self.malformed("its values take more memory than is allowed for them")),
        }
    }

    /// Returns a `Malformed` error about this message.
    pub fn malformed(&self, why: impl std::fmt::Display) -> DecodeError {
        let sentence = match self.field {
            None => format!("malformed {}: {why}", self.what),
            Some(field) => format!("malformed {}: {field}: {why}", self.what),
        };
        DecodeError::new(DecodeErrorKind::Malformed, sentence)
    }

    /// Checks that the message has no bytes left.
    pub fn end(&self) -> Result<()> {
        if self.left.is_empty() {
            return Ok(());
        }
        Err(self.malformed(format_args!("{} unexpected bytes at the end", self.left.len())))
    }

    fn bytes(&mut self, len: usize) -> Result<&'a [u8]> {
        let Some((bytes, left)) = self.left.split_at_checked(len) else {
            return Err(
                self.malformed(format_args!("{len} bytes expected, {} left", self.left.len()))
            );
        };
        self.left = left;
        Ok(bytes)
    }

    /// Reads a big-endian number of 1, 2, 4 or 8 bytes.
    fn number(&mut self, width: usize) -> Result<u64> {
        Ok(self.bytes(width)?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn sized(&mut self, width: usize) -> Result<&'a [u8]> {
        let len = self.number(width)?;
        self.bytes(usize::try_from(len).unwrap_or(usize::MAX))
    }

    /// Checks a number of items, each of at least `each` bytes, against the bytes that remain.
    fn count(&mut self, count: u64, each: usize) -> Result<usize> {
        match usize::try_from(count)
            .ok()
            .filter(|count| count.saturating_mul(each) <= self.left.len())
        {
            Some(count) => Ok(count),
            None => Err(self
                .malformed(format_args!("{count} items do not fit in {} bytes", self.left.len()))),
        }
    }

    fn head(&mut self) -> Result<Head<'a>> {
        Ok(match self.number(1)? as u8 {
            byte @ 0x00..=0x7f => Head::Unsigned(byte.into()),
            byte @ 0x80..=0x8f => Head::Map(self.count((byte & 0x0f).into(), 2)?),
            byte @ 0x90..=0x9f => Head::Array(self.count((byte & 0x0f).into(), 1)?),
            byte @ 0xa0..=0xbf => Head::Text(self.bytes((byte & 0x1f).into())?),
            0xc0 => Head::Nil,
            0xc2 | 0xc3 => Head::Bool,
            byte @ 0xc4..=0xc6 => Head::Binary(self.sized(1 << (byte - 0xc4))?),
            0xca => Head::Float(f32::from_bits(self.number(4)? as u32).into()),
            0xcb => Head::Float(f64::from_bits(self.number(8)?)),
            byte @ 0xcc..=0xcf => Head::Unsigned(self.number(1 << (byte - 0xcc))?),
            byte @ 0xd0..=0xd3 => {
                let width = 1 << (byte - 0xd0);
                let unused = 64 - 8 * width as u32;
                match (self.number(width)? << unused) as i64 >> unused {
                    negative @ ..0 => Head::Negative(negative),
                    positive => Head::Unsigned(positive as u64),
                }
            }
            byte @ 0xd9..=0xdb => Head::Text(self.sized(1 << (byte - 0xd9))?),
            byte @ 0xdc | byte @ 0xdd => {
                let count = self.number(2 << (byte - 0xdc))?;
                Head::Array(self.count(count, 1)?)
            }
            byte @ 0xde | byte @ 0xdf => {
                let count = self.number(2 << (byte - 0xde))?;
                Head::Map(self.count(count, 2)?)
            }
            byte @ 0xe0..=0xff => Head::Negative(i64::from(byte as i8)),
            byte @ 0xc1 | byte @ 0xc7..=0xc9 | byte @ 0xd4..=0xd8 => {
                return Err(self.malformed(format_args!("unknown value type {byte:#04x}")));
            }
        })
    }

    fn wrong<T>(&self, wanted: &str, got: &Head<'_>) -> Result<T> {
        Err(self.malformed(format_args!("expected {wanted}, found {}", got.name())))
    }

    /// Reads a non-negative integer.
    pub fn unsigned(&mut self) -> Result<u64> {
        match self.head()? {
            Head::Unsigned(number) => Ok(number),
            Head::Negative(number) => Err(self.malformed(format_args!("{number} is negative"))),
            other => self.wrong("an integer", &other),
        }
    }

    /// Reads a non-negative integer of at most 32 bits.
    pub fn unsigned_32(&mut self) -> Result<u32> {
        let number = self.unsigned()?;
        u32::try_from(number).map_err(|_| self.malformed(format_args!("{number} is too large")))
    }

    /// Reads a positive integer of at most 32 bits.
    pub fn size(&mut self) -> Result<u32> {
        match self.unsigned_32()? {
            0 => Err(self.malformed("it is 0, and must be at least 1")),
            size => Ok(size),
        }
    }

    /// Reads a port number.
    pub fn port(&mut self) -> Result<u16> {
        let number = self.unsigned()?;
        u16::try_from(number).map_err(|_| self.malformed(format_args!("{number} is not a port")))
    }

    /// Reads an integer.
    pub fn signed(&mut self) -> Result<i64> {
        match self.head()? {
            Head::Unsigned(number) => i64::try_from(number)
                .map_err(|_| self.malformed(format_args!("{number} is too large"))),
            Head::Negative(number) => Ok(number),
            other => self.wrong("an integer", &other),
        }
    }

    /// Reads a floating-point number. Integers are accepted too.
    pub fn float(&mut self) -> Result<f64> {
        match self.head()? {
            Head::Float(number) => Ok(number),
            Head::Unsigned(number) => Ok(number as f64),
            Head::Negative(number) => Ok(number as f64),
            other => self.wrong("a float", &other),
        }
    }

    /// Reads a string.
    pub fn text(&mut self) -> Result<&'a str> {
        match self.head()? {
            Head::Text(bytes) => {
                std::str::from_utf8(bytes).map_err(|_| self.malformed("a string that is not UTF-8"))
            }
            other => self.wrong("a string", &other),
        }
    }

    /// Reads a string and copies it.
    pub fn owned_text(&mut self) -> Result<String> {
        let text = self.text()?;
        self.keep::<u8>(text.len())?;
        Ok(text.to_owned())
    }

    /// Reads bytes.
    pub fn binary(&mut self) -> Result<&'a [u8]> {
        match self.head()? {
            Head::Binary(bytes) => Ok(bytes),
            other => self.wrong("bytes", &other),
        }
    }

    /// Reads bytes and copies them.
    #[cfg(feature = "protocol")]
    pub(crate) fn owned_binary(&mut self) -> Result<Vec<u8>> {
        let bytes = self.binary()?;
        self.keep::<u8>(bytes.len())?;
        Ok(bytes.to_owned())
    }

    /// Reads bytes or a string, as bytes.
    pub fn binary_or_text(&mut self) -> Result<&'a [u8]> {
        match self.head()? {
            Head::Binary(bytes) | Head::Text(bytes) => Ok(bytes),
            other => self.wrong("bytes", &other),
        }
    }

    /// Reads the head of an array and returns its length, at most `max`. The items follow.
    pub fn array(&mut self, max: usize) -> Result<usize> {
        match self.head()? {
            Head::Array(len) if len <= max => Ok(len),
            Head::Array(len) => {
                Err(self.malformed(format_args!("{len} items exceed the limit of {max}")))
            }
            other => self.wrong("an array", &other),
        }
    }

    /// Reads the head of a map and returns its number of entries, at most `max`. Keys and values
    /// follow.
    pub fn map(&mut self, max: usize) -> Result<usize> {
        match self.head()? {
            Head::Map(len) if len <= max => Ok(len),
            Head::Map(len) => {
                Err(self.malformed(format_args!("{len} entries exceed the limit of {max}")))
            }
            other => self.wrong("a map", &other),
        }
    }

    /// Reads an array of at most `max` items, each with `item`.
    pub fn list<T>(
        &mut self,
        max: usize,
        mut item: impl FnMut(&mut Self) -> Result<T>,
    ) -> Result<Vec<T>> {
        let len = self.array(max)?;
        self.keep::<T>(len)?;
        let mut items = Vec::with_capacity(len);
        for _ in 0..len {
            items.push(item(self)?);
        }
        Ok(items)
    }

    /// Reads an array of exactly two items.
    pub fn pair<A, B>(
        &mut self,
        first: impl FnOnce(&mut Self) -> Result<A>,
        second: impl FnOnce(&mut Self) -> Result<B>,
    ) -> Result<(A, B)> {
        match self.array(2)? {
            2 => Ok((first(self)?, second(self)?)),
            len => Err(self.malformed(format_args!("expected 2 items, found {len}"))),
        }
    }

    /// Reads a value or nil.
    pub fn optional<T>(&mut self, value: impl FnOnce(&mut Self) -> Result<T>) -> Result<Option<T>> {
        if let Some((0xc0, left)) = self.left.split_first() {
            self.left = left;
            return Ok(None);
        }
        value(self).map(Some)
    }

    /// Skips any value and returns its bytes. They are well formed, but strings in them may not be
    /// UTF-8.
    pub fn skip(&mut self) -> Result<&'a [u8]> {
        let all = self.left;
        let mut open: [usize; MAX_DEPTH] = [0; MAX_DEPTH];
        let mut depth = 0;
        open[0] = 1;
        loop {
            while open[depth] == 0 {
                if depth == 0 {
                    return Ok(&all[..all.len() - self.left.len()]);
                }
                depth -= 1;
            }
            open[depth] -= 1;
            let items = match self.head()? {
                Head::Array(len) => len,
                Head::Map(len) => len.saturating_mul(2),
                _ => continue,
            };
            if items == 0 {
                continue;
            }
            depth += 1;
            match open.get_mut(depth) {
                Some(level) => *level = items,
                None => {
                    return Err(
                        self.malformed(format_args!("nested deeper than {MAX_DEPTH} levels"))
                    );
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(bytes: &[u8]) -> MsgpackReader<'_> {
        MsgpackReader::new("test", bytes, 1 << 20).unwrap()
    }

    #[test]
    fn every_width_of_integer_is_read() {
        for (bytes, number) in [
            (&[0x7f][..], 127),
            (&[0xcc, 0xff], 255),
            (&[0xcd, 1, 0], 256),
            (&[0xce, 0, 1, 0, 0], 65_536),
            (&[0xcf, 0, 0, 0, 1, 0, 0, 0, 0], 1 << 32),
            (&[0xe0], -32),
            (&[0xd0, 0x80], -128),
            (&[0xd1, 0x80, 0], -32_768),
            (&[0xd2, 0x80, 0, 0, 0], i64::from(i32::MIN)),
            (&[0xd3, 0x80, 0, 0, 0, 0, 0, 0, 0], i64::MIN),
            (&[0xd0, 0x05], 5),
        ] {
            assert_eq!(reader(bytes).signed().unwrap(), number);
        }
        assert_eq!(reader(&[0xcf; 9]).unsigned().unwrap(), 0xcfcf_cfcf_cfcf_cfcf);
    }

    #[test]
    fn a_length_that_the_message_cannot_hold_is_refused_before_anything_is_allocated() {
        for bytes in [
            &[0xdd, 0xff, 0xff, 0xff, 0xff][..],
            &[0xdf, 0xff, 0xff, 0xff, 0xff],
            &[0xc6, 0xff, 0xff, 0xff, 0xff],
            &[0xdb, 0xff, 0xff, 0xff, 0xff],
            &[0x93, 1, 2],
            &[0x82, 0xa0, 0xa0, 0xa0],
            &[0xcf, 1],
            &[],
        ] {
            assert_eq!(
                reader(bytes).skip().unwrap_err().kind(),
                DecodeErrorKind::Malformed,
                "{bytes:?}"
            );
        }
    }

    #[test]
    fn nesting_is_limited_and_unknown_types_are_refused() {
        let deep = [vec![0x91; MAX_DEPTH - 1], vec![0x00]].concat();
        assert_eq!(reader(&deep).skip().unwrap(), deep);
        let deeper = [vec![0x91; MAX_DEPTH], vec![0x00]].concat();
        assert!(
            reader(&deeper)
                .skip()
                .unwrap_err()
                .to_string()
                .contains("nested deeper than 16 levels")
        );
        for extension in [&[0xc1][..], &[0xc7, 0, 1], &[0xd4, 1, 2]] {
            assert!(
                reader(extension).skip().unwrap_err().to_string().contains("unknown value type")
            );
        }
    }

    #[test]
    fn a_skipped_value_is_exactly_its_own_bytes() {
        let mut reader = reader(&[0x82, 0xa1, b'k', 0x92, 1, 0xc0, 0xa1, b'l', 0x80, 0x2a]);
        assert_eq!(reader.skip().unwrap(), &[0x82, 0xa1, b'k', 0x92, 1, 0xc0, 0xa1, b'l', 0x80]);
        assert_eq!(reader.unsigned().unwrap(), 42);
        reader.end().unwrap();
    }
}
