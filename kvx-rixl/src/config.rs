//! The options of the table `rixl`.
//!
//! | option | default | meaning |
//! |---|---|---|
//! | `plugin` | the first of `UCX`, `LIBFABRIC` in `backends`, else `UCX` | NIXL's plugin that moves the bytes |
//! | `params` | the plugin's own | an object of strings, passed to the plugin: `{"engine_config": "TLS=tcp"}` |
//! | `progress_thread` | false with `UCX`, else true | whether NIXL gets its own thread, which sleeps until an event |
//! | `any_version` | false | accept a wheel of a version that this release does not know |

use kvx_core::{ErrorKind, Options, Result};

use crate::ffi::UCX;

const KEYS: &[&str] = &["any_version", "params", "plugin", "progress_thread"];
/// kvx backends that are also NIXL plugins, and NIXL's own name.
pub(crate) const SPEAKS_FOR: &[&str] = &["UCX", "LIBFABRIC", "NIXL"];
/// The plugin that needs no NIXL thread, because its sockets wake kvx's thread. NIXL's thread would
/// read the data before kvx detects why it was woken; other plugins, such as `LIBFABRIC`, move
/// nothing without it.
const WITHOUT_THREAD: &str = UCX;
/// kvx backends that are NIXL plugins.
const PLUGINS: &[&str] = &[UCX, "LIBFABRIC"];

/// The parsed options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) plugin: String,
    pub(crate) params: Vec<(String, String)>,
    pub(crate) progress_thread: bool,
    pub(crate) any_version: bool,
}

impl Config {
    /// Reads the options. Errors: `Invalid`, naming the option.
    pub(crate) fn read(options: &Options) -> Result<Self> {
        let table = options.table("rixl", KEYS)?;
        let plugin = match table.text("plugin")? {
            Some(plugin) => plugin.to_owned(),
            None => {
                let named = options.backends()?.unwrap_or_default();
                let known =
                    |name: &&str| named.iter().any(|named| named.eq_ignore_ascii_case(name));
                PLUGINS.iter().copied().find(known).unwrap_or(UCX).to_owned()
            }
        };
        if plugin.is_empty() || !plugin.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            return Err(ErrorKind::Invalid.because(format!(
                "option \"rixl.plugin\" is {plugin:?}; write the name of a plugin of NIXL, such \
                 as UCX"
            )));
        }
        let progress_thread = table.flag("progress_thread")?.unwrap_or(plugin != WITHOUT_THREAD);
        Ok(Config {
            plugin,
            params: table.pairs("params")?.unwrap_or_default(),
            progress_thread,
            any_version: table.flag("any_version")?.unwrap_or(false),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Config> {
        Config::read(&Options::parse(text)?)
    }

    #[test]
    fn the_plugin_is_named_or_follows_the_list_of_backends() {
        assert_eq!(read("{}").unwrap().plugin, "UCX");
        assert_eq!(read(r#"{"backends": ["rixl", "libfabric"]}"#).unwrap().plugin, "LIBFABRIC");
        let both = read(r#"{"backends": ["LIBFABRIC"], "rixl": {"plugin": "POSIX"}}"#).unwrap();
        assert_eq!(both.plugin, "POSIX");
        for wrong in [r#"{"rixl": {"plugin": ""}}"#, r#"{"rixl": {"plugin": "../x"}}"#] {
            assert_eq!(read(wrong).unwrap_err().kind(), ErrorKind::Invalid, "{wrong}");
        }
    }

    #[test]
    fn ucx_needs_no_thread_of_nixls() {
        let has = |text| read(text).unwrap().progress_thread;
        assert!(!has("{}") && has(r#"{"rixl": {"plugin": "LIBFABRIC"}}"#));
        assert!(has(r#"{"rixl": {"progress_thread": true}}"#));
    }

    #[test]
    fn parameters_are_pairs_of_strings() {
        let config =
            read(r#"{"rixl": {"params": {"engine_config": "TLS=tcp", "num_workers": "2"}}}"#)
                .unwrap();
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(config.params, [pair("engine_config", "TLS=tcp"), pair("num_workers", "2")]);
        assert!(!config.any_version);
        assert!(
            read(r#"{"rixl": {"params": {"num_workers": 2}}}"#)
                .unwrap_err()
                .sentence()
                .contains("params")
        );
        assert!(read(r#"{"rixl": {"parms": {}}}"#).unwrap_err().sentence().contains("params"));
    }
}
