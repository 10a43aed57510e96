//! The expected time of a bench.

use std::hint::black_box;
use std::time::{Duration, Instant};

use kvx::Memory;

use super::content;
use super::measure::verified_lists;
use super::points::{self, Point};
use super::rounds::Effort;
use crate::Result;

/// The bytes of the sample that measures this machine: more than caches hold.
const SAMPLE: u64 = 64 << 20;
/// Seconds to start both processes, to connect them, and to end them.
const START: f64 = 0.5;
/// Copies of memory for each byte that a backend other than SHM moves: sockets and libraries copy
/// more than once, and both sides share the memory.
const COPIES: f64 = 3.0;

/// The speeds of this machine, in bytes per second.
#[derive(Clone, Copy, Debug)]
struct Speeds {
    /// One thread copies.
    copy: f64,
    /// One thread fills memory with content, or compares it.
    fill: f64,
    /// One thread fills memory whose pages the kernel must provide first.
    first: f64,
}

impl Speeds {
    fn measure() -> Result<Self> {
        let (from, mut to) = (vec![1u8; SAMPLE as usize], vec![2u8; SAMPLE as usize]);
        let per_second = |start: Instant| SAMPLE as f64 / start.elapsed().as_secs_f64().max(1e-6);
        let start = Instant::now();
        black_box(&mut to).copy_from_slice(black_box(&from));
        let copy = per_second(start);
        let memory = Memory::owned(vec![0; SAMPLE as usize]);
        let start = Instant::now();
        content::fill(&memory, SAMPLE)?;
        let first = per_second(start);
        let start = Instant::now();
        content::fill(&memory, SAMPLE)?;
        Ok(Speeds { copy, fill: per_second(start), first })
    }
}

/// Returns the expected time for the points, on this machine.
pub(super) fn duration(points: &[Point], effort: Effort, beside: bool) -> Result<Duration> {
    Ok(seconds(points, effort, beside, Speeds::measure()?))
}

/// Returns `about 5 s`.
pub(super) fn announced(about: Duration) -> String {
    match about.as_secs_f64().round() {
        seconds @ 0.0..300.0 => format!("about {} s", seconds.max(1.0)),
        seconds => format!("about {} min", (seconds / 60.0).round()),
    }
}

fn seconds(points: &[Point], effort: Effort, beside: bool, speeds: Speeds) -> Duration {
    let Speeds { copy, fill, first } = speeds;
    let (ours, theirs) = points::memory(points);
    let pools = [ours, theirs].map(|side| side.on_host() + side.on_device());
    let mut seconds = START + (pools[0] + pools[1]) as f64 / first;
    for point in points {
        let moved = if point.backend == "SHM" { copy } else { copy / COPIES };
        let once = point.shape.bytes() as f64 / moved;
        let rounds = (if beside { 3.0 } else { 2.0 }) * effort.rounds as f64;
        // A round moves the blocks once at least, and ends after the transfer that exceeds its time.
        seconds += (rounds * once).max(effort.seconds + rounds * once / 2.0);
        // kvx's bytes are compared before and after the rounds, the limit's once. Each time the
        // destination is wiped, which is faster than to fill; the source is filled twice.
        let compared = verified_lists(point) as f64 * point.shape.bytes() as f64;
        seconds += 4.0 * point.shape.memory() as f64 / fill;
        seconds += 3.0 * compared * (1.0 / fill + 1.0 / moved);
    }
    Duration::from_secs_f64(seconds)
}

#[cfg(test)]
mod tests {
    use super::super::points::Shape;
    use super::*;

    #[test]
    fn every_part_of_a_bench_counts() {
        let point = Point::of_the_document();
        let effort = Effort::new(11, 1.0).unwrap();
        let speeds = Speeds { copy: 8e9, fill: 2e9, first: 1e9 };
        let of = |points: &[Point], beside| seconds(points, effort, beside, speeds).as_secs_f64();
        let one = of(&[point], false);
        // 256 MiB of memory: 0.54 s for its pages, 0.54 s to fill it; 64 MiB are compared.
        assert!((one - (0.5 + 0.54 + 1.0 + 0.54 + 0.13)).abs() < 0.05, "{one}");
        assert!((of(&[point, point], false) - one - 1.67).abs() < 0.05);
        let large = Point { shape: Shape { count: 1 << 18, lists: 1, ..point.shape }, ..point };
        assert!(of(&[large], true) > of(&[large], false) + 1.0);
        assert!(of(&[Point { backend: "TCP", ..large }], false) > of(&[large], false) + 3.0);
        assert_eq!(announced(Duration::from_millis(200)), "about 1 s");
        assert_eq!(announced(Duration::from_secs(299)), "about 299 s");
        assert_eq!(announced(Duration::from_secs(301)), "about 5 min");
    }
}
