//! Tests of the choice of instances.

use std::time::Duration;

use kvx_instance::{Delays, Instance, Leg, Settings};
use serde_json::json;

use crate::proxy::client::{Call, completion, prompt};
use crate::proxy::fleet::{Fleet, Plan, Proxy, SetupFile};
use crate::proxy::recipes::{COMPLETIONS, seen};

fn prefills(fleet: &mut Fleet) -> Vec<usize> {
    fleet.prefill.iter_mut().map(|instance| seen(instance, Leg::Prefill).len()).collect()
}

async fn ask(port: u16, prompt: &str) {
    let answer = Call::post(port, COMPLETIONS, &completion(prompt, 2)).send().await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

pub(crate) async fn round_robin_takes_turns() {
    let mut fleet =
        Plan::of(3, 3, &Settings::default()).setup("choice = \"round-robin\"").start().await;
    for count in 0..9 {
        ask(fleet.port(), &prompt(&format!("turn {count}"), 20)).await;
    }
    assert_eq!(prefills(&mut fleet), [3, 3, 3]);
    let decodes: Vec<_> =
        fleet.decode.iter_mut().map(|instance| instance.report().decodes).collect();
    assert_eq!(decodes, [3, 3, 3]);
}

pub(crate) async fn least_tokens_go_where_least_is_outstanding() {
    let mut fleet = Fleet::new(2, 1).await;
    let slow = Delays { prefill_ms: 20_000, token_ms: 0 };
    fleet.prefill.iter_mut().for_each(|instance| instance.delays(slow));
    let long = Call::post(fleet.port(), COMPLETIONS, &completion(&prompt("long", 5_000), 2));
    let long = tokio::spawn(long.limit(Duration::from_secs(30)).try_send());
    let mut busy = None;
    while busy.is_none() {
        busy = (0..2).find(|index| fleet.prefill[*index].report().running == 1);
        tokio::task::yield_now().await;
    }
    let busy = busy.unwrap();
    fleet.prefill[1 - busy].delays(Delays::default());
    for count in 0..5 {
        ask(fleet.port(), &prompt(&format!("short {count}"), 20)).await;
    }
    assert_eq!(prefills(&mut fleet)[busy], 1, "the other one has less to do each time");
    long.abort();
}

pub(crate) async fn a_prefix_stays_with_its_instance() {
    let mut fleet = Plan::of(4, 1, &Settings::default())
        .setup("choice = \"prefix\"\nprefix_tokens = 32")
        .start()
        .await;
    let mut homes = Vec::new();
    for prefix in 0..6 {
        let before = prefills(&mut fleet);
        for count in 0..3 {
            ask(fleet.port(), &format!("{}{count}", prompt(&format!("{prefix} is my prefix"), 64)))
                .await;
        }
        let after = prefills(&mut fleet);
        let changed: Vec<_> = (0..4).filter(|index| after[*index] != before[*index]).collect();
        assert_eq!(
            changed.len(),
            1,
            "all three of prefix {prefix} went to one: {before:?} {after:?}"
        );
        homes.push(changed[0]);
    }
    homes.sort_unstable();
    homes.dedup();
    assert!(homes.len() > 1, "not all prefixes to one");
}

pub(crate) async fn short_prompts_stay_on_the_decode_side() {
    let mut fleet = Plan::of(1, 1, &Settings::default()).setup("local_below = 100").start().await;
    ask(fleet.port(), "short").await;
    ask(fleet.port(), &prompt("long", 400)).await;
    assert_eq!((fleet.decode[0].report().alone, fleet.decode[0].report().decodes), (1, 1));
    assert_eq!(prefills(&mut fleet), [1]);
}

pub(crate) async fn weights_count() {
    let mut fleet = Fleet::new(2, 1).await;
    let text = format!(
        "port = 0\nchoice = \"round-robin\"\n[[pool]]\nprefill = [{{ url = \"{}\", weight = 3.0 }}, \"{}\"]\ndecode = [\"{}\"]\n",
        fleet.prefill[0].url(),
        fleet.prefill[1].url(),
        fleet.decode[0].url()
    );
    let file = SetupFile::new(&text);
    let proxy = Proxy::start(&["--config", file.path()], &[]);
    proxy.wait_until("/ready", "it is ready", |status, _| status == 200).await;
    for count in 0..40 {
        ask(proxy.port, &prompt(&format!("weight {count}"), 20)).await;
    }
    let got = prefills(&mut fleet);
    assert!((27..=33).contains(&got[0]), "{got:?}");
}

pub(crate) async fn ranks_take_turns() {
    let ranks = Settings { dp_size: 2, ..Settings::default() };
    let (mut prefill, mut decode) = (Instance::start(ranks.clone()), Instance::start(ranks));
    let text = format!(
        "port = 0\n[[pool]]\nprefill = [{{ url = \"{}\", ranks = 2 }}]\ndecode = [{{ url = \"{}\", ranks = 2 }}]\n",
        prefill.url(),
        decode.url()
    );
    let file = SetupFile::new(&text);
    let proxy = Proxy::start(&["--config", file.path()], &[]);
    proxy.wait_until("/ready", "it is ready", |status, _| status == 200).await;
    for count in 0..6 {
        // A client cannot choose a rank itself.
        let body = completion(&prompt(&format!("rank {count}"), 20), 2);
        let answer = Call::post(proxy.port, COMPLETIONS, &body)
            .header("x-data-parallel-rank", "1")
            .send()
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    for (instance, leg) in [(&mut prefill, Leg::Prefill), (&mut decode, Leg::Decode)] {
        let ranks: Vec<_> = seen(instance, leg)
            .into_iter()
            .map(|seen| seen.headers.get("x-data-parallel-rank").cloned().unwrap_or_default())
            .collect();
        assert!(
            ranks == ["0", "1", "0", "1", "0", "1"] || ranks == ["1", "0", "1", "0", "1", "0"],
            "{leg:?}: {ranks:?}"
        );
    }
    // Also for requests that the decode instance answers alone.
    for _ in 0..2 {
        let body = json!({"model": "m", "prompt": "alone", "max_tokens": 1, "n": 2});
        assert_eq!(Call::post(proxy.port, COMPLETIONS, &body).send().await.status, 200);
    }
    let alone = seen(&mut decode, Leg::Alone);
    let mut ranks: Vec<_> =
        alone.iter().map(|seen| seen.headers["x-data-parallel-rank"].clone()).collect();
    ranks.sort();
    assert_eq!(ranks, ["0", "1"]);
    assert!([prefill, decode].iter_mut().all(|instance| instance.violations().is_empty()));
}

pub(crate) async fn without_a_model_instances_of_one_model_are_paired() {
    let models = |first: usize| {
        move |index: usize, settings: &mut Settings| {
            settings.models = vec![["a", "b"][(first + index) % 2].to_owned()];
        }
    };
    let plan = Plan::of(2, 2, &Settings::default()).prefill(models(0)).decode(models(1));
    let mut fleet = plan.setup("choice = \"round-robin\"").start().await;
    for count in 0..10 {
        let body = json!({"prompt": prompt(&format!("no model {count}"), 20), "max_tokens": 2});
        let answer = Call::post(fleet.port(), COMPLETIONS, &body).send().await;
        assert_eq!(
            (answer.status, answer.header("x-kvx-route")),
            (200, "disaggregated"),
            "{}",
            answer.text()
        );
    }
    for (p, d) in [(0, 1), (1, 0)] {
        let asked = seen(&mut fleet.decode[d], Leg::Decode);
        assert_eq!(asked.len(), 5);
        let port = json!(fleet.prefill[p].port());
        assert!(
            asked.iter().all(|seen| seen.body["kv_transfer_params"]["remote_port"] == port),
            "{asked:?}"
        );
    }
}

pub(crate) async fn only_compatible_instances_are_paired() {
    let settings = Settings::default();
    let mut prefill = [Instance::start(settings.clone()), Instance::start(settings.clone())];
    let mut decode = [Instance::start(settings.clone()), Instance::start(settings)];
    let entry = |instance: &Instance, kind: &str| {
        format!("{{ url = \"{}\", compatibility = \"{kind}\" }}", instance.url())
    };
    let text = format!(
        "port = 0\n[[pool]]\nprefill = [{}, {}]\ndecode = [{}, {}]\n",
        entry(&prefill[0], "old"),
        entry(&prefill[1], "new"),
        entry(&decode[0], "new"),
        entry(&decode[1], "old")
    );
    let file = SetupFile::new(&text);
    let proxy = Proxy::start(&["--config", file.path()], &[]);
    proxy.wait_until("/ready", "it is ready", |status, _| status == 200).await;
    for count in 0..10 {
        ask(proxy.port, &prompt(&format!("pair {count}"), 20)).await;
    }
    for (p, d) in [(0, 1), (1, 0)] {
        let engines: Vec<_> = seen(&mut decode[d], Leg::Decode)
            .into_iter()
            .map(|seen| seen.body["kv_transfer_params"]["remote_port"].clone())
            .collect();
        assert!(!engines.is_empty(), "both pairs serve");
        assert!(engines.iter().all(|port| *port == json!(prefill[p].port())), "{engines:?}");
    }
    assert!(prefill.iter_mut().chain(&mut decode).all(|instance| instance.violations().is_empty()));
}
