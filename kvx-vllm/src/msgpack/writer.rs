//! Writes values to a message.

/// A writer of values in msgspec's encoding.
#[derive(Debug, Default)]
pub struct MsgpackWriter {
    bytes: Vec<u8>,
}

impl MsgpackWriter {
    /// Returns the message.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Writes a value that is already encoded.
    pub fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Writes a nil.
    pub fn nil(&mut self) {
        self.bytes.push(0xc0);
    }

    /// Writes a non-negative integer.
    pub fn unsigned(&mut self, number: u64) {
        match number {
            0..=0x7f => self.bytes.push(number as u8),
            0x80..=0xff => self.raw(&[0xcc, number as u8]),
            0x100..=0xffff => self.marked(0xcd, &(number as u16).to_be_bytes()),
            0x1_0000..=0xffff_ffff => self.marked(0xce, &(number as u32).to_be_bytes()),
            _ => self.marked(0xcf, &number.to_be_bytes()),
        }
    }

    /// Writes an integer.
    pub fn signed(&mut self, number: i64) {
        match number {
            0.. => self.unsigned(number as u64),
            -0x20..0 => self.bytes.push(number as u8),
            -0x80..-0x20 => self.raw(&[0xd0, number as u8]),
            -0x8000..-0x80 => self.marked(0xd1, &(number as i16).to_be_bytes()),
            -0x8000_0000..-0x8000 => self.marked(0xd2, &(number as i32).to_be_bytes()),
            _ => self.marked(0xd3, &number.to_be_bytes()),
        }
    }

    /// Writes a floating-point number of 64 bits.
    pub fn float(&mut self, number: f64) {
        self.marked(0xcb, &number.to_be_bytes());
    }

    /// Writes a string.
    pub fn text(&mut self, text: &str) {
        match text.len() {
            len @ 0..=0x1f => self.bytes.push(0xa0 | len as u8),
            len => self.length(len, Some(0xd9), 0xda, 0xdb),
        }
        self.raw(text.as_bytes());
    }

    /// Writes bytes.
    pub fn binary(&mut self, bytes: &[u8]) {
        self.length(bytes.len(), Some(0xc4), 0xc5, 0xc6);
        self.raw(bytes);
    }

    /// Writes the head of an array. Exactly `len` items must follow.
    pub fn array(&mut self, len: usize) {
        match len {
            0..=0x0f => self.bytes.push(0x90 | len as u8),
            _ => self.length(len, None, 0xdc, 0xdd),
        }
    }

    /// Writes the head of a map. Exactly `len` keys and values must follow.
    pub fn map(&mut self, len: usize) {
        match len {
            0..=0x0f => self.bytes.push(0x80 | len as u8),
            _ => self.length(len, None, 0xde, 0xdf),
        }
    }

    /// Writes an array of all items, each with `item`.
    pub fn list<T>(&mut self, items: &[T], mut item: impl FnMut(&mut Self, &T)) {
        self.array(items.len());
        for each in items {
            item(self, each);
        }
    }

    /// Writes a value or nil.
    pub fn optional<T: ?Sized>(&mut self, value: Option<&T>, write: impl FnOnce(&mut Self, &T)) {
        match value {
            Some(value) => write(self, value),
            None => self.nil(),
        }
    }

    fn marked(&mut self, marker: u8, bytes: &[u8]) {
        self.bytes.push(marker);
        self.raw(bytes);
    }

    /// Writes a length in 8 bits if the type has that form, otherwise in 16 or 32.
    fn length(&mut self, len: usize, short: Option<u8>, medium: u8, long: u8) {
        match (short, len) {
            (Some(marker), 0..=0xff) => self.raw(&[marker, len as u8]),
            (_, 0..=0xffff) => self.marked(medium, &(len as u16).to_be_bytes()),
            _ => {
                let len = u32::try_from(len)
                    .expect("lists are bounded, so messages stay far below 4 GiB");
                self.marked(long, &len.to_be_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::msgpack::MsgpackReader;

    #[test]
    fn integers_take_the_shortest_form_and_read_back() {
        let edges =
            [0, 0x7f, 0x80, 0xff, 0x100, 0xffff, 0x1_0000, 0xffff_ffff, 0x1_0000_0000, i64::MAX];
        let below = [
            -1,
            -0x20,
            -0x21,
            -0x80,
            -0x81,
            -0x8000,
            -0x8001,
            -0x8000_0000,
            -0x8000_0001,
            i64::MIN,
        ];
        let widths = [1, 1, 2, 2, 3, 3, 5, 5, 9, 9, 1, 1, 2, 2, 3, 3, 5, 5, 9, 9];
        for (number, width) in edges.into_iter().chain(below).zip(widths) {
            let mut writer = MsgpackWriter::default();
            writer.signed(number);
            let bytes = writer.into_bytes();
            assert_eq!(bytes.len(), width, "{number}");
            assert_eq!(MsgpackReader::new("test", &bytes, 16).unwrap().signed().unwrap(), number);
        }
    }

    #[test]
    fn lengths_take_the_shortest_form_and_read_back() {
        for (len, text_head, bin_head, array_head) in [
            (0, 1, 2, 1),
            (15, 1, 2, 1),
            (16, 1, 2, 3),
            (31, 1, 2, 3),
            (32, 2, 2, 3),
            (255, 2, 2, 3),
            (256, 3, 3, 3),
            (65_535, 3, 3, 3),
            (65_536, 5, 5, 5),
        ] {
            let mut text = MsgpackWriter::default();
            text.text(&"a".repeat(len));
            let mut binary = MsgpackWriter::default();
            binary.binary(&vec![7; len]);
            let mut array = MsgpackWriter::default();
            array.list(&vec![7_u64; len], |writer, item| writer.unsigned(*item));
            for (writer, head) in [(text, text_head), (binary, bin_head), (array, array_head)] {
                let bytes = writer.into_bytes();
                assert_eq!(bytes.len(), head + len);
                assert_eq!(
                    MsgpackReader::new("test", &bytes, 1 << 20).unwrap().skip().unwrap(),
                    bytes
                );
            }
        }
    }
}
