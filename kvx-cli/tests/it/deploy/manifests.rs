//! Invariants between the objects of an overlay.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use kvx_testkit::{output, skip, test};
use serde_json::Value;

use super::{LIMIT, entries, flags_among, flags_of, folder, is_installed, kinds};
use crate::this_test;

/// The label that has kubectl print JSON without a server.
const MARK: &str = "kvx-test";

/// An overlay as kubectl renders it.
struct Overlay {
    name: String,
    objects: Vec<Value>,
}

/// Renders each overlay once; none if kubectl is not installed, which counts as a skip.
fn overlays() -> &'static [Overlay] {
    static RENDERED: OnceLock<Vec<Overlay>> = OnceLock::new();
    if !is_installed("kubectl") {
        skip(&this_test(), "kubectl is not installed", "cargo xtask test --install");
        return &[];
    }
    RENDERED.get_or_init(|| {
        let folders = entries(&folder("kustomize/overlays"));
        assert!(folders.len() >= 4, "{folders:?}");
        folders.iter().map(|folder| Overlay::rendered(folder)).collect()
    })
}

fn kubectl(arguments: &[&str]) -> String {
    let mut command = Command::new("kubectl");
    command.args(arguments).env("KUBECONFIG", "/dev/null");
    let output = output(&mut command, LIMIT);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "kubectl {}: {said}", arguments.join(" "));
    String::from_utf8(output.stdout).unwrap()
}

impl Overlay {
    fn rendered(folder: &Path) -> Overlay {
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        let yaml = kubectl(&["kustomize", folder.to_str().unwrap()]);
        let file = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("{name}-{}.yaml", std::process::id()));
        std::fs::write(&file, yaml).unwrap();
        let (file, mark) = (file.to_str().unwrap(), format!("{MARK}=1"));
        let json = kubectl(&["label", "--local", "-f", file, &mark, "-o", "json"]);
        std::fs::remove_file(file).unwrap();
        let objects = serde_json::Deserializer::from_str(&json).into_iter::<Value>();
        let mut objects: Vec<_> = objects.map(|object| object.unwrap()).collect();
        for object in &mut objects {
            let metadata = object["metadata"].as_object_mut().unwrap();
            let labels = metadata["labels"].as_object_mut().unwrap();
            labels.remove(MARK).unwrap();
            if labels.is_empty() {
                metadata.remove("labels");
            }
        }
        assert!(objects.len() >= 10, "{name} has {} objects", objects.len());
        Overlay { name, objects }
    }

    fn of_kind(&self, kind: &str) -> impl Iterator<Item = &Value> {
        self.objects.iter().filter(move |object| object["kind"] == kind)
    }

    /// Returns the templates of pods, with the names of their deployments.
    fn pods(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.of_kind("Deployment").map(|one| (name_of(one), &one["spec"]["template"]))
    }

    /// Returns the pods that a selector chooses, of which there is at least one.
    #[track_caller]
    fn selected(&self, by: &Value, selector: &Value) -> Vec<&Value> {
        let pods: Vec<_> = self
            .pods()
            .map(|(_, pod)| pod)
            .filter(|pod| selects(selector, &pod["metadata"]["labels"]))
            .collect();
        assert!(!pods.is_empty(), "{}: {} selects no pod", self.name, name_of(by));
        pods
    }
}

fn name_of(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// Returns whether a label selector matches labels. A Service's selector is its `matchLabels`.
fn selects(selector: &Value, labels: &Value) -> bool {
    let equal = selector["matchLabels"].as_object();
    let mut equal = equal.into_iter().flatten();
    equal.all(|(key, value)| labels[key] == *value)
        && list(&selector["matchExpressions"]).iter().all(|one| {
            assert_eq!(one["operator"], "In");
            list(&one["values"]).contains(&labels[one["key"].as_str().unwrap()])
        })
}

fn container(pod: &Value) -> &Value {
    let containers = list(&pod["spec"]["containers"]);
    assert_eq!(containers.len(), 1);
    &containers[0]
}

/// Returns the ports of a pod by name.
fn ports(pod: &Value) -> BTreeMap<&str, u64> {
    let ports = list(&container(pod)["ports"]).iter();
    ports
        .map(|port| (port["name"].as_str().unwrap(), port["containerPort"].as_u64().unwrap()))
        .collect()
}

fn has_port(pod: &Value, port: &Value) -> bool {
    match port.as_str() {
        Some(name) => ports(pod).contains_key(name),
        None => ports(pod).values().any(|number| Some(*number) == port.as_u64()),
    }
}

/// Returns the arguments of a pod, where `$(NAME)` has its value if the manifest knows it.
fn arguments(pod: &Value) -> Vec<String> {
    let variables = list(&container(pod)["env"]);
    let expanded = |argument: &str| {
        let known = variables.iter().filter(|one| one["value"].is_string());
        known.fold(argument.to_owned(), |text, one| {
            let name = format!("$({})", one["name"].as_str().unwrap());
            text.replace(&name, one["value"].as_str().unwrap())
        })
    };
    list(&container(pod)["args"]).iter().map(|one| expanded(one.as_str().unwrap())).collect()
}

/// Returns the value of `FLAG=VALUE` among arguments.
fn value_of<'a>(arguments: &'a [String], flag: &str) -> Option<&'a str> {
    arguments.iter().find_map(|one| one.strip_prefix(flag)?.strip_prefix('='))
}

fn transfer_config(pod: &Value) -> Value {
    let arguments = arguments(pod);
    let config = value_of(&arguments, "--kv-transfer-config").unwrap();
    serde_json::from_str(config).unwrap_or_else(|error| panic!("{config}: {error}"))
}

#[test]
fn every_object_has_only_fields_of_its_kind() {
    for overlay in overlays() {
        for object in &overlay.objects {
            let (overlay, name) = (&overlay.name, name_of(object));
            kinds::check(object)
                .unwrap_or_else(|why| panic!("{overlay}: {} {name}: {why}", object["kind"]));
            assert_eq!(object["metadata"]["namespace"], "kvx", "{overlay}: {name}");
        }
    }
}

#[test]
fn every_file_belongs_to_a_kustomization() {
    let (mut folders, mut files) = (vec![folder("kustomize")], 0);
    while let Some(folder) = folders.pop() {
        let kustomization = std::fs::read_to_string(folder.join("kustomization.yaml"));
        for path in entries(&folder) {
            let name = path.file_name().unwrap().to_str().unwrap();
            if path.is_dir() {
                folders.push(path);
            } else if name != "kustomization.yaml" {
                let text = kustomization.as_ref().unwrap();
                assert!(text.lines().any(|line| line.trim() == format!("- {name}")), "{path:?}");
                files += 1;
            }
        }
    }
    assert!(files > 10, "{files}");
}

#[test]
fn services_budgets_and_routes_lead_to_pods() {
    for overlay in overlays() {
        for service in overlay.of_kind("Service") {
            let selector = serde_json::json!({"matchLabels": service["spec"]["selector"]});
            for pod in overlay.selected(service, &selector) {
                for port in list(&service["spec"]["ports"]) {
                    assert!(has_port(pod, &port["targetPort"]), "{}: {port}", overlay.name);
                }
            }
        }
        for budget in overlay.of_kind("PodDisruptionBudget") {
            overlay.selected(budget, &budget["spec"]["selector"]);
        }
        for deployment in overlay.of_kind("Deployment") {
            let template = &deployment["spec"]["template"]["metadata"]["labels"];
            assert!(selects(&deployment["spec"]["selector"], template), "{}", name_of(deployment));
            let mut budgets = overlay.of_kind("PodDisruptionBudget");
            assert!(budgets.any(|one| selects(&one["spec"]["selector"], template)));
        }
        let port = |service: &Value, key: &str, value: &Value| {
            list(&service["spec"]["ports"]).iter().any(|port| port[key] == *value)
        };
        for monitor in overlay.of_kind("ServiceMonitor") {
            let services: Vec<_> = overlay
                .of_kind("Service")
                .filter(|one| selects(&monitor["spec"]["selector"], &one["metadata"]["labels"]))
                .collect();
            assert_eq!(services.len(), 3, "the router and both roles are scraped");
            for endpoint in list(&monitor["spec"]["endpoints"]) {
                assert!(services.iter().all(|one| port(one, "name", &endpoint["port"])));
            }
        }
        for route in overlay.of_kind("HTTPRoute") {
            for backend in
                list(&route["spec"]["rules"]).iter().flat_map(|one| list(&one["backendRefs"]))
            {
                let mut services = overlay.of_kind("Service");
                let service = services.find(|one| one["metadata"]["name"] == backend["name"]);
                assert!(port(service.unwrap(), "port", &backend["port"]), "{backend}");
            }
        }
    }
}

/// Ports of engines are open to engines and the router, as SECURITY.md demands, and to a Prometheus.
#[test]
fn network_policies_open_the_ports_that_pods_have() {
    for overlay in overlays() {
        let mut open = Vec::new();
        for policy in overlay.of_kind("NetworkPolicy") {
            assert_eq!(policy["spec"]["policyTypes"], serde_json::json!(["Ingress"]));
            for pod in overlay.selected(policy, &policy["spec"]["podSelector"]) {
                let role =
                    pod["metadata"]["labels"]["app.kubernetes.io/component"].as_str().unwrap();
                for rule in list(&policy["spec"]["ingress"]) {
                    for peer in
                        list(&rule["from"]).iter().filter(|one| one["podSelector"].is_object())
                    {
                        overlay.selected(policy, &peer["podSelector"]);
                    }
                    for port in list(&rule["ports"]) {
                        assert!(has_port(pod, &port["port"]), "{}: {role}: {port}", overlay.name);
                        open.push((role, port["port"].clone(), rule["from"].is_array()));
                        let Some(end) = port["endPort"].as_u64() else { continue };
                        let range = format!("{}-{end}", port["port"]);
                        let config = transfer_config(pod);
                        if config["kv_connector"] == "KvxConnector" {
                            let extra = &config["kv_connector_extra_config"];
                            assert_eq!(extra["tcp"]["ports"], range, "{}", overlay.name);
                        }
                    }
                }
            }
        }
        for role in ["prefill", "decode"] {
            for port in ["http", "side-channel"] {
                assert!(open.contains(&(role, port.into(), true)), "{role} {port}: {open:?}");
            }
            assert!(open.iter().all(|(of, _, limited)| *of != role || *limited), "{open:?}");
        }
        // A pod that no policy selects is open to everybody.
        for (name, pod) in overlay.pods() {
            let mut policies = overlay.of_kind("NetworkPolicy");
            let labels = &pod["metadata"]["labels"];
            assert!(policies.any(|one| selects(&one["spec"]["podSelector"], labels)), "{name}");
        }
    }
}

#[test]
fn pods_have_time_to_end_and_liveness_asks_only_themselves() {
    for overlay in overlays() {
        for (name, pod) in overlay.pods() {
            let before = &container(pod)["lifecycle"]["preStop"];
            let before = before["sleep"]["seconds"].as_u64().or_else(|| {
                let command = list(&before["exec"]["command"]);
                assert_eq!(command[0], "sleep", "{name}");
                command[1].as_str().unwrap().parse().ok()
            });
            let arguments = arguments(pod);
            let ends = match name {
                "kvx-router" => kvx_proxy::Setup::default().drain.as_secs(),
                _ => value_of(&arguments, "--shutdown-timeout").unwrap().parse().unwrap(),
            };
            let (before, grace) = (before.unwrap(), &pod["spec"]["terminationGracePeriodSeconds"]);
            let grace = grace.as_u64().unwrap();
            assert!(before > 0 && ends > 0 && grace > before + ends, "{name}: {grace} s");
            let probe = |probe: &str| container(pod)[probe]["httpGet"]["path"].clone();
            assert_eq!(probe("livenessProbe"), "/health", "{name}");
            let ready = if name == "kvx-router" { "/ready" } else { "/health" };
            assert_eq!(probe("readinessProbe"), ready, "{name}");
            for one in ["livenessProbe", "readinessProbe"] {
                assert!(has_port(pod, &container(pod)[one]["httpGet"]["port"]), "{name}");
            }
        }
    }
}

#[test]
fn the_router_has_the_flags_and_finds_pods_of_each_role() {
    let has = flags_of("proxy");
    for overlay in overlays() {
        let (_, router) = overlay.pods().find(|(name, _)| *name == "kvx-router").unwrap();
        let arguments = arguments(router);
        assert_eq!(arguments[0], "proxy");
        for flag in flags_among(arguments.iter().map(String::as_str)) {
            assert!(has.iter().any(|one| one == flag), "kvx proxy has no {flag}");
        }
        for role in ["prefill", "decode"] {
            let flag = format!("--{role}-selector");
            let labels = arguments.iter().skip_while(|one| **one != flag).skip(1);
            let labels = labels.take_while(|one| !one.starts_with("--"));
            let labels: BTreeMap<_, _> = labels.map(|one| one.split_once('=').unwrap()).collect();
            let selector = serde_json::json!({"matchLabels": labels});
            let found = overlay.selected(router, &selector);
            assert_eq!(found.len(), 1, "{flag}");
            let kv_role = if role == "prefill" { "kv_producer" } else { "kv_consumer" };
            assert_eq!(transfer_config(found[0])["kv_role"], kv_role);
            let port = value_of(&arguments, "--service-discovery-port").unwrap();
            assert_eq!(ports(found[0])["http"].to_string(), port);
        }
        let roles: Vec<_> = overlay.of_kind("Role").collect();
        let rules = serde_json::json!([
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
        ]);
        assert!(roles.len() == 1 && roles[0]["rules"] == rules, "{roles:?}");
    }
}

#[test]
fn kvx_finds_nothing_wrong_in_the_settings_of_engines() {
    for overlay in overlays() {
        for (name, pod) in overlay.pods().filter(|(name, _)| *name != "kvx-router") {
            let mut config = Command::new(env!("CARGO_BIN_EXE_kvx"));
            let output = output(config.arg("config").args(arguments(pod)), LIMIT);
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{}: {name}: {said}", overlay.name);
            assert!(said.contains("\nwarnings\n  none\n"), "{}: {name}: {said}", overlay.name);
        }
    }
}

#[test]
fn secrets_are_files_that_only_the_process_can_read() {
    for overlay in overlays() {
        for (name, pod) in overlay.pods() {
            let container = container(pod);
            let file = list(&container["env"]).iter().find(|one| one["name"] == "KVX_SECRET_FILE");
            let file = Path::new(file.unwrap()["value"].as_str().unwrap());
            let mounts = list(&container["volumeMounts"]);
            let mount =
                mounts.iter().find(|one| file.parent() == one["mountPath"].as_str().map(Path::new));
            let volumes = list(&pod["spec"]["volumes"]);
            let volume = volumes.iter().find(|one| one["name"] == mount.unwrap()["name"]).unwrap();
            let item = file.file_name().unwrap().to_str().unwrap();
            let items = list(&volume["secret"]["items"]);
            assert!(items.iter().any(|one| one["path"] == item), "{name}");
            assert_eq!(volume["secret"]["defaultMode"], 0o400, "{name}");
            assert_eq!(container["securityContext"]["allowPrivilegeEscalation"], false, "{name}");
            let user = &pod["spec"]["securityContext"];
            if name == "kvx-router" {
                assert!(user["runAsNonRoot"] == true && user["fsGroup"] == user["runAsGroup"]);
            }
        }
    }
}
