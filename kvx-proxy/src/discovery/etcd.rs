//! Instances that have registered themselves in etcd.

use std::time::Duration;

use tokio::time::sleep;

use super::{Discovered, Provider, ProviderSettings, Report, Reports};
use crate::fleet::instance::Role;
use crate::registration::{Registration, follow};
use crate::setup::{FleetAddress, FleetSecret, Setup};

/// Returns the provider of the registered instances of a fleet, if the configuration names one.
pub(super) fn provider(setup: &Setup) -> Option<Provider> {
    let fleet = setup.discovery.etcd.clone()?;
    let pools: Vec<_> = setup.pools().iter().map(|pool| pool.name.clone()).collect();
    let registered = RegisteredInstances {
        fleet,
        secret: setup.fleet_secret.clone(),
        first_pool: pools.first()?.clone(),
        every: setup.discovery.every,
    };
    let both = |pool: String| [Role::Prefill, Role::Decode].map(|role| (pool.clone(), role));
    Some(Provider {
        name: registered.fleet.to_string().into(),
        settings: ProviderSettings::Fleet(
            Box::new(registered.fleet.clone()),
            registered.secret.clone(),
            format!("{registered:?}"),
        ),
        every: registered.every,
        // The list itself keeps instances that etcd may have lost.
        absences: 1,
        places: pools.into_iter().flat_map(both).collect(),
        run: Box::new(move |reports| Box::pin(registered.report(reports))),
    })
}

#[derive(Debug)]
struct RegisteredInstances {
    fleet: FleetAddress,
    secret: Option<FleetSecret>,
    /// The pool of registrations that name none.
    first_pool: String,
    /// The time between two reports without a change.
    every: Duration,
}

impl RegisteredInstances {
    async fn report(self, reports: Reports) {
        let list = loop {
            match follow(&self.fleet, self.secret.as_ref()) {
                Ok(list) => break list,
                Err(error) => reports.send(Err(error.to_string())).await,
            }
            sleep(self.every).await; // before the next attempt
        };
        let (mut listed, mut failure) = (list.subscribe(), list.failure());
        loop {
            // A new list counts although the watch after it may fail.
            let is_new = listed.has_changed().unwrap_or(false);
            let current = listed.borrow_and_update().clone();
            let why = failure.borrow_and_update().clone();
            let report: Option<Report> = match (current, why) {
                (Some(current), why) if is_new || why.is_none() => {
                    Some(Ok(current.iter().map(|one| self.instance(one)).collect()))
                }
                (_, why) => why.map(Err),
            };
            if let Some(report) = report {
                reports.refused(list.refusals());
                reports.send(report).await;
            }
            let changed = tokio::select! {
                changed = listed.changed() => changed,
                changed = failure.changed() => changed,
                () = sleep(self.every) => Ok(()),
            };
            if changed.is_err() {
                return; // the list's task has ended: start anew
            }
        }
    }

    fn instance(&self, one: &Registration) -> Discovered {
        Discovered {
            identity: format!("{:016x}", one.id).into(),
            pool: one.pool.clone().unwrap_or_else(|| self.first_pool.clone()),
            role: one.role,
            setup: one.setup.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_secret_or_password_starts_the_provider_anew() {
        let settings = |secret: u8, password: &str| {
            let fleet = FleetAddress::new("etcd://a:1/f").unwrap().with_login("me", password);
            let mut setup = Setup::default();
            setup.discovery.etcd = Some(fleet);
            setup.fleet_secret = Some(FleetSecret::new([secret; 32]));
            provider(&setup).unwrap().settings
        };
        assert!(settings(1, "one") == settings(1, "one"));
        assert!(settings(1, "one") != settings(2, "one"), "the secret differs");
        assert!(settings(1, "one") != settings(1, "two"), "the password differs");
    }
}
