//! Tests of the reconciler with a scripted provider, on virtual time.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use kvx_testkit::most_allocated;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Mutex;

use super::reconcile::MAX_INSTANCES;
use super::*;
use crate::fleet::instance::Origin;
use crate::log::AccessLogger;
use crate::recording::writer::Recorder;
use crate::relay::core::LiveSetup;

const SETUP: &str = "[[pool]]\ndecode = ['http://fixed:1']";

/// A router without connections, and the lists of its provider.
struct Scripted {
    core: Arc<Core>,
    lists: mpsc::Sender<Report>,
    starts: Arc<AtomicUsize>,
}

/// A report for which the provider panics.
const PANIC: &str = "panic";

impl Scripted {
    /// Starts discovery; without `prefix_tokens` there is no provider.
    fn start(absences: u32) -> Self {
        let live = LiveSetup::new(Setup::from_toml(SETUP).unwrap(), None).unwrap();
        let core = Arc::new(Core::new(live, AccessLogger::off(), Recorder::off()).0);
        let (lists, script) = mpsc::channel(1);
        let script = Arc::new(Mutex::new(script));
        let starts = Arc::<AtomicUsize>::default();
        let counter = Arc::clone(&starts);
        let provider = move |setup: &Setup| {
            let script = Arc::clone(&script);
            let starts = Arc::clone(&counter);
            let run = move |reports: Reports| -> ProviderTask {
                starts.fetch_add(1, Relaxed);
                Box::pin(async move {
                    while let Some(report) = script.lock().await.recv().await {
                        assert_ne!(report, Err(PANIC.to_owned()));
                        reports.send(report).await;
                    }
                })
            };
            let places = ["default", "later"].map(|pool| (pool.to_owned(), Role::Decode)).into();
            let settings = ProviderSettings::Text(setup.local_below.to_string());
            let every = TICK;
            let (name, run) = ("script".into(), Box::new(run));
            let provider = Provider { name, settings, every, absences, places, run };
            if setup.prefix_tokens == 0 { Vec::new() } else { vec![provider] }
        };
        tokio::spawn(Reconciler::new(Arc::clone(&core)).run(provider));
        Scripted { core, lists, starts }
    }

    async fn send(&self, report: Report) {
        self.lists.send(report).await.unwrap();
        sleep(2 * TICK).await;
    }

    async fn list(&self, list: &[Discovered]) {
        self.send(Ok(list.to_vec())).await;
    }

    fn all(&self) -> Vec<Arc<Instance>> {
        let mut all: Vec<_> = self.core.live().fleet.all().cloned().collect();
        all.sort_by_key(|one| one.place());
        all
    }

    fn names(&self) -> Vec<String> {
        self.all().iter().map(|one| one.name().to_owned()).collect()
    }

    fn named(&self, name: &str) -> Arc<Instance> {
        let all = self.all();
        Arc::clone(all.iter().find(|one| one.name() == name).expect("it is in the fleet"))
    }

    async fn reload(&self, text: &str) {
        // Instances that were checked need no connection now.
        self.all().iter().for_each(|one| _ = one.state.healthy());
        self.core.replace(|| Setup::from_toml(text), || {}).await.unwrap();
        sleep(2 * TICK).await;
    }
}

fn found(name: &str) -> Discovered {
    Discovered {
        identity: name.into(),
        pool: "default".to_owned(),
        role: Role::Decode,
        setup: InstanceSetup::new(&format!("http://{name}")).unwrap(),
    }
}

fn virtual_time() -> Runtime {
    Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
}

#[test]
fn instances_appear_change_in_place_and_go_after_absences() {
    virtual_time().block_on(async {
        let script = Scripted::start(2);
        let (one, mut other) = (found("a:1"), found("b:1"));
        script.list(&[one.clone(), other.clone()]).await;
        assert_eq!(script.names(), ["a:1", "b:1", "fixed:1"]);
        let before = script.named("b:1");
        other.setup.weight = 3.0;
        other.setup.draining = true;
        script.list(&[other.clone()]).await;
        assert_eq!(script.names(), ["a:1", "b:1", "fixed:1"], "one absence");
        let after = script.named("b:1");
        assert_eq!((after.setup.weight, after.setup.draining), (3.0, true));
        assert!(Arc::ptr_eq(&before.state, &after.state), "a changed instance keeps its state");
        script.list(&[other]).await;
        assert_eq!(script.names(), ["b:1", "fixed:1"]);
    });
}

#[test]
fn failed_and_empty_answers_do_not_empty_the_fleet() {
    virtual_time().block_on(async {
        let script = Scripted::start(1);
        script.send(Err("SERVFAIL".to_owned())).await;
        script.list(&[]).await;
        assert_eq!(script.names(), ["fixed:1"]);
        script.list(&[found("a:1")]).await;
        for _ in 0..10 {
            script.send(Err("SERVFAIL".to_owned())).await;
        }
        let too_many: Vec<_> =
            (0..=MAX_INSTANCES).map(|number| found(&format!("a{number}:1"))).collect();
        script.list(&too_many).await;
        let status = script.core.metrics.discovery.json();
        assert_eq!((&status[0]["instances"], &status[0]["failures"]), (&1.into(), &12.into()));
        assert!(status[0]["last_error"].as_str().unwrap().contains("divide them"), "{status}");
        for _ in 0..2 {
            script.list(&[]).await;
            assert_eq!(script.names(), ["a:1", "fixed:1"]);
        }
        script.list(&[found("a:1")]).await;
        // Several at once count as one.
        for _ in 0..5 {
            script.lists.send(Ok(Vec::new())).await.unwrap();
        }
        script.list(&[]).await;
        assert_eq!(script.names(), ["a:1", "fixed:1"]);
        script.list(&[found("a:1")]).await;
        for _ in 0..2 {
            script.list(&[]).await;
        }
        script.send(Err("SERVFAIL".to_owned())).await;
        assert_eq!(script.names(), ["a:1", "fixed:1"], "absences in a row count");
        script.list(&[]).await;
        assert_eq!(script.names(), ["fixed:1"]);
    });
}

#[test]
fn another_instance_at_the_address_inherits_nothing() {
    virtual_time().block_on(async {
        let script = Scripted::start(1);
        let mut one = found("a:1");
        script.list(&[one.clone()]).await;
        let before = script.named("a:1");
        before.state.healthy();
        script.list(&[one.clone()]).await;
        assert!(Arc::ptr_eq(&before, &script.named("a:1")), "nothing has changed");
        // The former instance still ends when the next one is listed.
        let mut former = one.clone();
        former.setup.draining = true;
        one.identity = "another pod".into();
        for list in [[former.clone(), one.clone()], [one, former]] {
            script.list(&list).await;
            let after = script.named("a:1");
            assert!(!after.setup.draining && !Arc::ptr_eq(&before.state, &after.state));
            assert!(after.state.is_down(), "it was not checked yet");
        }
    });
}

#[test]
fn an_address_that_is_back_is_asked_again() {
    virtual_time().block_on(async {
        let script = Scripted::start(3);
        script.list(&[found("a:1"), found("b:1")]).await;
        let before = script.all();
        before.iter().for_each(|one| _ = one.state.healthy());
        script.list(&[found("b:1")]).await;
        script.list(&[found("a:1"), found("b:1")]).await;
        let stale: Vec<_> = script.all().iter().map(|one| one.state.is_stale()).collect();
        assert_eq!(stale, [true, false, false]);
        assert!(Arc::ptr_eq(&before[0].state, &script.named("a:1").state));
        assert!(before[0].state.is_sound(), "it serves until then");
    });
}

#[test]
fn instances_of_others_are_not_touched() {
    virtual_time().block_on(async {
        let script = Scripted::start(1);
        let setup = InstanceSetup::new("http://added:1").unwrap();
        let fleet = |fleet: &crate::fleet::Fleet, setup| Some(fleet.with(0, Role::Decode, setup));
        script.core.place(|now| fleet(now, setup)).await;
        let mut list = ["added:1", "fixed:1", "mine:1"].map(found);
        list.iter_mut().for_each(|one| one.setup.draining = true);
        script.list(&list).await;
        let draining = |all: &[Arc<Instance>]| -> Vec<_> {
            all.iter().filter(|one| one.setup.draining).map(|one| one.name().to_owned()).collect()
        };
        assert_eq!(draining(&script.all()), ["mine:1"]);
        script.list(&[found("mine:1")]).await;
        assert_eq!(script.names(), ["added:1", "fixed:1", "mine:1"]);
        assert!(draining(&script.all()).is_empty());
    });
}

#[test]
fn an_operators_settings_last_as_long_as_the_instance() {
    virtual_time().block_on(async {
        let script = Scripted::start(1);
        let (mut one, other) = (found("a:1"), found("b:1"));
        script.list(&[one.clone(), other.clone()]).await;
        let drain = async |name: &str| {
            let mut setup = InstanceSetup::new(&format!("http://{name}")).unwrap();
            setup.draining = true;
            script.core.place(|now| Some(now.with(0, Role::Decode, setup))).await;
        };
        drain("a:1").await;
        drain("b:1").await;
        one.setup.weight = 2.0;
        script.list(&[one.clone(), other.clone()]).await;
        script.reload(&format!("local_below = 9\n{SETUP}")).await;
        script.list(&[one.clone(), other.clone()]).await;
        let drained = script.named("a:1");
        assert_eq!((drained.setup.draining, drained.setup.weight), (true, 1.0));
        // The next pod at the address is another instance, and b:1 has gone.
        one.identity = "another pod".into();
        script.list(&[one.clone()]).await;
        assert_eq!(script.names(), ["a:1", "fixed:1"]);
        assert_eq!(script.named("a:1").setup, one.setup);
        // Without the operator's settings it has those of the provider again.
        drain("a:1").await;
        let drained = script.named("a:1");
        script.core.place(|now| Some(now.handed_back(0, Role::Decode, "a:1"))).await;
        sleep(2 * TICK).await;
        let after = script.named("a:1");
        assert_eq!(after.setup, one.setup);
        assert!(Arc::ptr_eq(&drained.state, &after.state), "its requests go on");
        // One that ends is drained, whatever the operator has set.
        let mut heavy = one.setup.clone();
        heavy.weight = 7.0;
        script.core.place(|now| Some(now.with(0, Role::Decode, heavy))).await;
        script.list(&[one.clone()]).await;
        assert_eq!(script.named("a:1").setup.weight, 7.0);
        one.setup.draining = true;
        script.list(&[one.clone()]).await;
        assert!(script.named("a:1").setup.draining);
    });
}

#[test]
fn a_provider_runs_on_while_its_settings_stay_and_again_if_it_ends() {
    virtual_time().block_on(async {
        let script = Scripted::start(1);
        script.list(&[found("a:1")]).await;
        script.reload(SETUP).await;
        assert_eq!(script.starts.load(Relaxed), 1);
        script.reload(&format!("local_below = 9\n{SETUP}")).await;
        assert_eq!(script.starts.load(Relaxed), 2);
        script.send(Err(PANIC.to_owned())).await;
        assert_eq!(script.starts.load(Relaxed), 3);
        assert_eq!(script.names(), ["a:1", "fixed:1"]);
        assert_eq!(script.core.metrics.discovery.json()[0]["failing"], true);
        script.list(&[found("b:1")]).await;
        assert_eq!(script.names(), ["b:1", "fixed:1"]);
    });
}

#[test]
fn instances_without_a_pool_are_counted_and_not_used() {
    virtual_time().block_on(async {
        let script = Scripted::start(1);
        let stray = Discovered { pool: "typo".to_owned(), ..found("c:1") };
        script.list(&[found("a:1"), stray]).await;
        assert_eq!(script.names(), ["a:1", "fixed:1"]);
        let status = &script.core.metrics.discovery.json()[0];
        assert_eq!((&status["instances"], &status["without_pool"]), (&1.into(), &1.into()));
    });
}

#[test]
fn a_reload_keeps_what_was_discovered_as_long_as_its_provider() {
    virtual_time().block_on(async {
        let script = Scripted::start(1);
        script.list(&[found("a:1"), found("b:1")]).await;
        script.reload("[[pool]]\ndecode = ['http://fixed:1', 'http://a:1']").await;
        assert_eq!(script.names(), ["a:1", "b:1", "fixed:1"]);
        script.list(&[found("b:1")]).await;
        assert_eq!(script.named("a:1").origin, Origin::Setup);
        script.reload(&format!("prefix_tokens = 0\n{SETUP}")).await;
        assert_eq!(script.names(), ["fixed:1"]);
        assert_eq!(script.core.metrics.discovery.json(), serde_json::json!([]));
        // A pool that does not exist yet.
        script.reload(SETUP).await;
        let later = Discovered { pool: "later".to_owned(), ..found("c:1") };
        script.list(&[later]).await;
        assert_eq!(script.names(), ["fixed:1"]);
        script.reload(&format!("{SETUP}\n[[pool]]\nname = 'later'")).await;
        assert_eq!(script.names(), ["fixed:1", "c:1"]);
    });
}

#[test]
fn a_pool_that_discovers_prefills_waits_for_them() {
    let text = "[[pool]]\nprefill = ['dns+http://p:1']\ndecode = ['http://d:1']";
    let fleet = crate::fleet::Fleet::new(&Setup::from_toml(text).unwrap(), None);
    assert_eq!((fleet.prefill.len(), fleet.decode.len()), (0, 1));
    fleet.decode[0].state.healthy();
    assert!(!fleet.is_ready() && fleet.has_pair(None), "decode does not compute its prompts");
    let why = fleet.why_unserved(None, &crate::fleet::missing::BOTH);
    assert_eq!(why, "no prefill instance is up in pool default");
}

/// 50 changes a second for ten seconds: new identities, new settings, and new addresses.
async fn churn(script: &Scripted) {
    let address = |number: u32| format!("10.0.{}.{}:8000", number >> 8, number & 255);
    let mut list: Vec<_> = (0..1000).map(|number| found(&address(number))).collect();
    for step in 1..=500 {
        let one = &mut list[step as usize * 7 % 1000];
        match step % 3 {
            0 => one.identity = step.to_string().into(),
            1 => one.setup.draining ^= true,
            _ => *one = found(&address(1000 + step)),
        }
        // The mark of the latest change.
        one.setup.weight = f64::from(step);
        script.lists.send(Ok(list.clone())).await.unwrap();
        sleep(Duration::from_millis(20)).await;
        let all = script.all();
        let newest = all.iter().map(|one| one.setup.weight as u32).max().unwrap();
        assert!(newest + 100 >= step, "change {step} is applied, and the registry is at {newest}");
        assert!(all.len() <= 1001, "{} instances", all.len());
    }
    sleep(Duration::from_secs(2)).await;
    let identity = |one: &Instance| match &one.origin {
        Origin::Discovered { identity, .. } => Some((Arc::clone(identity), one.setup.clone())),
        _ => None,
    };
    let mut is: Vec<_> = script.all().iter().filter_map(|one| identity(one)).collect();
    let mut wanted: Vec<_> = list.into_iter().map(|one| (one.identity, one.setup)).collect();
    is.sort_by(|one, other| one.0.cmp(&other.0));
    wanted.sort_by(|one, other| one.0.cmp(&other.0));
    assert_eq!(is, wanted);
}

#[test]
fn a_thousand_instances_that_churn_converge_in_bounded_memory() {
    let runtime = virtual_time();
    let ((), most) = most_allocated(|| {
        runtime.block_on(async { churn(&Scripted::start(1)).await });
    });
    assert!(most < 32 << 20, "{most} bytes");
}
