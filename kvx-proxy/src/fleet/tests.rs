//! Tests of choices among instances, and of changes to a fleet.

use super::*;

fn fleet(text: &str) -> Fleet {
    let fleet = Fleet::new(&Setup::from_toml(text).unwrap(), None);
    fleet.all().for_each(|one| _ = one.state.healthy());
    fleet
}

fn wanted(tokens: u64, prefix: u64) -> Requirements<'static> {
    Requirements {
        tokens,
        prefix,
        chunks: &[],
        token_ids: None,
        model: None,
        avoid: &[],
        now: Instant::now(),
    }
}

fn decodes(choice: &str, weights: &[f64]) -> Fleet {
    let list: Vec<String> = weights
        .iter()
        .enumerate()
        .map(|(i, weight)| format!("{{ url = 'http://d{i}:1', weight = {weight:?} }}"))
        .collect();
    fleet(&format!("choice = '{choice}'\n[[pool]]\ndecode = [{}]", list.join(", ")))
}

fn counts(fleet: &Fleet) -> Vec<u64> {
    fleet.decode.iter().map(|one| one.state.requests()).collect()
}

#[test]
fn the_least_outstanding_tokens_for_the_weight_win() {
    let fleet = decodes("least-tokens", &[1.0, 3.0]);
    let held: Vec<_> = (0..40).map(|_| fleet.choose_alone(&wanted(100, 0)).unwrap()).collect();
    assert_eq!(counts(&fleet), [10, 30]);
    let big = fleet.choose_alone(&wanted(100_000, 0)).unwrap();
    let other = fleet.choose_alone(&wanted(1, 0)).unwrap();
    assert_ne!(big.instance.name(), other.instance.name());
    drop((held, big, other));
    assert!(fleet.decode.iter().all(|one| one.state.outstanding() == 0), "all tokens are returned");
}

#[test]
fn equal_instances_take_turns() {
    let fleet = decodes("least-tokens", &[1.0; 4]);
    for _ in 0..40 {
        fleet.choose_alone(&wanted(10, 0)).unwrap();
    }
    let totals: Vec<u64> = fleet
        .decode
        .iter()
        .map(|one| one.state.requests_total.load(std::sync::atomic::Ordering::Relaxed))
        .collect();
    assert_eq!(totals, [10; 4]);
}

#[test]
fn round_robin_follows_the_weights_and_does_not_flood_a_returning_instance() {
    let fleet = decodes("round-robin", &[1.0, 2.0, 1.0]);
    fleet.decode[2].state.unhealthy("x", &Default::default(), false);
    fleet.decode[2].state.unhealthy("x", &Default::default(), false);
    let _held: Vec<_> = (0..30).map(|_| fleet.choose_alone(&wanted(1, 0)).unwrap()).collect();
    assert_eq!(counts(&fleet), [10, 20, 0]);
    fleet.decode[2].state.healthy();
    let _more: Vec<_> = (0..40).map(|_| fleet.choose_alone(&wanted(1, 0)).unwrap()).collect();
    let counts = counts(&fleet);
    assert!((9..=11).contains(&counts[2]) && (39..=41).contains(&counts[1]), "{counts:?}");
}

#[test]
fn round_robin_does_not_flood_an_instance_that_is_added() {
    let fleet = decodes("round-robin", &[1.0, 1.0]);
    (0..1000).for_each(|_| drop(fleet.choose_alone(&wanted(1, 0)).unwrap()));
    let added = InstanceSetup::new("http://new:1").unwrap();
    let fleet = fleet.with(0, Role::Decode, added);
    fleet.all().for_each(|one| _ = one.state.healthy());
    let _held: Vec<_> = (0..30).map(|_| fleet.choose_alone(&wanted(1, 0)).unwrap()).collect();
    let new = fleet.decode.iter().find(|one| one.name() == "new:1").unwrap();
    assert!((9..=11).contains(&new.state.requests()), "{}", new.state.requests());
}

#[test]
fn a_prefix_keeps_its_instance_until_the_bound() {
    let fleet = decodes("prefix", &[1.0; 8]);
    let home = fleet.choose_alone(&wanted(1, 7)).unwrap().instance.name().to_owned();
    for _ in 0..10 {
        assert_eq!(fleet.choose_alone(&wanted(1, 7)).unwrap().instance.name(), home);
    }
    let _held: Vec<_> = (0..80).map(|_| fleet.choose_alone(&wanted(100, 7)).unwrap()).collect();
    let most = counts(&fleet).into_iter().max().unwrap();
    assert!((10..=14).contains(&most), "one hot prefix spreads: {:?}", counts(&fleet));
}

#[test]
fn prefixes_spread_and_move_little_when_an_instance_leaves() {
    let fleet = decodes("prefix", &[1.0; 8]);
    let homes = |fleet: &Fleet| -> Vec<String> {
        (0..800u64)
            .map(|prefix| {
                let prefix = choice::hash(&prefix.to_le_bytes());
                fleet.choose_alone(&wanted(1, prefix)).unwrap().instance.name().to_owned()
            })
            .collect()
    };
    let before = homes(&fleet);
    for one in &fleet.decode {
        let share = before.iter().filter(|home| *home == one.name()).count();
        assert!((60..=140).contains(&share), "{} has {share}", one.name());
    }
    let after = homes(&fleet.without(0, Role::Decode, "d3:1"));
    let moved = before.iter().zip(&after).filter(|(before, after)| before != after).count();
    assert_eq!(
        moved,
        before.iter().filter(|home| *home == "d3:1").count(),
        "only its prefixes move"
    );
}

#[test]
fn affinity_takes_no_instance_beyond_its_bound() {
    let weights = [1.0, 2.0, 1.0, 4.0];
    let fleet = decodes("prefix", &weights);
    let load = |one: &Instance| one.state.outstanding() as f64 / one.setup.weight;
    let mut held = Vec::new();
    for step in 0..4000u64 {
        let bits = choice::hash(&step.to_le_bytes());
        let tokens = 1 + bits % 1000;
        // Three popular prefixes.
        let chosen =
            fleet.choose_alone(&wanted(tokens, choice::hash(&[(bits >> 40) as u8 % 3]))).unwrap();
        let total: u64 = fleet.decode.iter().map(|one| one.state.outstanding()).sum();
        let bound = total as f64 / weights.iter().sum::<f64>() * choice::BOUND;
        if held.len() >= 100 {
            let most = load(&chosen.instance);
            assert!(most <= bound, "{} has {most}, its bound is {bound}", chosen.instance.name());
        }
        held.push(chosen);
        if held.len() > 200 {
            held.swap_remove(bits as usize % 200);
        }
    }
}

#[test]
fn only_compatible_instances_of_one_pool_are_paired() {
    let fleet = fleet(
        "[[pool]]\nname = 'a'\nprefill = [{ url = 'http://p1:1', compatibility = 'x' }]
         decode = [{ url = 'http://d1:1', compatibility = 'y' }, { url = 'http://d2:1', compatibility = 'x' }]
         [[pool]]\nname = 'b'\nprefill = ['http://p2:1']\ndecode = ['http://d3:1']",
    );
    for _ in 0..20 {
        let prefill = fleet.choose_prefill(&wanted(1, 0)).unwrap();
        let decode = fleet.choose_partner(&prefill.instance, &wanted(1, 0)).unwrap();
        let pair = (prefill.instance.name().to_owned(), decode.instance.name().to_owned());
        assert!(matches!((&*pair.0, &*pair.1), ("p1:1", "d2:1") | ("p2:1", "d3:1")), "{pair:?}");
    }
    let fleet = fleet.without(0, Role::Decode, "d2:1");
    for _ in 0..20 {
        assert_eq!(fleet.choose_prefill(&wanted(1, 0)).unwrap().instance.name(), "p2:1");
    }
}

#[test]
fn without_a_model_only_instances_with_a_common_one_are_paired() {
    let fleet = fleet(
        "[[pool]]\nprefill = ['http://p1:1', 'http://p2:1', 'http://p3:1']
         decode = ['http://d1:1', 'http://d2:1', 'http://d3:1']",
    );
    // The third instance of each role has so many models that it shares a bit with another one's.
    let models = |number: u32| -> Vec<String> {
        let range = if number == 3 { 0..99 } else { 100 * number..100 * number + 1 };
        range.map(|model| format!("model-{model}")).collect()
    };
    for (one, number) in
        fleet.prefill.iter().zip([3, 1, 2]).chain(fleet.decode.iter().zip([2, 3, 1]))
    {
        let cards: Vec<_> =
            models(number).iter().map(|id| serde_json::json!({ "id": id })).collect();
        one.state.models.learn(&serde_json::json!({ "data": cards }), &fleet.names);
    }
    for _ in 0..20 {
        let prefill = fleet.choose_prefill(&wanted(1, 0)).unwrap();
        let decode = fleet.choose_partner(&prefill.instance, &wanted(1, 0)).unwrap();
        let pair = (prefill.instance.name().to_owned(), decode.instance.name().to_owned());
        let right = [("p1:1", "d2:1"), ("p2:1", "d3:1"), ("p3:1", "d1:1")];
        assert!(right.contains(&(&*pair.0, &*pair.1)), "{pair:?}");
    }
    let fleet = fleet.without(0, Role::Decode, "d2:1").without(0, Role::Decode, "d3:1");
    for _ in 0..20 {
        assert_eq!(fleet.choose_prefill(&wanted(1, 0)).unwrap().instance.name(), "p3:1");
    }
    assert!(fleet.has_pair(None) && fleet.has_pair(Some(fleet.names.named("model-200"))));
    let fleet = fleet.without(0, Role::Prefill, "p3:1");
    assert!(!fleet.has_pair(None) && fleet.choose_prefill(&wanted(1, 0)).is_none());
}

#[test]
fn an_instance_that_failed_a_request_gets_it_again_only_if_alone() {
    let fleet = decodes("least-tokens", &[1.0; 2]);
    let avoid = [Arc::clone(&fleet.decode[0])];
    for _ in 0..10 {
        let wanted = Requirements { avoid: &avoid, ..wanted(1, 0) };
        assert_eq!(fleet.choose_alone(&wanted).unwrap().instance.name(), "d1:1");
    }
    let alone = fleet.without(0, Role::Decode, "d1:1");
    let wanted = Requirements { avoid: &avoid, ..wanted(1, 0) };
    assert_eq!(alone.choose_alone(&wanted).unwrap().instance.name(), "d0:1");
}

#[test]
fn a_reload_keeps_states_and_instances_added_over_the_admin_endpoint() {
    let text = "[[pool]]\ndecode = ['http://a:1', 'http://b:1']";
    let fleet = fleet(text);
    let held = fleet.choose_alone(&wanted(5, 0)).unwrap();
    let fleet = fleet.with(0, Role::Decode, InstanceSetup::new("http://c:1").unwrap());
    let setup = Setup::from_toml("[[pool]]\ndecode = ['http://b:1', 'http://a:1']").unwrap();
    let fleet = Fleet::new(&setup, Some(&fleet));
    let names: Vec<&str> = fleet.decode.iter().map(|one| one.name()).collect();
    assert_eq!(names, ["b:1", "a:1", "c:1"]);
    let same = fleet.decode.iter().find(|one| one.name() == held.instance.name()).unwrap();
    assert_eq!(same.state.outstanding(), 5);
}

#[test]
fn draining_and_closed_instances_get_nothing() {
    let fleet = decodes("least-tokens", &[1.0; 2]);
    let drained = InstanceSetup { draining: true, ..InstanceSetup::new("http://d0:1").unwrap() };
    let fleet = fleet.with(0, Role::Decode, drained);
    for _ in 0..5 {
        assert_eq!(fleet.choose_alone(&wanted(1, 0)).unwrap().instance.name(), "d1:1");
    }
    let last = fleet.decode.iter().find(|one| one.name() == "d1:1").unwrap();
    assert!(fleet.is_last(last) && fleet.is_ready());
    (0..2).for_each(|_| _ = last.state.unhealthy("x", &Default::default(), false));
    assert!(fleet.choose_alone(&wanted(1, 0)).is_none() && !fleet.is_ready());
}

#[test]
fn a_slow_instance_is_used_again_once_no_other_is_left() {
    let fleet = fleet(
        "[health]\neject_after = 1\n[[pool]]\nprefill = ['http://p0:1', 'http://p1:1']
         decode = ['http://d0:1', 'http://d1:1']",
    );
    let health = Health { eject_after: 1, ..Health::default() };
    let failed = |one: &Instance, reason| fleet.failed(one, reason, "x", &health, Instant::now());
    let pair = || {
        let prefill = fleet.choose_prefill(&wanted(1, 0))?;
        let decode = fleet.choose_partner(&prefill.instance, &wanted(1, 0))?;
        Some([prefill.instance.name().to_owned(), decode.instance.name().to_owned()])
    };
    for (role, others) in [(Role::Prefill, &fleet.decode), (Role::Decode, &fleet.prefill)] {
        let [slow, last] = fleet.of(role) else { panic!("two instances") };
        assert!(failed(slow, Reason::Slow));
        for _ in 0..5 {
            assert_ne!(fleet.choose_prefill(&wanted(1, 0)).unwrap().instance.name(), slow.name());
            let decode = fleet.choose_partner(&others[0], &wanted(1, 0)).unwrap();
            assert_ne!(decode.instance.name(), slow.name(), "another instance is up");
        }
        // The last one fails its health checks.
        (0..2).for_each(|_| _ = fleet.unhealthy(last, "500", &health, false));
        for _ in 0..5 {
            let pair = pair().expect("a slow one is better than none");
            assert!(pair.contains(&slow.name().to_owned()), "{pair:?}");
        }
        assert!(fleet.is_ready() && !slow.state.is_sound());
        assert!(!failed(slow, Reason::Slow), "its state does not change");
        assert!(pair().is_some());
        assert!(failed(slow, Reason::Refused) && pair().is_none() && !fleet.is_ready());
        slow.state.succeeded();
        last.state.healthy();
    }
}

#[test]
fn two_instances_that_fail_at_once_are_not_both_ejected() {
    let fleet = decodes("least-tokens", &[1.0; 2]);
    let health = Health { eject_after: 1, down_after: 1, ..Health::default() };
    let begin = std::sync::Barrier::new(2);
    // Storing this text takes a while, in which the other thread may check who is left.
    let words = "late ".repeat(1 << 20);
    for round in 0..40 {
        std::thread::scope(|scope| {
            for one in &fleet.decode {
                let (fleet, health, begin, words) = (&fleet, &health, &begin, &words);
                scope.spawn(move || {
                    begin.wait();
                    match round % 2 {
                        0 => fleet.failed(one, Reason::Slow, words, health, Instant::now()),
                        _ => fleet.unhealthy(one, words, health, true),
                    }
                });
            }
        });
        let sound = fleet.decode.iter().filter(|one| one.state.is_sound()).count();
        assert_eq!(sound, 1, "round {round}");
        fleet.decode.iter().for_each(|one| {
            one.state.healthy();
            one.state.succeeded();
        });
    }
}

/// The target is 5 us; this only checks that a busy machine is not off by orders of magnitude.
#[test]
fn a_choice_among_256_is_quick() {
    for choice in ["least-tokens", "round-robin", "prefix"] {
        let fleet = decodes(choice, &[1.0; 256]);
        let started = Instant::now();
        for prefix in 0..1000 {
            fleet.choose_alone(&wanted(1, prefix)).unwrap();
        }
        assert!(started.elapsed().as_millis() < 1000, "{choice}: {:?} for 1000", started.elapsed());
    }
}
