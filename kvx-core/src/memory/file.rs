//! Memory files of the program, adopted as they are.

use std::os::fd::OwnedFd;

use rustix::fs::SealFlags;

use super::Memory;
use super::pool::PoolMapping;
use crate::{Error, ErrorKind, Result, fork};

const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
const HUGE: u64 = 2 << 20;

impl Memory {
    /// Adopts the first `len` bytes of a memory file of the program (a memfd, also on huge pages).
    /// Peers on this host map it like a [`pool`](Memory::pool), and read it as fast, unless pages
    /// beyond `len` are missing in the file.
    ///
    /// kvx maps the file once more and keeps its content. The program's own mappings stay as they
    /// are. kvx seals the file's size and prevents new writable mappings, so map it first. Peers on
    /// this host that may read the memory get access to the whole file, even beyond `len`: store
    /// nothing else in it.
    ///
    /// ```
    /// # use kvx_core as kvx;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    /// let file = memfd_create("kv-cache", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    /// ftruncate(&file, 1 << 20)?;
    /// // … the engine maps it here …
    /// let memory = kvx::Memory::adopt_file(file, 1 << 20)?;
    /// assert_eq!(memory.len(), 1 << 20);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// - `Invalid` for zero bytes.
    /// - `OutOfBounds` if the file is shorter than `len`.
    /// - `Unsupported` if it is not a memory file, cannot be sealed (`MFD_ALLOW_SEALING`), is
    ///   sealed against writing or not open for writing.
    /// - `Exhausted` if the machine has no memory for its pages.
    /// - `Native` for another error of the operating system; `Forked`.
    pub fn adopt_file(file: impl Into<OwnedFd>, len: usize) -> Result<Memory> {
        fork::check()?;
        let file = file.into();
        let unfit = |why: &str| {
            ErrorKind::Unsupported.because(format!(
                "the file {why}: adopt a memfd that was created with MFD_ALLOW_SEALING, before it \
                 is sealed against writing"
            ))
        };
        let seals =
            rustix::fs::fcntl_get_seals(&file).map_err(|_| unfit("is not a memory file"))?;
        if seals.contains(SealFlags::SEAL) {
            return Err(unfit("cannot be sealed"));
        }
        let stat = rustix::fs::fstat(&file)
            .map_err(|error| Error::os("fstat of the memory file failed", error))?;
        let size = usize::try_from(stat.st_size).unwrap_or(0);
        if len == 0 {
            return Err(ErrorKind::Invalid.because("0 bytes of a memory file: adopt at least one"));
        }
        if len > size {
            return Err(ErrorKind::OutOfBounds.because(format!(
                "the memory file has {size} bytes, fewer than {len}: call ftruncate first"
            )));
        }
        let block = u64::try_from(stat.st_blksize).unwrap_or(0);
        let on_huge_pages = rustix::fs::fstatfs(&file).is_ok_and(|fs| fs.f_type == HUGETLBFS_MAGIC);
        let page = if on_huge_pages { block as usize } else { rustix::param::page_size() };
        let mapped = len.next_multiple_of(page.max(1));
        let mut mapping =
            PoolMapping::of(file, mapped, on_huge_pages && block == HUGE).map_err(|error| {
                match error {
                    rustix::io::Errno::PERM => unfit("is sealed against writing"),
                    rustix::io::Errno::ACCESS => ErrorKind::Unsupported.because(
                        "the memory file is not open for writing: adopt a read-write descriptor",
                    ),
                    error => Error::os(
                        format!(
                            "a memory file of {len} bytes could not be mapped: raise ulimit -v"
                        ),
                        error,
                    )
                    .with_kind(ErrorKind::Exhausted),
                }
            })?;
        // Seals first, so that other holders of the file cannot shrink it or punch holes any more,
        // and the size that is read here stays true.
        mapping.seal()?;
        if mapping.file_size()? < len {
            return Err(ErrorKind::OutOfBounds
                .because("the memory file shrank while it was adopted: adopt it again"));
        }
        mapping.touch()?;
        mapping.note_found();
        Ok(mapping.into_memory(len))
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    fn file(size: u64) -> OwnedFd {
        let file =
            memfd_create("kvx-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, size).unwrap();
        file
    }

    #[test]
    fn a_descriptor_that_may_only_be_read_is_refused_for_that() {
        use std::os::fd::AsRawFd as _;
        let file = file(4096);
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let why = Memory::adopt_file(std::fs::File::open(path).unwrap(), 4096).unwrap_err();
        assert_eq!(why.kind(), ErrorKind::Unsupported);
        assert!(why.to_string().contains("not open for writing"), "{why}");
    }

    #[test]
    fn a_file_that_peers_could_not_map_is_refused_and_the_sentence_says_what_to_do() {
        let kind = |file: OwnedFd, len| Memory::adopt_file(file, len).unwrap_err().kind();
        assert_eq!(kind(file(4096), 0), ErrorKind::Invalid);
        assert_eq!(kind(file(4096), 4097), ErrorKind::OutOfBounds);
        let unsealable = memfd_create("kvx-test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&unsealable, 4096).unwrap();
        let read_only = file(4096);
        fcntl_add_seals(&read_only, SealFlags::WRITE).unwrap();
        for unfit in [unsealable, read_only, rustix::pipe::pipe().unwrap().0] {
            let why = Memory::adopt_file(unfit, 4096).unwrap_err();
            assert_eq!(why.kind(), ErrorKind::Unsupported, "{why}");
            assert!(why.to_string().contains("MFD_ALLOW_SEALING"), "{why}");
        }
    }
}
