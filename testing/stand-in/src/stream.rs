//! Streams: each is a thread that does its work in order.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::code::{Answer, Code};
use crate::devices::Device;
use crate::handles::{Handle, Handles};
use crate::settings::{settings, wait_until_released};

static STREAMS: Handles<Stream> = Handles::new();

/// Work of a stream. An error breaks the device.
pub(crate) type Work = Box<dyn FnOnce() -> Answer + Send>;

enum Item {
    Work(Work),
    Mark(Box<dyn FnOnce() + Send>),
}

pub(crate) struct Stream {
    pub(crate) device: Device,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    items: VecDeque<Item>,
    working: bool,
    closed: bool,
}

/// Creates a stream of a device.
pub(crate) fn create(device: Device) -> Answer<Handle> {
    Ok(STREAMS.add(Stream::start(device)?))
}

/// Closes a stream, which completes the work that it has.
pub(crate) fn destroy(handle: Handle) -> Answer {
    let stream = STREAMS.remove(handle)?;
    stream.lock().closed = true;
    stream.changed.notify_all();
    Ok(())
}

/// Returns the stream of a handle; null is the default stream of the device.
pub(crate) fn of(handle: Handle, device: Device) -> Answer<Arc<Stream>> {
    static DEFAULTS: LazyLock<Mutex<HashMap<Device, Arc<Stream>>>> = LazyLock::new(Mutex::default);
    if handle != 0 {
        return STREAMS.get(handle);
    }
    let mut defaults = DEFAULTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(stream) = defaults.get(&device) {
        return Ok(Arc::clone(stream));
    }
    let stream = Stream::start(device)?;
    defaults.insert(device, Arc::clone(&stream));
    Ok(stream)
}

impl Stream {
    fn start(device: Device) -> Answer<Arc<Self>> {
        let stream = Arc::new(Stream { device, queue: Mutex::default(), changed: Condvar::new() });
        let worker = Arc::clone(&stream);
        let started =
            thread::Builder::new().name("kvx-stand-in".into()).spawn(move || worker.run());
        started.map(|_| stream).map_err(|_| Code::OUT_OF_MEMORY)
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits work.
    pub(crate) fn push(&self, work: Work) {
        self.lock().items.push_back(Item::Work(work));
        self.changed.notify_all();
    }

    /// Submits a mark, which is executed even on a broken device.
    pub(crate) fn mark(&self, mark: Box<dyn FnOnce() + Send>) {
        self.lock().items.push_back(Item::Mark(mark));
        self.changed.notify_all();
    }

    /// Fails with `NOT_READY` while the stream has work.
    pub(crate) fn query(&self) -> Answer {
        let queue = self.lock();
        if queue.items.is_empty() && !queue.working { Ok(()) } else { Err(Code::NOT_READY) }
    }

    /// Waits until the stream has no work.
    pub(crate) fn wait(&self) {
        let mut queue = self.lock();
        while queue.working || !queue.items.is_empty() {
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn run(&self) {
        loop {
            let mut queue = self.lock();
            let item = loop {
                if let Some(item) = queue.items.pop_front() {
                    break item;
                }
                if queue.closed {
                    return;
                }
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            };
            queue.working = true;
            drop(queue);
            wait_until_released();
            self.perform(item);
            self.lock().working = false;
            self.changed.notify_all();
        }
    }

    fn perform(&self, item: Item) {
        let pause = match item {
            Item::Work(_) => settings().delay,
            Item::Mark(_) => settings().late,
        };
        thread::sleep(pause); // the test has requested a slow device
        match item {
            Item::Mark(mark) => mark(),
            Item::Work(work) if self.device.works().is_ok() => {
                let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
                if let Err(code) = done.unwrap_or(Err(Code::UNKNOWN)) {
                    self.device.break_down(code);
                }
            }
            Item::Work(_) => {}
        }
    }
}
