//! The flags of SGLang's and vLLM's routers for pods of Kubernetes.

use kvx_proxy::{KubernetesDiscovery, LabelSelector, Setup};

use crate::Result;

/// The flags for pods of Kubernetes. They override the file's `[discovery.kubernetes]`.
#[derive(Clone, clap::Args)]
pub(super) struct Flags {
    /// Find instances among the pods of a namespace, by their labels. Without a selector, llm-d's
    /// label llm-d.ai/role names their roles.
    #[arg(long)]
    service_discovery: bool,
    /// Labels that all instances have.
    #[arg(long, num_args = 1.., value_name = "KEY=VALUE", requires = "service_discovery")]
    selector: Vec<String>,
    /// Labels of prefill instances.
    #[arg(long, num_args = 1.., value_name = "KEY=VALUE", requires = "service_discovery")]
    prefill_selector: Vec<String>,
    /// Labels of decode instances.
    #[arg(long, num_args = 1.., value_name = "KEY=VALUE", requires = "service_discovery")]
    decode_selector: Vec<String>,
    /// The port of pods without an annotation that names theirs [default: 8000].
    #[arg(long, value_name = "PORT", requires = "service_discovery")]
    service_discovery_port: Option<u16>,
    /// The namespace of the pods [default: that of the router's own pod].
    #[arg(long, value_name = "NAME", requires = "service_discovery")]
    service_discovery_namespace: Option<String>,
}

impl Flags {
    /// Returns true if instances are found, so that none need to be named.
    pub(super) fn is_set(&self) -> bool {
        self.service_discovery
    }

    /// Puts the flags into the configuration.
    pub(super) fn apply(&self, setup: &mut Setup) -> Result<()> {
        if !self.is_set() {
            return Ok(());
        }
        let found = setup.discovery.kubernetes.get_or_insert_with(KubernetesDiscovery::default);
        for (labels, selector) in [
            (&self.selector, &mut found.selector),
            (&self.prefill_selector, &mut found.prefill_selector),
            (&self.decode_selector, &mut found.decode_selector),
        ] {
            if !labels.is_empty() {
                *selector = LabelSelector::new(labels)?;
            }
        }
        found.port = self.service_discovery_port.unwrap_or(found.port);
        if let Some(namespace) = &self.service_discovery_namespace {
            found.namespace = Some(namespace.clone());
        }
        Ok(())
    }
}
