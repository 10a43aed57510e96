//! Pods as the API server describes them, and the instances that they are.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::discovery::Discovered;
use crate::error::Result as SetupResult;
use crate::log::shown;
use crate::setup::{InstanceSetup, KubernetesDiscovery};

/// The most pods that are instances.
const MOST: usize = 4096;
/// The most ports of a pod.
const MOST_PORTS: usize = 64;
/// The most bytes of a uid and of a resource version.
const LONGEST: usize = 128;

/// Annotations with the port of the bootstrap server, or one for each port, in order of preference.
const BOOTSTRAP_PORTS: [&str; 2] = ["sglang.ai/bootstrap-port", "vllm.ai/bootstrap-port"];
/// Annotations with the ports of the instances in a pod.
const PORTS: [&str; 2] = ["smg.ai/worker-ports", "llm-d.ai/active-ports"];

/// A page of a list.
#[derive(Deserialize)]
pub(super) struct PodList {
    /// `PodList`: another program's JSON does not count as an empty list.
    kind: String,
    metadata: ListMetadata,
    items: Option<Vec<Pod>>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ListMetadata {
    resource_version: String,
    r#continue: String,
}

/// A page: its pods, the version of the list, and where the next page begins.
pub(super) struct Page {
    pub(super) pods: Vec<Pod>,
    pub(super) version: String,
    pub(super) next: Option<String>,
}

impl Page {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let list: PodList = serde_json::from_slice(bytes)
            .map_err(|error| format!("not a list of pods: {}", shown(&error.to_string())))?;
        if list.kind != "PodList" {
            return Err(format!("not a list of pods, but {}", shown(&list.kind)));
        }
        let next = Some(list.metadata.r#continue).filter(|next| !next.is_empty());
        let version = version(list.metadata.resource_version)?;
        Ok(Page { pods: list.items.unwrap_or_default(), version, next })
    }
}

/// Checks a version, which is opaque otherwise.
fn version(version: String) -> Result<String, String> {
    match version.len() {
        1..=LONGEST => Ok(version),
        _ => Err("no resourceVersion from which a watch can start".to_owned()),
    }
}

/// The fields of a pod that kvx reads.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Pod {
    metadata: PodMetadata,
    status: PodStatus,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodMetadata {
    name: String,
    uid: String,
    resource_version: String,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
    deletion_timestamp: Option<IgnoredAny>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodStatus {
    phase: String,
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    conditions: Option<Vec<Condition>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Condition {
    r#type: String,
    status: String,
}

impl Pod {
    /// Returns true if it may get requests.
    fn is_ready(&self) -> bool {
        let mut conditions = self.status.conditions.iter().flatten();
        self.status.phase == "Running"
            && self.metadata.deletion_timestamp.is_none()
            && conditions.any(|one| one.r#type == "Ready" && one.status == "True")
    }

    /// Returns true if its containers have ended for good. Its address may be another pod's.
    fn has_ended(&self) -> bool {
        matches!(&*self.status.phase, "Succeeded" | "Failed")
    }

    fn annotation<'a>(&self, names: [&'a str; 2]) -> Option<(&'a str, &str)> {
        let all = self.metadata.annotations.as_ref()?;
        names.into_iter().find_map(|name| Some((name, all.get(name)?.as_str())))
    }

    /// Returns the ports in an annotation.
    fn ports(&self, names: [&'static str; 2]) -> Result<Option<Vec<u16>>, String> {
        let Some((name, text)) = self.annotation(names) else { return Ok(None) };
        let wrong = || {
            format!(
                "annotation {name} is {:?}; write 1 to {MOST_PORTS} ports, such as \"8000,8001\"",
                shown(text)
            )
        };
        let port = |text: &str| text.trim().parse().ok().filter(|port| *port > 0);
        let ports: Option<Vec<u16>> = text.split(',').take(MOST_PORTS + 1).map(port).collect();
        let ports = ports.ok_or_else(wrong)?;
        let mut distinct = ports.clone();
        distinct.sort_unstable();
        distinct.dedup();
        match ports.len() <= MOST_PORTS && distinct.len() == ports.len() {
            true => Ok(Some(ports)),
            false => Err(wrong()),
        }
    }
}

/// A line of a watch.
#[derive(Debug)]
pub(super) enum Event {
    /// A pod was added or changed.
    Changed(Box<Pod>, String),
    /// A pod is gone, or has no longer the labels of the query.
    Gone(Box<Pod>, String),
    /// All changes until this version have arrived.
    Bookmark(String),
    /// The changes since the version are not kept any more.
    Expired,
}

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(borrow)]
    r#type: Cow<'a, str>,
    #[serde(borrow)]
    object: &'a RawValue,
}

/// An error of the API server.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Status {
    pub(super) code: u16,
    pub(super) message: String,
}

impl Event {
    pub(super) fn parse(line: &[u8]) -> Result<Self, String> {
        let invalid = |error: serde_json::Error| {
            format!("a line is not of a watch of pods: {}", shown(&error.to_string()))
        };
        let line: Line<'_> = serde_json::from_slice(line).map_err(invalid)?;
        let pod = || -> Result<(Box<Pod>, String), String> {
            let mut pod: Box<Pod> = serde_json::from_str(line.object.get()).map_err(invalid)?;
            let version = version(std::mem::take(&mut pod.metadata.resource_version))?;
            Ok((pod, version))
        };
        match &*line.r#type {
            "ADDED" | "MODIFIED" => pod().map(|(pod, version)| Event::Changed(pod, version)),
            "DELETED" => pod().map(|(pod, version)| Event::Gone(pod, version)),
            "BOOKMARK" => pod().map(|(_, version)| Event::Bookmark(version)),
            "ERROR" => {
                let status: Status = serde_json::from_str(line.object.get()).map_err(invalid)?;
                match status.code {
                    410 => Ok(Event::Expired),
                    code => Err(format!("status {code}: {}", shown(&status.message))),
                }
            }
            other => Err(format!("a line of a watch has the type {}", shown(other))),
        }
    }
}

/// The pods that are instances, by uid. Another pod of the same name is another instance.
#[derive(Clone, Debug)]
pub(super) struct Pods {
    rules: Arc<KubernetesDiscovery>,
    template: InstanceSetup,
    pods: BTreeMap<Box<str>, Vec<Discovered>>,
}

impl Pods {
    pub(super) fn new(rules: Arc<KubernetesDiscovery>) -> SetupResult<Self> {
        let template = rules.template()?;
        Ok(Pods { rules, template, pods: BTreeMap::new() })
    }

    /// Returns an empty set for the next complete list.
    pub(super) fn empty(&self) -> Self {
        let (rules, template) = (Arc::clone(&self.rules), self.template.clone());
        Pods { rules, template, pods: BTreeMap::new() }
    }

    /// Applies a change.
    ///
    /// # Errors
    ///
    /// Fails if there are too many pods.
    pub(super) fn apply(&mut self, pod: &Pod) -> Result<(), String> {
        let was_ready = self.pods.remove(&*pod.metadata.uid).is_some();
        self.add(pod, was_ready)
    }

    /// Adds a pod of a complete list that replaces `before`.
    pub(super) fn list(&mut self, pod: &Pod, before: &Pods) -> Result<(), String> {
        self.add(pod, before.pods.contains_key(&*pod.metadata.uid))
    }

    pub(super) fn remove(&mut self, pod: &Pod) {
        self.pods.remove(&*pod.metadata.uid);
    }

    /// Returns the instances of all pods.
    pub(super) fn instances(&self) -> Vec<Discovered> {
        self.pods.values().flatten().cloned().collect()
    }

    fn add(&mut self, pod: &Pod, was_ready: bool) -> Result<(), String> {
        match self.of(pod, was_ready) {
            Ok(instances) if instances.is_empty() => {}
            Ok(instances) if self.pods.len() < MOST => {
                self.pods.insert(pod.metadata.uid.as_str().into(), instances);
            }
            Ok(_) => {
                return Err(format!("more than {MOST} pods are instances: narrow the selectors"));
            }
            Err(why) => {
                let name = shown(&pod.metadata.name);
                tracing::warn!(pod = name, why, "discovery does not use a pod");
            }
        }
        Ok(())
    }

    /// Returns the instances in a pod. One that is not ready yet has none; one that is not ready
    /// any more, or ends, still finishes its requests, and keeps blocks that a decode may fetch.
    fn of(&self, pod: &Pod, was_ready: bool) -> Result<Vec<Discovered>, String> {
        let is_ready = pod.is_ready();
        if pod.has_ended() || !(is_ready || was_ready) {
            return Ok(Vec::new());
        }
        let none = BTreeMap::new();
        let roles = self.rules.roles(pod.metadata.labels.as_ref().unwrap_or(&none));
        let Some(address) = pod.status.pod_ip.as_deref().filter(|_| !roles.is_empty()) else {
            return Ok(Vec::new());
        };
        let address: IpAddr =
            address.parse().map_err(|_| format!("its address is {}", shown(address)))?;
        let uid = &*pod.metadata.uid;
        if uid.is_empty() || uid.len() > LONGEST {
            return Err("it has no uid".to_owned());
        }
        let host = match address {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        };
        let ports = pod.ports(PORTS)?.unwrap_or_else(|| vec![self.rules.port]);
        let bootstrap = pod.ports(BOOTSTRAP_PORTS)?;
        if let Some(all) = &bootstrap
            && all.len() != 1
            && all.len() != ports.len()
        {
            return Err(format!("it has {} bootstrap ports for {} ports", all.len(), ports.len()));
        }
        let mut found = Vec::new();
        for (number, port) in ports.iter().enumerate() {
            let Some(mut setup) = self.template.at(&host, *port) else { continue };
            setup.draining = !is_ready;
            setup.bootstrap_port =
                bootstrap.as_ref().map(|all| all[if all.len() == 1 { 0 } else { number }]);
            if ports.len() > 1 {
                setup.events = None; // each port would need its own
            }
            let identity: Arc<str> = format!("{uid}:{port}").into();
            found.extend(roles.iter().map(|role| Discovered {
                identity: Arc::clone(&identity),
                pool: self.rules.pool.clone(),
                role: *role,
                setup: setup.clone(),
            }));
        }
        Ok(found)
    }
}

/// Parses a page of a list and a line of a watch, and lists what they have.
pub(crate) fn fuzz(bytes: &[u8]) {
    let Ok(mut pods) = Pods::new(Arc::default()) else { return };
    let before = pods.clone();
    if let Ok(page) = Page::parse(bytes) {
        page.pods.iter().for_each(|pod| _ = pods.list(pod, &before));
    }
    for line in bytes.split(|byte| *byte == b'\n') {
        match Event::parse(line) {
            Ok(Event::Changed(pod, _)) => _ = pods.apply(&pod),
            Ok(Event::Gone(pod, _)) => pods.remove(&pod),
            _ => {}
        }
    }
    pods.instances();
}
