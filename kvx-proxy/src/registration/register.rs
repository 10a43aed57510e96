//! Registers an instance, and keeps it registered.

use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, timeout};

use super::entry::{OwnEntry, VALID};
use crate::backoff::{Backoff, Reporter};
use crate::error::{Error, Result};
use crate::etcd::{CallError, Client};
use crate::random::random_bytes;
use crate::setup::{FleetAddress, FleetSecret};

/// The time that leaving may take while etcd does not answer: two of its members are asked. The
/// lease then ends by itself.
const LEAVE: Duration = Duration::from_secs(6);

/// A registered instance. Dropping it deletes the registration too, without waiting.
#[derive(Debug)]
pub struct Registered {
    id: u64,
    registered: watch::Receiver<bool>,
    stop: oneshot::Sender<()>,
    left: oneshot::Receiver<()>,
}

impl Registered {
    /// Returns the random id in the registration's key.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns true if the registration stands: it was written, and its lease is not known to be
    /// lost.
    pub fn is_registered(&self) -> bool {
        *self.registered.borrow()
    }

    /// Waits until the registration stands.
    pub async fn wait_until_registered(&self) {
        let mut registered = self.registered.clone();
        // An error: the thread has ended, and with it the program.
        let _ = registered.wait_for(|registered| *registered).await;
    }

    /// Deletes the registration, so that routers send nothing new. The instance then finishes what
    /// it has. Takes at most 6 s while etcd does not answer; routers learn it when the lease ends.
    pub async fn leave(self) {
        drop(self.stop);
        // An error: the thread has ended, as it should.
        let _ = self.left.await;
    }
}

/// Registers an instance in a fleet, and keeps it registered. `instance` is the JSON that
/// `POST /instances` of the router takes, such as
/// `{"role": "prefill", "url": "http://10.0.0.1:8000"}`. With a secret the registration is signed.
///
/// A thread of its own renews the lease, so that a busy program does not lose it. If etcd does not
/// answer, or the lease is lost, the thread registers again under the same key, without end; the
/// instance serves on.
///
/// # Errors
///
/// Fails if the JSON is no instance, or the client or the thread cannot be created.
pub fn register(
    fleet: &FleetAddress,
    instance: &str,
    secret: Option<&FleetSecret>,
) -> Result<Registered> {
    let id = u64::from_ne_bytes(random_bytes()?);
    let entry = OwnEntry::new(fleet, id, instance, secret)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::io("cannot create a runtime", error))?;
    let (registered, is_registered) = watch::channel(false);
    let ((stop, stopped), (leaving, left)) = (oneshot::channel::<()>(), oneshot::channel());
    let mut keeper = Keeper {
        client: fleet.client()?,
        ttl: fleet.lease,
        entry,
        lease: None,
        registered,
        reporter: Reporter::new("the registration in etcd"),
        backoff: Backoff::new(),
    };
    let keep = move || {
        runtime.block_on(async {
            tokio::select! {
                never = keeper.keep() => match never {},
                _ = stopped => {}
            }
            let _ = timeout(LEAVE, keeper.leave()).await;
        });
        drop(leaving);
    };
    std::thread::Builder::new()
        .name("kvx-register".to_owned())
        .spawn(keep)
        .map_err(|error| Error::io("cannot start a thread", error))?;
    Ok(Registered { id, registered: is_registered, stop, left })
}

struct Keeper {
    client: Client,
    ttl: Duration,
    entry: OwnEntry,
    lease: Option<u64>,
    registered: watch::Sender<bool>,
    reporter: Reporter,
    backoff: Backoff,
}

impl Keeper {
    async fn keep(&mut self) -> std::convert::Infallible {
        loop {
            match self.hold().await {
                Ok(()) => self.reporter.failed("the lease is lost"),
                Err(error) => self.reporter.failed(error),
            }
            self.registered.send_replace(false);
            sleep(self.backoff.next()).await; // before the next attempt
        }
    }

    /// Registers with a new lease, and renews both until the lease is lost.
    async fn hold(&mut self) -> std::result::Result<(), CallError> {
        let lease = self.client.grant(self.ttl).await?;
        self.lease = Some(lease.id);
        let every = lease.ttl / 3;
        let (mut pause, mut renew_at) = (Duration::ZERO, Instant::now());
        loop {
            sleep(pause).await; // until the lease must be renewed
            match self.renew(lease.id, &mut renew_at).await {
                Ok(true) => {
                    self.reporter.works();
                    if !self.registered.send_replace(true) {
                        self.entry.log_registered();
                    }
                    self.backoff.reset();
                    pause = every;
                }
                Ok(false) => return Ok(()),
                // The lease may live: etcd's clocks stand still while it is away.
                Err(error) => {
                    self.reporter.failed(error);
                    renew_at = Instant::now(); // etcd may be back with older data
                    pause = self.backoff.next().min(every);
                }
            }
        }
    }

    /// Renews the lease, and the value long before it expires. Returns false if the lease is lost.
    async fn renew(
        &self,
        lease: u64,
        renew_at: &mut Instant,
    ) -> std::result::Result<bool, CallError> {
        if !self.client.keep_alive(lease).await? {
            return Ok(false);
        }
        if Instant::now() < *renew_at {
            return Ok(true);
        }
        match self.client.put(&self.entry.key, &self.entry.value(), lease).await {
            Err(error) if error.is_lost_lease() => Ok(false),
            put => {
                put?;
                *renew_at = Instant::now() + VALID / 3;
                Ok(true)
            }
        }
    }

    /// Deletes the key, and ends the lease. The end of the lease alone could leave a key that belongs
    /// to an earlier one.
    async fn leave(&self) {
        if let Err(error) = self.client.delete(&self.entry.key).await {
            tracing::warn!("cannot delete the registration, which ends with its lease: {error}");
        }
        if let Some(lease) = self.lease {
            // An error: the lease ends by itself.
            let _ = self.client.revoke(lease).await;
        }
    }
}
