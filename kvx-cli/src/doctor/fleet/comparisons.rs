//! Compares the instances and the pairs of a fleet with each other.

use std::collections::BTreeSet;

use kvx_proxy::{FleetTrial, InstanceReport, PairOutcome, Role};

use super::super::finding::Finding;
use super::address::{host, name};
use super::matrix::rate;

/// A pair is slow if it has less than this part of the median rate.
const SLOW: f64 = 1.0 / 3.0;

/// Reports what the instances of a pool should have in common.
pub(super) fn differences(trial: &FleetTrial) -> Vec<Finding> {
    let mut found = Vec::new();
    // Some engines convert what differs.
    let works = trial.pairs.iter().all(|pair| pair.outcome == PairOutcome::Moved);
    let finding = if works { Finding::note } else { Finding::problem };
    let pools: BTreeSet<&str> = trial.instances.iter().map(|one| &*one.pool).collect();
    for pool in pools {
        let up: Vec<_> =
            trial.instances.iter().filter(|one| one.pool == pool && one.fault.is_none()).collect();
        let values = |value: &dyn Fn(&InstanceReport) -> Option<String>| {
            let mut said: Vec<(String, Vec<String>)> = Vec::new();
            for one in &up {
                let Some(value) = value(one) else { continue };
                match said.iter_mut().find(|(known, _)| *known == value) {
                    Some((_, names)) => names.push(name(one)),
                    None => said.push((value, vec![name(one)])),
                }
            }
            let lines =
                said.iter().map(|(value, names)| format!("{value} at {}", names.join(", ")));
            (said.len() > 1).then(|| lines.collect::<Vec<_>>().join("; "))
        };
        if let Some(sizes) = values(&|one| one.block_size.map(|size| size.to_string())) {
            found.push(
                finding("block size", format!("it differs: {sizes}"))
                    .because(
                        "blocks of one size do not fit the other: transfers are refused, or \
                         cost a copy",
                    )
                    .cure("start all engines of a pool with one `--block-size`"),
            );
        }
        if let Some(types) = values(&|one| one.cache_type.clone()) {
            found.push(
                finding("cache type", format!("it differs: {types}"))
                    .because("a decode would read the numbers of another type")
                    .cure("start all engines of a pool with one `--kv-cache-dtype`"),
            );
        }
        // kvx's own servers speak the protocols of many versions of vLLM.
        let of_vllm = |version: &String| !version.starts_with("kvx-");
        if let Some(versions) = values(&|one| one.version.clone().filter(of_vllm)) {
            found.push(
                Finding::warning("version", format!("it differs: {versions}"))
                    .because("engines of different versions may refuse each other's handshake")
                    .cure("run one version, but for a rolling upgrade"),
            );
        }
        for role in [Role::Prefill, Role::Decode] {
            let models = |of: Role| -> BTreeSet<&String> {
                up.iter().filter(|one| one.role == of).flat_map(|one| &one.models).collect()
            };
            let other = if role == Role::Prefill { Role::Decode } else { Role::Prefill };
            let (ours, theirs) = (models(role), models(other));
            let only: Vec<&str> = ours.difference(&theirs).map(|name| name.as_str()).collect();
            if !only.is_empty() && !theirs.is_empty() {
                found.push(
                    Finding::warning(
                        "models",
                        format!("only {} instances serve {}", role.as_str(), only.join(", ")),
                    )
                    .because("requests for it are not disaggregated, or refused")
                    .cure("give both roles the same `--served-model-name`"),
                );
            }
        }
    }
    found
}

/// Reports routes that are slower than they could be.
pub(super) fn routes(trial: &FleetTrial) -> Vec<Finding> {
    let mut found = Vec::new();
    for pair in &trial.pairs {
        let Some(moved) = &pair.transfer else { continue };
        if host(&pair.prefill) == host(&pair.decode) && moved.backends == ["TCP"] {
            found.push(
                Finding::warning(
                    "route",
                    format!(
                        "prefill {} and decode {} are one host, and use TCP",
                        pair.prefill, pair.decode
                    ),
                )
                .because("shared memory is several times faster")
                .cure(
                    "the decode's log says why in the line `TCP: chosen`: most often separate \
                     network namespaces, another user, or ptrace scope; `kvx doctor` there names it",
                ),
            );
        }
    }
    let mut rates: Vec<f64> = trial.pairs.iter().filter_map(rate).collect();
    rates.sort_by(f64::total_cmp);
    if rates.len() >= 3 {
        let median = rates[rates.len() / 2];
        for pair in &trial.pairs {
            if let Some(rate) = rate(pair).filter(|rate| *rate < median * SLOW) {
                found.push(
                    Finding::warning(
                        "speed",
                        format!(
                            "prefill {} with decode {}: {:.2} GB/s, where the median of the \
                                 pairs is {:.2}",
                            pair.prefill,
                            pair.decode,
                            rate / 1e9,
                            median / 1e9
                        ),
                    )
                    .because("one slow link delays each request that takes it")
                    .cure(
                        "compare the routes in the decodes' logs (`reaches ... by`), and MTU \
                         and speed of the interfaces: `kvx doctor` on both hosts",
                    ),
                );
            }
        }
    }
    found
}
