//! Describes a configuration and finds what would not work in it, without a request to any
//! instance.

use super::{DnsRecords, Fallback, InstanceSetup, Pool, PoolConnector, Role, Setup};
use crate::log::AccessLogger;
use crate::recording::writer::Recorder;

/// One line of `kvx proxy --check`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// The meaning of a setting.
    Means(String),
    /// Something that works, but deserves a second look.
    Beware(String),
    /// Something that would not work.
    Fails(String),
}

/// Explains the names of DNS in a pool.
fn discovery<'a>(setup: &'a Setup, pool: &'a Pool) -> impl Iterator<Item = Finding> + 'a {
    let entries = |role, of: &'a [InstanceSetup]| of.iter().map(move |one| (role, one));
    let all = entries("prefill", &pool.prefill).chain(entries("decode", &pool.decode));
    all.filter_map(move |(role, one)| {
        let source = match one.records()? {
            DnsRecords::Addresses => "address",
            DnsRecords::Services => "target of the SRV records",
        };
        Some(Finding::Means(format!(
            "pool {}: each {source} of {} is a {role} instance; asked every {:?}, removed after {} \
             answers without it",
            pool.name,
            one.name(),
            setup.discovery.every,
            setup.discovery.absences
        )))
    })
}

/// Explains the pods of Kubernetes in a pool.
fn pods<'a>(setup: &'a Setup, pool: &'a str) -> impl Iterator<Item = Finding> + 'a {
    let found = setup.discovery.kubernetes.as_ref().filter(|one| one.pool == pool);
    found.into_iter().flat_map(move |found| {
        let roles = [Role::Prefill, Role::Decode].into_iter();
        roles.filter(|role| found.may_find(pool, *role)).map(move |role| {
            let namespace = found.namespace.as_deref().map_or_else(
                || "the router's namespace".to_owned(),
                |name| format!("namespace {name}"),
            );
            Finding::Means(format!(
                "pool {pool}: ready pods of {namespace} with {} are {} instances, at port {} \
                 unless an annotation names others",
                found.describe(role),
                role.as_str(),
                found.port
            ))
        })
    })
}

impl Setup {
    /// Returns the keys that differ in `next` and that a running router does not change.
    pub(crate) fn fixed_differences(&self, next: &Setup) -> Vec<&'static str> {
        let (limits, new) = (&self.limits, &next.limits);
        let per_address = "limits.connections_per_address";
        let keys = [
            ("host", self.host != next.host),
            ("port", self.port != next.port),
            ("release", self.release != next.release),
            ("access_log", self.access_log != next.access_log),
            ("record", self.record != next.record),
            ("record_size", self.record_size != next.record_size),
            ("limits.connections", limits.connections != new.connections),
            (per_address, limits.connections_per_address != new.connections_per_address),
            ("limits.headers", limits.headers != new.headers),
            ("limits.header_time", limits.header_time != new.header_time),
            ("limits.stall", limits.stall != new.stall),
        ];
        keys.into_iter().filter_map(|(key, differs)| differs.then_some(key)).collect()
    }

    /// Describes this configuration, and reports what would not work. Sends no requests to
    /// instances; [`check`](crate::check) does.
    pub fn findings(&self) -> Vec<Finding> {
        use Finding::{Beware, Fails, Means};
        let mut found = Vec::new();
        if let Err(error) = self.valid() {
            found.push(Fails(error.to_string()));
        }
        let scheme = if self.tls_cert.is_some() { "https" } else { "http" };
        found.push(Means(format!("listens on {scheme}://{}:{}", self.host, self.port)));
        match &self.api_key_file {
            None if self.is_loopback() => {}
            None => found.push(Beware(
                "anyone who can reach this address can use it: no api_key_file is set".to_owned(),
            )),
            Some(path) => match crate::serve::keys::Keys::from_file(path) {
                Ok(keys) => found.push(Means(format!("clients need one of {} keys", keys.len()))),
                Err(error) => found.push(Fails(error.to_string())),
            },
        }
        if self.page && self.api_key_file.is_none() && !self.is_loopback() {
            let words = "anyone who can reach this address sees the instances at / and /status; page = false hides them \
                         there, and api_key_file closes /metrics too";
            found.push(Beware(words.to_owned()));
        }
        if self.limits.connections_per_address >= self.limits.connections {
            let words = "one address can take all connections, also those of /health: \
                         limits.connections_per_address is not below limits.connections";
            found.push(Beware(words.to_owned()));
        }
        if let Err(error) = crate::serve::acceptor(self) {
            found.push(Fails(error.to_string()));
        }
        if let Err(error) = AccessLogger::can_open(&self.access_log) {
            found.push(Fails(error.to_string()));
        }
        if let Some(path) = &self.record {
            match Recorder::can_open(path) {
                Ok(()) => found.push(Means(format!(
                    "requests are recorded in {}, up to {} MiB: times, lengths, outcomes and keyed \
                     hashes of prompts, but no text",
                    path.display(),
                    self.record_size >> 20
                ))),
                Err(error) => found.push(Fails(error.to_string())),
            }
        }
        if self.admin_api_key.is_none() {
            found.push(Means("/instances is disabled: ADMIN_API_KEY is not set".to_owned()));
        }
        if self.local_below > 0 {
            let below = self.local_below;
            found.push(Means(format!(
                "prompts of fewer than about {below} tokens go to decode alone"
            )));
        }
        if self.fallback == Fallback::Decode {
            let words = "while no prefill instance is up, decode instances compute prompts, for at \
                         most a tenth of their load";
            found.push(Means(words.to_owned()));
        }
        if let Some(fleet) = &self.discovery.etcd {
            let signed = match &self.fleet_secret {
                Some(_) => ", if they are signed with the fleet's secret",
                None => "",
            };
            found.push(Means(format!(
                "instances that register themselves at {fleet} are used, in both roles{signed}"
            )));
            if self.fleet_secret.is_none() {
                let words = format!(
                    "anyone who can write to {fleet} can receive prompts: give the fleet a secret, \
                     KVX_SECRET_FILE"
                );
                found.push(Beware(words));
            }
        }
        let pools = self.pools();
        if pools.is_empty() {
            found.push(Fails(
                "there is no instance: add a [[pool]] with prefill and decode".to_owned(),
            ));
        }
        for pool in &*pools {
            let name = &pool.name;
            let connector = match pool.connector.unwrap_or(self.connector) {
                PoolConnector::Auto => "the connector detected from its prefill instances",
                PoolConnector::Nixl => {
                    "NixlConnector: prefill, then decode; push if prefill instances announce it"
                }
                PoolConnector::NixlPull => "NixlPullConnector: prefill, then decode",
                PoolConnector::NixlPush => {
                    "NixlPushConnector: both at once, after a prefill instance's first answer"
                }
                PoolConnector::Mooncake => "MooncakeConnector: both at once",
            };
            let fixed =
                |of: &[InstanceSetup]| of.iter().filter(|one| one.records().is_none()).count();
            found.push(Means(format!(
                "pool {name}: {} prefill and {} decode instances, {connector}",
                fixed(&pool.prefill),
                fixed(&pool.decode)
            )));
            found.extend(discovery(self, pool));
            found.extend(pods(self, name));
            if pool.decode.is_empty() && !self.discovery.may_find(name, Role::Decode) {
                found.push(Fails(format!(
                    "pool {name} has no decode instance: no request can be answered"
                )));
            }
            if pool.prefill.is_empty() && !self.discovery.may_find(name, Role::Prefill) {
                found.push(Beware(format!(
                    "pool {name} has no prefill instance: all requests go to decode alone"
                )));
            }
            let instances =
                || pool.prefill.iter().chain(&pool.decode).filter(|one| one.records().is_none());
            if instances().any(InstanceSetup::is_local) && instances().any(|one| !one.is_local()) {
                found.push(Beware(format!(
                    "pool {name} has instances on this host and on others: decode instances must reach the address \
                     that a prefill instance announces (VLLM_NIXL_SIDE_CHANNEL_HOST is localhost if unset)"
                )));
            }
            let unpaired = pool.prefill.iter().filter(|prefill| {
                !pool.decode.iter().any(|decode| {
                    match (&prefill.compatibility, &decode.compatibility) {
                        (Some(one), Some(other)) => one == other,
                        _ => true,
                    }
                })
            });
            for prefill in unpaired.filter(|_| !pool.decode.is_empty()) {
                found.push(Fails(format!(
                    "pool {name}: no decode instance is compatible with prefill {}",
                    prefill.name()
                )));
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::Finding::{Beware, Fails, Means};
    use super::*;

    const GOOD: &str = "[[pool]]\nprefill = ['http://10.0.0.1:1']\ndecode = ['http://10.0.0.2:1']";

    fn of(text: &str) -> Vec<Finding> {
        Setup::from_toml(text).unwrap().findings()
    }

    #[test]
    fn warnings_and_failures_are_reported() {
        assert!(of(GOOD).iter().all(|finding| matches!(finding, Means(_))), "{:?}", of(GOOD));
        let open = format!("host = '0.0.0.0'\n{GOOD}");
        let (prefill, decode) =
            ("prefill = ['http://10.0.0.1:1']", "decode = ['http://10.0.0.2:1']");
        let pair = |one: &str, other: &str| {
            format!(
                "[[pool]]\nprefill = [{{ url = 'http://10.0.0.1:1', compatibility = '{one}' }}]\n\
                 decode = [{{ url = 'http://10.0.0.2:1', compatibility = '{other}' }}, {{ url = 'http://10.0.0.3:1', \
                 compatibility = 'third' }}]"
            )
        };
        assert!(of(&pair("same", "same")).iter().all(|finding| matches!(finding, Means(_))));
        let cases = [
            (open.clone(), Beware(String::new()), "no api_key_file"),
            (open.clone(), Beware(String::new()), "sees the instances at / and /status"),
            (
                GOOD.replace(prefill, ""),
                Beware(String::new()),
                "has no prefill instance: all requests go to decode alone",
            ),
            (
                GOOD.replace("10.0.0.1", "127.0.0.1"),
                Beware(String::new()),
                "on this host and on others",
            ),
            (
                GOOD.replace("10.0.0.2", "localhost"),
                Beware(String::new()),
                "VLLM_NIXL_SIDE_CHANNEL_HOST",
            ),
            (
                GOOD.replace("10.0.0.2", "[::1]"),
                Beware(String::new()),
                "on this host and on others",
            ),
            (
                GOOD.replace(decode, ""),
                Fails(String::new()),
                "has no decode instance: no request can be answered",
            ),
            (
                pair("old", "new"),
                Fails(String::new()),
                "no decode instance is compatible with prefill 10.0.0.1:1",
            ),
            (
                format!("[limits]\nconnections = 100\n{GOOD}"),
                Beware(String::new()),
                "one address can take all connections",
            ),
            (String::new(), Fails(String::new()), "there is no instance"),
            (
                format!("api_key_file = '/nowhere/keys'\n{GOOD}"),
                Fails(String::new()),
                "/nowhere/keys",
            ),
        ];
        for (text, kind, words) in cases {
            let found = of(&text);
            let reported = found.iter().any(|finding| {
                let (Means(said) | Beware(said) | Fails(said)) = finding;
                std::mem::discriminant(finding) == std::mem::discriminant(&kind)
                    && said.contains(words)
            });
            assert!(reported, "{words}: {text}: {found:?}");
        }
        let closed = of(&open.replace("host", "page = false\nhost"));
        assert_eq!(
            closed.iter().filter(|finding| matches!(finding, Beware(_))).count(),
            1,
            "{closed:?}"
        );
    }

    #[test]
    fn keys_that_need_a_restart_are_named() {
        let setup = Setup::from_toml(GOOD).unwrap();
        assert_eq!(setup.fixed_differences(&setup), [""; 0]);
        let changed = "host = '10.0.0.9'\ndrain = '1s'\n[limits]\nstall = '7s'\nqueue = 1\n";
        let next = Setup::from_toml(&format!("{changed}{GOOD}")).unwrap();
        assert_eq!(setup.fixed_differences(&next), ["host", "limits.stall"]);
    }

    #[test]
    fn names_of_dns_are_explained() {
        let text = "[[pool]]\nprefill = ['dns+http://p.ns.svc:8000']\n\
                    decode = ['dnssrv+http://_http._tcp.d.ns.svc', 'http://10.0.0.2:1']";
        let found = of(text);
        for words in [
            "pool default: 0 prefill and 1 decode instances, the connector detected from its \
             prefill instances",
            "pool default: each address of p.ns.svc:8000 is a prefill instance; asked every 5s, \
             removed after 3 answers without it",
            "pool default: each target of the SRV records of _http._tcp.d.ns.svc is a decode \
             instance; asked every 5s, removed after 3 answers without it",
        ] {
            assert!(found.contains(&Means(words.to_owned())), "{words}: {found:?}");
        }
        assert!(found.iter().all(|finding| matches!(finding, Means(_))), "{found:?}");
    }

    #[test]
    fn the_recipe_of_a_pool_is_reported() {
        for (connector, words) in [
            ("auto", "the connector detected from its prefill instances"),
            (
                "NixlConnector",
                "NixlConnector: prefill, then decode; push if prefill instances announce it",
            ),
            ("NixlPullConnector", "NixlPullConnector: prefill, then decode"),
            (
                "NixlPushConnector",
                "NixlPushConnector: both at once, after a prefill instance's first answer",
            ),
            ("MooncakeConnector", "MooncakeConnector: both at once"),
        ] {
            let line = Means(format!("pool default: 1 prefill and 1 decode instances, {words}"));
            let of_all = of(&format!("connector = '{connector}'\n{GOOD}"));
            assert!(of_all.contains(&line), "{connector}: {of_all:?}");
            let of_pool = GOOD.replace("[[pool]]", &format!("[[pool]]\nconnector = '{connector}'"));
            assert!(
                of(&format!("connector = 'NixlPullConnector'\n{of_pool}")).contains(&line),
                "{connector}"
            );
        }
        let short = of(&format!("local_below = 7\n{GOOD}"));
        assert!(
            short.contains(&Means(
                "prompts of fewer than about 7 tokens go to decode alone".to_owned()
            )),
            "{short:?}"
        );
    }
}
