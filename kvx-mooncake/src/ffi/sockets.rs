//! Keeps children of this process from inheriting the engine's sockets.
//!
//! The engine creates its sockets without `SOCK_CLOEXEC`. A child process inherits copies of those
//! that are open when it starts, which keeps them open after the engine closes them. Then the
//! listener of the other end's engine waits 5 s for the end of each connection and accepts no other
//! meanwhile, and the port of an engine that has ended still accepts connections. So kvx replaces
//! `socket` and `accept` for the engine's files with functions that set the flag, by changing the
//! tables through which a file calls other libraries. Other files are unaffected, except a file
//! that another thread loads in the same milliseconds.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ops::Range;

use libc::{SOCK_CLOEXEC, sockaddr, socklen_t};

/// A file that the dynamic linker has loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct File {
    name: CString,
    base: usize,
    /// The address of the file's dynamic section.
    dynamic: usize,
    /// The addresses that became read-only after linking.
    sealed: Range<usize>,
}

impl File {
    /// Pins the file, even if it is closed elsewhere, and waits until it is linked. Returns whether
    /// it is loaded.
    fn keep(&self) -> bool {
        let how = libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
        // SAFETY: this loads nothing, so it runs no code of the file.
        !unsafe { libc::dlopen(self.name.as_ptr(), how) }.is_null()
    }
}

/// An entry of a dynamic section.
#[repr(C)]
struct Entry {
    tag: i64,
    value: usize,
}

/// An entry of a table of relocations.
#[repr(C)]
struct Relocation {
    offset: u64,
    info: u64,
    addend: i64,
}

const DT_NULL: i64 = 0;
const DT_PLTRELSZ: i64 = 2;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_RELA: i64 = 7;
const DT_RELASZ: i64 = 8;
const DT_JMPREL: i64 = 23;

/// The types of relocations that hold the address of an external function: `GLOB_DAT` and
/// `JUMP_SLOT`.
#[cfg(target_arch = "x86_64")]
const ADDRESSES: [u32; 2] = [6, 7];
#[cfg(target_arch = "aarch64")]
const ADDRESSES: [u32; 2] = [1025, 1026];
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const ADDRESSES: [u32; 0] = [];

unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: takes only integers.
    unsafe { libc::socket(domain, kind | SOCK_CLOEXEC, protocol) }
}

unsafe extern "C" fn accept(listener: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the caller upholds the conditions of `accept`, which are those of `accept4`.
    unsafe { libc::accept4(listener, address, len, SOCK_CLOEXEC) }
}

unsafe extern "C" fn accept4(
    listener: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { libc::accept4(listener, address, len, flags | SOCK_CLOEXEC) }
}

/// Returns kvx's replacement of a system function.
fn replacement(name: &CStr) -> Option<usize> {
    match name.to_bytes() {
        b"socket" => Some(socket as *const () as usize),
        b"accept" => Some(accept as *const () as usize),
        b"accept4" => Some(accept4 as *const () as usize),
        _ => None,
    }
}

fn page() -> usize {
    // SAFETY: takes only a number.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Returns the range that the linker makes read-only for a requested range: it rounds both ends
/// down to a page.
fn sealed(begin: usize, len: usize, page: usize) -> Range<usize> {
    begin / page * page..(begin + len) / page * page
}

/// Returns the files that are loaded now.
pub(super) fn files() -> Vec<File> {
    unsafe extern "C" fn note(
        info: *mut libc::dl_phdr_info,
        _: libc::size_t,
        found: *mut c_void,
    ) -> c_int {
        // SAFETY: the description is valid during this call, and `found` is the list below.
        let (info, found) = unsafe { (&*info, &mut *found.cast::<Vec<File>>()) };
        if info.dlpi_name.is_null() {
            return 0;
        }
        // SAFETY: the description is valid during this call, and `found` is the list below.
        let name = unsafe { CStr::from_ptr(info.dlpi_name) };
        let (base, page) = (info.dlpi_addr as usize, page());
        // SAFETY: there are as many headers as the description says.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        let part = |kind| headers.iter().find(|header| header.p_type == kind);
        let at = |header: &libc::Elf64_Phdr| base + header.p_vaddr as usize;
        let sealed =
            part(libc::PT_GNU_RELRO).map(|part| sealed(at(part), part.p_memsz as usize, page));
        let sealed = sealed.unwrap_or_default();
        let dynamic = part(libc::PT_DYNAMIC).map(at);
        found.extend(dynamic.map(|dynamic| File { name: name.to_owned(), base, dynamic, sealed }));
        0
    }
    let mut found = Vec::new();
    // SAFETY: the callback receives the pointer that is passed here, and does not unwind.
    unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut found).cast()) };
    found
}

/// Redirects the calls of the files that have been loaded since `before` to the functions above.
/// Returns the number of redirected entries: if it is 0, children inherit the engine's sockets.
pub(super) fn keep_from_children(before: &[File]) -> usize {
    let is_new = |file: &File| !before.contains(file) && file.keep();
    let kept: Vec<_> = files().into_iter().filter(is_new).collect();
    // Another thread may have closed a file before it was pinned, and loaded it again at another
    // address.
    let there = files().into_iter().filter(|file| kept.contains(file));
    // SAFETY: these files are loaded and pinned.
    there.map(|file| unsafe { lead(&file) }).sum()
}

/// # Safety
/// The file is linked, and never unloaded.
unsafe fn lead(file: &File) -> usize {
    let (mut symbols, mut texts) = (0, 0);
    let mut tables = [(0, 0); 2];
    let mut next = file.dynamic as *const Entry;
    // SAFETY: the dynamic section of a loaded file ends with this tag.
    while let entry = unsafe { &*next }
        && entry.tag != DT_NULL
    {
        // The linker may have replaced offsets with addresses.
        let address = if entry.value < file.base { file.base + entry.value } else { entry.value };
        match entry.tag {
            DT_SYMTAB => symbols = address,
            DT_STRTAB => texts = address,
            DT_RELA => tables[0].0 = address,
            DT_RELASZ => tables[0].1 = entry.value,
            DT_JMPREL => tables[1].0 = address,
            DT_PLTRELSZ => tables[1].1 = entry.value,
            _ => {}
        }
        next = next.wrapping_add(1);
    }
    let mut led = 0;
    for (table, bytes) in
        tables.into_iter().filter(|(table, _)| *table != 0 && symbols != 0 && texts != 0)
    {
        let count = bytes / size_of::<Relocation>();
        // SAFETY: the dynamic section gives the table's length; its memory stays valid.
        for relocation in unsafe { std::slice::from_raw_parts(table as *const Relocation, count) } {
            if !ADDRESSES.contains(&(relocation.info as u32)) {
                continue;
            }
            let symbol =
                (symbols as *const libc::Elf64_Sym).wrapping_add((relocation.info >> 32) as usize);
            // SAFETY: the linker has resolved this relocation to this symbol, whose name is a C
            // string.
            let name =
                unsafe { CStr::from_ptr((texts + (*symbol).st_name as usize) as *const c_char) };
            if let Some(function) = replacement(name) {
                let slot = file.base + relocation.offset as usize;
                // SAFETY: the slot holds the address of the function with this name, which has the
                // replacement's type; the linker does not change it any more.
                led += usize::from(unsafe { write(slot, function, file.sealed.contains(&slot)) });
            }
        }
    }
    led
}

/// Writes `function` to a slot. Returns whether it could.
///
/// # Safety
/// The slot holds the address of a function of that type, and nobody else writes to it.
unsafe fn write(slot: usize, function: usize, sealed: bool) -> bool {
    let page = page();
    let protect = |how| {
        // SAFETY: the slot's page is the file's own data. It is made writable, or read-only again
        // as before.
        unsafe { libc::mprotect((slot / page * page) as *mut c_void, page, how) == 0 }
    };
    if sealed && !protect(libc::PROT_READ | libc::PROT_WRITE) {
        return false;
    }
    // SAFETY: guaranteed by the caller; it is writable now. Atomic, for threads that call through
    // it concurrently.
    unsafe { std::sync::atomic::AtomicUsize::from_ptr(slot as *mut usize) }
        .store(function, std::sync::atomic::Ordering::Release);
    if sealed {
        protect(libc::PROT_READ);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_of_a_sealed_range_are_rounded_down() {
        assert_eq!(sealed(0x3d90, 0x270, 0x1000), 0x3000..0x4000);
        assert_eq!(sealed(0x3000, 0x1800, 0x1000), 0x3000..0x4000);
        assert!(sealed(0x3010, 0x800, 0x1000).is_empty());
    }

    #[test]
    fn sealed_ranges_are_those_that_the_linker_made_read_only() {
        // The C library is already linked; other files may be in the middle of being loaded.
        let function = libc::getpid as *const () as usize;
        let files = files();
        let of_c = files.iter().filter(|file| file.base <= function).max_by_key(|file| file.base);
        let of_c = of_c.expect("the C library is loaded");
        let maps = std::fs::read_to_string("/proc/self/maps").expect("a process may read its own");
        let may_be_written = |address: usize| {
            let mut parts = maps.lines().filter_map(|line| {
                let (range, how) = line.split_once(' ')?;
                let (begin, end) = range.split_once('-')?;
                let at = |text| usize::from_str_radix(text, 16).expect("an address");
                (at(begin)..at(end)).contains(&address).then(|| how.starts_with("rw"))
            });
            parts.next().expect("it is mapped")
        };
        let Range { start, end } = of_c.sealed;
        assert!(start < end && of_c.keep(), "{of_c:?}");
        assert!(!may_be_written(start) && !may_be_written(end - 1), "{of_c:?}");
        assert!(may_be_written(end), "the bytes after it are data: {of_c:?}");
    }
}
