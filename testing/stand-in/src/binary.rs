//! Device binaries, which are ELF files: their length, and the kernels of kvx in them.

use kvx_gpu::kernels::ENTRIES;

use crate::argument::In;
use crate::code::{Answer, Code};

/// The ELF machine number of NVIDIA devices.
const MACHINE: u64 = 190;
/// A length beyond that of any kernel binary of kvx.
const LONGEST: u64 = 16 << 20;

/// Returns an image if it is a binary. Fails with `INVALID_IMAGE` for one of another machine.
pub(crate) fn bytes(image: &In<u8>) -> Answer<Option<Vec<u8>>> {
    for (at, byte) in b"\x7fELF".iter().enumerate() {
        if image.at(at)? != *byte {
            return Ok(None);
        }
    }
    let number = |at: usize, len: usize| -> Answer<u64> {
        (0..len).rev().try_fold(0, |number, byte| Ok(number << 8 | u64::from(image.at(at + byte)?)))
    };
    // The section and segment headers are at the end of the file, one after the other.
    let end = |place: usize, size: usize| -> Answer<u64> {
        Ok(number(place, 8)?.saturating_add(number(size, 2)? * number(size + 2, 2)?))
    };
    let len = end(0x20, 0x36)?.max(end(0x28, 0x3a)?);
    if number(0x12, 2)? != MACHINE || len > LONGEST {
        return Err(Code::INVALID_IMAGE);
    }
    (0..len as usize).map(|at| image.at(at)).collect::<Answer<Vec<u8>>>().map(Some)
}

/// Returns the kernels that have a section of code.
pub(crate) fn entries(binary: &[u8]) -> Vec<&'static str> {
    let has = |entry: &&str| {
        let section = format!("\0.text.{entry}\0");
        binary.windows(section.len()).any(|window| window == section.as_bytes())
    };
    ENTRIES.into_iter().filter(has).collect()
}
