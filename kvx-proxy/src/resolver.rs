//! The addresses of instances' names, which outlast an outage of DNS.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::client::legacy::connect::dns::Name;
use tokio::net::lookup_host;
use tokio::time::timeout;
use tower_service::Service;

/// The time that a lookup may take while the addresses of an earlier one are known.
const PATIENCE: Duration = Duration::from_secs(1);
/// The most names whose addresses are kept.
const MOST: usize = 8192;

/// Looks names up by the C library. While that fails, a name keeps the addresses that it had;
/// otherwise an outage of DNS would end a fleet of names. An answer that the name does not exist is
/// no failure.
#[derive(Clone, Debug, Default)]
pub(crate) struct Resolver(Arc<Mutex<HashMap<String, KnownName>>>);

/// A name that had addresses.
#[derive(Debug)]
struct KnownName {
    addresses: Vec<SocketAddr>,
    /// True while a lookup runs. It holds a thread, so that there is one at a time.
    is_pending: bool,
}

impl Resolver {
    fn names(&self) -> MutexGuard<'_, HashMap<String, KnownName>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn resolve<L>(
        self,
        name: String,
        look_up: impl FnOnce(String) -> L,
    ) -> io::Result<Vec<SocketAddr>>
    where
        L: Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'static,
    {
        let known = match self.names().get_mut(&name) {
            Some(known) if known.is_pending => return Ok(known.addresses.clone()),
            Some(known) => {
                known.is_pending = true;
                Some(known.addresses.clone())
            }
            None => None,
        };
        let look_up = look_up(name.clone());
        // A task of its own, which notes a late answer too.
        let lookup = tokio::spawn(async move {
            let found = look_up.await;
            self.note(name, &found);
            found
        });
        let Some(known) = known else { return lookup.await.map_err(io::Error::other)? };
        match timeout(PATIENCE, lookup).await {
            Ok(Ok(Err(error))) if is_absence(&error) => Err(error),
            Ok(Ok(Ok(found))) if !found.is_empty() => Ok(found),
            _ => Ok(known),
        }
    }

    fn note(&self, name: String, found: &io::Result<Vec<SocketAddr>>) {
        let mut names = self.names();
        match found {
            Ok(found) if !found.is_empty() => {
                if names.len() >= MOST && !names.contains_key(&name) {
                    names.clear(); // most are those of instances that have gone
                }
                let known = KnownName { addresses: found.clone(), is_pending: false };
                names.insert(name, known);
            }
            Err(error) if is_absence(error) => _ = names.remove(&name),
            _ => {
                if let Some(known) = names.get_mut(&name) {
                    known.is_pending = false;
                }
            }
        }
    }
}

/// Returns true if the C library says that there is no such name or address. The standard library
/// keeps only its text; with any other text the query counts as failed, and removes nothing.
pub(crate) fn is_absence(error: &io::Error) -> bool {
    const TEXTS: [&str; 4] = [
        "Name or service not known",           // glibc
        "No address associated with hostname", // glibc
        "Name does not resolve",               // musl
        "Name has no usable address",          // musl
    ];
    let text = error.to_string();
    TEXTS.iter().any(|absence| text.contains(absence))
}

impl Service<Name> for Resolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let resolver = self.clone();
        let look_up = |name: String| async move { Ok(lookup_host((name, 0)).await?.collect()) };
        Box::pin(async move {
            let found = resolver.resolve(name.as_str().to_owned(), look_up).await;
            found.map(Vec::into_iter)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, last], 0))
    }

    async fn answer(resolver: &Resolver, answer: io::Result<u8>) -> io::Result<Vec<SocketAddr>> {
        let look_up = async |_| Ok(vec![address(answer?)]);
        resolver.clone().resolve("a".to_owned(), look_up).await
    }

    #[test]
    fn absence_is_no_failure() {
        let error = |text: &str| io::Error::other(format!("failed to lookup: {text}"));
        assert!(is_absence(&error("Name or service not known")));
        assert!(!is_absence(&error("Temporary failure in name resolution")));
    }

    fn fails() -> io::Error {
        io::Error::other("Temporary failure in name resolution")
    }

    #[tokio::test]
    async fn a_failed_lookup_leaves_the_last_addresses() {
        let resolver = Resolver::default();
        assert!(answer(&resolver, Err(fails())).await.is_err(), "nothing is known");
        assert_eq!(answer(&resolver, Ok(1)).await.unwrap(), [address(1)]);
        for _ in 0..3 {
            assert_eq!(answer(&resolver, Err(fails())).await.unwrap(), [address(1)]);
        }
        assert_eq!(answer(&resolver, Ok(2)).await.unwrap(), [address(2)], "the newest count");
        assert_eq!(answer(&resolver, Err(fails())).await.unwrap(), [address(2)]);
    }

    #[tokio::test]
    async fn a_name_that_does_not_exist_is_forgotten() {
        let resolver = Resolver::default();
        assert_eq!(answer(&resolver, Ok(1)).await.unwrap(), [address(1)]);
        let absent = || Err(io::Error::other("Name or service not known"));
        assert!(answer(&resolver, absent()).await.is_err());
        assert!(answer(&resolver, Err(fails())).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_lookup_that_hangs_is_not_repeated() {
        let resolver = Resolver::default();
        assert_eq!(answer(&resolver, Ok(1)).await.unwrap(), [address(1)]);
        let (answered, late) = tokio::sync::oneshot::channel();
        let look_up = async |_| Ok(vec![address(late.await.unwrap())]);
        let found = resolver.clone().resolve("a".to_owned(), look_up).await;
        assert_eq!(found.unwrap(), [address(1)], "it waits for a second");
        let never = async |_| panic!("a second lookup");
        let found = resolver.clone().resolve("a".to_owned(), never).await;
        assert_eq!(found.unwrap(), [address(1)]);
        answered.send(2).unwrap();
        while resolver.names()["a"].is_pending {
            tokio::task::yield_now().await;
        }
        assert_eq!(answer(&resolver, Err(fails())).await.unwrap(), [address(2)]);
    }

    #[tokio::test]
    async fn names_are_limited() {
        let resolver = Resolver::default();
        for name in 0..MOST + 10 {
            let look_up = async |_| Ok(vec![address(1)]);
            resolver.clone().resolve(name.to_string(), look_up).await.unwrap();
        }
        assert!(resolver.names().len() <= MOST);
    }
}
