//! The listening socket to which peers connect.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use kvx_core::backend::fork::Private;
use kvx_core::{Error, ErrorKind, Result};
use rustix::io::Errno;

use crate::tcp::config::Config;
use crate::tcp::socket::stream_socket;

/// The limit for connections that the kernel keeps until they are accepted.
const BACKLOG: i32 = 1024;

/// A listening socket, and the addresses that peers connect to.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) socket: Private,
    pub(crate) addresses: Vec<SocketAddr>,
}

impl Listener {
    /// Binds as configured.
    ///
    /// # Errors
    ///
    /// A busy port: names the port, the option and a free port. A wildcard address without
    /// `tcp.advertise`: lists the addresses of this host. Other errors of the system include its
    /// error code.
    pub(crate) fn open(config: &Config) -> Result<Self> {
        if config.bind.is_unspecified() && config.advertise.is_empty() {
            return Err(unspecified(config.bind));
        }
        let socket = match &config.ports {
            None => bound(SocketAddr::new(config.bind, 0))
                .map_err(|errno| refused(config.bind, errno))?,
            Some(ports) => {
                let mut free = None;
                for port in ports.clone() {
                    match bound(SocketAddr::new(config.bind, port)) {
                        Ok(socket) => {
                            free = Some(socket);
                            break;
                        }
                        Err(Errno::ADDRINUSE) => {}
                        Err(errno) => return Err(refused(config.bind, errno)),
                    }
                }
                free.ok_or_else(|| busy(config.bind, *ports.start(), *ports.end()))?
            }
        };
        let local = local_address(&socket).map_err(|errno| refused(config.bind, errno))?;
        let addresses = match config.advertise.is_empty() {
            true => vec![local],
            false => {
                config.advertise.iter().map(|address| or_port(*address, local.port())).collect()
            }
        };
        Ok(Listener { socket, addresses })
    }
}

fn or_port(address: SocketAddr, port: u16) -> SocketAddr {
    if address.port() == 0 { SocketAddr::new(address.ip(), port) } else { address }
}

fn bound(address: SocketAddr) -> Result<Private, Errno> {
    let socket = stream_socket(address)?;
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

fn local_address(socket: &Private) -> Result<SocketAddr, Errno> {
    rustix::net::getsockname(socket)?.try_into()
}

fn refused(bind: IpAddr, errno: Errno) -> Error {
    let hint = match errno {
        Errno::ADDRNOTAVAIL => format!(": it is not an address of this host, which has {}", list()),
        Errno::MFILE | Errno::NFILE => ": raise the limit of open files".into(),
        Errno::ACCESS => {
            ": ports below 1024 need privileges; choose others with \"tcp.ports\"".into()
        }
        _ => String::new(),
    };
    let error = Error::os(format!("cannot listen on {bind} (\"tcp.bind\"){hint}"), errno);
    error.with_kind(match errno {
        Errno::ADDRNOTAVAIL => ErrorKind::Invalid,
        Errno::MFILE | Errno::NFILE => ErrorKind::Exhausted,
        _ => ErrorKind::Native,
    })
}

fn busy(bind: IpAddr, from: u16, to: u16) -> Error {
    let free = bound(SocketAddr::new(bind, 0))
        .and_then(|socket| local_address(&socket))
        .map(|address| address.port());
    let free =
        free.map_or_else(|_| "another range".into(), |port| format!("{port}, which is free now,"));
    let which = if from == to {
        format!("port {from} is")
    } else {
        format!("ports {from} to {to} are all")
    };
    Error::os(
        format!("{which} in use on {bind} (\"tcp.ports\"): set it to {free} or leave it out"),
        Errno::ADDRINUSE,
    )
    .with_kind(ErrorKind::Exhausted)
}

fn unspecified(bind: IpAddr) -> Error {
    ErrorKind::Invalid.because(format!(
        "\"tcp.bind\" is {bind}, which means all addresses of this host, but peers need a specific \
         one: set \"tcp.advertise\" to one that they reach, of {}",
        list()
    ))
}

fn list() -> String {
    let addresses: Vec<_> =
        host_addresses().iter().map(|(name, ip)| format!("{ip} ({name})")).collect();
    if addresses.is_empty() { "none that is up".into() } else { addresses.join(", ") }
}

/// Returns the addresses of interfaces that are up, except for link-local ones.
pub(crate) fn host_addresses() -> Vec<(String, IpAddr)> {
    let mut first = std::ptr::null_mut();
    // SAFETY: `first` is a valid place for the list, which is freed below and nowhere else.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut next = first;
    // SAFETY: the list is valid and unchanged until it is freed; a pointer in it is null or valid.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        if entry.ifa_flags & libc::IFF_UP as u32 == 0 {
            continue;
        }
        // SAFETY: the address is null or points to a socket address of the family that it names.
        let ip = unsafe { ip_of(entry.ifa_addr) };
        // SAFETY: an interface's name is a C string.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        found.extend(ip.map(|ip| (name, ip)));
    }
    // SAFETY: `first` came from getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(first) };
    found
}

/// # Safety
///
/// The caller ensures that `address` is null or points to a socket address of the family that it
/// names.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the caller ensures that the pointer is valid; each family has its own layout.
    let ip = unsafe {
        match i32::from(address.as_ref()?.sa_family) {
            libc::AF_INET => {
                let v4 = address.cast::<libc::sockaddr_in>().read_unaligned();
                IpAddr::V4(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)))
            }
            libc::AF_INET6 => {
                let v6 = address.cast::<libc::sockaddr_in6>().read_unaligned();
                IpAddr::V6(Ipv6Addr::from(v6.sin6_addr.s6_addr))
            }
            _ => return None,
        }
    };
    let near = matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
    (!near).then_some(ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_descriptor_names_the_limit_to_raise() {
        let error = refused([127, 0, 0, 1].into(), Errno::MFILE);
        assert_eq!(error.kind(), ErrorKind::Exhausted);
        assert!(error.sentence().contains("raise the limit of open files"), "{error}");
    }
    use kvx_core::Options;

    fn open(json: &str) -> Result<Listener> {
        Listener::open(&Config::read(&Options::parse(json).unwrap()).unwrap())
    }

    #[test]
    fn the_error_of_a_busy_port_names_the_port_the_option_and_a_free_one() {
        let first = open("{}").unwrap();
        let port = first.addresses[0].port();
        let error = open(&format!(r#"{{"tcp": {{"ports": {port}}}}}"#)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted);
        let sentence = error.to_string();
        assert!(sentence.contains(&format!("port {port} is in use")), "{sentence}");
        assert!(sentence.contains("tcp.ports"), "{sentence}");
        let mut words = sentence
            .split(|c: char| !c.is_ascii_digit())
            .filter_map(|word| word.parse::<u16>().ok());
        let free =
            words.rfind(|number| *number > 1024 && *number != port).expect("a free port is named");
        assert!(sentence.contains(&format!("set it to {free}")), "{sentence}");
    }

    #[test]
    fn the_first_free_port_of_a_range_is_used() {
        // A range around a port that was just free.
        let taken = open("{}").unwrap();
        let from = taken.addresses[0].port();
        let to = from.saturating_add(20);
        let second = open(&format!(r#"{{"tcp": {{"ports": "{from}-{to}"}}}}"#)).unwrap();
        assert!((from + 1..=to).contains(&second.addresses[0].port()));
    }

    #[test]
    fn a_wildcard_without_an_advertised_address_lists_the_hosts_addresses() {
        for bind in ["0.0.0.0", "::"] {
            let error = open(&format!(r#"{{"tcp": {{"bind": "{bind}"}}}}"#)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.sentence().contains("tcp.advertise"), "{error}");
            for (_, ip) in host_addresses() {
                assert!(error.sentence().contains(&ip.to_string()), "{error}");
            }
        }
        let open = open(r#"{"tcp": {"bind": "0.0.0.0", "advertise": "127.0.0.1"}}"#).unwrap();
        assert_eq!(open.addresses[0].ip(), IpAddr::from([127, 0, 0, 1]));
        assert_ne!(open.addresses[0].port(), 0);
    }

    #[test]
    fn the_error_of_another_hosts_address_lists_those_of_this_one() {
        let error = open(r#"{"tcp": {"bind": "192.0.2.1"}}"#).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.sentence().contains("not an address of this host"), "{error}");
    }
}
