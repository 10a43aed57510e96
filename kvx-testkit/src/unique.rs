//! Names and ports that nothing else on this host uses.

use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::check::Failure;

/// Returns a name for an agent that no other agent of this host has. Two agents of one name are
/// taken for one that was restarted, and tests run side by side.
pub fn unique(name: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{name}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A port that nobody listens on, nor on so many neighbours above it, and that nobody gets who does
/// not ask for it: who comes back to it finds it free.
pub fn free_port(neighbours: u16) -> Result<u16, Failure> {
    /// Below those that the system gives away, and above those from which Mooncake draws its own.
    const PORTS: Range<u16> = 18_000..32_000;
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Processes that look at one time begin apart from each other.
    let first = u64::from(std::process::id()) * 97;
    let step = 1 + u64::from(neighbours);
    let next = || {
        PORTS.start
            + ((first + NEXT.fetch_add(step, Ordering::Relaxed)) % PORTS.len() as u64) as u16
    };
    let free = |port: u16| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
    let found = PORTS.map(|_| next()).find(|port| (*port..=port + neighbours).all(free));
    found.ok_or_else(|| {
        Failure::new(format!("no {step} ports of {PORTS:?} beside each other are free"))
    })
}
