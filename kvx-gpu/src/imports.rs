//! Memory of other processes: each allocation is opened once, however many regions it contains.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use super::calls::BlockingCalls;
use super::flights::code;
use crate::driver::{DeviceInfo, Driver, MappedMemory};
use kvx_backend::process::{ProcessId, ProcessWatch};
use kvx_core::backend::IpcHandle;
use kvx_core::backend::sync::Mutex;
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{Error, ErrorKind, Result};

/// The format of this release's handles.
const FORM: u8 = 1;

/// The handle of an allocation for other processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SharedHandle {
    pub(super) owner: ProcessId,
    /// The allocation's address in the owner's process.
    pub(super) base: u64,
    pub(super) len: u64,
    pub(super) name: AllocationName,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AllocationName {
    /// The driver's handle.
    Driver(Vec<u8>),
    /// A descriptor that the owner has open.
    Descriptor(RawFd),
}

impl SharedHandle {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = vec![FORM];
        self.owner.encode(&mut out);
        out.put_u64(self.base);
        out.put_u64(self.len);
        match &self.name {
            AllocationName::Driver(bytes) => {
                out.put_u8(0);
                out.put(bytes);
            }
            AllocationName::Descriptor(file) => {
                out.put_u8(1);
                out.put_u32(file.cast_unsigned());
            }
        }
        debug_assert!(out.len() <= IpcHandle::LONGEST);
        out
    }

    /// Decodes a handle. Errors: `Malformed`, `Incompatible`.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("the handle of device memory", bytes);
        if bytes.len() > IpcHandle::LONGEST {
            return Err(reader.malformed(format_args!("{} bytes", bytes.len())));
        }
        if reader.u8()? != FORM {
            return Err(ErrorKind::Incompatible.because(
                "the peer's kvx uses another format for handles of device memory: use the same \
                 release on both ends",
            ));
        }
        let owner = ProcessId::decode(&mut reader)?;
        let (base, len) = (reader.u64()?, reader.u64()?);
        let name = match reader.u8()? {
            0 => AllocationName::Driver(reader.bytes(reader.left())?.to_vec()),
            1 => AllocationName::Descriptor(reader.u32()?.cast_signed()),
            other => return Err(reader.malformed(format_args!("unknown kind {other} of handle"))),
        };
        reader.end()?;
        Ok(SharedHandle { owner, base, len, name })
    }
}

/// The allocations of other processes that a device has opened. Only the device's thread for calls
/// that may block changes the table, so that no allocation is opened while it is being closed.
#[derive(Default)]
pub(super) struct Imports(Mutex<ImportTable>);

#[derive(Default)]
struct ImportTable {
    by_handle: HashMap<Vec<u8>, ImportedAllocation>,
    by_address: BTreeMap<u64, (u64, Arc<ProcessWatch>)>,
}

struct ImportedAllocation {
    uses: usize,
    address: u64,
    len: u64,
    /// Set if the allocation was imported through a descriptor.
    mapped: Option<MappedMemory>,
    owner: Arc<ProcessWatch>,
}

impl Imports {
    /// Opens an allocation of `owner`, or counts another use of it. Returns its address and length.
    /// Runs on the thread of `calls`, while the device is current. Errors: `PeerLost` if the owner
    /// has ended; `Unsupported`; `Exhausted`.
    ///
    /// The caller has checked that the handle names the peer that sent it as the owner. The bytes
    /// of [`AllocationName::Driver`] are the driver's own, and cannot be checked: the peer may have
    /// received them from a third process, whose memory it could open itself.
    pub(super) fn open(
        self: &Arc<Self>,
        driver: &Driver,
        calls: BlockingCalls,
        key: &[u8],
        handle: &SharedHandle,
        owner: ProcessWatch,
    ) -> Result<(u64, u64, ImportGuard)> {
        let guard = || ImportGuard { imports: Arc::clone(self), calls, key: key.to_vec() };
        let known = self.0.lock().by_handle.get(key).map(|opened| Arc::clone(&opened.owner));
        if let Some(known) = known {
            // Reads files, so not under the lock, which each copy takes.
            if known.is_exiting() {
                return Err(owner_ended());
            }
            if let Some(opened) = self.0.lock().by_handle.get_mut(key) {
                opened.uses += 1;
                return Ok((opened.address, opened.len, guard()));
            }
        }
        let owner = Arc::new(owner);
        let (address, len, mapped) = match map(driver, handle, &owner) {
            Ok((address, _, mapped)) if owner.is_exiting() => {
                // SAFETY: opened above, and no caller has the address yet.
                unsafe { close(driver, address, mapped) };
                Err(owner_ended())
            }
            Err(cause) if owner.is_exiting() => Err(owner_ended().with_source(cause)),
            Err(cause) if cause.kind() == ErrorKind::Native && !driver.is_fatal(code(&cause)) => {
                Err(not_opened(driver, cause))
            }
            mapped => mapped,
        }?;
        let mut table = self.0.lock();
        table.by_address.insert(address, (len, Arc::clone(&owner)));
        table
            .by_handle
            .insert(key.to_vec(), ImportedAllocation { uses: 1, address, len, mapped, owner });
        drop(table);
        Ok((address, len, guard()))
    }

    /// Ends a use, and closes the allocation after the last one. Runs on the thread for calls.
    fn release(&self, driver: &Driver, key: &[u8]) {
        let closed = {
            let mut table = self.0.lock();
            let Some(opened) = table.by_handle.get_mut(key) else { return };
            opened.uses -= 1;
            if opened.uses > 0 {
                return;
            }
            let address = opened.address;
            table.by_address.remove(&address);
            table.by_handle.remove(key)
        };
        let Some(opened) = closed else { return };
        match driver.enter() {
            // SAFETY: it was opened once, and this was its last use.
            Ok(_current) => unsafe { close(driver, opened.address, opened.mapped) },
            Err(error) => tracing::warn!(%error, "a peer's device memory could not be closed"),
        }
    }

    /// Returns the processes that own the memory at these addresses.
    pub(super) fn owners(&self, addresses: impl Iterator<Item = u64>) -> Vec<Arc<ProcessWatch>> {
        let table = self.0.lock();
        let mut owners: Vec<Arc<ProcessWatch>> = Vec::new();
        if table.by_address.is_empty() {
            return owners;
        }
        let mut last = 0..0;
        for address in addresses {
            if last.contains(&address) {
                continue;
            }
            let Some((base, (len, owner))) = table.by_address.range(..=address).next_back() else {
                continue;
            };
            if address - base < *len && !owners.iter().any(|known| Arc::ptr_eq(known, owner)) {
                last = *base..base + len;
                owners.push(Arc::clone(owner));
            }
        }
        owners
    }
}

/// Maps an allocation. Returns its address and length, and the mapping of a descriptor.
fn map(
    driver: &Driver,
    handle: &SharedHandle,
    owner: &ProcessWatch,
) -> Result<(u64, u64, Option<MappedMemory>)> {
    match &handle.name {
        AllocationName::Driver(name) => {
            let address = driver.open(name)?;
            match driver.opened_len(address, handle.len) {
                Ok(len) => Ok((address, len, None)),
                Err(error) => {
                    // SAFETY: opened above, and no caller has the address yet.
                    unsafe { close(driver, address, None) };
                    Err(error)
                }
            }
        }
        AllocationName::Descriptor(number) => {
            let file = take_descriptor(owner, *number)?;
            let len = usize::try_from(handle.len).unwrap_or(usize::MAX);
            let mapped = driver.import(file.as_fd(), len)?;
            Ok((mapped.address, mapped.len as u64, Some(mapped)))
        }
    }
}

/// Closes an allocation; logs the driver's error. The device is current on the thread.
///
/// # Safety
/// `map` returned both, and nobody uses the memory afterwards.
unsafe fn close(driver: &Driver, address: u64, mapped: Option<MappedMemory>) {
    let closed = match mapped {
        // SAFETY: the driver opened the address in `map`, and the caller guarantees that nobody
        // uses it.
        None => unsafe { driver.close(address) },
        // SAFETY: the driver imported it in `map`, and the caller guarantees that nobody uses it.
        Some(mapped) => unsafe { driver.unmap(mapped) },
    };
    if let Err(error) = closed {
        tracing::warn!(%error, "a peer's device memory could not be closed");
    }
}

/// Returns the error for memory that the driver does not open, so that another transport moves it.
fn not_opened(driver: &Driver, cause: Error) -> Error {
    let DeviceInfo { driver, name, .. } = driver.info();
    let why = ErrorKind::Unsupported.because(format!(
        "{driver} does not open the peer's memory on {name}: run both processes in one container or \
         with shared IPC and PID namespaces (docker --ipc=host --pid=host), and not on different \
         MIG instances; without that, the transfer goes through the host (TCP)"
    ));
    let why = match cause.native().cloned() {
        Some(native) => why.with_native(native.code, native.text),
        None => why,
    };
    why.with_source(cause)
}

fn owner_ended() -> Error {
    ErrorKind::PeerLost.because("the process that shared this device memory has ended")
}

/// Duplicates another process's descriptor.
fn take_descriptor(owner: &ProcessWatch, number: RawFd) -> Result<OwnedFd> {
    pidfd_getfd(owner.fd(), number, PidfdGetfdFlags::empty()).map_err(|error| {
        Error::os(
            "the kernel does not allow this process to take the descriptor of a peer's device memory: run both as one \
             user, with \
             kernel.yama.ptrace_scope=0 or CAP_SYS_PTRACE, or let the owner make its pool without virtual memory",
            error,
        )
        .with_kind(ErrorKind::Unsupported)
    })
}

/// A use of an opened allocation, which is closed after the last one was dropped.
pub(super) struct ImportGuard {
    imports: Arc<Imports>,
    calls: BlockingCalls,
    key: Vec<u8>,
}

impl Drop for ImportGuard {
    fn drop(&mut self) {
        let (imports, key) = (Arc::clone(&self.imports), std::mem::take(&mut self.key));
        self.calls.later(move |driver| imports.release(driver, &key));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::calls::CallThread;

    /// Returns the identity that a child of this process would have.
    fn identity_of(child: u32) -> ProcessId {
        let stat = std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap();
        let (_, fields) = stat.rsplit_once(')').unwrap();
        let started: u64 = fields.split_ascii_whitespace().nth(19).unwrap().parse().unwrap();
        let mut bytes = Vec::new();
        ProcessId::current().encode(&mut bytes);
        bytes.truncate(24); // the host and the namespace, which are equal
        bytes.put_u32(child);
        bytes.put_u64(started);
        ProcessId::decode(&mut Reader::new("an identity", &bytes)).unwrap()
    }

    #[test]
    fn the_error_for_an_owner_that_ended_keeps_the_drivers() {
        let mut owner = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let id = identity_of(owner.id());
        let watch = id.watch().unwrap().unwrap();
        owner.kill().unwrap();
        while !watch.has_ended() {
            std::thread::yield_now();
        }
        let handle = SharedHandle {
            owner: id,
            base: 1 << 40,
            len: 4096,
            name: AllocationName::Driver(vec![7; 3]),
        };
        let (_, never) = std::sync::mpsc::channel();
        let driver = Arc::new(crate::panics::driver(never));
        let calls = CallThread::default().get(&driver).unwrap();
        let imports = Arc::new(Imports::default());
        let opened = imports.open(&driver, calls, &handle.encode(), &handle, watch);
        let error = opened.map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        let cause = std::error::Error::source(&error).expect("the driver's error").to_string();
        assert!(cause.contains("64 bytes"), "{cause}");
        owner.wait().unwrap();
    }

    #[test]
    fn handles_are_decoded_unchanged_and_invalid_ones_are_rejected() {
        for name in [AllocationName::Driver(vec![7; 64]), AllocationName::Descriptor(19)] {
            let handle =
                SharedHandle { owner: ProcessId::current(), base: 1 << 40, len: 1 << 30, name };
            let bytes = handle.encode();
            assert!(bytes.len() <= IpcHandle::LONGEST);
            assert_eq!(SharedHandle::decode(&bytes).unwrap(), handle);
            for len in 0..54 {
                // All truncations except of the driver's handle, whose length the driver checks.
                SharedHandle::decode(&bytes[..len]).unwrap_err();
            }
        }
        assert_eq!(SharedHandle::decode(&[9; 60]).unwrap_err().kind(), ErrorKind::Incompatible);
        assert_eq!(SharedHandle::decode(&[1; 300]).unwrap_err().kind(), ErrorKind::Malformed);
    }
}
