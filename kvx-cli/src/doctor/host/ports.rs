//! Examines whether the ports of an engine are free.

use std::net::{Ipv4Addr, TcpListener};

use super::super::finding::Finding;
use super::system::{names, read, variable};

pub(super) fn examine() -> Vec<Finding> {
    let named = |name: &str, default: u16| {
        variable(name).and_then(|port| port.parse().ok()).unwrap_or(default)
    };
    let ports = [
        ("side channel", "VLLM_NIXL_SIDE_CHANNEL_PORT", 5600),
        ("Mooncake's bootstrap server", "VLLM_MOONCAKE_BOOTSTRAP_PORT", 8998),
    ];
    let mut found = Vec::new();
    let mut free = Vec::new();
    for (what, name, default) in ports {
        let port = named(name, default);
        match TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)) {
            Ok(_) => free.push(format!("{port} ({what})")),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
                found.push(taken(what, name, port, holder(port)));
            }
            Err(error) => found.push(
                Finding::problem("ports", format!("{port} ({what}) cannot be bound: {error}"))
                    .cure(format!("`export {name}=` and a port that this user may bind")),
            ),
        }
    }
    if !free.is_empty() {
        found.push(Finding::ok("ports", format!("free: {}", free.join(", "))));
    }
    found
}

fn taken(what: &str, name: &str, port: u16, holder: Option<String>) -> Finding {
    let by = holder.unwrap_or_else(|| "a process that this user cannot see".to_owned());
    Finding::note("ports", format!("{port} ({what}) is taken by {by}"))
        .because("right if that is the engine; a second one on this host needs another port")
        .cure(format!("for a second engine `export {name}=` and a free port"))
}

/// Returns the program that listens at a port, with its process id.
fn holder(port: u16) -> Option<String> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
    let inode =
        tables.iter().find_map(|table| listening_inode(&read(table)?, port).map(str::to_owned))?;
    let socket = format!("socket:[{inode}]");
    let processes =
        names("/proc").into_iter().filter(|name| name.bytes().all(|b| b.is_ascii_digit()));
    for process in processes {
        let holds = names(format!("/proc/{process}/fd")).iter().any(|file| {
            std::fs::read_link(format!("/proc/{process}/fd/{file}"))
                .is_ok_and(|link| link.as_os_str() == socket.as_str())
        });
        if holds {
            let program = read(format!("/proc/{process}/comm")).unwrap_or_default();
            return Some(format!("{program} (process {process})"));
        }
    }
    None
}

/// Finds the inode of the socket that listens at a port, in a table of the kernel.
fn listening_inode(table: &str, port: u16) -> Option<&str> {
    const LISTEN: &str = "0A";
    table.lines().skip(1).find_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (_, local) = fields.nth(1)?.rsplit_once(':')?;
        let state = fields.nth(1)?;
        let inode = fields.nth(5)?;
        (u16::from_str_radix(local, 16) == Ok(port) && state == LISTEN).then_some(inode)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_that_listens_at_a_port_is_found() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let found = holder(port).unwrap();
        assert!(found.ends_with(&format!("(process {})", std::process::id())), "{found}");
        drop(listener);
        assert_eq!(holder(port), None);
    }

    #[test]
    fn only_listening_sockets_count() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
            0: 0100007F:15E0 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 111 1\n   \
            1: 00000000:15E0 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 222 1\n";
        assert_eq!(listening_inode(table, 5600), Some("222"));
        assert_eq!(listening_inode(table, 5601), None);
        assert_eq!(listening_inode("x\ny\n", 5600), None);
    }
}
