//! The operator's settings: NIXL's parameters, `KVX_…` variables, and the address of vLLM's side
//! channel.

use std::fmt;
use std::net::{IpAddr, TcpListener};
use std::time::Duration;

use kvx::{Error, ErrorKind, Options, Result};
use kvx_core::backend::nearest;

/// The parameters and their variables.
const KNOWN: [(&str, &str); 7] = [
    ("backends", "KVX_BACKENDS"),
    ("deadline", "KVX_DEADLINE"),
    ("secret_file", "KVX_SECRET_FILE"),
    ("tcp.bind", "KVX_TCP_BIND"),
    ("tcp.advertise", "KVX_TCP_ADVERTISE"),
    ("tcp.ports", "KVX_TCP_PORTS"),
    ("tcp.seal", "KVX_TCP_SEAL"),
];
/// The variable with the address at which vLLM's connector listens. vLLM passes no parameters, so
/// TCP listens there too.
const SIDE_CHANNEL: &str = "VLLM_NIXL_SIDE_CHANNEL_HOST";
const DEADLINE: Duration = Duration::from_secs(30);
const LONGEST: f64 = 86_400.0;

/// The parsed settings.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PluginSettings {
    /// The names of the backends, if they are restricted.
    pub(crate) backends: Option<Vec<String>>,
    /// For a transfer, and for deregistering memory.
    pub(crate) deadline: Duration,
    /// The file with the fleet's secret.
    pub(crate) secret_file: Option<String>,
    pub(crate) options: Options,
    /// The address at which TCP listens, and the source of that setting.
    bind: (String, &'static str),
    /// Other settings for the log, without the secret itself.
    more: Vec<String>,
}

impl PluginSettings {
    /// Reads NIXL's parameters, then the environment.
    ///
    /// # Errors
    /// `Invalid` for an unknown parameter or an invalid value, which the message names.
    pub(crate) fn read(
        parameters: &[(String, String)],
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self> {
        for (name, _) in parameters {
            if !KNOWN.iter().any(|(known, _)| known == name) {
                let known = KNOWN.map(|(known, _)| known);
                let hint = nearest(name, known)
                    .map_or_else(String::new, |near| format!("did you mean {near:?}? "));
                return Err(invalid(format!(
                    "parameter {name:?} of KVX is unknown; {hint}known: {}",
                    known.join(", ")
                )));
            }
        }
        // An empty value counts as unset.
        let some = |value: &str| Some(value.trim().to_owned()).filter(|value| !value.is_empty());
        let told = |which: &str| {
            let (_, named) = KNOWN.iter().find(|(known, _)| *known == which)?;
            let given = parameters
                .iter()
                .find(|(name, _)| name == which)
                .and_then(|(_, value)| some(value));
            let given = given.map(|value| (value, "its parameter"));
            given.or_else(|| Some((some(&variable(named)?)?, *named)))
        };
        // Except for a secret: an operator who names one must not run without it. Core rejects an
        // empty variable, and KVX_SECRET.
        if parameters.iter().any(|(name, value)| name == "secret_file" && some(value).is_none()) {
            return Err(invalid(
                "parameter \"secret_file\" is empty: name a file, or leave it out".into(),
            ));
        }
        let list =
            |value: String| value.split(',').map(|part| part.trim().to_owned()).collect::<Vec<_>>();
        let mut options = Options::new();
        let bind = match told("tcp.bind") {
            Some(told) => told,
            None => match variable(SIDE_CHANNEL).filter(|host| is_of_this_machine(host.trim())) {
                Some(host) => (host.trim().to_owned(), SIDE_CHANNEL),
                None => ("127.0.0.1".into(), "the default"),
            },
        };
        options.set("tcp", "bind", bind.0.clone());
        let mut more = Vec::new();
        if let Some((ports, by)) = told("tcp.ports") {
            more.push(format!("tcp.ports {ports} ({by})"));
            options.set("tcp", "ports", ports);
        }
        if let Some((seal, by)) = told("tcp.seal") {
            more.push(format!("tcp.seal {seal} ({by})"));
            options.set("tcp", "seal", seal);
        }
        if let Some((addresses, by)) = told("tcp.advertise") {
            more.push(format!("tcp.advertise {addresses} ({by})"));
            options.set("tcp", "advertise", list(addresses));
        }
        let secret_file = told("secret_file");
        if let Some((file, by)) = &secret_file {
            more.push(format!("the secret in {file} ({by})"));
        }
        Ok(PluginSettings {
            backends: told("backends").map(|(names, _)| list(names)),
            deadline: told("deadline").map_or(Ok(DEADLINE), |(value, by)| seconds(&value, by))?,
            secret_file: secret_file.map(|(file, _)| file),
            options,
            bind,
            more,
        })
    }

    /// Returns what to do when no peer can be reached, if TCP is the cause.
    pub(crate) fn cure(&self) -> &'static str {
        let loopback = self.bind.0.parse().is_ok_and(|bind: IpAddr| bind.is_loopback());
        if loopback {
            "; for peers on other hosts set KVX_TCP_BIND to an address of this one, on both ends"
        } else {
            ""
        }
    }
}

impl fmt::Display for PluginSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bind, by) = &self.bind;
        write!(f, "deadline {:?}, tcp.bind {bind} ({by})", self.deadline)?;
        self.more.iter().try_for_each(|more| write!(f, ", {more}"))
    }
}

fn invalid(sentence: String) -> Error {
    ErrorKind::Invalid.because(sentence)
}

fn seconds(value: &str, by: &str) -> Result<Duration> {
    let seconds = value.parse().ok().filter(|seconds: &f64| *seconds >= 0.1 && *seconds <= LONGEST);
    seconds.map(Duration::from_secs_f64).ok_or_else(|| {
        invalid(format!("the deadline is {value:?} ({by}): write seconds, 0.1 to {LONGEST}"))
    })
}

/// Returns whether `host` is an address to listen on that is not the wildcard address.
fn is_of_this_machine(host: &str) -> bool {
    host.parse().is_ok_and(|ip: IpAddr| !ip.is_unspecified() && TcpListener::bind((ip, 0)).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(parameters: &[(&str, &str)], variables: &[(&str, &str)]) -> Result<PluginSettings> {
        let owned: Vec<_> =
            parameters.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        PluginSettings::read(&owned, |wanted| {
            variables.iter().find(|(name, _)| *name == wanted).map(|(_, value)| value.to_string())
        })
    }

    #[test]
    fn the_defaults_are_loopback_and_thirty_seconds() {
        let settings = read(&[], &[]).unwrap();
        assert_eq!((settings.deadline, &settings.backends), (DEADLINE, &None));
        assert_eq!(settings.to_string(), "deadline 30s, tcp.bind 127.0.0.1 (the default)");
        assert!(settings.cure().contains("KVX_TCP_BIND"));
    }

    #[test]
    fn parameters_come_before_variables() {
        let variables =
            [("KVX_BACKENDS", "shm, tcp"), ("KVX_DEADLINE", "2.5"), ("KVX_TCP_PORTS", "7000-7010")];
        let settings = read(&[], &variables).unwrap();
        assert_eq!(settings.backends, Some(vec!["shm".into(), "tcp".into()]));
        assert_eq!(settings.deadline, Duration::from_millis(2500));
        let tcp = settings.options.table("tcp", &["bind", "ports"]).unwrap();
        assert_eq!(tcp.text("ports").unwrap(), Some("7000-7010"));
        let settings = read(&[("backends", "TCP"), ("tcp.bind", "::1")], &variables).unwrap();
        assert_eq!(settings.backends, Some(vec!["TCP".into()]));
        let said =
            "deadline 2.5s, tcp.bind ::1 (its parameter), tcp.ports 7000-7010 (KVX_TCP_PORTS)";
        assert_eq!(settings.to_string(), said);
    }

    #[test]
    fn settings_are_shown_without_the_secret() {
        let parameters = [("secret_file", "/run/fleet"), ("tcp.advertise", "10.0.0.5,10.0.0.6")];
        let said = read(&parameters, &[]).unwrap().to_string();
        let expected = ", tcp.advertise 10.0.0.5,10.0.0.6 (its parameter), the secret in /run/fleet (its parameter)";
        assert!(said.ends_with(expected), "{said}");
        assert!(
            read(&[], &[("KVX_SECRET_FILE", "/run/fleet")])
                .unwrap()
                .to_string()
                .ends_with("(KVX_SECRET_FILE)")
        );
        let of =
            |parameters: &[_], variables: &[_]| read(parameters, variables).unwrap().secret_file;
        assert_eq!(
            of(&parameters, &[("KVX_SECRET_FILE", "/run/other")]).as_deref(),
            Some("/run/fleet")
        );
        assert_eq!(of(&[], &[("KVX_SECRET_FILE", " /run/other ")]).as_deref(), Some("/run/other"));
        assert_eq!(of(&[], &[("KVX_SECRET_FILE", "")]), None);
        let error = read(&[("secret_file", " ")], &[]).unwrap_err();
        assert!(error.sentence().contains("\"secret_file\" is empty"), "{error}");
        let told = read(&[], &[("KVX_SECRET", "hush")]).unwrap();
        assert!(
            !format!("{told} {told:?}").contains("hush"),
            "core rejects it, and it is not shown"
        );
    }

    #[test]
    fn tcp_listens_at_vllms_address_if_it_is_local() {
        let of = |host| read(&[], &[(SIDE_CHANNEL, host)]).unwrap().bind.0;
        assert_eq!(of("127.0.0.2"), "127.0.0.2");
        // An address for documentation; all interfaces; not an address.
        for other in ["192.0.2.1", "0.0.0.0", "localhost", ""] {
            assert_eq!(of(other), "127.0.0.1", "{other}");
        }
    }

    #[test]
    fn invalid_settings_are_named() {
        let error = read(&[("backend", "SHM")], &[]).unwrap_err();
        assert!(error.sentence().contains("did you mean \"backends\""), "{error}");
        for bad in ["0", "-1", "soon", "1e9", "nan", "inf"] {
            let error = read(&[], &[("KVX_DEADLINE", bad)]).unwrap_err();
            assert!(error.sentence().contains("KVX_DEADLINE"), "{error}");
        }
    }
}
