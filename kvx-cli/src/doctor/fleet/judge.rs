//! Draws conclusions from the answers of a fleet.

use std::collections::BTreeSet;

use kvx_proxy::{FleetTrial, InstanceReport, PairOutcome, PairReport, Role};

use super::super::finding::Finding;
use super::address::{host, is_loopback, name};
use super::comparisons::{differences, routes};
use super::cures;

/// Clocks of one fleet should agree to this many seconds; an answer tells about one.
const CLOCKS: f64 = 5.0;

/// Returns the findings about a fleet.
pub(super) fn findings(trial: &FleetTrial) -> Vec<Finding> {
    let mut found: Vec<Finding> = trial
        .discovery
        .iter()
        .map(|why| {
            Finding::problem("discovery", why).because("the fleet below lacks what it would find")
        })
        .collect();
    for role in [Role::Prefill, Role::Decode] {
        if !trial.instances.iter().any(|one| one.role == role) {
            found.push(
                Finding::problem("instances", format!("no {} instance is known", role.as_str()))
                    .cure("name one in the file, or register one: `kvx register --help`"),
            );
        }
    }
    found.extend(trial.instances.iter().flat_map(instance));
    found.extend(side_channels(trial));
    found.extend(together(trial.pairs.iter().filter_map(|pair| outcome(pair, trial))));
    found.extend(differences(trial));
    found.extend(routes(trial));
    let working = trial.pairs.iter().filter(|pair| pair.outcome == PairOutcome::Moved).count();
    if working > 0 {
        found.push(Finding::ok(
            "pairs",
            format!("blocks move through {working} of {}", trial.pairs.len()),
        ));
    }
    found
}

fn instance(one: &InstanceReport) -> Vec<Finding> {
    let mut found = Vec::new();
    if let Some(fault) = &one.fault {
        found.push(
            Finding::problem("instance", format!("{} is not usable: {fault}", name(one)))
                .because("its pairs cannot be tried, and a router leaves it out")
                .cure(format!("`curl -i http://{}/health` from this host, and its log", one.name)),
        );
    }
    if one.requires_key {
        found.push(
            Finding::problem("instance", format!("{} demands an API key", name(one)))
                .because("its pairs cannot be tried without")
                .cure("`export OPENAI_API_KEY=` and the key of the instances"),
        );
    }
    if let Some(offset) = one.clock_offset.filter(|offset| offset.abs() > CLOCKS) {
        let which = if offset > 0.0 { "ahead of" } else { "behind" };
        found.push(
            Finding::warning(
                "clocks",
                format!("the clock of {} is {:.0} s {which} this host's", name(one), offset.abs()),
            )
            .because("registrations and grants of a fleet with a secret expire by the clock")
            .cure("run chrony, systemd-timesyncd or ntpd on both hosts"),
        );
    }
    found
}

/// Judges the side channels that prefill instances name, once for each instance.
fn side_channels(trial: &FleetTrial) -> Vec<Finding> {
    let mut seen = BTreeSet::new();
    let topic = "side channel";
    let named = trial.pairs.iter().filter_map(|pair| Some((pair, pair.side_channel.as_ref()?)));
    named
        .filter(|(pair, _)| seen.insert(&pair.prefill))
        .filter_map(|(pair, address)| {
            let (prefill, own) = (&pair.prefill, host(&pair.prefill));
            let cure = format!("start it with `VLLM_NIXL_SIDE_CHANNEL_HOST={own}`");
            if is_loopback(host(address)) && !is_loopback(own) {
                return Some(
                    Finding::problem(
                        topic,
                        format!(
                            "prefill {prefill} tells decodes to ask \
                         {address}"
                        ),
                    )
                    .because(
                        "a decode on another host then asks itself, and gets nothing or \
                             another engine",
                    )
                    .cure(cure),
                );
            }
            let why = pair.side_channel_fault.as_ref()?;
            let what = format!(
                "prefill {prefill} tells decodes to ask {address}, where this \
                 host gets no connection: {why}"
            );
            if trial
                .pairs
                .iter()
                .any(|one| one.prefill == *prefill && one.outcome == PairOutcome::Moved)
            {
                return Some(Finding::note(topic, what).because(
                    "a decode has reached it: a \
                     firewall may admit the decodes alone",
                ));
            }
            let elsewhere = host(address) != own;
            Some(Finding::problem(topic, what).because("decodes ask there for the blocks").cure(
                match elsewhere {
                    true => {
                        format!("{cure}, unless {} is another address of its host", host(address))
                    }
                    false => format!(
                        "open port {} of {own} to the decodes; `ss -ltn` on {own} shows \
                     whether it listens",
                        address.rsplit(':').next().unwrap_or_default()
                    ),
                },
            ))
        })
        .collect()
}

fn outcome(pair: &PairReport, trial: &FleetTrial) -> Option<Finding> {
    let topic = "pair";
    let both = format!("prefill {} with decode {}", pair.prefill, pair.decode);
    let why = pair.why.as_deref().unwrap_or_default();
    // Its own finding says so.
    let is_down =
        |name: &str| trial.instances.iter().any(|one| one.name == name && one.fault.is_some());
    match pair.outcome {
        PairOutcome::Failed => Some(
            Finding::problem(topic, format!("{both} fails: {why}"))
                .because("each request that takes this way fails, or is tried again elsewhere")
                .cure(cures::of(pair, trial)),
        ),
        PairOutcome::Computed => Some(computed(pair, &both, trial)),
        PairOutcome::Unknown => Some(
            Finding::warning(
                topic,
                format!("{both} answers, and does not say whether blocks moved: {why}"),
            )
            .cure("look at the decode's log; vLLM and `kvx serve` tell it in /metrics"),
        ),
        PairOutcome::Untried if is_down(&pair.prefill) || is_down(&pair.decode) => None,
        PairOutcome::Untried => {
            Some(Finding::warning(topic, format!("{both} was not tried: {why}")))
        }
        _ => None,
    }
}

/// Unites findings with one cure: a wrong instance spoils all of its pairs.
fn together(findings: impl Iterator<Item = Finding>) -> Vec<Finding> {
    let mut united: Vec<(Finding, usize)> = Vec::new();
    for finding in findings {
        match united.iter_mut().find(|(known, _)| {
            (known.level, &known.why, &known.cure) == (finding.level, &finding.why, &finding.cure)
        }) {
            Some((_, more)) => *more += 1,
            None => united.push((finding, 0)),
        }
    }
    let texts = united.into_iter().map(|(mut finding, more)| {
        if more > 0 {
            let pairs = if more == 1 { "pair" } else { "pairs" };
            finding.what = format!("{} (and {more} more {pairs})", finding.what);
        }
        finding
    });
    texts.collect()
}

fn computed(pair: &PairReport, both: &str, trial: &FleetTrial) -> Finding {
    let why = pair.why.as_deref();
    let finding = Finding::problem(
        "pair",
        match why {
            Some(why) => format!("{both} answers, and no block moves: {why}"),
            None => format!("{both} answers, and no block moves"),
        },
    )
    .because("the decode computes the prompt again: this is not P/D, and slower than one server");
    if pair.refused {
        return finding.cure(
            "the decode refused the prefill's parameters; its log has the reason in the line \
             `kv_transfer_params are not used`. Most often the prefill has no secret, or another: \
             give both the same KVX_SECRET_FILE",
        );
    }
    match cures::known(pair, trial) {
        Some(cure) => finding.cure(cure),
        None => finding.cure(
            "look for `its load has failed`, `kv_transfer_params` or `NIXL` in the decode's log. \
             The usual causes: an engine without --kv-transfer-config, a wrong side channel, another \
             secret",
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvx_proxy::Transfer;

    use super::super::super::finding::Level;
    use super::*;

    const P: &str = "10.0.0.1:8100";
    const D: &str = "10.0.0.3:8200";

    /// Returns a pair that works.
    fn pair(prefill: &str, decode: &str) -> PairReport {
        let mut pair = PairReport::default();
        (pair.pool, pair.prefill, pair.decode) = ("0".into(), prefill.into(), decode.into());
        pair.outcome = PairOutcome::Moved;
        pair.side_channel = Some(format!("{}:5600", host(prefill)));
        pair.prompt_tokens = 512;
        pair.time = Duration::from_millis(50);
        let mut moved = Transfer::default();
        (moved.bytes, moved.tokens, moved.seconds) = (64 << 20, 512, Some(0.01));
        moved.backends = vec!["TCP".to_owned()];
        pair.transfer = Some(moved);
        pair
    }

    fn trial(pairs: Vec<PairReport>) -> FleetTrial {
        let mut trial = FleetTrial::default();
        for pair in &pairs {
            for (role, name) in [(Role::Prefill, &pair.prefill), (Role::Decode, &pair.decode)] {
                if !trial.instances.iter().any(|one| one.name == *name && one.role == role) {
                    let mut one = InstanceReport::new("0", role, name.clone());
                    one.models = vec!["m".to_owned()];
                    trial.instances.push(one);
                }
            }
        }
        trial.pairs = pairs;
        trial
    }

    /// Returns the only finding that is serious.
    #[track_caller]
    fn only(trial: &FleetTrial) -> Finding {
        let serious: Vec<_> =
            findings(trial).into_iter().filter(|one| one.level <= Level::Warning).collect();
        assert_eq!(serious.len(), 1, "{serious:#?}");
        serious.into_iter().next().unwrap()
    }

    #[test]
    fn a_fleet_that_works_has_nothing_to_complain_about() {
        let found = findings(&trial(vec![pair(P, D)]));
        assert_eq!(found, [Finding::ok("pairs", "blocks move through 1 of 1")]);
    }

    #[test]
    fn a_loopback_side_channel_is_named_once_for_its_prefill() {
        let mut pairs = vec![pair(P, D), pair(P, "10.0.0.4:8200")];
        for pair in &mut pairs {
            pair.side_channel = Some("127.0.0.1:5600".to_owned());
            // Something else may listen here.
            pair.side_channel_fault = None;
        }
        let found = only(&trial(pairs));
        assert_eq!(found.level, Level::Problem);
        assert!(found.what.contains("127.0.0.1:5600"), "{found:?}");
        assert_eq!(
            found.cure.as_deref(),
            Some("start it with `VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1`")
        );
        // On one host it is right.
        let mut local = pair("127.0.0.1:8100", "127.0.0.1:8200");
        local.transfer.as_mut().unwrap().backends = vec!["SHM".to_owned()];
        local.side_channel = Some("localhost:5600".to_owned());
        assert_eq!(findings(&trial(vec![local])).len(), 1);
    }

    #[test]
    fn a_side_channel_without_an_answer_is_a_problem_unless_decodes_reach_it() {
        let mut closed = pair(P, D);
        closed.side_channel = Some("10.9.9.9:5600".to_owned());
        closed.side_channel_fault = Some("no answer within 2s".to_owned());
        let firewall = findings(&trial(vec![closed.clone()]));
        assert!(firewall.iter().any(|one| one.topic == "side channel" && one.level == Level::Note));
        closed.outcome = PairOutcome::Failed;
        closed.why = Some("status 500: no connection to 10.9.9.9:5600".to_owned());
        let found = findings(&trial(vec![closed.clone()]));
        let named = found.iter().find(|one| one.topic == "side channel").unwrap();
        assert!(named.cure.as_ref().unwrap().contains("VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1"));
        closed.side_channel = Some("10.0.0.1:5600".to_owned());
        let found = findings(&trial(vec![closed]));
        let named = found.iter().find(|one| one.topic == "side channel").unwrap();
        assert!(named.cure.as_ref().unwrap().starts_with("open port 5600 of 10.0.0.1"));
    }

    #[test]
    fn a_pair_that_is_quietly_not_disaggregated_names_the_likely_cause() {
        let mut quiet = pair(P, D);
        (quiet.outcome, quiet.transfer) = (PairOutcome::Computed, None);
        let found = only(&trial(vec![quiet.clone()]));
        assert!(found.what.contains("no block moves"), "{found:?}");
        let mut sizes = trial(vec![quiet.clone()]);
        sizes.instances[0].block_size = Some(16);
        sizes.instances[1].block_size = Some(128);
        let found = findings(&sizes);
        assert!(found.iter().any(|one| one.topic == "block size" && one.level == Level::Problem));
        let of_pair = found.iter().find(|one| one.topic == "pair").unwrap();
        assert!(of_pair.cure.as_ref().unwrap().contains("the prefill has 16, the decode 128"));
        quiet.refused = true;
        assert!(only(&trial(vec![quiet])).cure.unwrap().contains("KVX_SECRET_FILE"));
    }

    #[test]
    fn errors_of_instances_lead_to_what_to_do() {
        for (why, expected) in [
            ("status 403: the parameters have no signature of this fleet", "KVX_SECRET_FILE"),
            ("status 500: compatibility hash mismatch (here a, there b)", "kvx probe"),
            ("status 500: engine id mismatch: expected a, got b", "VLLM_NIXL_SIDE_CHANNEL_PORT"),
            ("status 500: no backend serves this peer and memory", "`backends`"),
            ("status 500: no connection to 10.0.0.1:7000 within 10 s", "open that port"),
            ("status 504: was silent: no answer in time", "hangs"),
            ("status 418: something new", "troubleshooting.md"),
        ] {
            let mut failed = pair(P, D);
            (failed.outcome, failed.transfer) = (PairOutcome::Failed, None);
            failed.why = Some(why.to_owned());
            let found = only(&trial(vec![failed]));
            assert!(found.what.contains(why), "{found:?}");
            assert!(found.cure.as_ref().unwrap().contains(expected), "{found:?}");
        }
    }

    #[test]
    fn kinds_of_errors_lead_to_what_to_do() {
        for (kind, expected) in [
            ("authentication", "KVX_SECRET_FILE"),
            ("timed_out", "does not reach 10.0.0.1:5600"),
            ("no_route", "open its ports"),
            ("peer_restarted", "another engine answers at 10.0.0.1:5600"),
            ("incompatible", "`kvx probe 10.0.0.1:5600 --api http://10.0.0.1:8100 -- ARGS`"),
            ("cancelled", "troubleshooting.md"),
        ] {
            let mut failed = pair(P, D);
            (failed.outcome, failed.transfer) = (PairOutcome::Failed, None);
            failed.why = Some("status 500: Internal server error".to_owned());
            failed.failures = vec![kind.to_owned()];
            let found = only(&trial(vec![failed]));
            assert!(found.cure.as_ref().unwrap().contains(expected), "{found:?}");
        }
    }

    #[test]
    fn pairs_with_one_cure_are_one_finding() {
        let mut pairs: Vec<_> =
            ["3", "4", "5"].iter().map(|host| pair(P, &format!("10.0.0.{host}:8200"))).collect();
        for failed in &mut pairs {
            (failed.outcome, failed.transfer) = (PairOutcome::Failed, None);
            failed.why = Some("Internal server error".to_owned());
            failed.failures = vec!["authentication".to_owned()];
        }
        let found = only(&trial(pairs));
        assert!(found.what.ends_with("Internal server error (and 2 more pairs)"), "{found:?}");
    }

    #[test]
    fn tcp_within_a_host_and_a_slow_pair_are_warnings() {
        let found = only(&trial(vec![pair(P, "10.0.0.1:8200")]));
        assert_eq!((found.level, found.topic), (Level::Warning, "route"));
        let mut pairs: Vec<_> =
            ["3", "4", "5"].iter().map(|host| pair(P, &format!("10.0.0.{host}:8200"))).collect();
        pairs[1].transfer.as_mut().unwrap().seconds = Some(0.1);
        let found = only(&trial(pairs));
        assert_eq!(found.topic, "speed");
        assert!(
            found.what.contains("10.0.0.4:8200: 0.67 GB/s, where the median of the pairs is 6.71"),
            "{found:?}"
        );
    }

    #[test]
    fn instances_are_judged_alone_and_together() {
        let mut fleet = trial(vec![pair(P, D)]);
        fleet.instances[0].clock_offset = Some(-30.0);
        let clock = only(&fleet);
        assert!(clock.what.contains("30 s behind"), "{clock:?}");
        fleet.instances[0].clock_offset = Some(0.9);
        fleet.instances[0].version = Some("0.33.0".to_owned());
        fleet.instances[1].version = Some("0.32.1".to_owned());
        assert_eq!(only(&fleet).topic, "version");
        fleet.instances[1].version = None;
        fleet.instances[1].models = vec!["m".to_owned(), "other".to_owned()];
        assert!(only(&fleet).what.contains("only decode instances serve other"));
        let mut untried = pair(P, D);
        (untried.outcome, untried.transfer) = (PairOutcome::Untried, None);
        untried.why = Some("the decode instance is down".to_owned());
        let mut down = trial(vec![untried]);
        down.instances[1].fault = Some("GET /health: could not be reached".to_owned());
        assert_eq!(only(&down).topic, "instance");
        let empty = findings(&FleetTrial::default());
        assert_eq!(empty.len(), 2, "no instance of either role");
    }
}
