//! Names: of requests, engines, their ranks and addresses, and of the blocks of a request.

use std::borrow::Borrow;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

/// The largest tensor-parallel size that is accepted; a peer's word is checked against it before anything is allocated.
pub const MAX_RANKS: u32 = 1024;

/// A request as one engine names it. The two engines of a request name it differently.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(Arc<str>);

/// One life of one engine, as its handshake says it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineId(Arc<str>);

macro_rules! name {
    ($type:ident) => {
        impl $type {
            /// As it is written.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl<T: Into<Arc<str>>> From<T> for $type {
            fn from(text: T) -> Self {
                $type(text.into())
            }
        }

        impl Borrow<str> for $type {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &*self.0)
            }
        }
    };
}

name!(RequestId);
name!(EngineId);

impl RequestId {
    /// The name without the eight hexadecimal digits that an engine appends to make it its own: what the two engines
    /// of a request have in common.
    pub fn shared(&self) -> &str {
        let Some((head, tail)) = self.0.rsplit_once('-') else { return &self.0 };
        let random =
            tail.len() == 8 && tail.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        if random { head } else { &self.0 }
    }
}

/// One worker of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerRank {
    /// Pipeline-parallel rank.
    pub pp: u32,
    /// Tensor-parallel rank.
    pub tp: u32,
}

/// Where an engine's side channel listens.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// Host name or address, IPv6 without brackets.
    pub host: Arc<str>,
    /// TCP port.
    pub port: u16,
}

impl Address {
    /// From `host:port`, IPv6 in brackets. `None`: it is none, or the port is 0.
    #[doc(hidden)]
    pub fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let host = match host.strip_prefix('[') {
            Some(host) => host.strip_suffix(']')?,
            None => Some(host).filter(|host| !host.contains(':'))?,
        };
        let port = port.parse().ok().filter(|port| *port > 0)?;
        let plain = !host.is_empty() && !host.contains(['/', '@', ' ']);
        plain.then(|| Address { host: host.into(), port })
    }
}

/// A host as it is written, IPv6 without brackets.
#[doc(hidden)]
pub fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// Whether a host as it is written leads to this machine alone.
#[doc(hidden)]
pub fn is_loopback(host: &str) -> bool {
    bare(host)
        .parse::<IpAddr>()
        .map_or(host.eq_ignore_ascii_case("localhost"), |ip| ip.is_loopback())
}

/// Block numbers of one request, a list for each KV cache group. Shared: a clone copies no number.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct BlockLists(Arc<[Arc<[u32]>]>);

impl BlockLists {
    /// One list for each group.
    pub fn new<T: Into<Arc<[u32]>>>(groups: impl IntoIterator<Item = T>) -> Self {
        BlockLists(groups.into_iter().map(Into::into).collect())
    }

    /// The only group's list: `&blocks[..]` of a vector, or an `Arc` that is shared.
    pub fn single(blocks: impl Into<Arc<[u32]>>) -> Self {
        BlockLists([blocks.into()].into())
    }

    /// The lists.
    pub fn groups(&self) -> &[Arc<[u32]>] {
        &self.0
    }

    /// Whether there is not one block.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|group| group.is_empty())
    }

    /// How many blocks in all groups.
    pub fn len(&self) -> usize {
        self.0.iter().map(|group| group.len()).sum()
    }

    /// All numbers, the lowest first.
    #[doc(hidden)]
    pub fn ascending(&self) -> Vec<u32> {
        let mut all: Vec<_> = self.iter().collect();
        all.sort_unstable();
        all
    }

    /// All numbers, group by group.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().flat_map(|group| group.iter().copied())
    }
}

/// How many there are, not which: a request may have thousands.
impl fmt::Debug for BlockLists {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts: Vec<_> = self.0.iter().map(|group| group.len()).collect();
        write!(f, "BlockLists{counts:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_leads_to_this_machine_alone_is_told() {
        for (host, loopback) in
            [("LocalHost", true), ("[::1]", true), ("127.0.0.9", true), ("10.0.0.1", false)]
        {
            assert_eq!(is_loopback(host), loopback, "{host}");
        }
    }

    #[test]
    fn the_shared_part_of_a_name_is_without_the_engines_own_suffix() {
        for (name, shared) in [
            ("cmpl-u-0-0123abcd", "cmpl-u-0"),
            ("cmpl-u-0-0123ABCD", "cmpl-u-0-0123ABCD"),
            ("cmpl-u-0-0123abc", "cmpl-u-0-0123abc"),
            ("0123abcd", "0123abcd"),
            ("-0123abcd", ""),
        ] {
            assert_eq!(RequestId::from(name).shared(), shared);
        }
    }
}
