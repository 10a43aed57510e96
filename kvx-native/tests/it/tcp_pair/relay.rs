//! A relay between two agents, which records, alters, stalls and cuts.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};

use super::raw::free_port;

pub(crate) struct Relay {
    listen: u16,
    target: u16,
    state: Arc<State>,
}

/// The byte to alter: its direction, and the number of bytes before it.
#[derive(Clone, Copy)]
pub(crate) struct Alteration {
    pub(crate) to_owner: bool,
    pub(crate) at: usize,
}

#[derive(Default)]
struct State {
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Default)]
struct Inner {
    /// The bytes that initiators sent, by connection.
    recorded: Vec<Vec<u8>>,
    /// The bytes that owners sent, by connection.
    answered: Vec<Vec<u8>>,
    /// The byte to alter on the next connection.
    alteration: Option<Alteration>,
    streams: Vec<TcpStream>,
    /// The number of bytes from the owner that may still pass, if limited.
    to_initiator: Option<u64>,
    /// The number of bytes to the owner that may still pass, if limited.
    to_owner: Option<u64>,
    /// True if a stalled direction has bytes that wait.
    stuck: bool,
}

impl Relay {
    pub(crate) fn new() -> Self {
        let (listener, target) = (TcpListener::bind("127.0.0.1:0").unwrap(), free_port());
        let relay =
            Relay { listen: listener.local_addr().unwrap().port(), target, state: Arc::default() };
        let state = Arc::clone(&relay.state);
        std::thread::spawn(move || {
            for initiator in listener.incoming() {
                let (Ok(initiator), Ok(owner)) =
                    (initiator, TcpStream::connect(("127.0.0.1", target)))
                else {
                    return;
                };
                let (number, alteration) = {
                    let mut inner = state.inner.lock().unwrap();
                    inner.recorded.push(Vec::new());
                    inner.answered.push(Vec::new());
                    inner.streams.push(initiator.try_clone().unwrap());
                    inner.streams.push(owner.try_clone().unwrap());
                    (inner.recorded.len() - 1, inner.alteration.take())
                };
                let meant =
                    |to_owner| alteration.filter(|alteration| alteration.to_owner == to_owner);
                let (there_at, back_at) = (meant(true), meant(false));
                let (from, to) = (initiator.try_clone().unwrap(), owner.try_clone().unwrap());
                let (there, back) = (Arc::clone(&state), Arc::clone(&state));
                std::thread::spawn(move || there.pass(from, to, (number, true), there_at));
                std::thread::spawn(move || back.pass(owner, initiator, (number, false), back_at));
            }
        });
        relay
    }

    /// Returns options for the owner behind the relay, with `others` in the same table.
    pub(crate) fn options(&self, others: &str) -> String {
        let (target, listen) = (self.target, self.listen);
        let others = if others.is_empty() { String::new() } else { format!(", {others}") };
        format!(r#"{{"tcp": {{"ports": {target}, "advertise": "127.0.0.1:{listen}"{others}}}}}"#)
    }

    /// Returns the address on which the owner itself listens.
    pub(crate) fn target(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.target))
    }

    /// Returns the bytes that initiators sent, by connection.
    pub(crate) fn recorded(&self) -> Vec<Vec<u8>> {
        self.state.inner.lock().unwrap().recorded.clone()
    }

    /// Returns the bytes that owners sent, by connection.
    pub(crate) fn answered(&self) -> Vec<Vec<u8>> {
        self.state.inner.lock().unwrap().answered.clone()
    }

    /// Alters a byte on the next connection.
    pub(crate) fn alter(&self, alteration: Alteration) {
        self.state.inner.lock().unwrap().alteration = Some(alteration);
    }

    /// Lets `after` more bytes pass to the initiator.
    pub(crate) fn stall_answers(&self, after: u64) {
        self.state.inner.lock().unwrap().to_initiator = Some(after);
    }

    /// Lets `after` more bytes pass to the owner.
    pub(crate) fn stall_requests(&self, after: u64) {
        self.state.inner.lock().unwrap().to_owner = Some(after);
    }

    /// Waits until the stall holds bytes back.
    pub(crate) fn wait_until_stuck(&self) {
        let mut inner = self.state.inner.lock().unwrap();
        while !inner.stuck {
            let (guard, timeout) = self.state.changed.wait_timeout(inner, super::CUT_OFF).unwrap();
            assert!(!timeout.timed_out(), "no bytes reach the stall");
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
    fn pass(
        &self,
        mut from: TcpStream,
        mut to: TcpStream,
        (number, to_owner): (usize, bool),
        alteration: Option<Alteration>,
    ) {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(count) = from.read(&mut buffer) {
            if count == 0 {
                break;
            }
            {
                let mut inner = self.inner.lock().unwrap();
                let Inner { recorded, answered, .. } = &mut *inner;
                let record = if to_owner { &mut recorded[number] } else { &mut answered[number] };
                let at = alteration.and_then(|alteration| alteration.at.checked_sub(record.len()));
                if let Some(byte) = at.and_then(|at| buffer[..count].get_mut(at)) {
                    *byte ^= 0x40;
                }
                record.extend_from_slice(&buffer[..count]);
            }
            let mut left = &buffer[..count];
            while !left.is_empty() {
                let now = self.allowed(to_owner, left.len());
                if to.write_all(&left[..now]).is_err() {
                    break;
                }
                left = &left[now..];
            }
        }
        to.shutdown(Shutdown::Both).ok();
        from.shutdown(Shutdown::Both).ok();
    }

    /// Returns how many of `wanted` bytes may pass; waits until it is at least one.
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
