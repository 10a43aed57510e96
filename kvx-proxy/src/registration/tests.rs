//! Tests with a real etcd.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvx_testkit::{Etcd, free_port};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::*;
use crate::etcd::{CallError, Client};
use crate::setup::FleetSecret;

/// The timeout of every wait.
const CUT_OFF: Duration = Duration::from_secs(20);
/// The lifetime of leases: etcd's minimum.
const LEASE: Duration = Duration::from_secs(2);

const PREFILL: &str = r#"{"role":"prefill","url":"http://10.0.0.1:8000","weight":2}"#;
const DECODE: &str = r#"{"role":"decode","url":"http://10.0.0.2:8000"}"#;

/// Starts an etcd, or reports that a test does not run.
fn etcd(test: &str) -> Option<Etcd> {
    let etcd = Etcd::start();
    if etcd.is_none() {
        kvx_testkit::skip(test, "etcd is not installed", "apt install etcd-server");
    }
    etcd
}

fn fleet(hosts: &str, name: &str) -> FleetAddress {
    FleetAddress::new(&format!("etcd://{hosts}/{name}")).unwrap().with_lease(LEASE)
}

/// Receives the lists of a fleet.
struct Lists {
    list: FleetList,
    receiver: watch::Receiver<Option<Arc<[Registration]>>>,
}

impl Lists {
    fn follow(fleet: &FleetAddress, secret: Option<&FleetSecret>) -> Self {
        let list = follow(fleet, secret).unwrap();
        let receiver = list.subscribe();
        Lists { list, receiver }
    }

    /// Waits for a list with these ids. Fails if a list is empty meanwhile, unless none are wanted.
    async fn wait_for(&mut self, ids: &[u64]) {
        let listed = |list: &Option<Arc<[Registration]>>| {
            let listed: Vec<_> = list.as_deref()?.iter().map(|one| one.id).collect();
            Some(listed)
        };
        let mut wanted = ids.to_vec();
        wanted.sort_unstable();
        let right = |list: &Option<Arc<[Registration]>>| {
            let Some(mut listed) = listed(list) else { return false };
            listed.sort_unstable();
            listed == wanted
        };
        let waited = timeout(CUT_OFF, self.receiver.wait_for(right)).await.map(|_| ());
        assert!(waited.is_ok(), "{:?} is not {ids:?}", listed(&self.receiver.borrow()));
    }

    /// Checks for this long that no list is empty.
    async fn stay_for(&mut self, time: Duration) {
        let is_empty =
            |list: &Option<Arc<[Registration]>>| list.as_deref().is_none_or(<[_]>::is_empty);
        let emptied = timeout(time, self.receiver.wait_for(is_empty)).await.map(|_| ());
        assert!(emptied.is_err(), "the list became empty");
    }

    fn refused(&self, reason: &str) -> u64 {
        self.list.refusals().find(|(name, _)| *name == reason).unwrap().1
    }
}

async fn registered(fleet: &FleetAddress, instance: &str) -> Registered {
    let registered = register(fleet, instance, None).unwrap();
    timeout(CUT_OFF, registered.wait_until_registered()).await.unwrap();
    registered
}

/// A relay of connections, which a test can cut.
struct Relay {
    port: u16,
    to: String,
    tasks: JoinSet<()>,
}

impl Relay {
    async fn start(to: String) -> Self {
        let mut relay = Relay { port: free_port(0).unwrap(), to, tasks: JoinSet::new() };
        relay.join().await;
        relay
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Closes its port and its connections.
    async fn cut(&mut self) {
        self.tasks.shutdown().await;
    }

    async fn join(&mut self) {
        let listener = TcpListener::bind(self.address()).await.unwrap();
        let to = self.to.clone();
        self.tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (mut one, _) = listener.accept().await.unwrap();
                let to = to.clone();
                connections.spawn(async move {
                    let mut other = TcpStream::connect(to).await.unwrap();
                    // An error ends the connection.
                    let _ = tokio::io::copy_bidirectional(&mut one, &mut other).await;
                });
            }
        });
    }
}

#[tokio::test]
async fn instances_register_are_listed_and_leave_before_their_lease_ends() {
    let Some(etcd) = etcd("instances_register_are_listed_and_leave_before_their_lease_ends") else {
        return;
    };
    // The first name begins the second one.
    let (chat, chat2) = (fleet(&etcd.address(), "chat"), fleet(&etcd.address(), "chat2"));
    let (mut list, mut list2) = (Lists::follow(&chat, None), Lists::follow(&chat2, None));
    list.wait_for(&[]).await;
    let prefill = registered(&chat, PREFILL).await;
    let decode = registered(&chat2, DECODE).await;
    list.wait_for(&[prefill.id()]).await;
    list2.wait_for(&[decode.id()]).await;
    let of_chat = list.receiver.borrow().clone().unwrap();
    assert_eq!((of_chat[0].role, of_chat[0].setup.name()), (Role::Prefill, "10.0.0.1:8000"));
    assert_eq!(of_chat[0].setup.weight, 2.0);
    // Keepalives hold it for longer than a lease.
    list.stay_for(LEASE * 2).await;
    prefill.leave().await;
    assert_eq!(etcd.keys(), 1, "it has left at once");
    list.wait_for(&[]).await;
    drop(decode);
    list2.wait_for(&[]).await;
}

#[tokio::test]
async fn an_outage_of_etcd_empties_no_list_and_ends_no_registration() {
    let Some(mut etcd) = etcd("an_outage_of_etcd_empties_no_list_and_ends_no_registration") else {
        return;
    };
    let fleet = fleet(&etcd.address(), "f");
    let mut list = Lists::follow(&fleet, None);
    let one = registered(&fleet, PREFILL).await;
    list.wait_for(&[one.id()]).await;
    etcd.kill();
    list.stay_for(LEASE * 2).await;
    etcd.restart(true);
    list.stay_for(LEASE * 2).await;
    // Lost leases: this etcd knows nothing.
    etcd.restart(false);
    let registers = async {
        while etcd.keys() == 0 {
            sleep(Duration::from_millis(20)).await; // between polls
        }
    };
    timeout(CUT_OFF, registers).await.unwrap();
    list.stay_for(LEASE * 3).await;
    assert!(one.is_registered());
    list.wait_for(&[one.id()]).await;
    one.leave().await;
    list.wait_for(&[]).await;
}

#[tokio::test]
async fn a_hung_etcd_empties_no_list_and_its_ended_leases_are_replaced() {
    let Some(etcd) = etcd("a_hung_etcd_empties_no_list_and_its_ended_leases_are_replaced") else {
        return;
    };
    let fleet = fleet(&etcd.address(), "f");
    let mut list = Lists::follow(&fleet, None);
    let one = registered(&fleet, PREFILL).await;
    list.wait_for(&[one.id()]).await;
    etcd.suspend();
    // The watch is silent without an error until the member is checked.
    list.stay_for(Duration::from_secs(10)).await;
    etcd.resume();
    list.stay_for(LEASE * 3).await;
    timeout(CUT_OFF, one.wait_until_registered()).await.unwrap();
    assert_eq!(etcd.keys(), 1);
    etcd.suspend();
    let left = Instant::now();
    timeout(CUT_OFF, one.leave()).await.unwrap();
    assert!(left.elapsed() < Duration::from_secs(8), "leaving is bounded: {:?}", left.elapsed());
    etcd.resume();
    list.wait_for(&[]).await;
}

#[tokio::test]
async fn a_watch_that_was_cut_off_during_a_compaction_lists_again() {
    let Some(etcd) = etcd("a_watch_that_was_cut_off_during_a_compaction_lists_again") else {
        return;
    };
    let mut relay = Relay::start(etcd.address()).await;
    let direct = fleet(&etcd.address(), "f");
    let mut list = Lists::follow(&fleet(&relay.address(), "f"), None);
    let one = registered(&direct, PREFILL).await;
    list.wait_for(&[one.id()]).await;
    // Without a compaction, the watch continues.
    relay.cut().await;
    let two = registered(&direct, DECODE).await;
    relay.join().await;
    list.wait_for(&[one.id(), two.id()]).await;
    relay.cut().await;
    let three = r#"{"role":"decode","url":"http://10.0.0.3:8000"}"#;
    let three = registered(&direct, three).await;
    two.leave().await;
    let listed = direct.client().unwrap().list("/", 1, |_| {}).await.unwrap();
    let compacted =
        etcd.post("/v3/kv/compaction", &json!({"revision": listed.to_string()}).to_string());
    assert!(compacted.unwrap().contains(" 200 "));
    relay.join().await;
    list.wait_for(&[one.id(), three.id()]).await;
}

#[tokio::test]
async fn a_short_cut_of_a_watch_does_not_delay_departures() {
    let Some(etcd) = etcd("a_short_cut_of_a_watch_does_not_delay_departures") else {
        return;
    };
    let mut relay = Relay::start(etcd.address()).await;
    let direct = fleet(&etcd.address(), "f");
    // After an outage nothing would leave the list for the time of a lease.
    let followed = fleet(&relay.address(), "f").with_lease(Duration::from_secs(600));
    let mut list = Lists::follow(&followed, None);
    let (one, two) = (registered(&direct, PREFILL).await, registered(&direct, DECODE).await);
    list.wait_for(&[one.id(), two.id()]).await;
    relay.cut().await;
    relay.join().await;
    two.leave().await;
    list.wait_for(&[one.id()]).await;
}

#[tokio::test]
async fn endpoints_that_refuse_or_hang_are_passed_over() {
    let Some(etcd) = etcd("endpoints_that_refuse_or_hang_are_passed_over") else {
        return;
    };
    let hung = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let hosts = format!(
        "127.0.0.1:{},{},{}",
        free_port(0).unwrap(),
        hung.local_addr().unwrap(),
        etcd.address()
    );
    let fleet = fleet(&hosts, "f");
    let mut list = Lists::follow(&fleet, None);
    let one = registered(&fleet, PREFILL).await;
    list.wait_for(&[one.id()]).await;
}

#[tokio::test]
async fn with_a_secret_forged_unsigned_and_expired_entries_are_refused_and_counted() {
    let test = "with_a_secret_forged_unsigned_and_expired_entries_are_refused_and_counted";
    let Some(etcd) = etcd(test) else { return };
    let fleet = fleet(&etcd.address(), "f");
    let client = fleet.client().unwrap();
    let [ours, theirs] = [1, 2].map(|byte| FleetSecret::new([byte; 32]));
    let own = |id, secret| entry::OwnEntry::new(&fleet, id, DECODE, secret).unwrap();
    let signed = own(1, Some(&ours));
    for (entry, value) in [
        (own(2, Some(&theirs)), own(2, Some(&theirs)).value()),
        (own(3, None), own(3, None).value()),
        (own(4, Some(&ours)), own(4, Some(&ours)).value_until(1)),
        // A copy under another key.
        (own(5, None), signed.value()),
        (own(6, None), "x".repeat(1 << 20)),
        (own(7, None), "{}".to_owned()),
    ] {
        client.put(&entry.key, &value, 0).await.unwrap();
    }
    client.put("/kvx/v1/instances/f/decode", "{}", 0).await.unwrap();
    client.put("/kvx/v1/instances/f/decode/1", "{}", 0).await.unwrap();
    let mut list = Lists::follow(&fleet, Some(&ours));
    list.wait_for(&[]).await;
    let registered = register(&fleet, DECODE, Some(&ours)).unwrap();
    list.wait_for(&[registered.id()]).await;
    for (reason, count) in
        [("forged", 2), ("unsigned", 1), ("expired", 1), ("size", 1), ("malformed", 1), ("key", 2)]
    {
        assert_eq!(list.refused(reason), count, "{reason}");
    }
    // Entries that the watch reports, one of which overwrites a registration.
    client.put(&own(2, None).key, &own(2, Some(&theirs)).value(), 0).await.unwrap();
    let key = fleet.key(Role::Decode, registered.id());
    client.put(&key, &own(registered.id(), Some(&theirs)).value(), 0).await.unwrap();
    list.wait_for(&[]).await;
    assert_eq!(list.refused("forged"), 4);
}

#[tokio::test]
async fn many_entries_and_large_ones_are_listed_in_pages() {
    let Some(etcd) = etcd("many_entries_and_large_ones_are_listed_in_pages") else {
        return;
    };
    let fleet = fleet(&etcd.address(), "f");
    let client = fleet.client().unwrap();
    for number in 0..600 {
        let value = if number % 100 == 0 { "x".repeat(1 << 20) } else { "{}".to_owned() };
        client.put(&format!("{}{number:04}", fleet.prefix()), &value, 0).await.unwrap();
    }
    let mut keys = Vec::new();
    client.list(&fleet.prefix(), 10_000, |entry| keys.push(entry.key)).await.unwrap();
    assert!(keys.is_sorted());
    keys.dedup();
    assert_eq!(keys.len(), 600);
    // A list without the rest would take instances for gone.
    let cut = client.list(&fleet.prefix(), 300, |_| {}).await.unwrap_err();
    assert!(matches!(cut, CallError::TooMany(300)), "{cut}");
}

/// Creates the user `root` with the password `right`, and turns users on.
fn turn_users_on(etcd: &Etcd) {
    for (path, body) in [
        ("/v3/auth/user/add", r#"{"name":"root","password":"right"}"#),
        ("/v3/auth/role/add", r#"{"name":"root"}"#),
        ("/v3/auth/user/grant", r#"{"user":"root","role":"root"}"#),
        ("/v3/auth/enable", "{}"),
    ] {
        let answer = etcd.post(path, body).unwrap();
        assert!(answer.contains(" 200 "), "{path}: {answer}");
    }
}

#[tokio::test]
async fn a_user_of_etcd_logs_in_and_again_when_its_token_is_lost() {
    let Some(mut etcd) = etcd("a_user_of_etcd_logs_in_and_again_when_its_token_is_lost") else {
        return;
    };
    turn_users_on(&etcd);
    let nobody = fleet(&etcd.address(), "f");
    let put = async |client: Client| client.put("key", "value", 0).await;
    let refused = put(nobody.client().unwrap()).await.unwrap_err();
    assert!(refused.to_string().contains("ETCD_AUTH_USERNAME"), "{refused}");
    let wrong = put(nobody.clone().with_login("root", "wrong").client().unwrap()).await;
    assert!(matches!(wrong, Err(CallError::Refused { .. })), "{wrong:?}");
    let root = nobody.with_login("root", "right");
    let mut list = Lists::follow(&root, None);
    let one = registered(&root, PREFILL).await;
    list.wait_for(&[one.id()]).await;
    // Tokens are in etcd's memory.
    etcd.restart(true);
    list.stay_for(LEASE * 2).await;
    assert!(one.is_registered());
    one.leave().await;
    list.wait_for(&[]).await;
}

#[tokio::test]
async fn an_engine_is_registered_while_it_is_healthy() {
    let Some(etcd) = etcd("an_engine_is_registered_while_it_is_healthy") else { return };
    let fleet = fleet(&etcd.address(), "f");
    let mut list = Lists::follow(&fleet, None);
    let engine = Relay::start(etcd.address()).await; // etcd has a `/health` too
    let url = format!("http://{}", engine.address());
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let watched = fleet.clone();
    let sidecar = tokio::spawn(async move {
        let stopped = async { _ = stopped.await };
        register_while_healthy(&watched, &url, PREFILL, None, stopped).await
    });
    let wait = async |list: &mut Lists, count: usize| {
        let has = |listed: &Option<Arc<[Registration]>>| {
            listed.as_deref().is_some_and(|listed| listed.len() == count)
        };
        let waited = timeout(CUT_OFF, list.receiver.wait_for(has)).await;
        waited.unwrap().unwrap().as_deref().unwrap().first().map(|one| one.id)
    };
    let first = wait(&mut list, 1).await;
    let mut engine = engine;
    engine.cut().await;
    wait(&mut list, 0).await;
    engine.join().await;
    let second = wait(&mut list, 1).await;
    assert_ne!(first, second, "it may be another process");
    drop(stop);
    timeout(CUT_OFF, sidecar).await.unwrap().unwrap().unwrap();
    assert_eq!(etcd.keys(), 0);
    wait(&mut list, 0).await;
}
