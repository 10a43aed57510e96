//! The second frame of an answer: the time on the listener's clock.

use kvx_core::Result;

use crate::msgpack::{MsgpackReader, MsgpackWriter};
use crate::time::Time;

/// A listener's monotonic clock in seconds, in the frame after the payload.
///
/// ```
/// use kvx_vllm::wire::ClockReading;
/// assert_eq!(ClockReading(1.5).encode(), *b"\xcb\x3f\xf8\0\0\0\0\0\0");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct ClockReading(
    /// Seconds since any origin; always finite.
    pub f64,
);

impl ClockReading {
    const LEN: usize = 9;

    /// Encodes the frame.
    pub fn encode(self) -> [u8; 9] {
        let mut writer = MsgpackWriter::default();
        writer.float(self.0);
        writer.into_bytes().try_into().expect("a float takes nine bytes")
    }

    /// Decodes a frame.
    ///
    /// # Errors
    ///
    /// Anything other than one finite number.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = MsgpackReader::new("clock of the peer", bytes, Self::LEN)?;
        let seconds = reader.float()?;
        reader.end()?;
        if !seconds.is_finite() {
            return Err(reader.malformed("it is not a number of seconds").into());
        }
        Ok(ClockReading(seconds))
    }
}

impl From<Time> for ClockReading {
    fn from(now: Time) -> Self {
        ClockReading(now.seconds())
    }
}
