//! Discovery of pods in Kubernetes: its settings.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

use super::{InstanceSetup, Role};
use crate::error::{Error, Result};

/// The label by which llm-d names the role of a pod.
const ROLE: &str = "llm-d.ai/role";
/// The roles of that label whose pods are instances. A pod with both roles is a decode instance: it
/// computes the prompts of requests that no prefill instance begins.
const ROLES: [(&str, Role); 6] = [
    ("both", Role::Decode),
    ("decode", Role::Decode),
    ("encode-prefill", Role::Prefill),
    ("encode-prefill-decode", Role::Decode),
    ("prefill", Role::Prefill),
    ("prefill-decode", Role::Decode),
];

/// Labels that an object has. Written `["app=vllm", "role=prefill"]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelSelector(BTreeMap<String, String>);

/// The pods of a namespace that are instances.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct KubernetesDiscovery {
    /// The namespace; `None`: that of the router's own pod.
    pub namespace: Option<String>,
    /// The labels that all instances have.
    pub selector: LabelSelector,
    /// The labels of prefill instances. Without these and `decode_selector`, llm-d's label
    /// `llm-d.ai/role` names the role.
    pub prefill_selector: LabelSelector,
    /// The labels of decode instances.
    pub decode_selector: LabelSelector,
    /// The port of pods without an annotation that names their ports.
    pub port: u16,
    /// The pool of the instances.
    pub pool: String,
    /// Where pods with one port publish KV cache events, such as `tcp://*:5557`.
    pub events: Option<String>,
    /// Where they replay earlier events.
    pub events_replay: Option<String>,
    /// The URL of the API server; `None`: that of the router's own cluster.
    pub api: Option<String>,
    /// The authorities that have signed the API server's certificate, PEM.
    pub ca: Option<PathBuf>,
    /// The file with the token for the API server, which is read again for each request.
    pub token: Option<PathBuf>,
    /// The certificate chain of the router for the API server, PEM.
    pub certificate: Option<PathBuf>,
    /// The private key of the certificate, PEM.
    pub key: Option<PathBuf>,
}

impl Default for KubernetesDiscovery {
    fn default() -> Self {
        KubernetesDiscovery {
            namespace: None,
            selector: LabelSelector::default(),
            prefill_selector: LabelSelector::default(),
            decode_selector: LabelSelector::default(),
            port: 8000,
            pool: "default".to_owned(),
            events: None,
            events_replay: None,
            api: None,
            ca: None,
            token: None,
            certificate: None,
            key: None,
        }
    }
}

impl LabelSelector {
    /// Creates a selector from `key=value` texts.
    ///
    /// # Errors
    ///
    /// Fails for other texts; the message shows the form.
    ///
    /// ```
    /// use kvx_proxy::LabelSelector;
    ///
    /// let selector = LabelSelector::new(["app=vllm", "role=prefill"]).unwrap();
    /// assert_eq!(selector.to_string(), "app=vllm,role=prefill");
    /// assert!(LabelSelector::new(["app in (a, b)"]).is_err());
    /// ```
    pub fn new<T: AsRef<str>>(labels: impl IntoIterator<Item = T>) -> Result<Self> {
        let mut selector = BTreeMap::new();
        for label in labels {
            let label = label.as_ref();
            let (key, value) = label.split_once('=').unwrap_or((label, ""));
            let has_form = |text: &str, longest: usize, others: &str| {
                text.len() <= longest
                    && text.chars().all(|c| c.is_ascii_alphanumeric() || others.contains(c))
            };
            if !label.contains('=')
                || key.is_empty()
                || !has_form(key, 317, "-_./")
                || !has_form(value, 63, "-_.")
            {
                return Err(Error::new(format!(
                    "{label:?} is not a label; write key=value, such as app=vllm"
                )));
            }
            if selector.insert(key.to_owned(), value.to_owned()).is_some() {
                return Err(Error::new(format!(
                    "the label {key} has two values, and no pod has both"
                )));
            }
        }
        Ok(LabelSelector(selector))
    }

    /// Returns true if it names no label.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|(key, value)| labels.get(key) == Some(value))
    }
}

impl fmt::Display for LabelSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (key, value)) in self.0.iter().enumerate() {
            let comma = if number == 0 { "" } else { "," };
            write!(f, "{comma}{key}={value}")?;
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for LabelSelector {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        LabelSelector::new(Vec::<String>::deserialize(from)?).map_err(D::Error::custom)
    }
}

impl KubernetesDiscovery {
    /// Returns true if llm-d's label names the roles.
    fn is_by_role(&self) -> bool {
        self.prefill_selector.is_empty() && self.decode_selector.is_empty()
    }

    /// Returns true if it may find instances of this role in this pool.
    pub(crate) fn may_find(&self, pool: &str, role: Role) -> bool {
        let selector = match role {
            Role::Prefill => &self.prefill_selector,
            Role::Decode => &self.decode_selector,
        };
        self.pool == pool && (self.is_by_role() || !selector.is_empty())
    }

    /// Returns true if a pool needs prefill instances that it finds. With llm-d's roles a fleet may
    /// have none, since pods of other roles compute prompts too.
    pub(crate) fn needs_prefill(&self, pool: &str) -> bool {
        self.pool == pool && !self.prefill_selector.is_empty()
    }

    /// Returns the roles of a pod with these labels.
    pub(crate) fn roles(&self, labels: &BTreeMap<String, String>) -> Vec<Role> {
        if !self.selector.matches(labels) {
            return Vec::new();
        }
        if !self.is_by_role() {
            let all =
                [(Role::Prefill, &self.prefill_selector), (Role::Decode, &self.decode_selector)];
            let matching =
                all.into_iter().filter(|(_, one)| !one.is_empty() && one.matches(labels));
            return matching.map(|(role, _)| role).collect();
        }
        match labels.get(ROLE) {
            Some(name) => {
                let known = ROLES.iter().find(|(known, _)| known == name);
                known.map(|(_, role)| *role).into_iter().collect()
            }
            // As for llm-d's router. Without a selector it would be each pod of the namespace.
            None if !self.selector.is_empty() => vec![Role::Decode],
            None => Vec::new(),
        }
    }

    /// Returns the narrowest selector of the API server that all instances match.
    pub(crate) fn query(&self) -> String {
        let mut terms: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        let by_role = self.is_by_role();
        if by_role && self.selector.is_empty() {
            terms.insert(ROLE, ROLES.iter().map(|(name, _)| *name).collect());
        } else if !by_role {
            let (prefill, decode) = (&self.prefill_selector.0, &self.decode_selector.0);
            for (key, value) in prefill.iter().chain(decode) {
                let of = |all: &BTreeMap<String, String>| all.is_empty() || all.contains_key(key);
                if of(prefill) && of(decode) {
                    terms.entry(key).or_default().push(value);
                }
            }
        }
        for (key, value) in &self.selector.0 {
            terms.insert(key, vec![value]);
        }
        let mut query = Vec::new();
        for (key, mut values) in terms {
            values.sort_unstable();
            values.dedup();
            query.push(match values[..] {
                [value] => format!("{key}={value}"),
                _ => format!("{key} in ({})", values.join(",")),
            });
        }
        query.join(",")
    }

    /// Returns the settings of the instance of a pod, at a host that [`InstanceSetup::at`] replaces.
    pub(crate) fn template(&self) -> Result<InstanceSetup> {
        let mut template = InstanceSetup::new(&format!("http://pod.invalid:{}", self.port))?;
        template.set_events(self.events.as_deref(), self.events_replay.as_deref())?;
        Ok(template)
    }

    /// Checks for errors that do not depend on the machine.
    pub(super) fn valid(&self) -> Result<()> {
        let wrong = |why: String| Err(Error::new(format!("discovery.kubernetes: {why}")));
        if let Some(namespace) = &self.namespace
            && (namespace.is_empty()
                || namespace.len() > 63
                || !namespace.bytes().all(|c| matches!(c, b'a'..=b'z' | b'0'..=b'9' | b'-')))
        {
            return wrong(format!("{namespace:?} is not the name of a namespace"));
        }
        if self.port == 0 {
            return wrong("port is 0; set the port that the instances serve at".to_owned());
        }
        if self.certificate.is_some() != self.key.is_some() {
            return wrong("certificate and key need each other; set both".to_owned());
        }
        let files = [&self.ca, &self.token, &self.certificate];
        if self.api.is_none() && files.iter().any(|file| file.is_some()) {
            return wrong(
                "ca, token and certificate are for another API server than that of the own pod; \
                 set api too"
                    .to_owned(),
            );
        }
        match self.template() {
            Ok(_) => Ok(()),
            Err(error) => wrong(error.to_string()),
        }
    }

    /// Describes the pods that are instances of a role.
    pub(crate) fn describe(&self, role: Role) -> String {
        let labels = match role {
            Role::Prefill => &self.prefill_selector,
            Role::Decode => &self.decode_selector,
        };
        let words = |selector: &LabelSelector| selector.to_string();
        match (self.is_by_role(), self.selector.is_empty()) {
            (true, true) => format!("{ROLE} for {}", role.as_str()),
            (true, false) => format!("{}, by {ROLE}", words(&self.selector)),
            (false, true) => words(labels),
            (false, false) => format!("{},{}", words(&self.selector), words(labels)),
        }
    }
}
