//! CPU time of this process and of others, to the nanosecond.

use std::time::Duration;

/// CPU time of all threads of a process so far; zero when it is gone.
pub(crate) fn of(process: u32) -> Duration {
    // How the kernel names another process's clock: the complement of its number, then the clock's
    // kind.
    const WHOLE_PROCESS: i32 = 2;
    read((!process.cast_signed() << 3) | WHOLE_PROCESS)
}

/// CPU time of this process and of another one.
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
