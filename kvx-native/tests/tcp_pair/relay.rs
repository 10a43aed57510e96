//! A middleman between two agents, who records, stalls and cuts.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};

use super::raw::free_port;

pub(crate) struct Relay {
    listen: u16,
    target: u16,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Default)]
struct Inner {
    /// What initiators sent, by connection.
    recorded: Vec<Vec<u8>>,
    streams: Vec<TcpStream>,
    /// Nothing from the owner passes after so many bytes.
    to_initiator: Option<u64>,
    /// Nothing to the owner passes after so many bytes.
    to_owner: Option<u64>,
    /// A stalled direction is waiting.
    stuck: bool,
}

impl Relay {
    pub(crate) fn new() -> Self {
        let (listener, target) = (TcpListener::bind("127.0.0.1:0").unwrap(), free_port());
        let relay = Relay { listen: listener.local_addr().unwrap().port(), target, state: Arc::default() };
        let state = Arc::clone(&relay.state);
        std::thread::spawn(move || {
            for initiator in listener.incoming() {
                let (Ok(initiator), Ok(owner)) = (initiator, TcpStream::connect(("127.0.0.1", target)))
                else {
                    return;
                };
                let number = {
                    let mut inner = state.inner.lock().unwrap();
                    inner.recorded.push(Vec::new());
                    inner.streams.push(initiator.try_clone().unwrap());
                    inner.streams.push(owner.try_clone().unwrap());
                    inner.recorded.len() - 1
                };
                let (from, to) = (initiator.try_clone().unwrap(), owner.try_clone().unwrap());
                let (there, back) = (Arc::clone(&state), Arc::clone(&state));
                std::thread::spawn(move || there.pass(from, to, Some(number)));
                std::thread::spawn(move || back.pass(owner, initiator, None));
            }
        });
        relay
    }

    /// Options for the owner behind it, with others of the table.
    pub(crate) fn options(&self, others: &str) -> String {
        let (target, listen) = (self.target, self.listen);
        let others = if others.is_empty() { String::new() } else { format!(", {others}") };
        format!(r#"{{"tcp": {{"ports": {target}, "advertise": "127.0.0.1:{listen}"{others}}}}}"#)
    }

    /// Where the owner itself listens.
    pub(crate) fn target(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.target))
    }

    /// What the initiators have sent, by connection.
    pub(crate) fn recorded(&self) -> Vec<Vec<u8>> {
        self.state.inner.lock().unwrap().recorded.clone()
    }

    /// Lets so many bytes pass to the initiator, and no more.
    pub(crate) fn stall_answers(&self, after: u64) {
        self.state.inner.lock().unwrap().to_initiator = Some(after);
    }

    /// Lets so many bytes pass to the owner, and no more.
    pub(crate) fn stall_requests(&self, after: u64) {
        self.state.inner.lock().unwrap().to_owner = Some(after);
    }

    /// Waits until the stall holds something back.
    pub(crate) fn wait_until_stuck(&self) {
        let mut inner = self.state.inner.lock().unwrap();
        while !inner.stuck {
            let (guard, timeout) = self.state.changed.wait_timeout(inner, super::CUT_OFF).unwrap();
            assert!(!timeout.timed_out(), "nothing reaches the stall");
            inner = guard;
        }
    }

    /// Lets everything pass again.
    pub(crate) fn go_on(&self) {
        let mut inner = self.state.inner.lock().unwrap();
        (inner.to_initiator, inner.to_owner, inner.stuck) = (None, None, false);
        self.state.changed.notify_all();
    }

    /// Closes every connection.
    pub(crate) fn cut(&self) {
        for stream in &self.state.inner.lock().unwrap().streams {
            stream.shutdown(Shutdown::Both).ok();
        }
        self.go_on();
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.cut();
    }
}

impl State {
    fn pass(&self, mut from: TcpStream, mut to: TcpStream, record: Option<usize>) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(count) = from.read(&mut buffer) {
            let mut left = &buffer[..count];
            if count == 0 {
                break;
            }
            if let Some(number) = record {
                self.inner.lock().unwrap().recorded[number].extend_from_slice(left);
            }
            while !left.is_empty() {
                let now = self.allowed(record.is_some(), left.len());
                if to.write_all(&left[..now]).is_err() {
                    break;
                }
                left = &left[now..];
            }
        }
        to.shutdown(Shutdown::Both).ok();
        from.shutdown(Shutdown::Both).ok();
    }

    /// How many of `wanted` bytes may pass; waits until it is at least one.
    fn allowed(&self, to_owner: bool, wanted: usize) -> usize {
        let mut inner = self.inner.lock().unwrap();
        loop {
            let Inner { to_owner: there, to_initiator: back, .. } = &mut *inner;
            match if to_owner { there } else { back } {
                None => return wanted,
                Some(0) => {
                    inner.stuck = true;
                    self.changed.notify_all();
                    inner = self.changed.wait(inner).unwrap();
                }
                Some(left) => {
                    let now = wanted.min(usize::try_from(*left).unwrap());
                    *left -= now as u64;
                    return now;
                }
            }
        }
    }
}
