//! Objects of libstdc++ that NIXL passes, laid out by hand (Itanium ABI, the layout of GCC since
//! 5).

use std::ffi::{CStr, c_void};
use std::ptr::{addr_of, addr_of_mut, null_mut};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};

/// The process's own `operator new` and `operator delete`: what NIXL frees must come from where it
/// frees to.
struct Heap {
    new: unsafe extern "C" fn(usize) -> *mut c_void,
    delete: unsafe extern "C" fn(*mut c_void),
}

static HEAP: OnceLock<Heap> = OnceLock::new();

/// Finds the heap. Errors: neither the program nor libstdc++ has one.
pub(super) fn find_heap() -> Result<(), String> {
    if HEAP.get().is_some() {
        return Ok(());
    }
    // A program may bring its own (tcmalloc, jemalloc), and the linker then gives it to all.
    let program = Library::this();
    // SAFETY: libstdc++ is in this process already: NIXL is written in C++.
    let library = unsafe { Library::open(Some("libstdc++.so.6"), RTLD_LAZY | RTLD_LOCAL) };
    let library = library.map_err(|error| error.to_string())?;
    // SAFETY: the mangled name encodes this signature.
    let find = |name: &CStr| unsafe {
        let symbol = program.get::<*mut c_void>(name.to_bytes_with_nul());
        symbol.or_else(|_| library.get(name.to_bytes_with_nul())).map(|symbol| symbol.into_raw())
    };
    let (new, delete) = (find(c"_Znwm"), find(c"_ZdlPv"));
    let (Ok(new), Ok(delete)) = (new, delete) else {
        return Err("this process has no operator new".into());
    };
    // SAFETY: the mangled name encodes this signature.
    let heap = unsafe {
        Heap {
            new: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(usize) -> *mut c_void>(
                new,
            ),
            delete: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void)>(delete),
        }
    };
    HEAP.get_or_init(|| heap);
    std::mem::forget(library); // never closed
    Ok(())
}

fn heap() -> &'static Heap {
    HEAP.get().expect("found before NIXL got the plug-in")
}

/// Bytes from `operator new`.
unsafe fn allocate<T>(bytes: usize) -> *mut T {
    // SAFETY: `operator new` of any size is sound; it throws only where Rust would abort.
    unsafe { (heap().new)(bytes) }.cast()
}

/// Frees memory from `operator new`.
unsafe fn free<T>(at: *mut T) {
    // SAFETY: the caller's promise.
    unsafe { (heap().delete)(at.cast()) }
}

/// `std::string`. Up to 15 bytes lie in `small`; else the capacity does.
#[repr(C)]
pub(super) struct Str {
    at: *mut u8,
    len: usize,
    small: [u8; 16],
}

impl Str {
    const SMALL: usize = 15;

    /// Its bytes.
    ///
    /// # Safety
    /// `this` is a live `std::string` that nobody changes for `'a`.
    pub(super) unsafe fn bytes<'a>(this: *const Str) -> &'a [u8] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts((*this).at, (*this).len) }
    }

    /// As text; what is no UTF-8 is replaced.
    ///
    /// # Safety
    /// As [`bytes`](Str::bytes).
    pub(super) unsafe fn text(this: *const Str) -> String {
        // SAFETY: the caller's promise.
        String::from_utf8_lossy(unsafe { Str::bytes(this) }).into_owned()
    }

    /// Returns whether this memory looks like a string of at most `longest` bytes. Follows no
    /// pointer.
    ///
    /// # Safety
    /// 32 bytes at `this` are readable.
    pub(super) unsafe fn is_plausible(this: *const Str, longest: usize) -> bool {
        // SAFETY: the caller's promise.
        let (at, len, small) =
            unsafe { ((*this).at, (*this).len, addr_of!((*this).small).cast::<u8>()) };
        let inside = std::ptr::eq(at, small);
        len <= longest && (inside == (len <= Str::SMALL) || !inside) && !at.is_null()
    }

    /// Makes one where there is none.
    ///
    /// # Safety
    /// `this` has room for it, and stays where it is.
    pub(super) unsafe fn make(this: *mut Str, bytes: &[u8]) {
        // SAFETY: the caller's promise; the buffer is one byte longer than the bytes that are
        // written before the zero.
        unsafe {
            let small = addr_of_mut!((*this).small).cast::<u8>();
            let at = if bytes.len() <= Str::SMALL {
                small
            } else {
                small.cast::<usize>().write(bytes.len());
                allocate(bytes.len() + 1)
            };
            at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            at.add(bytes.len()).write(0);
            addr_of_mut!((*this).at).write(at);
            addr_of_mut!((*this).len).write(bytes.len());
        }
    }

    /// Ends it.
    ///
    /// # Safety
    /// `this` is a live `std::string`, and is none afterwards.
    pub(super) unsafe fn end(this: *mut Str) {
        // SAFETY: the caller's promise; a string that points elsewhere owns what it points to.
        unsafe {
            if (*this).at != addr_of_mut!((*this).small).cast() {
                free((*this).at);
            }
        }
    }

    /// Replaces its content.
    ///
    /// # Safety
    /// `this` is a live `std::string`.
    pub(super) unsafe fn set(this: *mut Str, bytes: &[u8]) {
        // SAFETY: the caller's promise.
        unsafe {
            Str::end(this);
            Str::make(this, bytes);
        }
    }
}

/// `std::vector<T>`.
#[repr(C)]
pub(super) struct Vector<T> {
    begin: *mut T,
    end: *mut T,
    room: *mut T,
}

impl<T> Vector<T> {
    pub(super) const EMPTY: Vector<T> =
        Vector { begin: null_mut(), end: null_mut(), room: null_mut() };

    /// Its elements.
    ///
    /// # Safety
    /// It is a live vector of `T` that nobody changes for `'a`.
    pub(super) unsafe fn slice<'a>(this: *const Vector<T>) -> &'a [T] {
        // SAFETY: the caller's promise.
        unsafe {
            if (*this).begin.is_null() {
                return &[];
            }
            std::slice::from_raw_parts(
                (*this).begin,
                (*this).end.offset_from_unsigned((*this).begin),
            )
        }
    }

    /// Room for `count` elements, which the caller writes; all of them count as written.
    ///
    /// # Safety
    /// `this` is a live, empty vector.
    pub(super) unsafe fn grow(this: *mut Vector<T>, count: usize) -> *mut T {
        // SAFETY: the caller's promise; the old buffer is released.
        unsafe {
            if !(*this).begin.is_null() {
                free((*this).begin);
            }
            let begin: *mut T = allocate(size_of::<T>() * count.max(1));
            this.write(Vector { begin, end: begin.add(count), room: begin.add(count) });
            begin
        }
    }
}

/// `std::unordered_map<std::string, std::string>`.
#[repr(C)]
pub(super) struct Map {
    buckets: *mut usize,
    count: usize,
    first: *mut Node,
    size: usize,
    load: f32,
    next: usize,
    single: usize,
}

#[repr(C)]
struct Node {
    next: *mut Node,
    key: Str,
    value: Str,
    hash: usize,
}

impl Map {
    /// An empty one. Its only bucket is on the heap, so that it may be moved.
    pub(super) fn empty() -> Map {
        // SAFETY: eight bytes were asked for.
        let buckets = unsafe {
            let buckets: *mut usize = allocate(8);
            buckets.write(0);
            buckets
        };
        Map { buckets, count: 1, first: null_mut(), size: 0, load: 1.0, next: 0, single: 0 }
    }

    /// Its pairs, at most a thousand.
    ///
    /// # Safety
    /// `this` is a live map that nobody changes meanwhile.
    pub(super) unsafe fn pairs(this: *const Map) -> Vec<(String, String)> {
        let mut pairs = Vec::new();
        // SAFETY: the caller's promise: each node is one of a list that ends.
        unsafe {
            let mut node = (*this).first;
            while !node.is_null() && pairs.len() < 1000 {
                pairs.push((Str::text(addr_of!((*node).key)), Str::text(addr_of!((*node).value))));
                node = (*node).next;
            }
        }
        pairs
    }

    /// Ends an [`empty`](Map::empty) one.
    ///
    /// # Safety
    /// It is one, and nothing was put into it.
    pub(super) unsafe fn end_empty(this: *mut Map) {
        // SAFETY: the caller's promise.
        unsafe { free((*this).buckets) };
    }
}

const _: () =
    assert!(size_of::<Str>() == 32 && size_of::<Map>() == 56 && size_of::<Vector<u8>>() == 24);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_of_all_lengths_come_back() {
        find_heap().expect("libstdc++ is on this machine");
        for len in [0, 1, 15, 16, 17, 100_000] {
            let bytes = vec![7u8; len];
            let mut string = std::mem::MaybeUninit::<Str>::uninit();
            let string = string.as_mut_ptr();
            // SAFETY: made before it is read, and ended once.
            unsafe {
                Str::make(string, b"something longer than before");
                Str::set(string, &bytes);
                assert_eq!(Str::bytes(string), bytes);
                assert!(Str::is_plausible(string, 100_000));
                assert!(len == 0 || !Str::is_plausible(string, len - 1));
                Str::end(string);
            }
        }
    }

    #[test]
    fn a_vector_holds_what_was_written() {
        find_heap().expect("libstdc++ is on this machine");
        let mut vector = Vector::<u32>::EMPTY;
        // SAFETY: grown from empty, written in full, and released once.
        unsafe {
            assert!(Vector::slice(&vector).is_empty());
            let at = Vector::grow(&mut vector, 2);
            at.write(1);
            at.add(1).write(2);
            assert_eq!(Vector::slice(&vector), [1, 2]);
            free(vector.begin);
        }
    }
}
