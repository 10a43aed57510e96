//! The attackers: connections that send, and never read.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use super::{AttackBytes, Connect};
use crate::random::Random;

/// The byte with which attackers continue a message.
pub(super) const LETTER: u8 = b'a';
/// The pause between two bytes of a slow message.
const SLOW: Duration = Duration::from_millis(50);
/// How long attackers try to send more to a listener whose answers they do not read.
const STUBBORN: Duration = Duration::from_millis(200);
/// The pause after attackers were blocked.
const BLOCKED: Duration = Duration::from_millis(2);
/// The number of random bytes that are sent at a time.
const PIECE: usize = 4096;

/// All attackers of a listener, with what they have sent.
pub(super) struct Attackers<'a> {
    connect: &'a Connect<'a>,
    /// The bytes that the kernel has taken.
    sent: AtomicU64,
    open: AtomicU64,
    most: AtomicU64,
}

/// A connection of an attacker.
pub(super) struct Attacker<'a> {
    all: &'a Attackers<'a>,
    stream: OwnedFd,
}

impl<'a> Attackers<'a> {
    pub(super) fn new(connect: &'a Connect<'a>) -> Self {
        Attackers {
            connect,
            sent: AtomicU64::new(0),
            open: AtomicU64::new(0),
            most: AtomicU64::new(0),
        }
    }

    /// Returns the bytes that were sent so far.
    pub(super) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Returns the highest number of connections that were open at a time.
    pub(super) fn most(&self) -> u64 {
        self.most.load(Ordering::Relaxed)
    }

    fn enter(&'a self) -> io::Result<Attacker<'a>> {
        let stream = (self.connect)()?;
        let open = self.open.fetch_add(1, Ordering::Relaxed) + 1;
        self.most.fetch_max(open, Ordering::Relaxed);
        Ok(Attacker { all: self, stream })
    }

    /// Opens connections that send these parts. A connection that the listener does not accept is
    /// left out.
    pub(super) fn say(&'a self, count: usize, parts: &[&[u8]]) -> Vec<Attacker<'a>> {
        let mut entered: Vec<_> = (0..count).flat_map(|_| self.enter()).collect();
        for attacker in &mut entered {
            parts.iter().for_each(|part| _ = attacker.send(part));
        }
        entered
    }

    /// Opens connections that send random bytes.
    pub(super) fn say_random(&'a self, count: usize, len: usize) -> Vec<Attacker<'a>> {
        let entered = self.say(count, &[]);
        let mut random = Random::seeded(7);
        for attacker in &entered {
            let bytes: Vec<u8> = (0..len / 8).flat_map(|_| random.word().to_le_bytes()).collect();
            // In pieces, because a packet of a Unix socket has a greatest length.
            bytes.chunks(PIECE).for_each(|piece| _ = attacker.send(piece));
        }
        entered
    }

    /// Opens connections and closes them at once, without a pause: silent ones, and those that have
    /// sent half a message.
    pub(super) fn storm(&'a self, bytes: &AttackBytes, until: Instant) {
        let half = &bytes.message[..bytes.message.len() / 2];
        for number in 0_u64.. {
            if Instant::now() >= until {
                return;
            }
            // An error: the listener does not accept as fast.
            let Ok(attacker) = self.enter() else { continue };
            if number % 2 == 0 {
                attacker.send(&bytes.prelude);
                attacker.send(half);
            }
        }
    }
}

impl Attacker<'_> {
    /// Sends as many of these bytes as the kernel takes without waiting. Returns their number, or
    /// `None` if the connection has ended.
    fn send(&self, bytes: &[u8]) -> Option<usize> {
        let mut sent = 0;
        while sent < bytes.len() {
            match send(&self.stream, &bytes[sent..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(count) => {
                    sent += count;
                    self.all.sent.fetch_add(count as u64, Ordering::Relaxed);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => return None,
            }
        }
        Some(sent)
    }
}

impl Drop for Attacker<'_> {
    fn drop(&mut self) {
        self.all.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Sends a message on each connection again and again, until the listener reads no more or has got
/// `most` bytes.
pub(super) fn repeat(connections: &[Attacker<'_>], message: &[u8], most: usize) {
    let many = message.repeat(most.div_ceil(message.len().max(1)));
    let mut sent = vec![Some(0); connections.len()];
    let until = Instant::now() + STUBBORN;
    while Instant::now() < until {
        for (connection, sent) in connections.iter().zip(&mut sent) {
            *sent = sent.and_then(|before| Some(before + connection.send(&many[before..])?));
        }
        std::thread::sleep(BLOCKED);
    }
}

/// Sends single bytes on each connection.
pub(super) fn drip(connections: &[Attacker<'_>], end: &AtomicBool) {
    while !end.load(Ordering::Relaxed) {
        connections.iter().for_each(|connection| _ = connection.send(&[LETTER]));
        std::thread::sleep(SLOW);
    }
}
