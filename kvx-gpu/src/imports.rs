//! Memory of other processes: each allocation is opened once, however many regions it contains.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use crate::driver::{Driver, MappedMemory};
use kvx_backend::process::{ProcessId, ProcessWatch};
use kvx_core::backend::sync::Mutex;
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::backend::{IpcHandle, fork};
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

/// The allocations of other processes that a device has opened.
pub(super) struct Imports {
    driver: Arc<Driver>,
    /// Held during calls of the driver: an allocation must not be opened while it is being closed.
    one: Mutex<()>,
    table: Mutex<ImportTable>,
    forks: u64,
}

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
    pub(super) fn new(driver: &Arc<Driver>) -> Arc<Self> {
        let (one, table) = (Mutex::new(()), Mutex::new(ImportTable::default()));
        Arc::new(Imports { driver: Arc::clone(driver), one, table, forks: fork::count() })
    }

    /// Opens an allocation of `owner`, or counts another use of it. Returns its address and length.
    /// Errors: `PeerLost` if the owner has ended; `Unsupported`; `Exhausted`.
    ///
    /// The caller has checked that the handle names the peer that sent it as the owner. The bytes
    /// of [`AllocationName::Driver`] are the driver's own, and cannot be checked: the peer may have
    /// received them from a third process, whose memory it could open itself.
    pub(super) fn open(
        self: &Arc<Self>,
        key: &[u8],
        handle: &SharedHandle,
        owner: ProcessWatch,
    ) -> Result<(u64, u64, ImportGuard)> {
        let _one = self.one.lock();
        if let Some(opened) = self.table.lock().by_handle.get_mut(key) {
            if opened.owner.is_exiting() {
                return Err(owner_ended());
            }
            opened.uses += 1;
            return Ok((opened.address, opened.len, self.used(key)));
        }
        let owner = Arc::new(owner);
        let (address, len, mapped) = {
            let _current = self.driver.enter()?;
            match self.map(handle, &owner) {
                Ok((address, _, mapped)) if owner.is_exiting() => {
                    // SAFETY: opened above, and no caller has the address yet.
                    unsafe { self.close(address, mapped) };
                    Err(owner_ended())
                }
                Err(cause) if owner.is_exiting() => Err(owner_ended().with_source(cause)),
                mapped => mapped,
            }?
        };
        let mut table = self.table.lock();
        table.by_address.insert(address, (len, Arc::clone(&owner)));
        table
            .by_handle
            .insert(key.to_vec(), ImportedAllocation { uses: 1, address, len, mapped, owner });
        drop(table);
        Ok((address, len, self.used(key)))
    }

    fn used(self: &Arc<Self>, key: &[u8]) -> ImportGuard {
        ImportGuard { imports: Arc::clone(self), key: key.to_vec() }
    }

    fn map(
        &self,
        handle: &SharedHandle,
        owner: &ProcessWatch,
    ) -> Result<(u64, u64, Option<MappedMemory>)> {
        match &handle.name {
            AllocationName::Driver(name) => {
                let address = self.driver.open(name)?;
                match self.driver.opened_len(address, handle.len) {
                    Ok(len) => Ok((address, len, None)),
                    Err(error) => {
                        // SAFETY: opened above, and no caller has the address yet.
                        unsafe { self.close(address, None) };
                        Err(error)
                    }
                }
            }
            AllocationName::Descriptor(number) => {
                let file = take_descriptor(owner, *number)?;
                let len = usize::try_from(handle.len).unwrap_or(usize::MAX);
                let mapped = self.driver.import(file.as_fd(), len)?;
                Ok((mapped.address, mapped.len as u64, Some(mapped)))
            }
        }
    }

    /// Closes an allocation; logs the driver's error. The device is current on the thread.
    ///
    /// # Safety
    /// `map` returned both, and nobody uses the memory afterwards.
    unsafe fn close(&self, address: u64, mapped: Option<MappedMemory>) {
        let closed = match mapped {
            // SAFETY: the driver opened the address in `map`, and the caller guarantees that nobody
            // uses it.
            None => unsafe { self.driver.close(address) },
            // SAFETY: the driver imported it in `map`, and the caller guarantees that nobody uses
            // it.
            Some(mapped) => unsafe { self.driver.unmap(mapped) },
        };
        if let Err(error) = closed {
            tracing::warn!(%error, "a peer's device memory could not be closed");
        }
    }

    /// Returns the processes that own the memory at these addresses.
    pub(super) fn owners(&self, addresses: impl Iterator<Item = u64>) -> Vec<Arc<ProcessWatch>> {
        let table = self.table.lock();
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

/// A use of an opened allocation, which is closed with the last one.
pub(super) struct ImportGuard {
    imports: Arc<Imports>,
    key: Vec<u8>,
}

impl Drop for ImportGuard {
    fn drop(&mut self) {
        let Imports { driver, one, table, forks } = &*self.imports;
        if fork::count() != *forks {
            return; // a forked child has no device
        }
        let _one = one.lock();
        let closed = {
            let mut table = table.lock();
            let Some(opened) = table.by_handle.get_mut(&self.key) else { return };
            opened.uses -= 1;
            if opened.uses > 0 {
                return;
            }
            let address = opened.address;
            table.by_address.remove(&address);
            table.by_handle.remove(&self.key)
        };
        let Some(opened) = closed else { return };
        match driver.enter() {
            // SAFETY: it was opened once, and this was its last use.
            Ok(_current) => unsafe { self.imports.close(opened.address, opened.mapped) },
            Err(error) => tracing::warn!(%error, "a peer's device memory could not be closed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let imports = Imports::new(&Arc::new(crate::panics::driver(never)));
        let error = imports.open(&handle.encode(), &handle, watch).map(drop).unwrap_err();
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
