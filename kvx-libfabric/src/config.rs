//! The options of libfabric: the table `libfabric`.
//!
//! | option | |
//! |---|---|
//! | `provider` | libfabric's name of the provider: `"efa"`, `"verbs"`, `"tcp"`, `"shm"`; default: the first available one of these except `shm` |
//! | `domain` | the cards or interfaces to use, with an endpoint on each: `["rdmap0s6", "rdmap1s6"]`; default: all cards, or the loopback interface for `tcp` |
//! | `rails` | the maximum number of endpoints that one region's transfers use; default 4 |
//!
//! libfabric reads the variables `FI_*` itself, and they override kvx's choices: with `FI_PROVIDER`
//! set, kvx sees no other provider.

use kvx_core::{Error, ErrorKind, Options, Result};

/// The maximum number of endpoints of an agent.
pub(crate) const MAX_RAILS: usize = 32;
/// The maximum number of rails of one region without the option `rails`.
const RAILS: u64 = 4;

/// The parsed table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) provider: Option<String>,
    /// Empty: kvx chooses the domains.
    pub(crate) domains: Vec<String>,
    pub(crate) rails: usize,
}

impl Config {
    /// Parses the table. Errors: `Invalid`, naming the option.
    pub(crate) fn read(options: &Options) -> Result<Self> {
        let table = options.table("libfabric", &["domain", "provider", "rails"])?;
        let provider = table.text("provider")?.map(str::to_owned);
        let domains = table.texts("domain")?;
        let is_name = |name: &String| !name.trim().is_empty() && !name.contains('\0');
        if provider.as_ref().is_some_and(|name| !is_name(name)) {
            return Err(wrong("provider", "name one of libfabric's providers, such as \"tcp\""));
        }
        if domains.as_ref().is_some_and(|names| names.is_empty() || !names.iter().all(is_name)) {
            return Err(wrong("domain", "name cards or interfaces, such as [\"rdmap0s6\"]"));
        }
        let domains = domains.unwrap_or_default();
        if domains.len() > MAX_RAILS {
            return Err(wrong("domain", &format!("name at most {MAX_RAILS}")));
        }
        let rails = table.number("rails", 1..=MAX_RAILS as u64)?.unwrap_or(RAILS) as usize;
        Ok(Config { provider, domains, rails })
    }
}

fn wrong(key: &str, cure: &str) -> Error {
    ErrorKind::Invalid
        .because(format!("option \"libfabric.{key}\" is of no use: {cure}, or remove the option"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Config> {
        Config::read(&Options::parse(json).unwrap())
    }

    #[test]
    fn the_table_is_read() {
        let config = read("{}").unwrap();
        assert_eq!(config, Config { provider: None, domains: Vec::new(), rails: 4 });
        let config =
            read(r#"{"libfabric": {"provider": "tcp", "domain": ["lo", "lo"], "rails": 2}}"#)
                .unwrap();
        assert_eq!((config.provider.as_deref(), config.rails), (Some("tcp"), 2));
        assert_eq!(config.domains, ["lo", "lo"]);
        assert_eq!(read(r#"{"libfabric": {"domain": "eth0"}}"#).unwrap().domains, ["eth0"]);
    }

    #[test]
    fn mistakes_are_named() {
        for (json, name) in [
            (r#"{"provider": ""}"#, "libfabric.provider"),
            (r#"{"provider": 3}"#, "libfabric.provider"),
            (r#"{"domain": []}"#, "libfabric.domain"),
            (r#"{"domain": ["lo", " "]}"#, "libfabric.domain"),
            (r#"{"rails": 0}"#, "libfabric.rails"),
            (r#"{"rails": 33}"#, "libfabric.rails"),
            (r#"{"domains": "lo"}"#, "libfabric.domain"),
        ] {
            let error = read(&format!(r#"{{"libfabric": {json}}}"#)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.sentence().contains(name), "{json}: {error}");
        }
    }
}
