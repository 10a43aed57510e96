//! A configuration written in Rust, for programs that have no JSON text or command line.

use kvx_core::Result;
use serde_json::{Map, Value};

use super::fields::{LoadFailurePolicy, Role};
use super::given::Given;
use super::surroundings::Surroundings;
use super::transfer_config::KvTransferConfig;

/// A builder of a [`KvTransferConfig`], with the same checks and defaults as JSON text.
///
/// ```
/// # use kvx_vllm as kvx;
/// use kvx::config::{KvTransferConfig, LoadFailurePolicy, Role};
/// let config = KvTransferConfig::builder("NixlConnector")
///     .role(Role::Both)
///     .engine_id("decode-0")
///     .load_failure_policy(LoadFailurePolicy::Recompute)
///     .backends(["SHM", "TCP"])
///     .build()?;
/// assert_eq!(config.engine_id(), "decode-0");
/// # Ok::<(), kvx_core::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct KvTransferConfigBuilder {
    object: Map<String, Value>,
    extra: Map<String, Value>,
    surroundings: Surroundings,
}

impl KvTransferConfig {
    /// Starts a configuration of this connector (`NixlConnector`, …), in the environment of this
    /// process.
    pub fn builder(connector: impl Into<String>) -> KvTransferConfigBuilder {
        let mut object = Map::new();
        object.insert("kv_connector".into(), Value::String(connector.into()));
        let surroundings = Surroundings::of_process();
        KvTransferConfigBuilder { object, extra: Map::new(), surroundings }
    }
}

impl KvTransferConfigBuilder {
    /// Sets `kv_role`, which every connector requires.
    pub fn role(self, role: Role) -> Self {
        self.field("kv_role", role.as_str())
    }

    /// Sets `engine_id`. Without it the engine generates a random one.
    pub fn engine_id(self, id: impl Into<String>) -> Self {
        self.field("engine_id", id.into())
    }

    /// Sets `kv_load_failure_policy`. Default: that of the vLLM version, since 0.17
    /// [`Fail`](LoadFailurePolicy::Fail).
    pub fn load_failure_policy(self, policy: LoadFailurePolicy) -> Self {
        self.field("kv_load_failure_policy", policy.as_str())
    }

    /// Sets the backends that may be used, in order of preference. Without it, kvx chooses.
    pub fn backends<T: Into<String>>(self, names: impl IntoIterator<Item = T>) -> Self {
        let names: Vec<_> = names.into_iter().map(|name| Value::String(name.into())).collect();
        self.extra("backends", names)
    }

    /// Sets a key of `kv_connector_extra_config`, such as `"tcp"` or `"kv_compat"`.
    pub fn extra(mut self, key: impl Into<String>, value: impl Into<Value>) -> Self {
        self.extra.insert(key.into(), value.into());
        self
    }

    /// Sets whether the KV cache is in GPU memory. The default of `kv_buffer_device` depends on it.
    pub fn gpu(mut self, present: bool) -> Self {
        self.surroundings = self.surroundings.gpu(present);
        self
    }

    /// Replaces the environment of this process, for a test or a tool.
    pub fn surroundings(mut self, surroundings: Surroundings) -> Self {
        self.surroundings = surroundings;
        self
    }

    fn field(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.object.insert(key.into(), value.into());
        self
    }

    /// Checks the fields and fills in the defaults.
    ///
    /// # Errors
    /// As [`KvTransferConfig::resolve`].
    pub fn build(mut self) -> Result<KvTransferConfig> {
        if !self.extra.is_empty() {
            self.object.insert("kv_connector_extra_config".into(), Value::Object(self.extra));
        }
        KvTransferConfig::resolve(Given::from_object(self.object), &self.surroundings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvx_core::ErrorKind;

    #[test]
    fn a_built_configuration_equals_the_one_from_json_text() {
        let surroundings = Surroundings::default();
        let built = KvTransferConfig::builder("NixlConnector")
            .role(Role::Consumer)
            .engine_id("e")
            .load_failure_policy(LoadFailurePolicy::Fail)
            .backends(["UCX"])
            .extra("tcp", serde_json::json!({"seal": "all"}))
            .surroundings(surroundings.clone())
            .build()
            .unwrap();
        let text = r#"{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "engine_id": "e",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"backends": ["UCX"], "tcp": {"seal": "all"}}}"#;
        let read = KvTransferConfig::from_json(text, &surroundings).unwrap();
        assert_eq!(built.engine_id(), read.engine_id());
        assert_eq!(built.extra(), read.extra());
        assert_eq!(built.kv_role(), read.kv_role());
        assert_eq!(built.kv_load_failure_policy(), read.kv_load_failure_policy());
        assert_eq!(built.backends().unwrap(), read.backends().unwrap());
    }

    #[test]
    fn a_builder_rejects_what_json_text_must_not_contain() {
        let error = KvTransferConfig::builder("NixlConector").role(Role::Both).build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("NixlConnector"), "{error}");
        assert!(KvTransferConfig::builder("NixlConnector").build().is_err(), "it has no role");
    }
}
