//! Which vLLM's defaults count: `kv_compat`, and what each version says.

use std::fmt;
use std::time::Duration;

use serde_json::Value;

use super::fields::{BufferDevice, LoadFailurePolicy};
use kvx_core::{Error, ErrorKind, Result};

/// The vLLM version whose defaults and rules a configuration follows: the key `kv_compat` of
/// `kv_connector_extra_config`. Versions that none of these stands for are refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Compat {
    /// vLLM 0.9 and 0.10: a side channel port for each worker. Defaults only: kvx does not speak with a vLLM of that
    /// age.
    V0_9,
    /// vLLM 0.11.0, likewise. With the MooncakeConnector, its protocol before vLLM 0.16, which kvx does speak.
    V0_11,
    /// vLLM 0.16 and 0.17: a side channel port for each engine, abort after 480 s.
    V0_16,
    /// vLLM 0.20: a failed load fails the request.
    V0_20,
    /// vLLM 0.21: prefill may read back from decode.
    V0_21,
    /// vLLM 0.22 to 0.25: leases.
    V0_22,
    /// vLLM 0.26 and 0.27: another handshake.
    V0_26,
    /// vLLM 0.28: another compatibility hash.
    V0_28,
    /// vLLM 0.29: another one, and new names of layouts.
    V0_29,
    /// vLLM 0.30: another handshake.
    V0_30,
    /// vLLM 0.31: another handshake.
    V0_31,
    /// vLLM 0.32: four fields fewer.
    V0_32,
    /// vLLM 0.33, the default: registrations have generations.
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
    pub const ALL: [Compat; 13] = [
        Compat::V0_9,
        Compat::V0_11,
        Compat::V0_16,
        Compat::V0_20,
        Compat::V0_21,
        Compat::V0_22,
        Compat::V0_26,
        Compat::V0_28,
        Compat::V0_29,
        Compat::V0_30,
        Compat::V0_31,
        Compat::V0_32,
        Compat::V0_33,
    ];

    /// As it is written: `"0.33"`.
    pub fn as_str(self) -> &'static str {
        match self {
            Compat::V0_9 => "0.9",
            Compat::V0_11 => "0.11",
            Compat::V0_16 => "0.16",
            Compat::V0_20 => "0.20",
            Compat::V0_21 => "0.21",
            Compat::V0_22 => "0.22",
            Compat::V0_26 => "0.26",
            Compat::V0_28 => "0.28",
            Compat::V0_29 => "0.29",
            Compat::V0_30 => "0.30",
            Compat::V0_31 => "0.31",
            Compat::V0_32 => "0.32",
            Compat::V0_33 => "0.33",
        }
    }

    /// The last minor version that it stands for. What lies between two of them differs from both.
    fn last_minor(self) -> u32 {
        match self {
            Compat::V0_9 => 10,
            Compat::V0_16 => 17,
            Compat::V0_22 => 25,
            Compat::V0_26 => 27,
            other => other.minor(),
        }
    }

    fn minor(self) -> u32 {
        minor(self.as_str()).expect("names of versions have a minor version")
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
                Compat::V0_16 | Compat::V0_20 | Compat::V0_21 => Some(Duration::from_secs(480)),
                _ => None,
            },
            side_channel_port: if old { 5557 } else { 5600 },
            ports: if old { PortRule::PerWorker } else { PortRule::PerEngine },
        }
    }

    /// What there is to say of a version that is not in the list: `"0.17.2"` is covered by 0.16, 0.18 by none, and 0.13
    /// in the MooncakeConnector alone.
    fn hint(value: &Value) -> String {
        let written = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let Some(wanted) = minor(&written) else { return String::new() };
        // 0.11.1 had the ports of 0.16, and a handshake of its own.
        let between = matches!(written.trim(), "0.11.1" | "0.11.2");
        let stands =
            |compat: &Compat| !between && (compat.minor()..=compat.last_minor()).contains(&wanted);
        match Compat::ALL.into_iter().find(stands) {
            Some(compat) => format!("; \"{}\" stands for that one", compat.as_str()),
            None if wanted > Compat::default().minor() => {
                "; kvx does not know a later one".to_owned()
            }
            None if (Compat::V0_11.minor()..Compat::V0_16.minor()).contains(&wanted) => {
                let (version, older, newer) =
                    (written.trim(), Compat::V0_11.as_str(), Compat::V0_16.as_str());
                format!(
                    "; none of them stands for vLLM {version}, with whose NixlConnector kvx does not speak; for the \
                     MooncakeConnector before vLLM {newer} write \"{older}\" (its protocol was read in vLLM 0.13)"
                )
            }
            None => {
                format!(
                    "; none of them stands for vLLM {}, with which kvx does not speak",
                    written.trim()
                )
            }
        }
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
            let hint = Compat::hint(value);
            let known = names.map(|name| format!("\"{name}\"")).join(", ");
            Error::new(
                ErrorKind::Invalid,
                format!("kv_compat is {value}; write the vLLM whose defaults kvx shall take: {known}{hint}"),
            )
        })
    }
}

/// The minor version of `0.x` or `0.x.y`.
fn minor(text: &str) -> Option<u32> {
    text.trim().strip_prefix("0.")?.split('.').next()?.parse().ok()
}

impl fmt::Display for Compat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vLLM {}", self.as_str())
    }
}
