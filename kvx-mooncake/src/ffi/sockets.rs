//! Keeps children of this process from inheriting the engine's sockets.
//!
//! The engine makes its sockets without `SOCK_CLOEXEC`. A child process that the program starts has
//! copies of those that are open at that moment, and what the engine closes later stays open there:
//! the listener of the engine at the other end waits 5 s for the end of each connection, and
//! accepts no other meanwhile; the port of an engine that is gone still answers. So the engine's
//! files call kvx's `socket` and `accept`, which set the flag: their entries in the tables through
//! which a file calls other libraries are replaced. No other calls change, except those of a file
//! that another thread happens to load in the same milliseconds.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ops::Range;

use libc::{SOCK_CLOEXEC, sockaddr, socklen_t};

/// A file that the dynamic linker has loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct File {
    name: CString,
    base: usize,
    /// Its dynamic section.
    dynamic: usize,
    /// The part that became read-only after it was linked.
    sealed: Range<usize>,
}

impl File {
    /// Pins the file, even if it is closed elsewhere, and waits until it is linked. Returns whether
    /// it is loaded.
    fn keep(&self) -> bool {
        let how = libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
        // SAFETY: nothing is loaded, so that nothing of the file's runs.
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

/// The relocations that are the address of a function elsewhere: `GLOB_DAT` and `JUMP_SLOT`.
#[cfg(target_arch = "x86_64")]
const ADDRESSES: [u32; 2] = [6, 7];
#[cfg(target_arch = "aarch64")]
const ADDRESSES: [u32; 2] = [1025, 1026];
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const ADDRESSES: [u32; 0] = [];

unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: numbers only.
    unsafe { libc::socket(domain, kind | SOCK_CLOEXEC, protocol) }
}

unsafe extern "C" fn accept(listener: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the caller's promise to `accept`, which is one to this.
    unsafe { libc::accept4(listener, address, len, SOCK_CLOEXEC) }
}

unsafe extern "C" fn accept4(
    listener: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { libc::accept4(listener, address, len, flags | SOCK_CLOEXEC) }
}

/// The function of ours in place of the system's.
fn replacement(name: &CStr) -> Option<usize> {
    match name.to_bytes() {
        b"socket" => Some(socket as *const () as usize),
        b"accept" => Some(accept as *const () as usize),
        b"accept4" => Some(accept4 as *const () as usize),
        _ => None,
    }
}

fn page() -> usize {
    // SAFETY: a number.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Returns what the linker makes read-only of a part that is to be: it rounds both ends down to a
/// page.
fn sealed(begin: usize, len: usize, page: usize) -> Range<usize> {
    begin / page * page..(begin + len) / page * page
}

/// The files that are loaded now.
pub(super) fn files() -> Vec<File> {
    unsafe extern "C" fn note(
        info: *mut libc::dl_phdr_info,
        _: libc::size_t,
        found: *mut c_void,
    ) -> c_int {
        // SAFETY: the C library lends the description for the length of this call, and `found` is
        // the list below.
        let (info, found) = unsafe { (&*info, &mut *found.cast::<Vec<File>>()) };
        if info.dlpi_name.is_null() {
            return 0;
        }
        // SAFETY: the C library lends the description for the length of this call, and `found` is
        // the list below.
        let name = unsafe { CStr::from_ptr(info.dlpi_name) };
        let (base, page) = (info.dlpi_addr as usize, page());
        // SAFETY: as many headers as it says.
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
    // SAFETY: the callback takes what it is handed here, and does not unwind.
    unsafe { libc::dl_iterate_phdr(Some(note), (&raw mut found).cast()) };
    found
}

/// Leads the calls of the files that have been loaded since `before` to the functions above.
/// Returns how many entries that were: with none, children inherit what the engine has open.
pub(super) fn keep_from_children(before: &[File]) -> usize {
    let is_new = |file: &File| !before.contains(file) && file.keep();
    let kept: Vec<_> = files().into_iter().filter(is_new).collect();
    // Another thread may have closed one before it was kept, and opened it again elsewhere.
    let there = files().into_iter().filter(|file| kept.contains(file));
    // SAFETY: these are there, by names that have been kept.
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
        // The linker may have turned offsets into addresses.
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
        // SAFETY: the table is as long as the dynamic section says, in memory that stays.
        for relocation in unsafe { std::slice::from_raw_parts(table as *const Relocation, count) } {
            if !ADDRESSES.contains(&(relocation.info as u32)) {
                continue;
            }
            let symbol =
                (symbols as *const libc::Elf64_Sym).wrapping_add((relocation.info >> 32) as usize);
            // SAFETY: the linker has followed this relocation to this symbol, whose name is a C
            // string.
            let name =
                unsafe { CStr::from_ptr((texts + (*symbol).st_name as usize) as *const c_char) };
            if let Some(function) = replacement(name) {
                let slot = file.base + relocation.offset as usize;
                // SAFETY: the slot holds the address of a function of this name, which ours stands
                // in for; the linker is done with it.
                led += usize::from(unsafe { write(slot, function, file.sealed.contains(&slot)) });
            }
        }
    }
    led
}

/// Writes `function` to a slot. Returns whether it could.
///
/// # Safety
/// A slot for the address of a function of that type, which nobody else writes to.
unsafe fn write(slot: usize, function: usize, sealed: bool) -> bool {
    let page = page();
    let protect = |how| {
        // SAFETY: the slot's page is the file's own data, and is made writable, or read-only again
        // as it was.
        unsafe { libc::mprotect((slot / page * page) as *mut c_void, page, how) == 0 }
    };
    if sealed && !protect(libc::PROT_READ | libc::PROT_WRITE) {
        return false;
    }
    // SAFETY: the caller's promise; it is writable now. Atomic, for threads that call through it
    // meanwhile.
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
    fn both_ends_of_what_is_sealed_are_rounded_down() {
        assert_eq!(sealed(0x3d90, 0x270, 0x1000), 0x3000..0x4000);
        assert_eq!(sealed(0x3000, 0x1800, 0x1000), 0x3000..0x4000);
        assert!(sealed(0x3010, 0x800, 0x1000).is_empty());
    }

    #[test]
    fn what_counts_as_sealed_is_what_the_linker_has_made_read_only() {
        // The C library is linked long since; others may be on their way into this process.
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
        assert!(may_be_written(end), "what lies behind it is data: {of_c:?}");
    }
}
