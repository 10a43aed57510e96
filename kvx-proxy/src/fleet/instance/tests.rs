use super::*;

fn health() -> Health {
    Health { eject_after: 2, eject_for: Duration::from_secs(10), ..Health::default() }
}

#[test]
fn an_instance_is_closed_until_its_first_check_passes() {
    let state = State::default();
    let now = Instant::now();
    assert!(!state.is_open(now));
    assert!(!state.unhealthy("refused", &health(), false), "it was never up");
    assert!(state.healthy());
    assert!(state.is_open(now) && state.is_sound());
}

#[test]
fn after_an_ejection_one_request_tries_the_instance_and_success_reopens_it() {
    let state = State::default();
    state.healthy();
    let now = Instant::now();
    assert!(!state.failed(Reason::Errors, "x", &health(), false, now));
    assert!(state.failed(Reason::Errors, "x", &health(), false, now));
    assert!(!state.is_open(now + Duration::from_secs(9)));
    let later = now + Duration::from_secs(11);
    assert!(state.is_open(later));
    assert!(state.enter(later, health().eject_for));
    assert!(!state.enter(later, health().eject_for), "one request tries it");
    assert!(!state.is_open(later));
    state.succeeded();
    assert!(state.is_sound());
}

#[test]
fn a_failed_trial_doubles_the_ejection() {
    let state = State::default();
    state.healthy();
    let now = Instant::now();
    state.failed(Reason::Errors, "x", &health(), false, now);
    state.failed(Reason::Errors, "x", &health(), false, now);
    let later = now + Duration::from_secs(11);
    assert!(state.enter(later, health().eject_for));
    assert!(state.failed(Reason::Errors, "x", &health(), false, later));
    assert!(!state.is_open(later + Duration::from_secs(19)));
    assert!(state.is_open(later + Duration::from_secs(21)));
}

#[test]
fn concurrent_failures_cause_one_ejection() {
    let state = State::default();
    state.healthy();
    let now = Instant::now();
    let ejections =
        (0..100).filter(|_| state.failed(Reason::Errors, "x", &health(), false, now)).count();
    assert_eq!(ejections, 1);
    assert!(state.is_open(now + Duration::from_secs(11)), "the ejection was not doubled");
}

#[test]
fn the_last_instance_is_ejected_for_refused_connections_only() {
    let state = State::default();
    state.healthy();
    let now = Instant::now();
    for _ in 0..10 {
        assert!(!state.failed(Reason::Slow, "late", &health(), true, now));
        assert!(!state.failed(Reason::Errors, "500", &health(), true, now));
        assert!(!state.unhealthy("late", &health(), true));
    }
    assert!(state.is_sound());
    assert!(state.failed(Reason::Refused, "refused", &health(), true, now));
    let state = State::default();
    state.healthy();
    let failed = || state.failed(Reason::Slow, "late", &health(), false, now);
    assert!(!failed() && failed(), "another could take over");
}

#[test]
fn an_instance_that_was_slow_is_usable_until_it_refuses() {
    let state = State::default();
    let now = Instant::now();
    let failed = |reason| state.failed(reason, "x", &health(), false, now);
    assert!(!state.is_usable(), "no check has passed");
    state.healthy();
    assert!(!failed(Reason::Slow) && failed(Reason::Slow) && !state.is_open(now));
    assert!(state.is_usable());
    assert!(failed(Reason::Refused) && !state.is_usable(), "a refusal ejects it again");
    assert!(!failed(Reason::Refused), "a second refusal does not");
    state.succeeded();
    assert!(
        !failed(Reason::Slow) && failed(Reason::Slow) && state.is_usable(),
        "it takes connections again"
    );
    (0..2).for_each(|_| _ = state.unhealthy("500", &health(), false));
    assert!(!state.is_usable());
}

#[test]
fn health_checks_take_an_instance_down_and_up() {
    let state = State::default();
    state.healthy();
    assert!(!state.unhealthy("refused", &health(), false));
    assert!(state.unhealthy("refused", &health(), false));
    assert!(
        !state.is_open(Instant::now() + Duration::from_secs(3600)),
        "only a check brings it back"
    );
    state.succeeded();
    assert!(state.is_down(), "an earlier request does not");
    assert!(state.healthy() && state.is_sound());
}

#[test]
fn push_targets_are_learnt_by_rank_and_forgotten() {
    let state = State::default();
    let params = TransferParams::from_value(&serde_json::json!({
        "transfer_mode": "push", "remote_engine_id": "e_dp1", "remote_host": "h", "remote_port": 5600, "tp_size": 2,
    }))
    .unwrap();
    assert_eq!(state.learn_push(&params, 1, 2).unwrap().tp_size, 2);
    let PrefillKind::Push(targets) = state.kind() else { panic!("{:?}", state.kind()) };
    assert_eq!(
        (targets[0].is_none(), targets[1].as_ref().unwrap().engine_id.as_str()),
        (true, "e_dp1")
    );
    state.forget_ranks();
    assert_eq!(state.kind(), PrefillKind::Push(vec![None, None]));
    let mut pull = params;
    pull.transfer_mode = None;
    assert!(State::default().learn_push(&pull, 0, 1).is_none());
}
