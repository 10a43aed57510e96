//! The file of a recording: how it is opened, and where its whole lines end.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Read, Seek};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use super::{Header, VERSION};
use crate::error::{Error, Result};

pub(super) fn unwritable(path: &Path, error: std::io::Error) -> Error {
    Error::io(format_args!("cannot write the recording {}", path.display()), error)
}

pub(super) fn wrong(path: &Path, why: &str) -> Error {
    Error::new(format!("the recording {} {why}; name another file", path.display()))
}

/// Returns true if a disk, a quota or a limit leaves no space.
pub(super) fn is_full(error: &std::io::Error) -> bool {
    use ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

/// Fails for a device, a folder or a pipe.
pub(super) fn must_be_regular(path: &Path) -> Result<()> {
    match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => Err(wrong(path, "is not a regular file")),
        _ => Ok(()),
    }
}

/// Opens a file to read it and to append to it.
pub(super) fn open(path: &Path, options: &mut OpenOptions) -> std::io::Result<File> {
    // Times and lengths of users' requests are nobody else's business.
    options.read(true).append(true).mode(0o600).open(path)
}

/// A header is shorter, in bytes.
pub(super) const LONGEST_HEADER: u64 = 512;

/// Returns the length of the whole lines of a recording; 0 for an empty file, or one with only a
/// part of its first header.
pub(super) fn whole_lines(path: &Path, file: &mut File) -> Result<u64> {
    let cannot_read =
        |error| Error::io(format_args!("cannot read the recording {}", path.display()), error);
    let length = file.metadata().map_err(cannot_read)?.len();
    if length > 0 && !is_recording(file).map_err(cannot_read)? {
        if is_torn_header(file, length).map_err(cannot_read)? {
            return Ok(0);
        }
        return Err(wrong(path, "exists, and is not a recording"));
    }
    end_of_lines(file, length).map_err(cannot_read)
}

/// Returns the place after the last newline: a power failure may leave a part of a line.
fn end_of_lines(file: &File, length: u64) -> std::io::Result<u64> {
    let mut block = vec![0; 64 << 10];
    let mut end = length;
    while end > 0 {
        let begin = end.saturating_sub(block.len() as u64);
        let part = &mut block[..(end - begin) as usize];
        file.read_exact_at(part, begin)?;
        if let Some(at) = part.iter().rposition(|byte| *byte == b'\n') {
            return Ok(begin + at as u64 + 1);
        }
        end = begin;
    }
    Ok(0)
}

/// Returns true if a file begins with a whole header of this version.
fn is_recording(file: &mut File) -> std::io::Result<bool> {
    #[derive(serde::Deserialize)]
    struct Version {
        kvx_recording: u32,
    }
    file.rewind()?;
    let mut first = Vec::new();
    BufReader::new(Read::take(file, 4096)).read_until(b'\n', &mut first)?;
    let version = serde_json::from_slice::<Version>(&first).map(|header| header.kvx_recording);
    Ok(first.ends_with(b"\n") && version.is_ok_and(|version| version == VERSION))
}

/// Returns true if a power failure may have left this much of a first header: its beginning, NULs,
/// or its beginning and then NULs.
fn is_torn_header(file: &File, length: u64) -> std::io::Result<bool> {
    if length >= LONGEST_HEADER {
        return Ok(false);
    }
    let mut bytes = vec![0; length as usize];
    file.read_exact_at(&mut bytes, 0)?;
    let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |at| at + 1);
    let header = Header::new(0.0).line()?;
    // The time of the start differs from header to header.
    let Some((before, after)) = header.split_once("0.0") else { return Ok(false) };
    let found = &bytes[..end];
    Ok(match found.strip_prefix(before.as_bytes()) {
        None => before.as_bytes().starts_with(found),
        Some(rest) => {
            let is_digit = |byte: &&u8| byte.is_ascii_digit() || b".eE+-".contains(byte);
            let time = rest.iter().take_while(is_digit).count();
            after.trim_end().as_bytes().starts_with(&rest[time..])
        }
    })
}
