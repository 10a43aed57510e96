//! An endpoint with its completion queue and its address vector.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use kvx_backend::loader;
use kvx_core::Op;

use super::bindings_1_17::*;
use super::domain::{Domain, Registration, close, function, try_close};
use super::errno::Errno;
use super::library::LIBRARY;
use super::options;

/// The maximum length of an address.
const MAX_ADDRESS: usize = 256;
/// The maximum number of completions per read.
const BATCH: usize = 64;
/// The number of names for shared memory that are tried.
const NAMES: usize = 64;

/// A peer's number in the address vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PeerNumber(fi_addr_t);

#[cfg(test)]
impl PeerNumber {
    /// Returns a number that no peer has.
    pub(crate) fn none() -> Self {
        PeerNumber(u64::MAX)
    }
}

/// The maximum number of ranges per operation.
pub(crate) const MAX_RANGES: usize = 4;

/// A range of local memory, and a range of a peer's memory of the same length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Range {
    pub(crate) local: *mut u8,
    pub(crate) len: usize,
    pub(crate) descriptor: *mut c_void,
    pub(crate) remote: RemoteRange,
}

// SAFETY: only endpoints use the addresses; this type just stores them.
unsafe impl Send for Range {}

/// A position in a peer's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteRange {
    pub(crate) peer: PeerNumber,
    pub(crate) address: u64,
    pub(crate) key: u64,
}

/// How the reactor detects that there is something to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitMethod {
    /// This descriptor becomes readable, if [`Endpoint::may_sleep`] was called before.
    Descriptor(RawFd),
    /// Only by polling.
    Never,
}

/// A successful operation.
pub(crate) struct CompletedOperation {
    /// The context that the operation was posted with.
    pub(crate) context: *mut c_void,
    /// The length of a message.
    pub(crate) len: usize,
}

/// A failed operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FailedOperation {
    /// The context that the operation was posted with, unless the provider has lost it.
    pub(crate) context: *mut c_void,
    pub(crate) errno: Errno,
    /// The provider's own error code.
    pub(crate) provider: c_int,
}

/// The description of a failed operation, followed by space for the fields of later versions: from
/// 1.20 on, providers write the sender's address there.
#[repr(C)]
#[derive(Default)]
struct ErrorEntry {
    known: fi_cq_err_entry,
    later: [u64; 8],
}

/// The outcome of [`Endpoint::read`].
pub(crate) enum Read {
    Nothing,
    Completed,
    Failed(FailedOperation),
}

/// An open endpoint. Until it is dropped, the provider owns the buffers and contexts that it was
/// given.
pub(crate) struct Endpoint {
    raw: NonNull<fid_ep>,
    queue: NonNull<fid_cq>,
    table: NonNull<fid_av>,
    wait_method: WaitMethod,
    /// See [`Info::flags`](super::Info::flags).
    flags: u64,
    domain: Arc<Domain>,
    is_closed: bool,
    /// Memory that the provider uses; freed after the endpoint is closed.
    given: Arc<dyn Any + Send + Sync>,
}

// SAFETY: libfabric keeps no thread-local state of endpoints.
unsafe impl Send for Endpoint {}
// SAFETY: only the owner of the rail posts, reads and inserts addresses; the transport's machine
// upholds that. Other threads enable memory, which libfabric serialises, or make an endpoint over
// shared memory forget a neighbour, for which the provider always locks its address vector.
unsafe impl Sync for Endpoint {}

impl Endpoint {
    /// Opens an endpoint whose queue holds `completions`. `sleeps` requests a descriptor to wait
    /// for. The endpoint keeps `given` for the provider.
    ///
    /// # Errors
    /// libfabric's; `FI_ENOSYS` and others if the provider has no such descriptor.
    pub(crate) fn open(
        domain: &Arc<Domain>,
        sleeps: bool,
        completions: usize,
        given: Arc<dyn Any + Send + Sync>,
    ) -> Result<Endpoint, Errno> {
        // Shared memory of 1.17 installs handlers for the signals that end a process.
        loader::with_signals_kept(|| {
            let make = || Endpoint::make(domain, sleeps, completions, Arc::clone(&given));
            let mut made = make();
            // A killed process with the same process id may have left shared memory of the same
            // name. Each try uses the next name.
            for _ in 0..NAMES {
                if matches!(made, Err(Errno(libc::EBUSY))) {
                    made = make();
                }
            }
            made
        })
    }

    fn make(
        domain: &Arc<Domain>,
        sleeps: bool,
        completions: usize,
        given: Arc<dyn Any + Send + Sync>,
    ) -> Result<Endpoint, Errno> {
        let raw_domain = domain.raw();
        let queue = open_queue(domain, sleeps, completions)?;
        let mut attributes = fi_av_attr { type_: FI_AV_UNSPEC, ..fi_av_attr::default() };
        let mut table = ptr::null_mut();
        // SAFETY: the domain is open.
        let answer = unsafe {
            function!(raw_domain, ops, av_open)(
                raw_domain,
                &mut attributes,
                &mut table,
                ptr::null_mut(),
            )
        };
        Errno::check(answer)?;
        let table = CloseOnDrop(NonNull::new(table).ok_or(Errno(libc::ENOMEM))?, "address table");
        let mut raw = ptr::null_mut();
        // SAFETY: the domain is open, and its info is what it was opened with.
        let answer = unsafe {
            let info = domain.info().raw();
            function!(raw_domain, ops, endpoint)(raw_domain, info, &mut raw, ptr::null_mut())
        };
        Errno::check(answer)?;
        let raw = CloseOnDrop(NonNull::new(raw).ok_or(Errno(libc::ENOMEM))?, "endpoint");
        if let Some(library) = LIBRARY.opened() {
            // SAFETY: the endpoint is open.
            unsafe { options::set(raw.0.as_ptr(), domain.info(), library.version()) };
        }
        // SAFETY: all three are open, and begin with their `fid`.
        unsafe {
            let own = raw.0.as_ptr().cast::<fid>();
            Errno::check(function!(own, ops, bind)(own, table.0.as_ptr().cast(), 0))?;
            let both = u64::from(FI_TRANSMIT | FI_RECV);
            Errno::check(function!(own, ops, bind)(own, queue.0.as_ptr().cast(), both))?;
            Errno::check(function!(own, ops, control)(
                own,
                FI_ENABLE.cast_signed(),
                ptr::null_mut(),
            ))?;
        }
        let wait_method = if sleeps { wait_method(&queue)? } else { WaitMethod::Never };
        let (raw, queue, table) = (raw.keep(), queue.keep(), table.keep());
        let flags = domain.info().flags();
        Ok(Endpoint {
            raw,
            queue,
            table,
            wait_method,
            flags,
            domain: Arc::clone(domain),
            is_closed: false,
            given,
        })
    }

    /// Closes the endpoint. Errors: the provider keeps it, and may still access the memory of its
    /// operations and `given`, which is then never freed.
    pub(crate) fn close(mut self) -> Result<(), Errno> {
        self.end()
    }

    fn end(&mut self) -> Result<(), Errno> {
        if std::mem::replace(&mut self.is_closed, true) {
            return Ok(());
        }
        // SAFETY: it is open, and not used afterwards: both callers consume it.
        unsafe { try_close(self.fid()) }.inspect_err(|errno| {
            tracing::error!(?errno, "libfabric did not close an endpoint");
            std::mem::forget(Arc::clone(&self.given));
        })?;
        // SAFETY: they are open, and not used afterwards; the endpoint that was bound to them is
        // closed.
        unsafe {
            close(self.queue.as_ptr().cast(), "completion queue");
            close(self.table.as_ptr().cast(), "address table");
        }
        Ok(())
    }

    /// Returns the domain.
    pub(crate) fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// Returns how the reactor detects that there is something to do.
    pub(crate) fn wait_method(&self) -> WaitMethod {
        self.wait_method
    }

    pub(super) fn fid(&self) -> *mut fid {
        self.raw.as_ptr().cast()
    }

    /// Enables access to memory through this endpoint, if the provider requires that
    /// (`FI_MR_ENDPOINT`). Errors: libfabric's.
    pub(crate) fn enable(&self, memory: &Registration) -> Result<(), Errno> {
        if !self.domain.info().wants(FI_MR_ENDPOINT) {
            return Ok(());
        }
        // SAFETY: the endpoint is open.
        unsafe { memory.enable(self.fid()) }
    }

    /// Returns the address at which peers reach the endpoint. Errors: libfabric's.
    pub(crate) fn address(&self) -> Result<Vec<u8>, Errno> {
        let (mut bytes, mut len) = (vec![0_u8; MAX_ADDRESS], MAX_ADDRESS);
        // SAFETY: the buffer has that many bytes.
        let answer = unsafe {
            function!(self.raw.as_ptr(), cm, getname)(
                self.fid(),
                bytes.as_mut_ptr().cast(),
                &mut len,
            )
        };
        Errno::check(answer)?;
        bytes.truncate(len);
        Ok(bytes)
    }

    /// Inserts a peer's address, which must have the form of this endpoint's own address: see
    /// `Address::check`. Errors: libfabric's.
    ///
    /// # Safety
    /// `address` is at least as long as the provider reads.
    pub(crate) unsafe fn insert(&self, address: &[u8]) -> Result<PeerNumber, Errno> {
        let mut number = u64::MAX;
        // SAFETY: one address; the caller guarantees that it is as long as the provider reads.
        let answer = unsafe {
            let table = self.table.as_ptr();
            function!(table, ops, insert)(
                table,
                address.as_ptr().cast(),
                1,
                &mut number,
                0,
                ptr::null_mut(),
            )
        };
        if Errno::check(answer)? == 1 && number != u64::MAX {
            Ok(PeerNumber(number))
        } else {
            Err(Errno(libc::EADDRNOTAVAIL))
        }
    }

    /// Removes a peer's address.
    pub(crate) fn remove(&self, peer: PeerNumber) {
        let mut number = peer.0;
        let table = self.table.as_ptr();
        // SAFETY: the number came from the table.
        let answer = unsafe { function!(table, ops, remove)(table, &mut number, 1, 0) };
        if let Err(errno) = Errno::check(answer) {
            tracing::debug!(?errno, "libfabric did not remove an address");
        }
    }

    /// Posts a receive.
    ///
    /// # Safety
    /// The buffer has `len` bytes, covered by `descriptor` if the provider needs one, and nobody
    /// accesses it until the provider returns `context`. `context` points to 64 bytes that belong
    /// to the provider until then.
    #[inline]
    pub(crate) unsafe fn receive(
        &self,
        buffer: *mut u8,
        len: usize,
        descriptor: *mut c_void,
        context: *mut c_void,
    ) -> Result<(), Errno> {
        let raw = self.raw.as_ptr();
        // SAFETY: guaranteed by the caller.
        let answer = unsafe {
            function!(raw, msg, recv)(raw, buffer.cast(), len, descriptor, u64::MAX, context)
        };
        Errno::check_count(answer).map(|_| ())
    }

    /// Posts a message.
    ///
    /// # Safety
    /// As for [`receive`](Endpoint::receive).
    #[inline]
    pub(crate) unsafe fn send(
        &self,
        buffer: *const u8,
        len: usize,
        descriptor: *mut c_void,
        peer: PeerNumber,
        context: *mut c_void,
    ) -> Result<(), Errno> {
        let raw = self.raw.as_ptr();
        // SAFETY: guaranteed by the caller.
        let answer = unsafe {
            function!(raw, msg, send)(raw, buffer.cast(), len, descriptor, peer.0, context)
        };
        Errno::check_count(answer).map(|_| ())
    }

    /// Posts a read of a range of the peer's memory into local memory, or a write the other way.
    ///
    /// # Safety
    /// As for [`receive`](Endpoint::receive) for a read; during a write nobody writes to the local
    /// memory.
    #[inline]
    pub(crate) unsafe fn transfer(
        &self,
        op: Op,
        Range { local, len, descriptor, remote }: Range,
        context: *mut c_void,
    ) -> Result<(), Errno> {
        let (raw, local) = (self.raw.as_ptr(), local.cast::<c_void>());
        let RemoteRange { peer: PeerNumber(peer), address, key } = remote;
        // SAFETY: guaranteed by the caller.
        let answer = unsafe {
            match op {
                Op::Read => function!(raw, rma, read)(
                    raw, local, len, descriptor, peer, address, key, context,
                ),
                Op::Write => function!(raw, rma, write)(
                    raw, local, len, descriptor, peer, address, key, context,
                ),
            }
        };
        Errno::check_count(answer).map(|_| ())
    }

    /// Posts a read of ranges of one peer's memory into as many local ranges, or a write the other
    /// way, as one operation. There are at most [`MAX_RANGES`], and at most as many as the provider
    /// takes.
    ///
    /// # Safety
    /// As for [`transfer`](Endpoint::transfer), for each range.
    pub(crate) unsafe fn transfer_all(
        &self,
        op: Op,
        ranges: impl Iterator<Item = Range>,
        context: *mut c_void,
    ) -> Result<(), Errno> {
        let mut ours = [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; MAX_RANGES];
        let mut theirs = [fi_rma_iov { addr: 0, len: 0, key: 0 }; MAX_RANGES];
        let mut descriptors = [ptr::null_mut(); MAX_RANGES];
        let (mut count, mut peer) = (0, u64::MAX);
        for (at, Range { local, len, descriptor, remote }) in ranges.take(MAX_RANGES).enumerate() {
            ours[at] = libc::iovec { iov_base: local.cast(), iov_len: len };
            theirs[at] = fi_rma_iov { addr: remote.address, len, key: remote.key };
            descriptors[at] = descriptor;
            (count, peer) = (at + 1, remote.peer.0);
        }
        let message = fi_msg_rma {
            msg_iov: ours.as_ptr(),
            desc: descriptors.as_mut_ptr(),
            iov_count: count,
            addr: peer,
            rma_iov: theirs.as_ptr(),
            rma_iov_count: count,
            context,
            data: 0,
        };
        let raw = self.raw.as_ptr();
        // SAFETY: guaranteed by the caller; the provider copies the descriptions of the ranges.
        let answer = unsafe {
            match op {
                Op::Read => function!(raw, rma, readmsg)(raw, &message, self.flags),
                Op::Write => function!(raw, rma, writemsg)(raw, &message, self.flags),
            }
        };
        Errno::check_count(answer).map(|_| ())
    }

    /// Makes progress, and reports completions. Errors: libfabric's.
    #[inline]
    pub(crate) fn read(&self, mut each: impl FnMut(CompletedOperation)) -> Result<Read, Errno> {
        let queue = self.queue.as_ptr();
        let mut entries = [const { std::mem::MaybeUninit::<fi_cq_msg_entry>::uninit() }; BATCH];
        // SAFETY: the queue has entries of this format, and the array has that many.
        let answer =
            unsafe { function!(queue, ops, read)(queue, entries.as_mut_ptr().cast(), BATCH) };
        match Errno::check_count(answer) {
            Ok(count) => {
                for entry in &entries[..count.min(BATCH)] {
                    // SAFETY: the call has written that many entries.
                    let entry = unsafe { entry.assume_init_ref() };
                    each(CompletedOperation { context: entry.op_context, len: entry.len });
                }
                Ok(if count == 0 { Read::Nothing } else { Read::Completed })
            }
            Err(Errno(libc::EAGAIN)) => Ok(Read::Nothing),
            Err(Errno(errno)) if errno == FI_EAVAIL.cast_signed() => self.read_failed(),
            Err(errno) => Err(errno),
        }
    }

    fn read_failed(&self) -> Result<Read, Errno> {
        let queue = self.queue.as_ptr();
        let mut failed = ErrorEntry::default();
        // SAFETY: the entry requests no error data, and has space for the fields of later versions.
        let answer = unsafe { function!(queue, ops, readerr)(queue, (&raw mut failed).cast(), 0) };
        let entry = failed.known;
        match Errno::check_count(answer) {
            Ok(0) | Err(Errno(libc::EAGAIN)) => Ok(Read::Nothing),
            Ok(_) => Ok(Read::Failed(FailedOperation {
                context: entry.op_context,
                // Some providers store a negative number.
                errno: Errno(entry.err.saturating_abs()),
                provider: entry.prov_errno,
            })),
            Err(errno) => Err(errno),
        }
    }

    /// Returns whether the descriptor will report every event from now on; call it before each
    /// sleep.
    pub(crate) fn may_sleep(&self) -> bool {
        let fabric = self.domain.fabric();
        let mut watched = self.queue.as_ptr().cast::<fid>();
        // SAFETY: the fabric and the queue are open.
        unsafe { function!(fabric, ops, trywait)(fabric, &mut watched, 1) == 0 }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.end().ok(); // logged; memory that the provider may access is kept
    }
}

/// Returns whether the provider has descriptors to sleep on.
pub(crate) fn has_descriptors(domain: &Arc<Domain>) -> bool {
    open_queue(domain, true, 1).and_then(|queue| wait_method(&queue)).is_ok()
}

/// Opens a queue for this number of completions. Errors: libfabric's, also if the provider has no
/// descriptor to sleep on and `sleeps` requests one.
fn open_queue(
    domain: &Arc<Domain>,
    sleeps: bool,
    completions: usize,
) -> Result<CloseOnDrop<fid_cq>, Errno> {
    let domain = domain.raw();
    let mut attributes = fi_cq_attr {
        size: completions,
        format: FI_CQ_FORMAT_MSG,
        wait_obj: if sleeps { FI_WAIT_FD } else { FI_WAIT_NONE },
        ..fi_cq_attr::default()
    };
    let mut queue = ptr::null_mut();
    // SAFETY: the domain is open.
    let answer = unsafe {
        function!(domain, ops, cq_open)(domain, &mut attributes, &mut queue, ptr::null_mut())
    };
    Errno::check(answer)?;
    Ok(CloseOnDrop(NonNull::new(queue).ok_or(Errno(libc::ENOMEM))?, "completion queue"))
}

/// Returns the descriptor of a queue that was opened with one. Errors: libfabric's.
fn wait_method(queue: &CloseOnDrop<fid_cq>) -> Result<WaitMethod, Errno> {
    let mut descriptor: c_int = -1;
    // SAFETY: the queue is open; the call writes the descriptor.
    let answer = unsafe {
        let own = queue.0.as_ptr().cast::<fid>();
        let get = FI_GETWAIT.cast_signed();
        function!(own, ops, control)(own, get, (&raw mut descriptor).cast())
    };
    Errno::check(answer)?;
    Ok(WaitMethod::Descriptor(descriptor))
}

/// An object that is closed unless the endpoint is opened completely.
struct CloseOnDrop<T>(NonNull<T>, &'static str);

impl<T> CloseOnDrop<T> {
    fn keep(self) -> NonNull<T> {
        std::mem::ManuallyDrop::new(self).0
    }
}

impl<T> Drop for CloseOnDrop<T> {
    fn drop(&mut self) {
        // SAFETY: libfabric's objects begin with their `fid`; this one is open and not used
        // afterwards.
        unsafe { close(self.0.as_ptr().cast(), self.1) };
    }
}

/// A provider that makes progress for half of the time.
#[cfg(test)]
mod slow {
    use std::sync::OnceLock;
    use std::time::{Duration, Instant};

    use super::*;

    const HALF: Duration = Duration::from_millis(10);

    type ReadQueue = unsafe extern "C" fn(*mut fid_cq, *mut c_void, usize) -> isize;
    static READ: OnceLock<ReadQueue> = OnceLock::new();
    static START: OnceLock<Instant> = OnceLock::new();

    unsafe extern "C" fn read_slowly(
        queue: *mut fid_cq,
        entries: *mut c_void,
        count: usize,
    ) -> isize {
        let turns = START.get_or_init(Instant::now).elapsed().as_millis() / HALF.as_millis();
        match READ.get() {
            // SAFETY: the provider's own function, with the caller's arguments.
            Some(read) if turns % 2 == 1 => unsafe { read(queue, entries, count) },
            _ => -(libc::EAGAIN as isize),
        }
    }

    impl Endpoint {
        /// Makes the endpoint progress for half of the time from now on.
        pub(crate) fn slow_down(&self) {
            let queue = self.queue.as_ptr();
            // SAFETY: the queue is open and has a table of functions; the new one stays allocated.
            unsafe {
                let functions = *(*queue).ops;
                let read = functions.read.expect("a queue can be read");
                assert!(std::ptr::fn_addr_eq(*READ.get_or_init(|| read), read), "one provider");
                let slow = fi_ops_cq { read: Some(read_slowly), ..functions };
                (*queue).ops = Box::leak(Box::new(slow));
            }
        }
    }
}
