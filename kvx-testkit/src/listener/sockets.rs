//! The sockets at which a process listens, as the kernel lists them.

use std::collections::HashSet;
use std::net::{Ipv4Addr, SocketAddrV4};

use crate::check::Failure;

/// The kernel's number of the state of a listening socket.
const LISTENS: &str = "0A";

/// Returns the IPv4 addresses at which a process of this host listens over TCP. Those of a native
/// library are in no metadata that kvx can read.
///
/// # Errors
/// The process has ended, or is another user's.
pub fn listening_addresses(process: u32) -> Result<Vec<SocketAddrV4>, Failure> {
    let failed = |why: std::io::Error| {
        Failure::new(format!("the sockets of process {process} cannot be listed: {why}"))
    };
    let descriptors = std::fs::read_dir(format!("/proc/{process}/fd")).map_err(failed)?;
    // A descriptor that was closed meanwhile has no name any more.
    let names = descriptors.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let names: HashSet<_> = names.map(|name| name.to_string_lossy().into_owned()).collect();
    let table = std::fs::read_to_string(format!("/proc/{process}/net/tcp")).map_err(failed)?;
    let listening = table.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_ours = names.contains(&format!("socket:[{}]", fields.get(9)?));
        if is_ours && fields[3] == LISTENS { address(fields[1]) } else { None }
    });
    Ok(listening.collect())
}

/// Decodes an address and a port, such as `0100007F:1F90`. The address is in the host's order.
fn address(text: &str) -> Option<SocketAddrV4> {
    let (address, port) = text.split_once(':')?;
    let address = u32::from_str_radix(address, 16).ok()?;
    let port = u16::from_str_radix(port, 16).ok()?;
    Some(SocketAddrV4::new(Ipv4Addr::from(address.to_ne_bytes()), port))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_listener_is_found_by_its_process() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let found = || {
            let all = listening_addresses(std::process::id()).unwrap();
            all.into_iter().any(|one| address == one.into())
        };
        assert!(found());
        drop(listener);
        assert!(!found());
    }
}
