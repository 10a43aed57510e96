//! What a set-up means, and what of it would not work, as far as can be said without asking anybody.

use super::{Connector, InstanceSetup, Setup};

/// One line of `kvx proxy --check`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// What something means.
    Means(String),
    /// What works, and is worth a second look.
    Beware(String),
    /// What would not work.
    Fails(String),
}

fn is_local(instance: &InstanceSetup) -> bool {
    let host = instance.url.host().unwrap_or_default();
    host == "localhost" || host == "[::1]" || host.starts_with("127.")
}

impl Setup {
    /// What this set-up means, and what would not work. Asks no instance: see [`check`](crate::check).
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
            None => {
                found.push(Beware("anybody who reaches this address can use it: no api_key_file".to_owned()))
            }
            Some(path) => match crate::serve::keys::Keys::from_file(path) {
                Ok(keys) => found.push(Means(format!("clients need one of {} keys", keys.len()))),
                Err(error) => found.push(Fails(error.to_string())),
            },
        }
        for path in [&self.tls_cert, &self.tls_key].into_iter().flatten() {
            if let Err(error) = std::fs::metadata(path) {
                found.push(Fails(format!("cannot read {}: {error}", path.display())));
            }
        }
        if self.admin_api_key.is_none() {
            found.push(Means("/instances is refused: ADMIN_API_KEY is not set".to_owned()));
        }
        if self.local_below > 0 {
            let below = self.local_below;
            found.push(Means(format!("prompts of fewer than about {below} tokens go to decode alone")));
        }
        if self.pools.is_empty() {
            found.push(Fails("there is no instance: give [[pool]] with prefill and decode".to_owned()));
        }
        for pool in &self.pools {
            let name = &pool.name;
            let connector = match pool.connector.unwrap_or(self.connector) {
                Connector::Auto => "the connector that its prefill instances turn out to have",
                Connector::Nixl => "NixlConnector: prefill, then decode; push if prefill instances say so",
                Connector::NixlPull => "NixlPullConnector: prefill, then decode",
                Connector::NixlPush => {
                    "NixlPushConnector: both at once, after a prefill instance's first answer"
                }
                Connector::Mooncake => "MooncakeConnector: both at once",
            };
            found.push(Means(format!(
                "pool {name}: {} prefill and {} decode instances, {connector}",
                pool.prefill.len(),
                pool.decode.len()
            )));
            if pool.decode.is_empty() {
                found.push(Fails(format!("pool {name} has no decode instance: nobody could answer")));
            }
            if pool.prefill.is_empty() {
                found.push(Beware(format!("pool {name} has no prefill instance: all goes to decode alone")));
            }
            let mut instances = pool.prefill.iter().chain(&pool.decode);
            if instances.any(is_local) && pool.prefill.iter().chain(&pool.decode).any(|one| !is_local(one)) {
                found.push(Beware(format!(
                    "pool {name} has instances on this host and on others: the address that a prefill instance tells \
                     must be one that decode instances reach (VLLM_NIXL_SIDE_CHANNEL_HOST is localhost if unset)"
                )));
            }
            let unpaired = pool.prefill.iter().filter(|prefill| {
                !pool.decode.iter().any(|decode| match (&prefill.compatibility, &decode.compatibility) {
                    (Some(one), Some(other)) => one == other,
                    _ => true,
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
