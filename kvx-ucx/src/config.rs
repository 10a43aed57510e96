//! The options of UCX: the table `ucx`, and how it maps to UCX's own settings.
//!
//! | option | UCX's variable | |
//! |---|---|---|
//! | `tls` | `UCX_TLS` | transports, a list or as UCX writes it: `["rc", "cuda_copy"]`, `"^cuda_ipc"`, `"all"` |
//! | `net_devices` | `UCX_NET_DEVICES` | devices, likewise: `["mlx5_0:1"]` |
//! | `set` | any | a list of `"NAME=value"`, with or without `UCX_` |
//!
//! `num_threads`, a key outside the table as in vLLM, is the number of progress threads, each with
//! its own worker; default 1. Transfers of more than 1 MiB are striped over them.
//!
//! An option overrides the environment and UCX's configuration files, which override kvx's
//! defaults:
//!
//! | setting | why |
//! |---|---|
//! | `RNDV_THRESH=inf` | kvx sends no message by rendezvous. With rendezvous on and peer failures reported, UCX refuses zero-copy lanes whose registrations cannot be invalidated, such as cma and tcp, and emulates gets and puts |
//! | `MM_ERROR_HANDLING=y` | shared memory can report peer failures; UCX does not use it otherwise |
//! | `KEEPALIVE_INTERVAL=1s` | how often UCX checks a peer that is silent on its lanes; UCX's default is 20 s |
//! | `IB_FORK_INIT=n` | otherwise pages that hold registered memory can be missing in forked children, which crash if other data is in the same pages. Set if there is a card, since Linux 5.13, which copies pinned pages at a fork |
//! | `TCP_TX_SEG_SIZE=256k`, `TCP_RX_SEG_SIZE=256k` | doubles the rate of emulated gets over tcp, at the cost of buffers of this size per connection |

use std::path::{Path, PathBuf};

use kvx_backend::devices::rdma_devices;
use kvx_core::{ErrorKind, Options, Result, Table};

/// kvx's defaults for settings that the user has not set. The last column lists further variables
/// with the same meaning.
const DEFAULTS: &[(&str, &str, &[&str])] = &[
    ("RNDV_THRESH", "inf", &[]),
    ("MM_ERROR_HANDLING", "y", &["POSIX_ERROR_HANDLING", "SYSV_ERROR_HANDLING"]),
    ("KEEPALIVE_INTERVAL", "1s", &[]),
    ("TCP_TX_SEG_SIZE", "256k", &[]),
    ("TCP_RX_SEG_SIZE", "256k", &[]),
];

/// A default on machines with RDMA cards whose kernels copy pinned pages at a fork. A UCX that asks
/// libibverbs whether they do has no use for it. Another one warns at each fork that data may be
/// corrupted, which cannot happen with such a kernel.
const NO_FORK_INIT: &[(&str, &str, &[&str])] = &[("IB_FORK_INIT", "n", &[])];

/// The number of progress threads without the option `num_threads`.
pub(crate) const NUM_THREADS: u32 = 1;
/// kvx reads at most this many bytes of a UCX configuration file.
const MAX_FILE: usize = 1 << 20;

/// The parsed table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    /// UCX settings from the options: names without `UCX_`.
    chosen: Vec<Setting>,
    pub(crate) num_threads: usize,
}

/// A setting of UCX.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Setting {
    /// The variable's name without `UCX_`.
    pub(crate) name: String,
    pub(crate) value: String,
    /// True if the user set the setting: UCX must then accept it. Some versions do not know all of
    /// kvx's defaults.
    pub(crate) required: bool,
}

impl Config {
    /// Parses the table. Errors: `Invalid`, naming the option.
    pub(crate) fn read(options: &Options) -> Result<Self> {
        let table = options.table("ucx", &["net_devices", "set", "tls"])?;
        let mut chosen = Vec::new();
        for (key, name) in [("tls", "TLS"), ("net_devices", "NET_DEVICES")] {
            if let Some(value) = list(&table, key)? {
                chosen.push(required(name, value));
            }
        }
        for text in table.texts("set")?.unwrap_or_default() {
            chosen.push(assignment(&text)?);
        }
        let num_threads =
            options.top().number("num_threads", 1..=64)?.unwrap_or(NUM_THREADS.into()) as usize;
        Ok(Config { chosen, num_threads })
    }

    /// Returns the settings to pass to UCX, given the environment of this process and the
    /// configuration files that the library at `library` reads.
    pub(crate) fn settings(&self, library: &Path) -> Vec<Setting> {
        let in_files: Vec<_> = files(library).iter().flat_map(|file| read_settings(file)).collect();
        self.settings_unless(|name| {
            std::env::var_os(format!("UCX_{name}")).is_some()
                || in_files.iter().any(|(set, _)| set == name)
        })
    }

    /// Returns the transports that the user has named: in the options, else in the environment,
    /// else in a configuration file that the library at `library` reads.
    pub(crate) fn transports(&self, library: &Path) -> Option<String> {
        let chosen = self.chosen.iter().rev().find(|setting| setting.name == "TLS");
        let tls = chosen.map(|setting| setting.value.clone());
        tls.or_else(|| std::env::var("UCX_TLS").ok()).or_else(|| named_transports(&files(library)))
    }

    /// Returns whether the user names tcp among the transports.
    pub(crate) fn names_tcp(&self, library: &Path) -> bool {
        let tls = self.transports(library);
        tls.is_some_and(|tls| tls.split(',').any(|transport| transport.trim() == "tcp"))
    }

    /// Returns the settings to pass to UCX besides those that the user has set; `is_set` reports
    /// these by name, without `UCX_`.
    fn settings_unless(&self, is_set: impl Fn(&str) -> bool) -> Vec<Setting> {
        let chosen = |name: &str| self.chosen.iter().any(|setting| setting.name == name);
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let no_fork_init = !rdma_devices().is_empty() && copies_pinned_pages(&release);
        let no_fork_init = NO_FORK_INIT.iter().filter(|_| no_fork_init);
        let defaults = DEFAULTS.iter().chain(no_fork_init).filter(|(name, _, others)| {
            !std::iter::once(name).chain(*others).any(|name| is_set(name) || chosen(name))
        });
        let defaults = defaults.map(|(name, value, _)| Setting {
            name: (*name).to_owned(),
            value: (*value).to_owned(),
            required: false,
        });
        defaults.chain(self.chosen.iter().cloned()).collect()
    }
}

/// Returns whether a kernel copies pinned pages at a fork, so that cards and children each have
/// their own: since Linux 5.13, which reports it to libibverbs.
fn copies_pinned_pages(release: &str) -> bool {
    let mut numbers = release.split(|other: char| !other.is_ascii_digit());
    let mut number = || numbers.next().and_then(|number| number.parse::<u32>().ok()).unwrap_or(0);
    (number(), number()) >= (5, 13)
}

/// Returns the setting with which UCX uses no RDMA card.
pub(crate) fn no_rdma() -> Setting {
    required("TLS", "^ib".to_owned())
}

fn required(name: &str, value: String) -> Setting {
    Setting { name: name.to_owned(), value, required: true }
}

/// Joins a list with commas, as UCX writes it.
fn list(table: &Table<'_>, key: &str) -> Result<Option<String>> {
    let Some(items) = table.texts(key)? else { return Ok(None) };
    if items.is_empty() || items.iter().any(|item| item.trim().is_empty()) {
        return Err(ErrorKind::Invalid.because(format!(
            "option \"ucx.{key}\" has an empty name; write a list such as [\"all\"], or remove the \
             option"
        )));
    }
    let items: Vec<_> = items.iter().map(|item| item.trim()).collect();
    Ok(Some(items.join(",")))
}

/// Parses `UCX_NAME=value` or `NAME=value`.
fn assignment(text: &str) -> Result<Setting> {
    let wrong = || {
        ErrorKind::Invalid.because(format!(
            "option \"ucx.set\" has {text:?}; write UCX's settings as \"UCX_MAX_RMA_RAILS=2\""
        ))
    };
    let (name, value) = text.split_once('=').ok_or_else(wrong)?;
    let name = name.trim();
    let name = name.strip_prefix("UCX_").unwrap_or(name);
    let is_name =
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    if is_name && !value.contains('\0') {
        Ok(required(name, value.trim().to_owned()))
    } else {
        Err(wrong())
    }
}

/// Returns the paths at which UCX looks for `ucx.conf`.
fn files(library: &Path) -> Vec<PathBuf> {
    let mut folders = vec![PathBuf::from("/etc/ucx")];
    if let Some(folder) = library.parent() {
        folders.extend([folder.join("../etc/ucx"), folder.join("../etc")]);
    }
    folders.extend(std::env::var_os("HOME").map(PathBuf::from));
    folders.extend(std::env::var_os("UCX_CONFIG_DIR").map(PathBuf::from));
    folders.push(PathBuf::from("."));
    folders.into_iter().map(|folder| folder.join("ucx.conf")).collect()
}

/// Returns the transports that the last of these configuration files names.
fn named_transports(files: &[PathBuf]) -> Option<String> {
    let mut named =
        files.iter().flat_map(|file| read_settings(file)).filter(|(name, _)| name == "TLS");
    named.next_back().map(|(_, tls)| tls)
}

/// Returns a configuration file's settings for all machines: names without `UCX_`, and values.
fn read_settings(file: &Path) -> Vec<(String, String)> {
    use std::io::Read as _;

    let mut text = Vec::new();
    let Ok(open) = std::fs::File::open(file) else { return Vec::new() };
    if open.take(MAX_FILE as u64).read_to_end(&mut text).is_err() {
        return Vec::new();
    }
    let text = String::from_utf8_lossy(&text);
    parse_settings(&text).map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// Parses the lines before the first section. A section applies to one kind of machine; the files
/// that UCX installs consist of sections only.
fn parse_settings(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with('['));
    let set = lines.filter_map(|line| line.strip_prefix("UCX_")?.split_once('='));
    set.map(|(name, value)| (name.trim(), value.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Config> {
        Config::read(&Options::parse(json).unwrap())
    }

    fn shown(settings: &[Setting]) -> Vec<String> {
        settings.iter().map(|setting| format!("{}={}", setting.name, setting.value)).collect()
    }

    #[test]
    fn lists_are_written_as_ucx_reads_them() {
        let tls = |json: &str| shown(&read(json).unwrap().chosen);
        assert_eq!(tls(r#"{"ucx": {"tls": "all"}}"#), ["TLS=all"]);
        assert_eq!(tls(r#"{"ucx": {"tls": "^cuda_ipc"}}"#), ["TLS=^cuda_ipc"]);
        assert_eq!(tls(r#"{"ucx": {"tls": ["rc", "cuda_copy"]}}"#), ["TLS=rc,cuda_copy"]);
        assert_eq!(
            tls(r#"{"ucx": {"tls": "rc,ud", "net_devices": ["mlx5_0:1", "mlx5_1:1"]}}"#),
            ["TLS=rc,ud", "NET_DEVICES=mlx5_0:1,mlx5_1:1"]
        );
        assert_eq!(
            tls(r#"{"ucx": {"set": ["UCX_MAX_RMA_RAILS=2", "RC_TM_ENABLE = n"]}}"#),
            ["MAX_RMA_RAILS=2", "RC_TM_ENABLE=n"]
        );
    }

    #[test]
    fn only_a_list_that_contains_tcp_names_tcp() {
        let names =
            |json: &str| read(json).unwrap().names_tcp(Path::new("/nowhere/lib/libucp.so.0"));
        assert!(names(r#"{"ucx": {"tls": "tcp"}}"#) && names(r#"{"ucx": {"tls": ["rc", "tcp"]}}"#));
        assert!(!names(r#"{"ucx": {"tls": "all"}}"#) && !names(r#"{"ucx": {"tls": "^tcp"}}"#));
    }

    #[test]
    fn mistakes_are_named() {
        for (json, name) in [
            (r#"{"tls": []}"#, "ucx.tls"),
            (r#"{"tls": ["rc", ""]}"#, "ucx.tls"),
            (r#"{"tls": {"rc": true}}"#, "ucx.tls"),
            (r#"{"net_devices": 3}"#, "ucx.net_devices"),
            (r#"{"net_devices": ["mlx5_0:1", 1]}"#, "ucx.net_devices"),
            (r#"{"net_devices": " "}"#, "ucx.net_devices"),
            (r#"{"set": ["UCX_TLS"]}"#, "ucx.set"),
            (r#"{"set": ["=1"]}"#, "ucx.set"),
            (r#"{"set": ["TLS MODE=1"]}"#, "ucx.set"),
            (r#"{"set": ["TLS=\u0000"]}"#, "ucx.set"),
            (r#"{"set": {"TLS": "all"}}"#, "ucx.set"),
            (r#"{"TLS": "all"}"#, "ucx.tls"),
            (r#"{"net_device": "lo"}"#, "ucx.net_devices"),
            (r#"["all"]"#, "ucx"),
        ] {
            let error = read(&format!(r#"{{"ucx": {json}}}"#)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.sentence().contains(name), "{json}: {error}");
        }
    }

    #[test]
    fn threads_are_counted_beside_the_table() {
        assert_eq!(read("{}").unwrap().num_threads, 1);
        assert_eq!(read(r#"{"num_threads": 4}"#).unwrap().num_threads, 4);
        assert_eq!(read(r#"{"num_threads": 64}"#).unwrap().num_threads, 64);
        for wrong in ["0", "65", "-1", "1.5", r#""two""#, "[2]"] {
            let error = read(&format!(r#"{{"num_threads": {wrong}}}"#)).unwrap_err();
            assert!(
                error.kind() == ErrorKind::Invalid && error.sentence().contains("num_threads"),
                "{error}"
            );
        }
    }

    #[test]
    fn what_the_user_set_wins_over_kvx() {
        let config = read(r#"{"ucx": {"tls": "rc", "set": "KEEPALIVE_INTERVAL=5s"}}"#).unwrap();
        let settings = config.settings_unless(|name| {
            ["RNDV_THRESH", "SYSV_ERROR_HANDLING", "TLS", "IB_FORK_INIT"].contains(&name)
        });
        assert_eq!(
            shown(&settings),
            ["TCP_TX_SEG_SIZE=256k", "TCP_RX_SEG_SIZE=256k", "TLS=rc", "KEEPALIVE_INTERVAL=5s"]
        );
        assert_eq!(settings.iter().filter(|setting| setting.required).count(), 2);
        let untouched = read("{}").unwrap().settings_unless(|name| name == "IB_FORK_INIT");
        assert_eq!(
            shown(&untouched),
            [
                "RNDV_THRESH=inf",
                "MM_ERROR_HANDLING=y",
                "KEEPALIVE_INTERVAL=1s",
                "TCP_TX_SEG_SIZE=256k",
                "TCP_RX_SEG_SIZE=256k"
            ]
        );
    }

    #[test]
    fn kernels_since_5_13_copy_pinned_pages() {
        for release in ["5.13.0", "5.15.0-105-generic", "6.1.0-57-amd64", "10.0-rc1"] {
            assert!(copies_pinned_pages(release), "{release}");
        }
        for release in ["5.12.19", "4.18.0-553.el8.x86_64", "", "five"] {
            assert!(!copies_pinned_pages(release), "{release}");
        }
    }

    #[test]
    fn only_settings_before_the_first_section_count() {
        let text = "# UCX_TLS=x\n UCX_RNDV_THRESH=8k\n\n[Grace]\nUCX_KEEPALIVE_INTERVAL=3s\n";
        assert_eq!(parse_settings(text).collect::<Vec<_>>(), [("RNDV_THRESH", "8k")]);
        let folder = std::env::temp_dir().join(format!("kvx-ucx-config-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = |name: &str, text| {
            std::fs::write(folder.join(name), text).unwrap();
            folder.join(name)
        };
        let (first, last) = (file("ucx.conf", text), file("last.conf", "UCX_TLS = rc,tcp\n"));
        assert_eq!(read_settings(&first), [("RNDV_THRESH".to_owned(), "8k".to_owned())]);
        assert_eq!(named_transports(&[last.clone(), first.clone()]).as_deref(), Some("rc,tcp"));
        let overruled = file("more.conf", "UCX_TLS=sm\n");
        assert_eq!(
            named_transports(&[last, overruled, first]).as_deref(),
            Some("sm"),
            "the last file wins"
        );
        std::fs::remove_dir_all(folder).unwrap();
        assert!(read_settings(Path::new("/nowhere/ucx.conf")).is_empty());
    }
}
