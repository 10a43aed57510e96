//! Instances by DNS: `dns+http://HOST:PORT` for each address of a name, and `dnssrv+http://NAME` for
//! each target of its SRV records.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use tokio::net::lookup_host;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::srv::{self, Target};
use super::{Discovered, Provider, ProviderSettings, Reports};
use crate::fleet::instance::Role;
use crate::resolver::is_absence;
use crate::setup::{DnsRecords, InstanceSetup, Setup};

/// Returns the providers of the names in a configuration. A name in several places is one provider.
pub(super) fn providers(setup: &Setup) -> Vec<Provider> {
    let mut queries: BTreeMap<String, DnsQuery> = BTreeMap::new();
    for pool in &setup.pools {
        for (role, entries) in [(Role::Prefill, &pool.prefill), (Role::Decode, &pool.decode)] {
            for entry in entries {
                let Some(records) = entry.records() else { continue };
                let query = queries.entry(entry.provider()).or_insert_with(|| DnsQuery {
                    records,
                    host: entry.host().to_owned(),
                    port: entry.url.port_u16().unwrap_or(80),
                    resolvers: setup.discovery.resolvers.clone(),
                    templates: Vec::new(),
                });
                query.templates.push((pool.name.clone(), role, entry.clone()));
            }
        }
    }
    let (every, limit) = (setup.discovery.every, setup.discovery.timeout);
    let provider = |(name, query): (String, DnsQuery)| Provider {
        name: name.into(),
        settings: ProviderSettings::Text(format!("{query:?} {every:?} {limit:?}")),
        every,
        absences: setup.discovery.absences,
        places: query.templates.iter().map(|(pool, role, _)| (pool.clone(), *role)).collect(),
        run: Box::new(move |reports| Box::pin(query.repeat(every, limit, reports))),
    };
    queries.into_iter().map(provider).collect()
}

#[derive(Debug)]
struct DnsQuery {
    records: DnsRecords,
    host: String,
    port: u16,
    resolvers: Vec<SocketAddr>,
    /// The settings of its instances, for each place in the configuration.
    templates: Vec<(String, Role, InstanceSetup)>,
}

type Lookup = Pin<Box<dyn Future<Output = Result<Vec<Target>, String>> + Send>>;

impl DnsQuery {
    async fn repeat(self, every: Duration, limit: Duration, reports: Reports) {
        let mut ticks = interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // A late lookup is not repeated, so that there is never more than one: the C library's
        // holds a thread.
        let mut pending: Option<Lookup> = None;
        loop {
            ticks.tick().await;
            let lookup = pending.get_or_insert_with(|| self.look_up());
            let found = timeout(limit, lookup).await;
            let report = match found {
                Ok(found) => {
                    pending = None;
                    found.map(|targets| self.instances(&targets))
                }
                Err(_) => Err(format!("no answer within {limit:?}; see discovery.timeout")),
            };
            reports.send(report).await;
        }
    }

    fn look_up(&self) -> Lookup {
        let (host, port) = (self.host.clone(), self.port);
        match self.records {
            DnsRecords::Addresses => Box::pin(async move { addresses(&host, port).await }),
            DnsRecords::Services => {
                let resolvers = self.resolvers.clone();
                Box::pin(async move { srv::targets(&host, &resolvers).await })
            }
        }
    }

    fn instances(&self, targets: &[Target]) -> Vec<Discovered> {
        let at = |(pool, role, template): &(String, Role, InstanceSetup), target: &Target| {
            let setup = template.at(&target.0, target.1)?;
            let identity = setup.name().into();
            Some(Discovered { identity, pool: pool.clone(), role: *role, setup })
        };
        let all =
            targets.iter().flat_map(|target| self.templates.iter().map(move |one| (one, target)));
        all.filter_map(|(template, target)| at(template, target)).collect()
    }
}

/// Returns the addresses of a name by the C library, so as `/etc/hosts` and search domains have it.
/// IPv6 addresses count only without an IPv4 one: a host with both is one instance.
async fn addresses(host: &str, port: u16) -> Result<Vec<Target>, String> {
    let found: Vec<SocketAddr> = match lookup_host((host, port)).await {
        Ok(found) => found.collect(),
        Err(error) if is_absence(&error) => Vec::new(),
        Err(error) => return Err(error.to_string()),
    };
    let has_ipv4 = found.iter().any(SocketAddr::is_ipv4);
    let mut found: Vec<_> =
        found.iter().filter(|one| one.is_ipv4() || !has_ipv4).map(SocketAddr::ip).collect();
    found.sort();
    found.dedup();
    let host = |address: std::net::IpAddr| match address {
        std::net::IpAddr::V4(address) => address.to_string(),
        std::net::IpAddr::V6(address) => format!("[{address}]"),
    };
    Ok(found.into_iter().map(|address| (host(address), port)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn addresses_are_found() {
        let local = addresses("localhost", 8000).await.unwrap();
        assert_eq!(local, [("127.0.0.1".to_owned(), 8000)]);
        assert_eq!(addresses("::1", 80).await.unwrap(), [("[::1]".to_owned(), 80)]);
    }

    #[test]
    fn each_address_is_an_instance_with_the_settings_of_its_name() {
        let text = "[[pool]]\nname = 'a'\nprefill = [{ url = 'dns+http://p.test:8000', weight = 2, \
                    events = 'tcp://*:5557' }]\ndecode = ['dnssrv+http://_http._tcp.d.test', \
                    'http://fixed:1']\n[[pool]]\nname = 'b'\nprefill = ['dns+http://p.test:8000']";
        let setup = Setup::from_toml(text).unwrap();
        let names: Vec<_> = providers(&setup).iter().map(|one| one.name.to_string()).collect();
        assert_eq!(names, ["dns+http://p.test:8000", "dnssrv+http://_http._tcp.d.test"]);
        let entry = &setup.pools[0].prefill[0];
        let query = DnsQuery {
            records: DnsRecords::Addresses,
            host: entry.host().to_owned(),
            port: 8000,
            resolvers: Vec::new(),
            templates: vec![("a".to_owned(), Role::Prefill, entry.clone())],
        };
        let found =
            query.instances(&[("10.0.0.1".to_owned(), 8000), ("[fd00::1]".to_owned(), 8000)]);
        assert_eq!(found[0].setup.url, "http://10.0.0.1:8000");
        assert_eq!((found[0].setup.weight, &*found[0].identity), (2.0, "10.0.0.1:8000"));
        let events = |one: &Discovered| one.setup.events.clone().unwrap().endpoint;
        assert_eq!(events(&found[0]), ("10.0.0.1".to_owned(), 5557));
        assert_eq!(events(&found[1]), ("fd00::1".to_owned(), 5557));
        assert_eq!((found[1].setup.name(), found[1].setup.records()), ("[fd00::1]:8000", None));
    }
}
