//! Objects of libstdc++ that NIXL passes, with the layout declared by hand (Itanium ABI, GCC's
//! layout since 5).

use std::ffi::{CStr, c_void};
use std::ptr::{addr_of, addr_of_mut, null_mut};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};

/// The process's own `operator new` and `operator delete`: NIXL frees memory from this library, and
/// this library frees NIXL's, so both must use the same heap.
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
    // A program may have its own (tcmalloc, jemalloc), which the linker then uses for all
    // libraries.
    let program = Library::this();
    // SAFETY: libstdc++ is already loaded: NIXL is written in C++.
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
    HEAP.get().expect("`nixl_plugin_init` has found the heap")
}

/// Allocates bytes with `operator new`.
unsafe fn allocate<T>(bytes: usize) -> *mut T {
    // SAFETY: `operator new` is sound for any size; it throws only where Rust would abort.
    unsafe { (heap().new)(bytes) }.cast()
}

/// Frees memory from `operator new`.
unsafe fn free<T>(at: *mut T) {
    // SAFETY: guaranteed by the caller.
    unsafe { (heap().delete)(at.cast()) }
}

/// `std::string`. Up to 15 bytes are in `small`, which otherwise holds the capacity.
#[repr(C)]
pub(super) struct Str {
    at: *mut u8,
    len: usize,
    small: [u8; 16],
}

impl Str {
    const SMALL: usize = 15;

    /// Returns the string's bytes.
    ///
    /// # Safety
    /// `this` is a live `std::string` that nobody changes for `'a`.
    pub(super) unsafe fn bytes<'a>(this: *const Str) -> &'a [u8] {
        // SAFETY: guaranteed by the caller.
        unsafe { std::slice::from_raw_parts((*this).at, (*this).len) }
    }

    /// Returns the string's text; invalid UTF-8 is replaced.
    ///
    /// # Safety
    /// As for [`bytes`](Str::bytes).
    pub(super) unsafe fn text(this: *const Str) -> String {
        // SAFETY: guaranteed by the caller.
        String::from_utf8_lossy(unsafe { Str::bytes(this) }).into_owned()
    }

    /// Returns whether this memory looks like a string of at most `longest` bytes. Does not follow
    /// the pointer.
    ///
    /// # Safety
    /// 32 bytes at `this` are readable.
    pub(super) unsafe fn is_plausible(this: *const Str, longest: usize) -> bool {
        // SAFETY: guaranteed by the caller.
        let (at, len, small) =
            unsafe { ((*this).at, (*this).len, addr_of!((*this).small).cast::<u8>()) };
        let inside = std::ptr::eq(at, small);
        len <= longest && (inside == (len <= Str::SMALL) || !inside) && !at.is_null()
    }

    /// Creates a string in uninitialised memory.
    ///
    /// # Safety
    /// `this` has space for it, and does not move.
    pub(super) unsafe fn make(this: *mut Str, bytes: &[u8]) {
        // SAFETY: guaranteed by the caller; the buffer is one byte longer than the bytes that are
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

    /// Destroys the string.
    ///
    /// # Safety
    /// `this` is a live `std::string`, and is not used as one afterwards.
    pub(super) unsafe fn end(this: *mut Str) {
        // SAFETY: guaranteed by the caller; a string that does not point to `small` owns its
        // buffer.
        unsafe {
            if (*this).at != addr_of_mut!((*this).small).cast() {
                free((*this).at);
            }
        }
    }

    /// Replaces the string's content.
    ///
    /// # Safety
    /// `this` is a live `std::string`.
    pub(super) unsafe fn set(this: *mut Str, bytes: &[u8]) {
        // SAFETY: guaranteed by the caller.
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

    /// Returns the vector's elements.
    ///
    /// # Safety
    /// `this` is a live vector of `T` that nobody changes for `'a`.
    pub(super) unsafe fn slice<'a>(this: *const Vector<T>) -> &'a [T] {
        // SAFETY: guaranteed by the caller.
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

    /// Allocates `count` elements, which count as initialised; the caller writes all of them.
    ///
    /// # Safety
    /// `this` is a live, empty vector.
    pub(super) unsafe fn grow(this: *mut Vector<T>, count: usize) -> *mut T {
        // SAFETY: guaranteed by the caller; the old buffer is released.
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
    /// Returns an empty map. Its only bucket is on the heap, so it may be moved.
    pub(super) fn empty() -> Map {
        // SAFETY: eight bytes were allocated.
        let buckets = unsafe {
            let buckets: *mut usize = allocate(8);
            buckets.write(0);
            buckets
        };
        Map { buckets, count: 1, first: null_mut(), size: 0, load: 1.0, next: 0, single: 0 }
    }

    /// Returns the map's pairs, at most a thousand.
    ///
    /// # Safety
    /// `this` is a live map that nobody changes meanwhile.
    pub(super) unsafe fn pairs(this: *const Map) -> Vec<(String, String)> {
        let mut pairs = Vec::new();
        // SAFETY: guaranteed by the caller: the nodes form a list that ends.
        unsafe {
            let mut node = (*this).first;
            while !node.is_null() && pairs.len() < 1000 {
                pairs.push((Str::text(addr_of!((*node).key)), Str::text(addr_of!((*node).value))));
                node = (*node).next;
            }
        }
        pairs
    }

    /// Destroys an [`empty`](Map::empty) map.
    ///
    /// # Safety
    /// `this` is a map from `empty`, and nothing was inserted.
    pub(super) unsafe fn end_empty(this: *mut Map) {
        // SAFETY: guaranteed by the caller.
        unsafe { free((*this).buckets) };
    }
}

const _: () =
    assert!(size_of::<Str>() == 32 && size_of::<Map>() == 56 && size_of::<Vector<u8>>() == 24);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_of_all_lengths_are_read_back() {
        find_heap().expect("libstdc++ is installed");
        for len in [0, 1, 15, 16, 17, 100_000] {
            let bytes = vec![7u8; len];
            let mut string = std::mem::MaybeUninit::<Str>::uninit();
            let string = string.as_mut_ptr();
            // SAFETY: initialised before it is read, and destroyed once.
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
        find_heap().expect("libstdc++ is installed");
        let mut vector = Vector::<u32>::EMPTY;
        // SAFETY: grown from empty, written completely, and released once.
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
