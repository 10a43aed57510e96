//! Copies of bytes that others may access at the same time.

/// Copies `len` bytes while others may write to either side and read from the destination.
///
/// Bytes that are written concurrently arrive with unspecified but initialised content. To the
/// compiler, the copy consists of `len` relaxed atomic loads and stores of one byte each, in no
/// order, so it has no data race with other copies of this kind.
///
/// # Safety
/// `from..from + len` is readable and `into..into + len` is writable memory until the call returns,
/// and the two do not overlap. Others access them meanwhile only by this function, by system calls,
/// from devices or from other processes: not through references, and not by plain reads and writes.
#[inline(always)]
pub unsafe fn copy_shared(from: *const u8, into: *mut u8, len: usize) {
    // SAFETY: the caller upholds the same contract.
    unsafe { imp::copy(from, into, len) }
}

#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64"),
    not(any(kvx_portable, kvx_tsan))
))]
mod imp {
    use std::arch::asm;

    /// Calls the C library's `memcpy` from assembly. The compiler cannot see into the block,
    /// whereas a plain copy would let it assume that nothing else accesses the bytes. The processor
    /// executes the library's code.
    #[inline(always)]
    pub(super) unsafe fn copy(from: *const u8, into: *mut u8, len: usize) {
        // SAFETY: this calls `memcpy` by the C calling convention: the arguments are in their
        // registers, and `clobber_abi` names all registers that the call may change. `memcpy`
        // accesses only the two ranges, which the caller promises are valid.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            asm!(
                "call {copy}",
                copy = in(reg) libc::memcpy as *const (),
                in("rdi") into,
                in("rsi") from,
                in("rdx") len,
                clobber_abi("C"),
            );
        }
        // SAFETY: this calls `memcpy` by the C calling convention: the arguments are in their
        // registers, and `clobber_abi` names all registers that the call may change. `memcpy`
        // accesses only the two ranges, which the caller promises are valid.
        #[cfg(target_arch = "aarch64")]
        unsafe {
            asm!(
                "blr {copy}",
                copy = in(reg) libc::memcpy as *const (),
                in("x0") into,
                in("x1") from,
                in("x2") len,
                clobber_abi("C"),
            );
        }
    }
}

#[cfg(not(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64"),
    not(any(kvx_portable, kvx_tsan))
)))]
mod imp {
    use std::sync::atomic::{AtomicU8, Ordering};

    /// Copies by relaxed atomic accesses, byte by byte: on targets without the assembly above, and
    /// for ThreadSanitizer (`--cfg kvx_tsan`), which sees these accesses but not assembly.
    pub(super) unsafe fn copy(from: *const u8, into: *mut u8, len: usize) {
        for at in 0..len {
            // SAFETY: `at` is below `len`, and the caller promises that others access the ranges
            // only atomically.
            unsafe {
                let byte = AtomicU8::from_ptr(from.add(at).cast_mut()).load(Ordering::Relaxed);
                AtomicU8::from_ptr(into.add(at)).store(byte, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use crate::Memory;

    #[test]
    fn every_length_and_alignment_is_copied_and_nothing_beside() {
        let from: Vec<u8> = (0..600_u32).map(|at| (at * 7 + 3) as u8).collect();
        for len in [0, 1, 7, 8, 9, 31, 64, 65, 255, 513] {
            for (out, back) in [(0, 0), (1, 3), (7, 8), (8, 1)] {
                let memory = Memory::owned(vec![0xee; 600]);
                memory.copy_in(out, &from[back..back + len]).unwrap();
                let mut all = vec![0; 600];
                memory.copy_out(0, &mut all).unwrap();
                assert_eq!(all[out..out + len], from[back..back + len]);
                assert!(all[..out].iter().chain(&all[out + len..]).all(|byte| *byte == 0xee));
            }
        }
    }

    /// ThreadSanitizer reports a data race here if the copies are plain
    /// (docs/project/decisions/shared-copies.md).
    #[test]
    fn threads_copy_in_and_out_of_the_same_bytes_at_once() {
        let (memory, done) = (Memory::owned(vec![1; 4096]), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let writers: Vec<_> = [1, 2]
                .map(|byte| {
                    let memory = &memory;
                    scope.spawn(move || {
                        (0..300).for_each(|_| memory.copy_in(0, &[byte; 4096]).unwrap())
                    })
                })
                .into();
            let reader = scope.spawn(|| {
                let mut seen = [0; 4096];
                while !done.load(Ordering::Relaxed) {
                    memory.copy_out(0, &mut seen).unwrap();
                    assert!(seen.iter().all(|byte| matches!(byte, 1 | 2)), "bytes of nobody's");
                }
            });
            writers.into_iter().for_each(|writer| writer.join().unwrap());
            done.store(true, Ordering::Relaxed);
            reader.join().unwrap();
        });
    }
}
