//! The instances that a fleet lacks to serve requests.

use std::sync::Arc;

use serde::Serialize;

use super::Fleet;
use super::instance::{Instance, Role};
use super::models::ModelName;

/// The roles that a disaggregated request needs.
pub(crate) const BOTH: [Role; 2] = [Role::Prefill, Role::Decode];

/// The roles that a pool lacks to serve requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct MissingSides {
    pool: String,
    /// The roles without an instance that is up. If both roles have one, none of them form a pair.
    missing: Vec<Role>,
}

impl Fleet {
    /// Returns what each pool lacks in these roles to serve a request, for the model if it is
    /// named. A pool without prefill instances lacks none, unless they are discovered.
    pub(crate) fn missing(
        &self,
        model: Option<ModelName<'_>>,
        roles: &[Role],
    ) -> Vec<MissingSides> {
        let serves = |one: &Instance| model.is_none_or(|model| one.state.models.serve(model));
        let is_up = |one: &&Arc<Instance>| one.state.is_usable() && !one.setup.draining;
        let mut missing = Vec::new();
        for (place, pool) in self.pools.iter().enumerate() {
            let of = |role: Role| self.of(role).iter().filter(move |one| one.pool == place);
            if !of(Role::Prefill).chain(of(Role::Decode)).any(|one| serves(one)) {
                continue;
            }
            let needs_both = roles.contains(&Role::Prefill) && self.needs_prefill(place);
            let up = |role: Role| of(role).filter(|one| serves(one)).filter(is_up);
            let lacks = |role: &&Role| {
                (**role == Role::Decode || needs_both) && up(**role).next().is_none()
            };
            let sides: Vec<Role> = roles.iter().filter(lacks).copied().collect();
            let unpaired = needs_both
                && !up(Role::Prefill)
                    .any(|prefill| up(Role::Decode).any(|decode| prefill.pairs_with(decode)));
            if !sides.is_empty() || unpaired {
                missing.push(MissingSides { pool: pool.name.clone(), missing: sides });
            }
        }
        missing
    }

    /// Describes which sides of which pools are missing, so that a request for this model is not served.
    pub(crate) fn why_unserved(&self, model: Option<&str>, roles: &[Role]) -> String {
        let name = model.map(|model| self.names.named(model));
        let missing = self.missing(name, roles);
        let which = if model.is_some() { " for this model" } else { "" };
        match &missing[..] {
            [] if roles == [Role::Decode] => format!("no decode instance{which} is up"),
            [] => format!("no pair of prefill and decode instances{which} is up"),
            missing => {
                let words: Vec<_> = missing.iter().map(|one| one.words(which)).collect();
                words.join("; ")
            }
        }
    }
}

impl MissingSides {
    fn words(&self, which: &str) -> String {
        let pool = &self.pool;
        match &self.missing[..] {
            [] => format!(
                "no prefill instance{which} that is up pairs with a decode instance in pool {pool}"
            ),
            [side] => format!("no {} instance{which} is up in pool {pool}", side.as_str()),
            _ => format!("no prefill and no decode instance{which} is up in pool {pool}"),
        }
    }
}

/// Returns the sentences of [`Fleet::missing`] for requests in general.
pub(crate) fn words(missing: &[MissingSides]) -> String {
    missing.iter().map(|one| one.words("")).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::Setup;

    fn fleet(up: &[&str]) -> Fleet {
        let setup = Setup::from_toml(
            "[[pool]]\nname = 'a'\nprefill = ['http://p:1']\ndecode = ['http://d:1']\n\
             [[pool]]\nname = 'b'\nprefill = [{ url = 'http://q:1', compatibility = 'x' }]\n\
             decode = [{ url = 'http://e:1', compatibility = 'y' }]\n\
             [[pool]]\nname = 'c'\ndecode = ['http://f:1']\n",
        );
        let fleet = Fleet::new(&setup.unwrap(), None);
        for one in fleet.all().filter(|one| up.contains(&one.name())) {
            one.state.healthy();
        }
        fleet
    }

    #[test]
    fn the_missing_sides_of_each_pool_are_named() {
        let said = |up: &[&str], roles: &[Role]| fleet(up).why_unserved(None, roles);
        let none = "no prefill and no decode instance is up in pool";
        assert_eq!(
            said(&[], &BOTH),
            format!("{none} a; {none} b; no decode instance is up in pool c")
        );
        assert_eq!(
            said(&["d:1", "q:1", "e:1", "f:1"], &BOTH),
            "no prefill instance is up in pool a; \
             no prefill instance that is up pairs with a decode instance in pool b"
        );
        assert_eq!(
            said(&["p:1", "e:1"], &[Role::Decode]),
            "no decode instance is up in pool a; no decode instance is up in pool c"
        );
        let served = fleet(&["p:1", "d:1", "f:1"]);
        assert_eq!(served.missing(None, &BOTH).len(), 1, "pool b alone");
    }

    #[test]
    fn pools_without_the_model_are_not_named() {
        let fleet = fleet(&["d:1"]);
        for (name, model) in [("d:1", "m"), ("p:1", "m"), ("e:1", "o"), ("q:1", "o"), ("f:1", "o")]
        {
            let one = fleet.all().find(|one| one.name() == name).unwrap();
            one.state.models.learn(&serde_json::json!({"data": [{"id": model}]}), &fleet.names);
        }
        assert_eq!(
            fleet.why_unserved(Some("m"), &BOTH),
            "no prefill instance for this model is up in pool a"
        );
    }
}
