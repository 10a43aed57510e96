//! Names of requests, engines, worker ranks and addresses, and the block lists of a request.

use std::borrow::Borrow;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

/// The largest tensor-parallel size that is accepted. Sizes from peers are checked against it
/// before anything is allocated.
pub const MAX_RANKS: u32 = 1024;

/// A request's name in one engine. The other engine may use the same name or another: the
/// parameters of a load carry the prefill's.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(Arc<str>);

/// The id of one incarnation of an engine, as its handshake carries it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineId(Arc<str>);

macro_rules! name {
    ($type:ident) => {
        impl $type {
            /// Returns the name as text.
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
    /// Returns the name without the suffix of eight hexadecimal digits that each engine appends.
    /// The rest is the same in both engines of a request.
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

/// The address of an engine's side channel.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// Host name or address, IPv6 without brackets.
    pub host: Arc<str>,
    /// TCP port.
    pub port: u16,
}

impl Address {
    /// Parses `host:port`, with IPv6 in brackets. Returns `None` for any other form and for port 0.
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

/// Returns a host without the brackets around an IPv6 address.
#[doc(hidden)]
pub fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// Returns whether a host, as written, is a loopback name or address.
#[doc(hidden)]
pub fn is_loopback(host: &str) -> bool {
    bare(host)
        .parse::<IpAddr>()
        .map_or(host.eq_ignore_ascii_case("localhost"), |ip| ip.is_loopback())
}

/// The block numbers of one request, one list for each KV cache group. Clones share the lists.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct BlockLists(Arc<[Arc<[u32]>]>);

impl BlockLists {
    /// Creates block lists from one list for each group.
    pub fn new<T: Into<Arc<[u32]>>>(groups: impl IntoIterator<Item = T>) -> Self {
        BlockLists(groups.into_iter().map(Into::into).collect())
    }

    /// Creates block lists with one group. A slice is copied; an `Arc` is shared.
    pub fn single(blocks: impl Into<Arc<[u32]>>) -> Self {
        BlockLists([blocks.into()].into())
    }

    /// Returns the lists.
    pub fn groups(&self) -> &[Arc<[u32]>] {
        &self.0
    }

    /// Returns whether no list holds a block.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|group| group.is_empty())
    }

    /// Returns the number of blocks in all groups.
    pub fn len(&self) -> usize {
        self.0.iter().map(|group| group.len()).sum()
    }

    /// Returns all block numbers in ascending order.
    #[doc(hidden)]
    pub fn ascending(&self) -> Vec<u32> {
        let mut all: Vec<_> = self.iter().collect();
        all.sort_unstable();
        all
    }

    /// Returns an iterator over all block numbers, group by group.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().flat_map(|group| group.iter().copied())
    }
}

/// Prints the number of blocks of each group, not the blocks: a request may have thousands.
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
    fn loopback_hosts_are_recognised() {
        for (host, loopback) in
            [("LocalHost", true), ("[::1]", true), ("127.0.0.9", true), ("10.0.0.1", false)]
        {
            assert_eq!(is_loopback(host), loopback, "{host}");
        }
    }

    #[test]
    fn the_shared_part_of_a_name_lacks_the_engines_suffix() {
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
