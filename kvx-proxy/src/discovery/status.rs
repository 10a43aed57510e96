//! The state of providers, for `/status` and the metrics.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use serde::Serialize;

/// The state of each provider, by name. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct DiscoveryStatus(Arc<Mutex<BTreeMap<Arc<str>, ProviderStatus>>>);

/// The state of one provider. Times are seconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct ProviderStatus {
    /// The instances in its last list.
    instances: usize,
    /// Instances that its last lists lack, which are kept for the time being.
    absent: usize,
    /// Instances in its last list that are not used, because the configuration lacks their pool.
    without_pool: usize,
    /// Entries that were refused, by reason.
    refused: BTreeMap<&'static str, u64>,
    last_success: Option<f64>,
    failures: u64,
    last_failure: Option<f64>,
    last_error: Option<String>,
    /// True if the last answer was an error.
    failing: bool,
}

fn now() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0.0, |since| since.as_secs_f64())
}

impl DiscoveryStatus {
    fn all(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, ProviderStatus>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows these providers and no others.
    pub(super) fn keep<'a>(&self, names: impl Iterator<Item = &'a Arc<str>>) {
        let mut all = self.all();
        let mut before = std::mem::take(&mut *all);
        all.extend(names.map(|name| (Arc::clone(name), before.remove(name).unwrap_or_default())));
    }

    /// Notes a list: the numbers of its instances, of those absent, and of those without a pool.
    /// Returns true if the last number has changed.
    pub(super) fn succeeded(
        &self,
        name: &str,
        [instances, absent, without_pool]: [usize; 3],
    ) -> bool {
        let mut all = self.all();
        let Some(one) = all.get_mut(name) else { return false };
        let has_changed = one.without_pool != without_pool;
        (one.instances, one.absent, one.without_pool) = (instances, absent, without_pool);
        (one.last_success, one.failing) = (Some(now()), false);
        has_changed
    }

    /// Sets the numbers of refused entries by reason.
    pub(super) fn refused(&self, name: &str, counts: impl Iterator<Item = (&'static str, u64)>) {
        if let Some(one) = self.all().get_mut(name) {
            one.refused = counts.filter(|(_, count)| *count > 0).collect();
        }
    }

    /// Returns the numbers of entries of a provider that were refused, by reason.
    pub(crate) fn refused_entries(&self, name: &str) -> BTreeMap<&'static str, u64> {
        self.all().get(name).map(|one| one.refused.clone()).unwrap_or_default()
    }

    /// Returns true if the failure is a new one.
    pub(super) fn failed(&self, name: &str, why: &str) -> bool {
        let mut all = self.all();
        let Some(one) = all.get_mut(name) else { return false };
        let is_new = !one.failing || one.last_error.as_deref() != Some(why);
        one.failing = true;
        one.failures += 1;
        one.last_failure = Some(now());
        one.last_error = Some(why.to_owned());
        is_new
    }

    /// Describes the providers as JSON.
    pub(crate) fn json(&self) -> serde_json::Value {
        let described = |(name, one): (&Arc<str>, &ProviderStatus)| {
            let mut described = serde_json::json!(one);
            described["provider"] = (&**name).into();
            described
        };
        self.all().iter().map(described).collect()
    }

    /// Writes the metrics of the providers.
    pub(crate) fn write(&self, into: &mut String, head: fn(&mut String, &str, &str, &str)) {
        type Read = fn(&ProviderStatus) -> f64;
        let rows: [(&str, &str, &str, Read); 3] = [
            ("instances", "gauge", "Instances in the provider's last list.", |one| {
                one.instances as f64
            }),
            (
                "last_success_seconds",
                "gauge",
                "Time of the provider's last list, in seconds since 1970; 0 if there was none.",
                |one| one.last_success.unwrap_or(0.0),
            ),
            ("failures_total", "counter", "Queries of the provider that failed.", |one| {
                one.failures as f64
            }),
        ];
        for (name, kind, help, read) in rows {
            let name = format!("kvx_proxy_discovery_{name}");
            head(into, &name, kind, help);
            for (provider, one) in self.all().iter() {
                let _ = writeln!(into, "{name}{{provider=\"{provider}\"}} {}", read(one));
            }
        }
        let name = "kvx_proxy_discovery_refused_total";
        head(into, name, "counter", "Entries that were refused, counted in each list, by reason.");
        for (provider, one) in self.all().iter() {
            for (reason, count) in &one.refused {
                let labels = format!("provider=\"{provider}\",reason=\"{reason}\"");
                let _ = writeln!(into, "{name}{{{labels}}} {count}");
            }
        }
    }
}
