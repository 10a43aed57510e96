//! Reads the files of native libraries. Treats them as untrusted: checks each number before using
//! it.

use std::path::{Path, PathBuf};

use crate::loader;

/// The bytes of a 64-bit little-endian ELF file.
#[derive(Clone, Copy, Debug)]
pub struct Elf<'a>(&'a [u8]);

impl<'a> Elf<'a> {
    /// Returns `None` for any other file.
    pub fn new(file: &'a [u8]) -> Option<Self> {
        file.starts_with(b"\x7fELF\x02\x01").then_some(Elf(file))
    }

    /// Returns the size of the file in bytes.
    pub fn size(self) -> u64 {
        self.0.len() as u64
    }

    /// Returns the `N` bytes at an offset, if the file has them.
    pub fn array<const N: usize>(self, at: u64) -> Option<[u8; N]> {
        let at = usize::try_from(at).ok()?;
        self.0.get(at..at.checked_add(N)?)?.try_into().ok()
    }

    /// Returns the 16-bit number at an offset.
    pub fn u16(self, at: u64) -> Option<u16> {
        self.array(at).map(u16::from_le_bytes)
    }

    /// Returns the 32-bit number at an offset.
    pub fn u32(self, at: u64) -> Option<u32> {
        self.array(at).map(u32::from_le_bytes)
    }

    /// Returns the 64-bit number at an offset.
    pub fn u64(self, at: u64) -> Option<u64> {
        self.array(at).map(u64::from_le_bytes)
    }

    /// Returns the NUL-terminated text at an offset, if it has at most 4096 bytes.
    pub fn text(self, at: u64) -> Option<&'a str> {
        let rest = self.0.get(usize::try_from(at).ok()?..)?;
        let end = rest.iter().take(4096).position(|byte| *byte == 0)?;
        std::str::from_utf8(&rest[..end]).ok()
    }
}

/// Returns all libraries that `file` needs and the dynamic linker does not find; the linker itself
/// reports only the first. Returns an empty list if the file cannot be read.
pub fn missing_libraries(file: &Path) -> Vec<String> {
    let Some(dynamic) = std::fs::read(file).ok().and_then(|bytes| Dynamic::read(&bytes)) else {
        return Vec::new();
    };
    let origin = file.parent().unwrap_or(Path::new("/"));
    let folders: Vec<PathBuf> = dynamic
        .paths
        .iter()
        .flat_map(|paths| paths.split(':'))
        .filter(|path| !path.is_empty())
        .map(|path| path.replace("$ORIGIN", &origin.to_string_lossy()).into())
        .collect();
    let is_there = |name: &str| {
        folders.iter().any(|folder| folder.join(name).exists()) || loader::preload(name).is_ok()
    };
    dynamic.needed.into_iter().filter(|name| !is_there(name)).collect()
}

/// The dependencies that a library declares.
#[derive(Debug, Default, PartialEq, Eq)]
struct Dynamic {
    needed: Vec<String>,
    /// The search paths in RPATH and RUNPATH.
    paths: Vec<String>,
}

const TAG_NEEDED: u64 = 1;
const TAG_STRINGS: u64 = 5;
const TAG_RPATH: u64 = 15;
const TAG_RUNPATH: u64 = 29;

impl Dynamic {
    fn read(file: &[u8]) -> Option<Self> {
        let elf = Elf::new(file)?;
        let headers = elf.u64(32)?;
        let (size, count) = (u64::from(elf.u16(54)?), u64::from(elf.u16(56)?));
        let (mut loads, mut dynamic) = (Vec::new(), None);
        for header in 0..count {
            let at = headers.checked_add(header * size).filter(|at| *at < elf.size())?;
            let (kind, offset) = (elf.u32(at)?, elf.u64(at + 8)?);
            let (address, len) = (elf.u64(at + 16)?, elf.u64(at + 32)?);
            match kind {
                libc::PT_LOAD => loads.push((address, offset, len)),
                libc::PT_DYNAMIC => dynamic = Some((offset, len)),
                _ => {}
            }
        }
        let (offset, len) = dynamic?;
        let mut entries = Vec::new();
        for entry in 0..len / 16 {
            let at = offset.checked_add(entry * 16)?;
            entries.push((elf.u64(at)?, elf.u64(at.checked_add(8)?)?));
        }
        let strings = entries.iter().find(|(tag, _)| *tag == TAG_STRINGS)?.1;
        let in_segment = |(base, _, len): &&(u64, u64, u64)| {
            strings.checked_sub(*base).is_some_and(|offset| offset < *len)
        };
        let (base, offset, _) = loads.iter().find(in_segment)?;
        let strings = (strings - base).checked_add(*offset)?;
        let all = |wanted: &[u64]| -> Vec<String> {
            let entries = entries.iter().filter(|(tag, _)| wanted.contains(tag));
            entries
                .filter_map(|(_, at)| Some(elf.text(strings.checked_add(*at)?)?.to_owned()))
                .collect()
        };
        Some(Dynamic { needed: all(&[TAG_NEEDED]), paths: all(&[TAG_RPATH, TAG_RUNPATH]) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_needs_the_c_library_and_no_library_is_missing() {
        let program = std::env::current_exe().unwrap();
        let needs = Dynamic::read(&std::fs::read(&program).unwrap()).unwrap();
        assert!(needs.needed.iter().any(|name| name.starts_with("libc.so")), "{needs:?}");
        assert_eq!(missing_libraries(&program), Vec::<String>::new());
    }

    #[test]
    fn other_files_and_truncated_ones_yield_nothing() {
        let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        for bytes in [&b""[..], b"\x7fELF\x02\x01", &[0; 100], &program[..64]] {
            assert_eq!(Dynamic::read(bytes), None);
        }
        let mut seed = 1_u64;
        let mut head = program[..4096.min(program.len())].to_vec();
        for _ in 0..2_000 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let at = (seed >> 33) as usize % head.len();
            head[at] = (seed >> 20) as u8;
            Dynamic::read(&head);
        }
    }
}
