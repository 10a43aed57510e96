//! Values that write themselves.

use std::collections::BTreeMap;

use super::MsgpackWriter;

/// A value with one form in msgpack.
pub(crate) trait MsgpackValue {
    /// Writes the value.
    fn write_to(&self, writer: &mut MsgpackWriter);
}

macro_rules! unsigned_values {
    ($($Number:ty)*) => {$(
        impl MsgpackValue for $Number {
            fn write_to(&self, writer: &mut MsgpackWriter) {
                writer.unsigned((*self).into());
            }
        }
    )*};
}

// A flag is 0 or 1.
unsigned_values!(bool u16 u32 u64);

impl MsgpackValue for i64 {
    fn write_to(&self, writer: &mut MsgpackWriter) {
        writer.signed(*self);
    }
}

impl MsgpackValue for String {
    fn write_to(&self, writer: &mut MsgpackWriter) {
        writer.text(self);
    }
}

impl MsgpackValue for Vec<u8> {
    fn write_to(&self, writer: &mut MsgpackWriter) {
        writer.binary(self);
    }
}

impl<T: MsgpackValue> MsgpackValue for Vec<T> {
    fn write_to(&self, writer: &mut MsgpackWriter) {
        writer.list(self, |writer, item| item.write_to(writer));
    }
}

impl<A: MsgpackValue, B: MsgpackValue> MsgpackValue for (A, B) {
    fn write_to(&self, writer: &mut MsgpackWriter) {
        writer.array(2);
        self.0.write_to(writer);
        self.1.write_to(writer);
    }
}

impl<T: MsgpackValue> MsgpackValue for BTreeMap<String, T> {
    fn write_to(&self, writer: &mut MsgpackWriter) {
        writer.map(self.len());
        for (key, value) in self {
            writer.text(key);
            value.write_to(writer);
        }
    }
}

/// A value that is absent is nil.
impl<T: MsgpackValue> MsgpackValue for Option<T> {
    fn write_to(&self, writer: &mut MsgpackWriter) {
        writer.optional(self.as_ref(), |writer, value| value.write_to(writer));
    }
}
