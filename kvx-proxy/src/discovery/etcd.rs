//! Instances that have registered themselves in etcd.

use std::time::Duration;

use tokio::time::sleep;

use super::{Discovered, Provider, Report, Reports};
use crate::fleet::instance::Role;
use crate::registration::{FleetList, Registration, follow};
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
        settings: format!("{registered:?}"),
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
            if let Some(report) = self.current(&list) {
                reports.refused(list.refusals());
                reports.send(report).await;
            }
            tokio::select! {
                // Errors: the list's task has ended, which its failure says.
                _ = listed.changed() => {}
                _ = failure.changed() => {}
                () = sleep(self.every) => {}
            }
        }
    }

    /// Returns the registered instances, or why the list may be old; `None` before etcd's first
    /// answer.
    fn current(&self, list: &FleetList) -> Option<Report> {
        if let Some(why) = list.failure().borrow().clone() {
            return Some(Err(why));
        }
        let listed = list.subscribe().borrow().clone()?;
        Some(Ok(listed.iter().map(|one| self.instance(one)).collect()))
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
