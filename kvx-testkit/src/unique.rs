//! Names and ports that nothing else on this host uses.

use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::check::Failure;

/// Returns a name for an agent that no other agent of this host has. Tests run concurrently, and
/// two agents with one name would count as one that was restarted.
pub fn unique(name: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{name}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Returns a port that is free, together with the `neighbours` ports above it. The kernel assigns
/// it only to programs that request it, so a test that restarts an agent finds it free again.
///
/// # Errors
/// No such ports are free.
pub fn free_port(neighbours: u16) -> Result<u16, Failure> {
    /// Below the ports that the system assigns, and above those from which Mooncake draws its own.
    const PORTS: Range<u16> = 18_000..32_000;
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Processes that search at the same time start at different ports.
    let first = u64::from(std::process::id()) * 97;
    let step = 1 + u64::from(neighbours);
    let next = || {
        PORTS.start
            + ((first + NEXT.fetch_add(step, Ordering::Relaxed)) % PORTS.len() as u64) as u16
    };
    let free = |port: u16| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
    let found = PORTS.map(|_| next()).find(|port| (*port..=port + neighbours).all(free));
    found.ok_or_else(|| Failure::new(format!("no {step} adjacent ports of {PORTS:?} are free")))
}
