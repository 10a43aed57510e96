//! Which vLLM's defaults count: `kv_compat`, and what each version says.

use std::fmt;
use std::time::Duration;

use serde_json::Value;

use super::fields::{BufferDevice, LoadFailurePolicy};
use kvx_core::{Error, Kind, Result};

/// The vLLM version whose defaults and rules a configuration follows: the key `kv_compat` of
/// `kv_connector_extra_config`. A version stands for itself and those after it, up to the next one named here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Compat {
    /// vLLM 0.9 and 0.10.
    V0_9,
    /// vLLM 0.11: a side channel port for each worker.
    V0_11,
    /// vLLM 0.16: a side channel port for each engine, abort after 480 s.
    V0_16,
    /// vLLM 0.20: a failed load fails the request.
    V0_20,
    /// vLLM 0.32: leases, and four fields fewer.
    V0_32,
    /// vLLM 0.33, the default: another handshake.
    #[default]
    V0_33,
}

/// What a version of vLLM takes when nothing is written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Defaults {
    pub load_failure_policy: LoadFailurePolicy,
    /// `None`: the platform's own device.
    pub buffer_device: Option<BufferDevice>,
    /// `None`: leases.
    pub abort_after: Option<Duration>,
    pub side_channel_port: u16,
    pub ports: PortRule,
}

/// How the port of a rank follows from the base port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PortRule {
    /// base + dp rank × tp size + tp rank.
    PerWorker,
    /// base + dp rank.
    PerEngine,
}

impl Compat {
    /// All of them, oldest first.
    pub const ALL: [Compat; 6] =
        [Compat::V0_9, Compat::V0_11, Compat::V0_16, Compat::V0_20, Compat::V0_32, Compat::V0_33];

    /// As it is written: `"0.33"`.
    pub fn as_str(self) -> &'static str {
        match self {
            Compat::V0_9 => "0.9",
            Compat::V0_11 => "0.11",
            Compat::V0_16 => "0.16",
            Compat::V0_20 => "0.20",
            Compat::V0_32 => "0.32",
            Compat::V0_33 => "0.33",
        }
    }

    pub(super) fn defaults(self) -> Defaults {
        let old = self <= Compat::V0_11;
        Defaults {
            load_failure_policy: if self <= Compat::V0_16 {
                LoadFailurePolicy::Recompute
            } else {
                LoadFailurePolicy::Fail
            },
            buffer_device: old.then_some(BufferDevice::Cuda),
            abort_after: match self {
                Compat::V0_9 | Compat::V0_11 => Some(Duration::from_secs(120)),
                Compat::V0_16 | Compat::V0_20 => Some(Duration::from_secs(480)),
                Compat::V0_32 | Compat::V0_33 => None,
            },
            side_channel_port: if old { 5557 } else { 5600 },
            ports: if old { PortRule::PerWorker } else { PortRule::PerEngine },
        }
    }

    /// The version that stands for the one written, which is not in the list: `"0.17.2"` is covered by 0.16.
    fn covering(value: &Value) -> Option<Self> {
        let written = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let minor = |text: &str| text.trim().strip_prefix("0.")?.split('.').next()?.parse::<u32>().ok();
        let wanted = minor(&written)?;
        Compat::ALL.into_iter().rev().find(|compat| minor(compat.as_str()).is_some_and(|own| own <= wanted))
    }

    /// From `kv_compat`. A dotted argument makes a number of `0.20`: numbers are understood too.
    pub(super) fn from_value(value: &Value) -> Result<Self> {
        let found = Compat::ALL.into_iter().find(|compat| match value {
            Value::String(text) => text.trim() == compat.as_str(),
            Value::Number(number) => number.as_f64() == compat.as_str().parse().ok(),
            _ => false,
        });
        found.ok_or_else(|| {
            let names = Compat::ALL.map(Compat::as_str);
            let hint = Compat::covering(value)
                .map_or_else(String::new, |compat| format!("; \"{}\" stands for that one", compat.as_str()));
            let known = names.map(|name| format!("\"{name}\"")).join(", ");
            Error::new(
                Kind::Invalid,
                format!("kv_compat is {value}; write the vLLM whose defaults kvx shall take: {known}{hint}"),
            )
        })
    }
}

impl fmt::Display for Compat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vLLM {}", self.as_str())
    }
}
