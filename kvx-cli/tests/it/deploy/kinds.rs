//! The fields that objects of each kind may have.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use kvx_testkit::test;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// A ServiceMonitor of the Prometheus operator: the fields that the manifests use, by its
/// documentation. k8s-openapi has no types of extensions.
#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ServiceMonitor {
    api_version: String,
    kind: String,
    metadata: ObjectMeta,
    spec: ServiceMonitorSpec,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ServiceMonitorSpec {
    selector: LabelSelector,
    target_labels: Vec<String>,
    endpoints: Vec<Endpoint>,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Endpoint {
    port: String,
    path: String,
    interval: String,
}

/// An HTTPRoute of the Gateway API, as [`ServiceMonitor`].
#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct HttpRoute {
    api_version: String,
    kind: String,
    metadata: ObjectMeta,
    spec: HttpRouteSpec,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct HttpRouteSpec {
    parent_refs: Vec<ParentRef>,
    rules: Vec<HttpRouteRule>,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ParentRef {
    name: String,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct HttpRouteRule {
    matches: Vec<HttpRouteMatch>,
    timeouts: HttpRouteTimeouts,
    backend_refs: Vec<BackendRef>,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct HttpRouteMatch {
    path: PathMatch,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct PathMatch {
    r#type: String,
    value: String,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct HttpRouteTimeouts {
    request: String,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct BackendRef {
    name: String,
    port: u16,
}

/// Reads an object as its kind and writes it again, which loses fields that the kind does not have.
fn read_and_written<T: DeserializeOwned + Serialize>(object: &Value) -> Result<Value, String> {
    let read: T = serde_json::from_value(object.clone()).map_err(|error| error.to_string())?;
    serde_json::to_value(read).map_err(|error| error.to_string())
}

/// Checks the types of an object's fields, and that its kind has all of them.
pub(super) fn check(object: &Value) -> Result<(), String> {
    let (version, kind) = (object["apiVersion"].as_str(), object["kind"].as_str());
    let again = match (version.unwrap_or_default(), kind.unwrap_or_default()) {
        ("v1", "Service") => read_and_written::<Service>(object),
        ("v1", "ServiceAccount") => read_and_written::<ServiceAccount>(object),
        ("apps/v1", "Deployment") => read_and_written::<Deployment>(object),
        ("networking.k8s.io/v1", "NetworkPolicy") => read_and_written::<NetworkPolicy>(object),
        ("policy/v1", "PodDisruptionBudget") => read_and_written::<PodDisruptionBudget>(object),
        ("rbac.authorization.k8s.io/v1", "Role") => read_and_written::<Role>(object),
        ("rbac.authorization.k8s.io/v1", "RoleBinding") => read_and_written::<RoleBinding>(object),
        ("monitoring.coreos.com/v1", "ServiceMonitor") => {
            read_and_written::<ServiceMonitor>(object)
        }
        ("gateway.networking.k8s.io/v1", "HTTPRoute") => read_and_written::<HttpRoute>(object),
        (version, kind) => Err(format!("no type is known for {version} {kind}")),
    }?;
    match difference(object, &again, "") {
        Some(path) => Err(format!("{path} is no field, or has another value once read")),
        None => Ok(()),
    }
}

/// Returns the path of the first difference between two values.
fn difference(one: &Value, other: &Value, path: &str) -> Option<String> {
    match (one, other) {
        (Value::Object(one), Value::Object(other)) => {
            let keys = one.keys().chain(other.keys().filter(|key| !one.contains_key(*key)));
            let mut found = keys.filter_map(|key| {
                let get = |map: &serde_json::Map<String, Value>| map.get(key).cloned();
                difference(
                    &get(one).unwrap_or(Value::Null),
                    &get(other).unwrap_or(Value::Null),
                    &format!("{path}.{key}"),
                )
            });
            found.next()
        }
        (Value::Array(one), Value::Array(other)) if one.len() == other.len() => {
            let mut pairs = one.iter().zip(other).enumerate();
            pairs.find_map(|(at, (one, other))| difference(one, other, &format!("{path}[{at}]")))
        }
        _ => (one != other).then(|| path.to_owned()),
    }
}

#[test]
fn a_misspelt_field_a_wrong_type_and_an_unknown_kind_are_found() {
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"},
        "spec": {"selector": {"a": "b"}, "ports": [{"name": "http", "port": 80}]},
    });
    check(&service).unwrap();
    let with = |pointer: &str, key: &str, value: Value| {
        let mut changed = service.clone();
        changed.pointer_mut(pointer).unwrap()[key] = value;
        check(&changed).unwrap_err()
    };
    let said = with("/spec/ports/0", "targetport", json!("http"));
    assert!(said.contains(".spec.ports[0].targetport"), "{said}");
    let said = with("/spec/ports/0", "port", json!("80"));
    assert!(said.contains("invalid type"), "{said}");
    let said = with("", "kind", json!("Server"));
    assert!(said.contains("no type is known"), "{said}");
    let route = json!({
        "apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute",
        "metadata": {"name": "a"}, "spec": {"parentRef": [], "rules": []},
    });
    let said = check(&route).unwrap_err();
    assert!(said.contains("parentRef"), "{said}");
}
