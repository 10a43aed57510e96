//! The thread for slow calls of NIXL: loading a peer's address, and removing it.

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

/// A slow call; calls are made in order.
pub(crate) enum LoadTask {
    /// Loads a blob and connects; produces a [`LoadResult`].
    Load { peer: Name, load: u64, blob: Vec<u8> },
    /// Loads only a lost peer's name, without a connection, which may be impossible by now;
    /// produces a [`LoadResult`].
    Name { peer: Name, load: u64 },
    /// Removes a peer.
    Forget { peer: Name },
}

/// The result of a [`LoadTask::Load`] or [`LoadTask::Name`].
pub(crate) struct LoadResult {
    pub(crate) peer: Name,
    /// The number of the load.
    pub(crate) load: u64,
    pub(crate) result: Result<()>,
}

/// The thread, and its results.
pub(crate) struct PeerLoader {
    tasks: Option<Sender<LoadTask>>,
    answers: Arc<Mailbox<LoadResult>>,
    thread: Option<JoinHandle<()>>,
}

impl PeerLoader {
    /// Starts the thread. Errors: `Exhausted`.
    pub(crate) fn start(name: String, agent_lock: Arc<AgentLock>) -> Result<Self> {
        let answers = Arc::new(Mailbox::new()?);
        let (tasks, todo) = channel();
        let theirs = Arc::clone(&answers);
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(move || serve(&todo, &agent_lock, &theirs));
        let thread = thread.map_err(|error| {
            Error::os("could not start a thread for NIXL", error).with_kind(ErrorKind::Exhausted)
        })?;
        Ok(PeerLoader { tasks: Some(tasks), answers, thread: Some(thread) })
    }

    /// Returns a descriptor that is readable when there are results.
    pub(crate) fn fd(&self) -> RawFd {
        self.answers.fd()
    }

    pub(crate) fn ask(&self, task: LoadTask) {
        if let Some(tasks) = &self.tasks {
            tasks.send(task).ok(); // the thread ends only after the last task
        }
    }

    /// Takes the results.
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
                        return Err(blob::malformed("NIXL reads another agent's name in it"));
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
