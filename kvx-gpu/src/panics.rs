//! A driver that panics: nobody waits for its device in vain.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use super::driver::{
    CopyDirection, Current, DeviceInfo, Driver, EventHandle, FunctionHandle, Pointer, Rows,
    StreamHandle,
};
use super::{Device, DevicePtr};
use kvx_core::memory::{DeviceAccess as _, Hop};
use kvx_core::sync::Mutex;
use kvx_core::{Completion, DeviceId, ErrorKind, MemoryKind, Result};

const LONG: Duration = Duration::from_secs(8);

/// Panics at its first copy, once it is told to.
struct Panics {
    about: DeviceInfo,
    go: Mutex<Receiver<()>>,
}

fn device(go: Receiver<()>) -> Arc<Device> {
    let about = DeviceInfo {
        kind: MemoryKind::Cuda,
        driver: "TEST",
        id: DeviceId([1; 16]),
        ordinal: 0,
        name: "one that panics".into(),
        bus: String::new(),
        version: String::new(),
    };
    Device::new(Arc::new(Panics { about, go: Mutex::new(go) }))
}

// SAFETY: it has no memory and copies nothing.
unsafe impl Driver for Panics {
    fn about(&self) -> &DeviceInfo {
        &self.about
    }

    fn enter(&self) -> Result<Current> {
        Ok(Current(0))
    }

    fn leave(&self, _: Current) {}

    fn stream(&self) -> Result<StreamHandle> {
        Ok(StreamHandle(0))
    }

    unsafe fn end_stream(&self, _: StreamHandle) -> Result<()> {
        Ok(())
    }

    fn load(&self) -> Result<Vec<FunctionHandle>> {
        Err(self.cannot("no kernels"))
    }

    unsafe fn copy(&self, _: CopyDirection, _: Hop, _: StreamHandle) -> Result<()> {
        self.go.lock().recv_timeout(LONG).ok();
        panic!("a driver panics, as a test wants it");
    }

    fn ends_all_work(&self, _: i64) -> bool {
        false
    }

    fn allocate(&self, _: usize) -> Result<u64> {
        Err(self.cannot("no memory"))
    }

    unsafe fn free(&self, _: u64) -> Result<()> {
        Err(self.cannot("no memory"))
    }

    fn pin(&self, _: usize) -> Result<*mut u8> {
        Err(self.cannot("no memory"))
    }

    unsafe fn unpin(&self, _: *mut u8) -> Result<()> {
        Err(self.cannot("no memory"))
    }

    fn classify(&self, _: u64) -> Result<Pointer> {
        Err(self.cannot("no memory"))
    }

    fn allocation(&self, _: u64) -> Result<Range<u64>> {
        Err(self.cannot("no memory"))
    }

    fn reaches(&self, _: DeviceId) -> Result<Option<bool>> {
        Ok(None)
    }

    fn share(&self, _: u64) -> Result<Vec<u8>> {
        Err(self.cannot("no memory"))
    }

    fn open(&self, _: &[u8]) -> Result<u64> {
        Err(self.cannot("no memory"))
    }

    unsafe fn close(&self, _: u64) -> Result<()> {
        Err(self.cannot("no memory"))
    }

    fn dma_buf(&self, _: Range<u64>) -> Result<(OwnedFd, u64)> {
        Err(self.cannot("no memory"))
    }

    fn event(&self) -> Result<EventHandle> {
        Ok(EventHandle(0))
    }

    unsafe fn end_event(&self, _: EventHandle) -> Result<()> {
        Ok(())
    }

    unsafe fn record(&self, _: EventHandle, _: StreamHandle) -> Result<()> {
        Ok(())
    }

    unsafe fn reached(&self, _: EventHandle) -> Result<bool> {
        Ok(true)
    }

    unsafe fn copy_rows(&self, _: CopyDirection, _: Rows, _: StreamHandle) -> Result<()> {
        Err(self.cannot("no memory"))
    }

    unsafe fn zero(&self, _: u64, _: usize, _: StreamHandle) -> Result<()> {
        Err(self.cannot("no memory"))
    }

    unsafe fn launch(
        &self,
        _: FunctionHandle,
        _: [u32; 3],
        _: u32,
        _: &[u64],
        _: StreamHandle,
    ) -> Result<()> {
        Err(self.cannot("no kernels"))
    }
}

#[test]
fn a_driver_that_panics_leaves_no_ticket_behind() {
    let (go, wait) = channel();
    let device = device(wait);
    let ask = |device: &Device| {
        let (completion, ticket) = Completion::with_ticket();
        // SAFETY: nothing is copied.
        unsafe { device.hop(&[Hop { from: 4096, to: 8192, len: 64 }], ticket) };
        completion
    };
    let (first, second) = (ask(&device), ask(&device));
    go.send(()).unwrap();
    // The driver may have begun the first: its memory is quarantined.
    assert_eq!(first.wait(LONG).unwrap_err().kind(), ErrorKind::Forgotten);
    second.wait(LONG).unwrap_err();
    let error = ask(&device).wait(LONG).unwrap_err();
    assert!(error.sentence().contains("the thread of the device has ended"), "{error}");
    let (completion, ticket) = Completion::with_ticket();
    // SAFETY: as above.
    unsafe { device.gather(DevicePtr(0), &[], &[0].into(), ticket) };
    completion.wait(LONG).unwrap_err();
    drop(device);
}
