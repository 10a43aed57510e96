//! Parsing of peers' bytes with bounds, without trusting them. All input that kvx parses from
//! outside goes through [`Reader`].

use std::sync::Arc;

use crate::fault_injection::injected;
use crate::identity::{Generation, Identity, Incarnation, MAX_NAME, RegionId, RegionKey};
use crate::{Error, ErrorKind, Result};

/// A parser of the fields of a message. It checks every read, and allocates memory only for bytes
/// that are present.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    what: &'static str,
    left: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Creates a reader of `bytes`; `what` names the message in errors.
    pub fn new(what: &'static str, bytes: &'a [u8]) -> Self {
        Reader { what, left: bytes }
    }

    /// Returns the error of a malformed message, with the reason `why`.
    pub fn malformed(&self, why: impl std::fmt::Display) -> Error {
        ErrorKind::Malformed.because(format!("malformed {}: {why}", self.what))
    }

    /// Returns the number of bytes left.
    pub fn left(&self) -> usize {
        self.left.len()
    }

    /// Reads the next `len` bytes.
    ///
    /// # Errors
    /// `Malformed` if fewer are left.
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8]> {
        match self.left.split_at_checked(len) {
            Some((bytes, left)) => {
                self.left = left;
                Ok(bytes)
            }
            None if injected("trust-lengths") => {
                panic!("the length {len} was trusted, as injected")
            }
            None => {
                Err(self.malformed(format_args!("{len} bytes wanted, {} left", self.left.len())))
            }
        }
    }

    /// Reads the next `N` bytes.
    ///
    /// # Errors
    /// `Malformed` if fewer are left.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    /// Reads a byte.
    ///
    /// # Errors
    /// `Malformed` if none is left.
    pub fn u8(&mut self) -> Result<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    /// Reads a little-endian number of 16 bits.
    ///
    /// # Errors
    /// `Malformed` if the bytes end before.
    pub fn u16(&mut self) -> Result<u16> {
        self.array().map(u16::from_le_bytes)
    }

    /// Reads a little-endian number of 32 bits.
    ///
    /// # Errors
    /// `Malformed` if the bytes end before.
    pub fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Reads a little-endian number of 64 bits.
    ///
    /// # Errors
    /// `Malformed` if the bytes end before.
    pub fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a 32-bit length of at most `max`, and as many bytes.
    ///
    /// # Errors
    /// `Malformed` if the length exceeds `max` or the bytes end before.
    pub fn block(&mut self, max: usize) -> Result<&'a [u8]> {
        let len = self.u32()? as usize;
        if len > max {
            return Err(
                self.malformed(format_args!("a field of {len} bytes, at most {max} are allowed"))
            );
        }
        self.bytes(len)
    }

    /// Reads a name of at most [`MAX_NAME`] bytes: one byte of length, then UTF-8.
    ///
    /// # Errors
    /// `Malformed` if the bytes are not a valid name.
    pub fn name(&mut self) -> Result<Arc<str>> {
        let len = usize::from(self.u8()?);
        debug_assert!(len <= MAX_NAME);
        let name = std::str::from_utf8(self.bytes(len)?)
            .map_err(|_| self.malformed("a name that is not UTF-8"))?;
        crate::identity::checked_name("name", name).map_err(|error| self.malformed(error))
    }

    /// Reads a name and an incarnation.
    ///
    /// # Errors
    /// `Malformed` if the bytes are not a valid name, or end before.
    pub fn identity(&mut self) -> Result<Identity> {
        Ok(Identity { name: self.name()?, incarnation: Incarnation(self.array()?) })
    }

    /// Reads a region's number and key.
    ///
    /// # Errors
    /// `Malformed` if the bytes end before.
    pub fn region(&mut self) -> Result<(RegionId, RegionKey)> {
        Ok((RegionId(self.u64()?), RegionKey(self.array()?)))
    }

    /// Reads a generation.
    ///
    /// # Errors
    /// `Malformed` if the bytes end before.
    pub fn generation(&mut self) -> Result<Generation> {
        self.u64().map(Generation)
    }

    /// Consumes `word`, which must come next.
    ///
    /// # Errors
    /// `Malformed` if other bytes come next.
    pub fn word(&mut self, word: &[u8]) -> Result<()> {
        if self.left() < word.len() || self.bytes(word.len())? != word {
            let word = String::from_utf8_lossy(word);
            return Err(self.malformed(format_args!("{word:?} was expected")));
        }
        Ok(())
    }

    /// Reads a tagged field: the tag, a length of 64 bits, as many bytes, and `|`.
    ///
    /// # Errors
    /// `Malformed` if another tag comes next or the bytes end before.
    pub fn tagged(&mut self, tag: &str) -> Result<&'a [u8]> {
        self.word(tag.as_bytes())?;
        let len = self.u64()?;
        let Some(len) = usize::try_from(len).ok().filter(|len| *len < self.left()) else {
            return Err(self.malformed(format!("the field {tag:?} is longer than the message")));
        };
        let data = self.bytes(len)?;
        self.word(b"|")?;
        Ok(data)
    }

    /// Reads a tagged field of `N` bytes.
    ///
    /// # Errors
    /// `Malformed` if another tag comes next or the field has another length.
    pub fn tagged_array<const N: usize>(&mut self, tag: &str) -> Result<[u8; N]> {
        let data = self.tagged(tag)?;
        data.try_into()
            .map_err(|_| self.malformed(format_args!("the field {tag:?} holds no number")))
    }

    /// Reads a tagged field that counts items of at least `least` bytes each.
    ///
    /// # Errors
    /// `Malformed` if another tag comes next, or the bytes cannot hold that many items.
    pub fn tagged_count(&mut self, tag: &str, least: usize) -> Result<usize> {
        let count = u64::from_le_bytes(self.tagged_array(tag)?);
        let fits = usize::try_from(count).ok().filter(|count| *count <= self.left() / least);
        fits.ok_or_else(|| {
            self.malformed(format!(
                "the field {tag:?} counts more items than the bytes left can hold"
            ))
        })
    }

    /// Checks that no bytes are left.
    ///
    /// # Errors
    /// `Malformed` if some are.
    pub fn end(&self) -> Result<()> {
        if self.left.is_empty() {
            return Ok(());
        }
        Err(self.malformed(format_args!("{} bytes too many", self.left.len())))
    }
}

/// A writer of the fields of a message; the counterpart of [`Reader`].
pub trait Writer {
    /// Writes a byte.
    fn put_u8(&mut self, value: u8);
    /// Writes a little-endian number of 16 bits.
    fn put_u16(&mut self, value: u16);
    /// Writes a little-endian number of 32 bits.
    fn put_u32(&mut self, value: u32);
    /// Writes a little-endian number of 64 bits.
    fn put_u64(&mut self, value: u64);
    /// Writes the bytes as they are.
    fn put(&mut self, bytes: &[u8]);
    /// Writes a 32-bit length and the bytes, which must be fewer than 4 GiB.
    fn put_block(&mut self, bytes: &[u8]);
    /// Writes a name of at most [`MAX_NAME`] bytes.
    fn put_name(&mut self, name: &str);
    /// Writes a name and an incarnation.
    fn put_identity(&mut self, identity: &Identity);
    /// Writes a region's number and key.
    fn put_region(&mut self, id: RegionId, key: &RegionKey);
    /// Writes a tagged field, as [`Reader::tagged`] reads it.
    fn put_tagged(&mut self, tag: &str, data: &[u8]);
}

impl Writer for Vec<u8> {
    fn put_u8(&mut self, value: u8) {
        self.push(value);
    }
    fn put_u16(&mut self, value: u16) {
        self.extend_from_slice(&value.to_le_bytes());
    }
    fn put_u32(&mut self, value: u32) {
        self.extend_from_slice(&value.to_le_bytes());
    }
    fn put_u64(&mut self, value: u64) {
        self.extend_from_slice(&value.to_le_bytes());
    }
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
    fn put_block(&mut self, bytes: &[u8]) {
        self.put_u32(u32::try_from(bytes.len()).expect("blocks are bounded far below 4 GiB"));
        self.put(bytes);
    }
    fn put_name(&mut self, name: &str) {
        self.put_u8(u8::try_from(name.len()).expect("names are checked when they are given"));
        self.put(name.as_bytes());
    }
    fn put_identity(&mut self, identity: &Identity) {
        self.put_name(&identity.name);
        self.put(&identity.incarnation.0);
    }
    fn put_region(&mut self, id: RegionId, key: &RegionKey) {
        self.put_u64(id.0);
        self.put(&key.0);
    }

    fn put_tagged(&mut self, tag: &str, data: &[u8]) {
        self.put(tag.as_bytes());
        self.put_u64(data.len() as u64);
        self.put(data);
        self.put_u8(b'|');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let identity = Identity { name: "p0".into(), incarnation: Incarnation([7; 16]) };
        let mut bytes = Vec::new();
        bytes.put_u8(1);
        bytes.put_u16(2);
        bytes.put_u64(4);
        bytes.put_block(b"xyz");
        bytes.put_identity(&identity);
        let mut reader = Reader::new("test", &bytes);
        assert_eq!((reader.u8().unwrap(), reader.u16().unwrap(), reader.u64().unwrap()), (1, 2, 4));
        assert_eq!(reader.block(3).unwrap(), b"xyz");
        assert_eq!(reader.identity().unwrap(), identity);
        reader.end().unwrap();
    }

    #[test]
    fn lengths_are_bounded_before_anything_is_read() {
        let mut long = Vec::new();
        long.put_u32(u32::MAX);
        assert_eq!(Reader::new("test", &long).block(10).unwrap_err().kind(), ErrorKind::Malformed);
        assert_eq!(
            Reader::new("test", &[9, b'a']).name().unwrap_err().kind(),
            ErrorKind::Malformed
        );
        assert_eq!(Reader::new("test", &[1]).end().unwrap_err().kind(), ErrorKind::Malformed);
    }
}
