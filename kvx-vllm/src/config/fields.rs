//! The fields of vLLM's `KVTransferConfig`, and readers for their values.

use serde_json::Value;

use crate::Version;
use kvx_core::backend::nearest;
use kvx_core::{Error, ErrorKind, Result};

/// One field of `KVTransferConfig`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field {
    pub name: &'static str,
    /// True if vLLM 0.32 removed the field.
    pub removed: bool,
    /// True if a version after vLLM 0.10 added the field.
    pub added: bool,
}

impl Field {
    /// Returns whether this version of vLLM has the field.
    pub(super) fn is_in(&self, version: Version) -> bool {
        match version {
            Version::V0_9 => !self.added,
            version => !self.removed || version < Version::V0_32,
        }
    }
}

const fn field(name: &'static str) -> Field {
    Field { name, removed: false, added: false }
}

/// Every field of every version, in vLLM's order.
pub(super) const FIELDS: &[Field] = &[
    field("kv_connector"),
    field("engine_id"),
    field("kv_buffer_device"),
    Field { removed: true, ..field("kv_buffer_size") },
    field("kv_role"),
    Field { removed: true, ..field("kv_rank") },
    Field { removed: true, ..field("kv_parallel_size") },
    Field { removed: true, ..field("kv_ip") },
    field("kv_port"),
    field("kv_connector_extra_config"),
    field("kv_connector_module_path"),
    Field { added: true, ..field("enable_permute_local_kv") },
    Field { added: true, ..field("kv_load_failure_policy") },
];

macro_rules! closed_set {
    ($(#[$doc:meta])* $name:ident { $($(#[$item_doc:meta])* $item:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$item_doc])* $item,)+ }

        impl $name {
            /// All values.
            pub const ALL: &[$name] = &[$($name::$item),+];

            /// Returns the value as vLLM writes it.
            pub fn as_str(self) -> &'static str {
                match self { $($name::$item => $text,)+ }
            }

            pub(super) fn read(key: &str, value: &Value) -> Result<Self> {
                let names = $name::ALL.iter().map(|item| item.as_str());
                let found = value.as_str().and_then(|text| $name::ALL.iter().find(|item| item.as_str() == text));
                found.copied().ok_or_else(|| not_one_of(key, value, names))
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

closed_set! {
    /// The side of the transfers that an instance is on. NixlConnector ignores it: there the
    /// request decides.
    Role {
        /// `kv_producer`: prefill.
        Producer = "kv_producer",
        /// `kv_both`.
        Both = "kv_both",
        /// `kv_consumer`: decode.
        Consumer = "kv_consumer",
    }
}

closed_set! {
    /// The treatment of a request whose KV blocks could not be loaded.
    LoadFailurePolicy {
        /// `fail`: the request ends with an error.
        Fail = "fail",
        /// `recompute`: the decode instance computes the missing blocks itself.
        Recompute = "recompute",
    }
}

closed_set! {
    /// The memory in which the connector keeps the KV blocks that it transfers.
    BufferDevice {
        /// `cuda`: GPU memory, also of AMD GPUs.
        Cuda = "cuda",
        /// `cpu`: host memory.
        Cpu = "cpu",
        /// `xpu`: memory of an Intel GPU.
        Xpu = "xpu",
    }
}

closed_set! {
    /// The order of a KV cache's dimensions: Layers, Blocks, Heads, tokens (N), Content.
    KvCacheLayout {
        /// `LBNHC`.
        Lbnhc = "LBNHC",
        /// `LBHNC`.
        Lbhnc = "LBHNC",
        /// `LHBNC`.
        Lhbnc = "LHBNC",
        /// `NHD`, the older name of a layout with tokens before heads.
        Nhd = "NHD",
        /// `HND`, the older name of a layout with heads before tokens.
        Hnd = "HND",
        /// `BLHNC`.
        Blhnc = "BLHNC",
        /// `BLNHC`.
        Blnhc = "BLNHC",
        /// `BHLNC`.
        Bhlnc = "BHLNC",
    }
}

/// Returns the names of all roles, for the error of a missing role.
pub(super) fn roles() -> String {
    Role::ALL.iter().map(|role| role.as_str()).collect::<Vec<_>>().join(", ")
}

fn not_one_of<'a>(key: &str, value: &Value, names: impl Iterator<Item = &'a str> + Clone) -> Error {
    let hint = value
        .as_str()
        .and_then(|text| nearest(text, names.clone()))
        .map_or_else(String::new, |near| format!("; did you mean {near}?"));
    let known = names.collect::<Vec<_>>().join(", ");
    ErrorKind::Invalid.because(format!("{key} is {value}; supported: {known}{hint}"))
}

pub(super) fn wrong(key: &str, value: &Value, wanted: &str) -> Error {
    ErrorKind::Invalid.because(format!("{key} is {value}; write {wanted}"))
}

/// Reads a string. A number is an error as in vLLM; the message says how to write it in a dotted
/// argument.
pub(super) fn text(key: &str, value: &Value) -> Result<String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Number(_) => {
            Err(wrong(key, value, &format!("a string; as a dotted argument: '\"{value}\"'")))
        }
        _ => Err(wrong(key, value, "a string")),
    }
}

/// Reads true or false, or another form that vLLM accepts.
pub(super) fn flag(key: &str, value: &Value) -> Result<bool> {
    let read = match value {
        Value::Bool(flag) => Some(*flag),
        Value::Number(number) => match number.as_f64() {
            Some(0.0) => Some(false),
            Some(1.0) => Some(true),
            _ => None,
        },
        Value::String(text) => match text.to_ascii_lowercase().as_str() {
            "true" | "t" | "yes" | "y" | "on" | "1" => Some(true),
            "false" | "f" | "no" | "n" | "off" | "0" => Some(false),
            _ => None,
        },
        _ => None,
    };
    read.ok_or_else(|| wrong(key, value, "true or false"))
}

/// Reads an integer within `range`. A string of digits and `3.0` are accepted.
pub(super) fn whole(key: &str, value: &Value, range: std::ops::RangeInclusive<i64>) -> Result<i64> {
    let read = match value {
        Value::Number(number) => number.as_i64().or_else(|| {
            number.as_f64().filter(|n| n.fract() == 0.0 && n.abs() < 9.0e15).map(|n| n as i64)
        }),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    };
    read.filter(|number| range.contains(number)).ok_or_else(|| {
        let wanted = if *range.end() == i64::MAX {
            format!("a whole number of at least {}", range.start())
        } else {
            format!("a whole number from {} to {}", range.start(), range.end())
        };
        wrong(key, value, &wanted)
    })
}

/// Reads a finite number, or a string of one.
pub(super) fn number(key: &str, value: &Value) -> Result<f64> {
    let read = match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    };
    read.filter(|number: &f64| number.is_finite()).ok_or_else(|| wrong(key, value, "a number"))
}

/// Reads seconds, with fractions, above zero and at most ten years.
pub(super) fn seconds(key: &str, value: &Value) -> Result<std::time::Duration> {
    number(key, value)
        .ok()
        .filter(|seconds| *seconds > 0.0 && *seconds <= 315_360_000.0)
        .map(std::time::Duration::from_secs_f64)
        .filter(|time| !time.is_zero())
        .ok_or_else(|| wrong(key, value, "a number of seconds above 0 and below ten years"))
}

/// Reads a list of strings. One string is read as a list of one.
pub(super) fn texts(key: &str, value: &Value) -> Result<Vec<String>> {
    match value {
        Value::String(one) => Ok(vec![one.clone()]),
        Value::Array(items) => items
            .iter()
            .map(|item| {
                item.as_str()
                    .map(str::to_owned)
                    .ok_or_else(|| wrong(key, value, "a list of strings"))
            })
            .collect(),
        _ => Err(wrong(key, value, "a list of strings")),
    }
}
