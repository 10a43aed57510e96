//! `kv_compat`: the version of vLLM whose defaults apply, and those defaults.

use std::time::Duration;

use serde_json::Value;

use super::fields::{BufferDevice, LoadFailurePolicy};
use crate::Version;
use kvx_core::{ErrorKind, Result};

/// The defaults of a version of vLLM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Defaults {
    pub load_failure_policy: LoadFailurePolicy,
    /// `None`: the platform's device.
    pub buffer_device: Option<BufferDevice>,
    /// `None`: leases.
    pub abort_after: Option<Duration>,
    pub side_channel_port: u16,
    pub ports: PortRule,
}

/// The rule that derives the port of a rank from the base port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PortRule {
    /// base + dp rank × tp size + tp rank.
    PerWorker,
    /// base + dp rank.
    PerEngine,
}

impl Version {
    /// Returns the last minor version that this variant covers. Versions between two variants
    /// differ from both.
    fn last_minor(self) -> u32 {
        match self {
            Version::V0_9 => 10,
            Version::V0_16 => 17,
            Version::V0_22 => 25,
            Version::V0_26 => 27,
            other => other.minor(),
        }
    }

    fn minor(self) -> u32 {
        minor(self.as_str()).expect("names of versions have a minor version")
    }

    /// Returns the version that covers a release of vLLM, given as `vllm.__version__`.
    ///
    /// `None` for releases that no version covers, and for builds between two releases, such as
    /// `0.25.1.dev3`: these may speak the protocol of either.
    ///
    /// ```
    /// use kvx_vllm::Version;
    /// assert_eq!(Version::of_release("0.32.1+cpu"), Some(Version::V0_32));
    /// assert_eq!(Version::of_release("0.25.1.dev3+g1234567"), None);
    /// ```
    pub fn of_release(release: &str) -> Option<Version> {
        let release = release.split('+').next().unwrap_or_default();
        if release.contains("dev") { None } else { Version::covering(release) }
    }

    fn covering(written: &str) -> Option<Version> {
        let wanted = minor(written)?;
        // 0.11.1 had the ports of 0.16 but a different handshake.
        let between = matches!(written.trim(), "0.11.1" | "0.11.2");
        let covers = |version: &Version| {
            !between && (version.minor()..=version.last_minor()).contains(&wanted)
        };
        Version::ALL.into_iter().find(covers)
    }

    pub(super) fn defaults(self) -> Defaults {
        let old = self.has_port_per_worker();
        Defaults {
            load_failure_policy: if self <= Version::V0_16 {
                LoadFailurePolicy::Recompute
            } else {
                LoadFailurePolicy::Fail
            },
            buffer_device: old.then_some(BufferDevice::Cuda),
            abort_after: match self {
                Version::V0_9 | Version::V0_11 => Some(Duration::from_secs(120)),
                Version::V0_16 | Version::V0_20 | Version::V0_21 => Some(Duration::from_secs(480)),
                _ => None,
            },
            side_channel_port: if old { 5557 } else { 5600 },
            ports: if old { PortRule::PerWorker } else { PortRule::PerEngine },
        }
    }

    /// Returns the end of the error message for an unknown version. `"0.17.2"` is covered by 0.16,
    /// 0.18 by no variant, and 0.13 only for the MooncakeConnector.
    fn hint(value: &Value) -> String {
        let written = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let Some(wanted) = minor(&written) else { return String::new() };
        match Version::covering(&written) {
            Some(version) => format!("; \"{}\" covers that version", version.as_str()),
            None if wanted > Version::default().minor() => {
                "; kvx does not know later versions".to_owned()
            }
            None if (Version::V0_11.minor()..Version::V0_16.minor()).contains(&wanted) => {
                let (version, older, newer) =
                    (written.trim(), Version::V0_11.as_str(), Version::V0_16.as_str());
                format!(
                    "; none of them covers vLLM {version}, whose NixlConnector protocol kvx does not speak; for the \
                     MooncakeConnector before vLLM {newer} write \"{older}\" (kvx implements the protocol of vLLM 0.13)"
                )
            }
            None => {
                format!(
                    "; none of them covers vLLM {}, whose protocol kvx does not speak",
                    written.trim()
                )
            }
        }
    }

    /// Reads `kv_compat`. Numbers are accepted too, because a dotted argument turns `0.20` into a
    /// number.
    pub(super) fn from_value(value: &Value) -> Result<Self> {
        let found = Version::ALL.into_iter().find(|version| match value {
            Value::String(text) => text.trim() == version.as_str(),
            Value::Number(number) => number.as_f64() == version.as_str().parse().ok(),
            _ => false,
        });
        found.ok_or_else(|| {
            let names = Version::ALL.map(Version::as_str);
            let hint = Version::hint(value);
            let known = names.map(|name| format!("\"{name}\"")).join(", ");
            ErrorKind::Invalid.because(format!(
                "kv_compat is {value}; write the version of vLLM whose defaults apply: \
                 {known}{hint}"
            ))
        })
    }
}

/// Returns the minor version of `0.x` or `0.x.y`.
fn minor(text: &str) -> Option<u32> {
    text.trim().strip_prefix("0.")?.split('.').next()?.parse().ok()
}
