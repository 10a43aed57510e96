//! The thread for calls of NIXL that take long: loading a peer's address, and forgetting it.

use std::ffi::CStr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use kvx_backend::reactor::Mailbox;
use kvx_core::{Error, ErrorKind, Result};

use crate::agent_lock::AgentLock;
use crate::blob;

/// A peer's name.
pub(crate) type Name = Arc<CStr>;

/// A call that takes long; made in the order of asking.
pub(crate) enum LoadTask {
    /// Loads a blob and connects; the answer is a [`LoadResult`].
    Load { peer: Name, load: u64, blob: Vec<u8> },
    /// Has NIXL know a lost peer's name again, and no way to it, which there may not be any more;
    /// the answer is a [`LoadResult`].
    Name { peer: Name, load: u64 },
    /// Forgets a peer.
    Forget { peer: Name },
}

/// A [`LoadTask::Load`] or [`LoadTask::Name`] has ended.
pub(crate) struct LoadResult {
    pub(crate) peer: Name,
    /// Its number.
    pub(crate) load: u64,
    pub(crate) result: Result<()>,
}

/// The thread, and what it has done.
pub(crate) struct PeerLoader {
    tasks: Option<Sender<LoadTask>>,
    answers: Arc<Mailbox<LoadResult>>,
    thread: Option<JoinHandle<()>>,
}

impl PeerLoader {
    /// Starts it. Errors: `Exhausted`.
    pub(crate) fn start(name: String, agent_lock: Arc<AgentLock>) -> Result<Self> {
        let answers = Arc::new(Mailbox::new()?);
        let (tasks, todo) = channel();
        let theirs = Arc::clone(&answers);
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || serve(&todo, &agent_lock, &theirs));
        let thread = thread.map_err(|error| {
            Error::os("a thread for NIXL could not be started", error)
                .with_kind(ErrorKind::Exhausted)
        })?;
        Ok(PeerLoader { tasks: Some(tasks), answers, thread: Some(thread) })
    }

    /// Readable when something has ended.
    pub(crate) fn fd(&self) -> RawFd {
        self.answers.fd()
    }

    pub(crate) fn ask(&self, task: LoadTask) {
        if let Some(tasks) = &self.tasks {
            tasks.send(task).ok(); // the thread ends only after the last task
        }
    }

    /// Returns the results of the loads that have ended.
    pub(crate) fn take(&self) -> Vec<LoadResult> {
        self.answers.take()
    }
}

impl Drop for PeerLoader {
    fn drop(&mut self) {
        self.tasks = None;
        if let Some(thread) = self.thread.take() {
            thread.join().ok(); // a panic there has been reported by the panic hook
        }
    }
}

fn serve(todo: &Receiver<LoadTask>, agent_lock: &AgentLock, answers: &Mailbox<LoadResult>) {
    for task in todo {
        let locked = agent_lock.lock();
        // The transport was stopped before this task.
        let Some(agent) = locked.as_ref() else { continue };
        let (peer, load, result) = match task {
            LoadTask::Forget { peer } => {
                agent.forget(&peer);
                continue;
            }
            LoadTask::Name { peer, load } => {
                let result = agent.load(&blob::of_name(&peer)).map(drop);
                (peer, load, result)
            }
            LoadTask::Load { peer, load, blob } => {
                let result = agent.load(&blob).and_then(|name| {
                    if name.as_bytes() != peer.to_bytes() {
                        return Err(blob::malformed("it names another agent than it seemed to"));
                    }
                    agent.connect(&peer)
                });
                (peer, load, result)
            }
        };
        drop(locked);
        answers.put(LoadResult { peer, load, result });
    }
}
