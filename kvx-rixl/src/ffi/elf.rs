//! Which libraries a library needs: the dynamic linker names only the first that it misses.

use std::path::{Path, PathBuf};

use kvx_backend::loader;

/// The libraries that `file` needs and the dynamic linker does not find for it. Empty when that cannot be told.
pub(super) fn missing_libraries(file: &Path) -> Vec<String> {
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

/// What a 64-bit little-endian ELF file says of its needs.
#[derive(Debug, Default, PartialEq, Eq)]
struct Dynamic {
    needed: Vec<String>,
    /// RPATH and RUNPATH.
    paths: Vec<String>,
}

const SEGMENT_LOAD: u32 = 1;
const SEGMENT_DYNAMIC: u32 = 2;
const TAG_NEEDED: u64 = 1;
const TAG_STRINGS: u64 = 5;
const TAG_RPATH: u64 = 15;
const TAG_RUNPATH: u64 = 29;

impl Dynamic {
    fn read(bytes: &[u8]) -> Option<Self> {
        if bytes.get(..6)? != b"\x7fELF\x02\x01" {
            return None;
        }
        let u16_at = |at: usize| Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
        let u32_at = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let u64_at = |at: usize| {
            Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
        };
        let headers = usize::try_from(u64_at(32)?).ok()?;
        let (size, count) = (usize::from(u16_at(54)?), usize::from(u16_at(56)?));
        let (mut loads, mut dynamic) = (Vec::new(), None);
        for header in 0..count {
            let at = headers.checked_add(header * size).filter(|at| *at < bytes.len())?;
            let (kind, offset) = (u32_at(at)?, u64_at(at + 8)?);
            let (address, len) = (u64_at(at + 16)?, u64_at(at + 32)?);
            match kind {
                SEGMENT_LOAD => loads.push((address, offset, len)),
                SEGMENT_DYNAMIC => dynamic = Some((offset, len)),
                _ => {}
            }
        }
        let (offset, len) = dynamic?;
        let mut entries = Vec::new();
        for entry in 0..len / 16 {
            let at = usize::try_from(offset.checked_add(entry * 16)?).ok()?;
            entries.push((u64_at(at)?, u64_at(at.checked_add(8)?)?));
        }
        let strings = entries.iter().find(|(tag, _)| *tag == TAG_STRINGS)?.1;
        let (base, offset, _) =
            loads.iter().find(|(base, _, len)| (*base..base + len).contains(&strings))?;
        let strings = usize::try_from(strings - base + offset).ok()?;
        let string = |at: u64| {
            let start = strings.checked_add(usize::try_from(at).ok()?)?;
            let rest = bytes.get(start..)?;
            let end = rest.iter().position(|byte| *byte == 0)?;
            Some(String::from_utf8_lossy(&rest[..end]).into_owned())
        };
        let all = |wanted: &[u64]| -> Vec<String> {
            entries
                .iter()
                .filter(|(tag, _)| wanted.contains(tag))
                .filter_map(|(_, at)| string(*at))
                .collect()
        };
        Some(Dynamic { needed: all(&[TAG_NEEDED]), paths: all(&[TAG_RPATH, TAG_RUNPATH]) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_needs_the_c_library_and_misses_nothing() {
        let program = std::env::current_exe().unwrap();
        let needs = Dynamic::read(&std::fs::read(&program).unwrap()).unwrap();
        assert!(needs.needed.iter().any(|name| name.starts_with("libc.so")), "{needs:?}");
        assert_eq!(missing_libraries(&program), Vec::<String>::new());
    }

    #[test]
    fn other_files_and_cut_ones_tell_nothing() {
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
