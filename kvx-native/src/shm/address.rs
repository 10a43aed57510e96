//! The address of an agent, as encoded in its metadata.

use kvx_backend::checksum;
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{ErrorKind, Result};

use super::error::error;
use super::host::{self, Host};

/// The transport's section of the metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) host: Host,
    /// The name of the agent's socket in the abstract namespace.
    pub(super) socket: Vec<u8>,
}

impl Address {
    const VERSION: u8 = 1;
    /// The kernel's limit, without the leading NUL.
    const MAX_SOCKET: usize = 107;

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = vec![Self::VERSION];
        out.put(&self.host.boot);
        out.put_u64(self.host.network);
        out.put_block(&self.socket);
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("SHM address", bytes);
        let version = reader.u8()?;
        if version != Self::VERSION {
            return Err(error(
                ErrorKind::Incompatible,
                format!(
                    "the peer's SHM address has version {version}, but this release knows {}",
                    Self::VERSION
                ),
            ));
        }
        let host = Host { boot: reader.array()?, network: reader.u64()? };
        let socket = reader.block(Self::MAX_SOCKET)?.to_vec();
        if socket.is_empty() {
            return Err(reader.malformed("a socket without a name"));
        }
        reader.end()?;
        Ok(Address { host, socket })
    }
}

/// Returns an unguessable socket name.
pub(super) fn random_socket_name() -> Result<Vec<u8>> {
    let [high, low] = [kvx_core::backend::random_number()?, kvx_core::backend::random_number()?];
    Ok(format!("kvx-shm-{high:016x}{low:016x}").into_bytes())
}

/// Returns the name under which an agent answers peers that know an earlier incarnation of it.
pub(super) fn name_socket_name(agent: &str) -> Vec<u8> {
    let hash = checksum::fnv1a(agent.as_bytes());
    format!("kvx-shm-{}-{hash:016x}", host::our_uid()).into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip_and_other_bytes_are_rejected() {
        let address = Address {
            host: Host { boot: [3; 16], network: 7 },
            socket: random_socket_name().unwrap(),
        };
        let bytes = address.encode();
        assert_eq!(Address::decode(&bytes).unwrap(), address);
        for len in 0..bytes.len() {
            assert!(Address::decode(&bytes[..len]).is_err());
        }
        let newer = [&[9], &bytes[1..]].concat();
        assert_eq!(Address::decode(&newer).unwrap_err().kind(), ErrorKind::Incompatible);
        let nameless = Address { socket: Vec::new(), ..address };
        assert_eq!(Address::decode(&nameless.encode()).unwrap_err().kind(), ErrorKind::Malformed);
    }
}
