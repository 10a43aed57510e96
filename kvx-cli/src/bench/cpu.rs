//! CPU time of this and other processes, in nanoseconds.

use std::time::Duration;

/// Returns the CPU time of all threads of a process so far, or zero if it does not exist.
pub(crate) fn of(process: u32) -> Duration {
    // The kernel's clock id of another process: the complement of its number, then the clock's
    // kind.
    const WHOLE_PROCESS: i32 = 2;
    read((!process.cast_signed() << 3) | WHOLE_PROCESS)
}

/// Returns the CPU time of this process and of another one, summed.
pub(crate) fn ours_and(process: u32) -> Duration {
    of(std::process::id()) + of(process)
}

fn read(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` may be written.
    match unsafe { libc::clock_gettime(clock, &mut time) } {
        0 => Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32),
        _ => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_seen_in_the_clock_of_its_process() {
        let before = of(std::process::id());
        let mut sum = 0u64;
        while of(std::process::id()) < before + Duration::from_millis(20) {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(sum > 0);
        assert!(ours_and(std::process::id()) >= before * 2);
    }
}
