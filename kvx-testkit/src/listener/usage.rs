//! The resources of a server, as the kernel counts them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::check::{CUT_OFF, Failure};
use crate::process_state::number_of;

/// The pause between two measurements.
const PAUSE: Duration = Duration::from_millis(5);
/// The number of equal measurements after which the descriptors count as settled, and the pause
/// between them.
const ALIKE: usize = 5;
const SETTLING: Duration = Duration::from_millis(20);

/// The resources of a process.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ServerUsage {
    pub(super) descriptors: u64,
    pub(super) threads: u64,
    /// Resident bytes, and the most of them since [`reset_peak`].
    pub(super) resident: u64,
    pub(super) peak: u64,
    /// Bytes of private memory, resident or not. Memory that was allocated and not used yet counts.
    pub(super) data: u64,
}

impl ServerUsage {
    pub(super) fn of(process: u32) -> Result<Self, Failure> {
        let failed = |why: std::io::Error| {
            Failure::new(format!("the server's process {process} cannot be measured: {why}"))
        };
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).map_err(failed)?;
        let descriptors = std::fs::read_dir(format!("/proc/{process}/fd")).map_err(failed)?.count();
        let bytes = |name| number_of(&status, name) * 1024;
        Ok(ServerUsage {
            descriptors: descriptors as u64,
            threads: number_of(&status, "Threads:"),
            resident: bytes("VmRSS:"),
            peak: bytes("VmHWM:"),
            data: bytes("VmData:"),
        })
    }
}

/// Sets the highest number of resident bytes to the current one.
pub(super) fn reset_peak(process: u32) -> Result<(), Failure> {
    // 5 is the kernel's command for that.
    std::fs::write(format!("/proc/{process}/clear_refs"), "5").map_err(|why| {
        Failure::new(format!("the peak of process {process} cannot be reset: {why}"))
    })
}

/// Waits until the number of descriptors stays the same. Returns the usage.
pub(super) fn settled(process: u32) -> Result<ServerUsage, Failure> {
    let until = Instant::now() + CUT_OFF;
    let mut last = ServerUsage::of(process)?;
    let mut alike = 1;
    while alike < ALIKE && Instant::now() < until {
        std::thread::sleep(SETTLING);
        let now = ServerUsage::of(process)?;
        alike = if now.descriptors == last.descriptors { alike + 1 } else { 1 };
        last = now;
    }
    Ok(last)
}

/// The highest usage so far.
#[derive(Default)]
pub(super) struct PeakUsage(Mutex<ServerUsage>);

impl PeakUsage {
    fn lock(&self) -> MutexGuard<'_, ServerUsage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, now: ServerUsage) {
        let mut most = self.lock();
        let ServerUsage { descriptors, threads, resident, peak, data } = now;
        most.descriptors = most.descriptors.max(descriptors);
        most.threads = most.threads.max(threads);
        most.resident = most.resident.max(resident);
        most.peak = most.peak.max(peak);
        most.data = most.data.max(data);
    }

    pub(super) fn highest(&self) -> ServerUsage {
        *self.lock()
    }
}

/// Measures the usage until `end`, or until the process has ended.
pub(super) fn watch_until(process: u32, peak: &PeakUsage, end: &AtomicBool) {
    while !end.load(Ordering::Relaxed) {
        // The attack itself reports a process that has ended.
        let Ok(now) = ServerUsage::of(process) else { return };
        peak.add(now);
        std::thread::sleep(PAUSE);
    }
}
