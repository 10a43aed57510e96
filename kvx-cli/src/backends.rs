//! `kvx backends`: lists every backend that kvx knows, whether it works here, and what to do if
//! not.

use std::io::Write;

use clap::Args;
use kvx::{BackendStatus, Options, Registry};
use kvx_core::backend::AutoOpen;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::wheels::{self, FoundLibrary};
use crate::{Result, routes};

/// The arguments of `kvx backends`.
#[derive(Args, Default)]
pub(crate) struct Arguments {
    /// Print one JSON array of objects.
    #[arg(long)]
    json: bool,
    /// Look for native libraries in Python environments, and print the variables to set.
    #[arg(long)]
    find: bool,
    /// Start a second process with each available backend, move a block each way, and print the
    /// route.
    #[arg(long)]
    routes: bool,
    /// List this backend only; exit with 1 and the reason if it cannot be used.
    #[arg(long, value_name = "NAME")]
    require: Option<String>,
}

/// Runs the command. Fails with the registry's error if a required backend cannot be used, or if
/// the output cannot be written.
pub(crate) fn run(arguments: &Arguments, registry: &Registry, out: &mut dyn Write) -> Result<()> {
    let options = Options::new();
    let names = match &arguments.require {
        None => registry.names(),
        Some(name) => vec![registry.require(name, &options)?.0.name()],
    };
    let found =
        if arguments.find { wheels::find(&wheels::Environments::of_process()) } else { Vec::new() };
    let rows = names.into_iter().map(|name| BackendRow::of(name, registry, &options));
    let mut rows = rows.map(|row| Ok(row?.with(&found))).collect::<Result<Vec<_>>>()?;
    if arguments.routes {
        for row in rows.iter_mut().filter(|row| row.available) {
            row.route(registry, arguments.require.is_some())?;
        }
    }
    if arguments.json {
        writeln!(out, "{:#}", serde_json::to_value(&rows)?)?;
        return Ok(());
    }
    table(&rows, out)?;
    if arguments.require.is_none() {
        writeln!(out, "\n{}", default_choice(&rows))?;
    }
    if arguments.find { tell_found(&found, &rows, out) } else { Ok(()) }
}

/// A row of the list.
#[derive(Default, Serialize)]
struct BackendRow {
    name: &'static str,
    compiled: bool,
    available: bool,
    version: Option<String>,
    library: Option<String>,
    /// The order of preference, if an agent opens it without a list of backends.
    default_order: Option<u32>,
    /// The usable devices, each with its capabilities.
    devices: Vec<String>,
    /// The route to a second process of this host, with `--routes`.
    route: Option<String>,
    reason: Option<String>,
    next_step: Option<String>,
    capabilities: Option<Map<String, Value>>,
}

impl BackendRow {
    fn of(name: &'static str, registry: &Registry, options: &Options) -> Result<Self> {
        let mut row = BackendRow { name, compiled: true, ..BackendRow::default() };
        match registry.status(name, options)?.1 {
            BackendStatus::Available(found) => {
                row.available = true;
                let placement = registry.require(name, options)?.0.placement();
                let is_opened = match placement.auto_open {
                    AutoOpen::Open => true,
                    AutoOpen::OpenWithRdma => found.rdma,
                    AutoOpen::Skip => false,
                };
                row.default_order = is_opened.then_some(placement.order);
                row.version = Some(found.version);
                row.library = found.library.map(|path| path.display().to_string());
                row.devices = found.devices;
                row.next_step = (!found.cautions.is_empty()).then(|| found.cautions.join("; "));
                let capabilities = found.capabilities.rows();
                row.capabilities = Some(
                    capabilities
                        .into_iter()
                        .map(|(name, value)| (name.to_owned(), value.into()))
                        .collect(),
                );
            }
            BackendStatus::Unavailable(why) => {
                row.reason = Some(why.reason());
                row.next_step = Some(why.cure);
            }
            BackendStatus::NotCompiled { feature } => {
                row.compiled = false;
                row.reason = Some("not in this build".into());
                row.next_step = Some(format!("enable feature \"{feature}\""));
            }
            BackendStatus::NotReleased => {
                row.compiled = false;
                row.reason = Some("not in this release".into());
            }
        }
        Ok(row)
    }

    /// Determines the route to a second process. A failure becomes the reason in the row, or an
    /// error if the backend is `required`.
    fn route(&mut self, registry: &Registry, required: bool) -> Result<()> {
        match routes::of(self.name, registry) {
            Ok(route) => self.route = Some(route),
            Err(why) => {
                let why = format!("no link to a second process of this host: {why}");
                if required {
                    return Err(format!("backend {}: {why}", self.name).into());
                }
                self.reason = Some(why);
            }
        }
        Ok(())
    }

    /// Makes a found library the next step of a backend that lacks it.
    fn with(mut self, found: &[FoundLibrary]) -> Self {
        if let Some(found) =
            found.iter().find(|found| found.backend == self.name && !self.available)
        {
            let path = found.path.display();
            let set = match found.variable {
                wheels::MOONCAKE_ENGINE => {
                    format!("run `kvx mooncake-adapter FOLDER --engine {path}`")
                }
                variable => format!("set {variable}={path}"),
            };
            self.next_step = Some(match self.next_step {
                Some(feature) if !self.compiled => format!("{feature}, then {set}"),
                None => format!("in a release with this backend, {set}"),
                Some(_) => set,
            });
        }
        self
    }

    fn cells(&self) -> [String; 3] {
        let parts: Vec<_> =
            [&self.version, &self.library].into_iter().flatten().map(String::as_str).collect();
        let version = if parts.is_empty() { "-".to_owned() } else { parts.join(" ") };
        let available = if self.available { "yes" } else { "no" };
        [self.name.to_owned(), available.to_owned(), version]
    }

    /// Returns what the table shows below the row.
    fn details(&self) -> Vec<String> {
        let reason = self.reason.iter().map(|reason| format!("why: {reason}"));
        let next = if self.available { "note" } else { "do" };
        let next_step = self.next_step.iter().map(|step| format!("{next}: {step}"));
        let devices = self.devices.iter().map(|device| format!("device: {device}"));
        let route = self.route.iter().map(|route| format!("to a second process: {route}"));
        devices.chain(route).chain(reason).chain(next_step).collect()
    }
}

const HEADINGS: [&str; 3] = ["BACKEND", "AVAILABLE", "VERSION AND LIBRARY"];

/// The most columns of a line of details.
const WIDTH: usize = 100;

fn table(rows: &[BackendRow], out: &mut dyn Write) -> Result<()> {
    let cells: Vec<_> = rows.iter().map(BackendRow::cells).collect();
    let width = |column: usize| {
        let cells = cells.iter().map(|cells| cells[column].chars().count());
        cells.chain([HEADINGS[column].len()]).max().unwrap_or(0)
    };
    let (name_width, available_width) = (width(0), width(1));
    let line = |[name, available, version]: [&str; 3]| {
        format!("{name:<name_width$}  {available:<available_width$}  {version}")
    };
    writeln!(out, "{}", line(HEADINGS))?;
    for (row, cells) in rows.iter().zip(&cells) {
        writeln!(out, "{}", line(cells.each_ref().map(String::as_str)))?;
        for detail in row.details() {
            for wrapped in wrap(words(&detail), WIDTH, "  ") {
                writeln!(out, "  {wrapped}")?;
            }
        }
    }
    Ok(())
}

/// Joins words to lines of at most `width` columns, but for longer words. The second and later lines
/// begin with `indent`.
pub(crate) fn wrap(
    words: impl IntoIterator<Item = impl AsRef<str>>,
    width: usize,
    indent: &str,
) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in words {
        let word = word.as_ref();
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(format!("{indent}{word}")),
        }
    }
    lines
}

/// Splits a text into words. A command between backquotes is one word, to be copied.
pub(crate) fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut is_command = false;
    for word in text.split_whitespace() {
        match words.last_mut().filter(|_| is_command) {
            Some(command) => {
                command.push(' ');
                command.push_str(word);
            }
            None => words.push(word.to_owned()),
        }
        is_command ^= word.matches('`').count() % 2 == 1;
    }
    words
}

/// Returns a sentence that says which backends an agent uses without a list.
fn default_choice(rows: &[BackendRow]) -> String {
    let mut opened: Vec<_> =
        rows.iter().filter_map(|row| Some((row.default_order?, row.name))).collect();
    opened.sort_unstable();
    let opened: Vec<_> = opened.into_iter().map(|(_, name)| name).collect();
    if opened.is_empty() {
        return "No backend here is used unless a list of backends names it.".to_owned();
    }
    format!(
        "Without a list of backends, the first of {} that serves a peer moves the blocks.",
        opened.join(", ")
    )
}

fn tell_found(found: &[FoundLibrary], rows: &[BackendRow], out: &mut dyn Write) -> Result<()> {
    writeln!(out)?;
    if found.is_empty() {
        writeln!(
            out,
            "No native library was found in Python environments (looked in {}).",
            wheels::PLACES
        )?;
        return Ok(());
    }
    writeln!(out, "Native libraries in Python environments:")?;
    for FoundLibrary { backend, variable, path } in found {
        let use_of_it = match rows.iter().find(|row| row.name == *backend) {
            Some(row) if row.available => "  # not needed: the backend works without it",
            Some(row) if row.compiled && *variable == wheels::MOONCAKE_ENGINE => {
                "  # opened by the library that `kvx mooncake-adapter` builds"
            }
            Some(row) if row.compiled => "",
            _ => "  # unused: the backend is not in this build",
        };
        writeln!(out, "export {variable}={}{use_of_it}", path.display())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;

    use kvx::{Capabilities, ErrorKind};
    use kvx_core::backend::{
        Availability, BackendName, Context, Factory, Placement, Transport, Unavailable,
    };
    use kvx_core::{HungPageScope, Idle, Isolation, MemoryKinds, PerOp, Revocation};

    use serde_json::json;

    use super::*;

    const KNOWN: &[BackendName] = &[
        BackendName { name: "UCX", aliases: &[], feature: Some("ucx") },
        BackendName { name: "LIBFABRIC", aliases: &[], feature: Some("libfabric") },
        BackendName { name: "RIXL", aliases: &["NIXL"], feature: None },
        BackendName { name: "WIRE", aliases: &[], feature: Some("wire") },
    ];

    /// A stub: UCX lacks its library, WIRE works, and RADIO works with warnings.
    struct Stub(&'static str);

    impl Factory for Stub {
        fn name(&self) -> &'static str {
            self.0
        }

        fn placement(&self) -> Placement {
            Placement { order: 1, auto_open: AutoOpen::Skip, speaks_for: &[] }
        }

        fn available(&self, _options: &Options) -> std::result::Result<Availability, Unavailable> {
            if self.0 == "UCX" {
                return Err(Unavailable {
                    missing: "libucp.so.0 not found".into(),
                    variable: Some("KVX_UCX_LIB"),
                    value: None,
                    tried: vec!["libucp.so.0".into()],
                    cure: "apt install libucx0".into(),
                });
            }
            Ok(Availability {
                version: "7.1".into(),
                library: Some("/lib/libwire.so.7".into()),
                devices: vec!["wire0: reads and writes".into()],
                rdma: false,
                capabilities: Capabilities {
                    isolation: PerOp::same(Isolation::Nic),
                    idle: Idle::Asleep,
                    target_cpu: PerOp::NEITHER,
                    revocation: Revocation::Owner,
                    peer_loss_within: None,
                    settles_without_peer: PerOp::BOTH,
                    hung_page: HungPageScope::Agent,
                    ordered: false,
                    local: MemoryKinds::HOST,
                    remote: MemoryKinds::HOST,
                },
                cautions: match self.0 {
                    "RADIO" => vec!["everybody hears it".into(), "say nothing secret".into()],
                    _ => Vec::new(),
                },
            })
        }

        fn open(&self, _context: Context) -> kvx::Result<Arc<dyn Transport>> {
            Err(ErrorKind::Unsupported.because("a stub moves nothing"))
        }
    }

    fn registry() -> Registry {
        let mut registry = Registry::new().with_names(KNOWN);
        registry.add(Stub("UCX")).unwrap().add(Stub("WIRE")).unwrap();
        registry
    }

    fn output(arguments: &Arguments) -> Result<String> {
        let mut out = Vec::new();
        run(arguments, &registry(), &mut out)?;
        Ok(String::from_utf8(out).unwrap())
    }

    #[test]
    fn the_table_lists_every_known_backend_even_if_it_is_not_compiled_in() {
        assert_eq!(
            output(&Arguments::default()).unwrap(),
            "BACKEND    AVAILABLE  VERSION AND LIBRARY\n\
             UCX        no         -\n  \
             why: libucp.so.0 not found (KVX_UCX_LIB unset; tried libucp.so.0)\n  \
             do: apt install libucx0\n\
             LIBFABRIC  no         -\n  \
             why: not in this build\n  do: enable feature \"libfabric\"\n\
             RIXL       no         -\n  why: not in this release\n\
             WIRE       yes        7.1 /lib/libwire.so.7\n  device: wire0: reads and writes\n\
             \nNo backend here is used unless a list of backends names it.\n"
        );
    }

    #[test]
    fn json_is_one_array_of_objects_with_null_where_nothing_applies() {
        let text = output(&Arguments { json: true, ..Arguments::default() }).unwrap();
        let rows: Vec<Map<String, Value>> = serde_json::from_str(&text).unwrap();
        assert_eq!(rows.len(), KNOWN.len());
        let mut keys = [
            "name",
            "compiled",
            "available",
            "version",
            "library",
            "default_order",
            "devices",
            "route",
            "reason",
            "next_step",
            "capabilities",
        ];
        keys.sort_unstable();
        for row in &rows {
            let mut found: Vec<_> = row.keys().map(String::as_str).collect();
            found.sort_unstable();
            assert_eq!(found, keys);
        }
        assert_eq!(
            Value::Object(rows[0].clone()),
            json!({
                "name": "UCX", "compiled": true, "available": false, "version": null, "library": null,
                "default_order": null, "devices": [], "route": null, "reason": "libucp.so.0 not found (KVX_UCX_LIB unset; tried libucp.so.0)",
                "next_step": "apt install libucx0", "capabilities": null,
            })
        );
        assert_eq!(
            (&rows[1]["compiled"], &rows[1]["reason"]),
            (&json!(false), &json!("not in this build"))
        );
        assert_eq!(
            (&rows[2]["next_step"], &rows[2]["reason"]),
            (&Value::Null, &json!("not in this release"))
        );
        assert_eq!(
            (&rows[3]["version"], &rows[3]["library"]),
            (&json!("7.1"), &json!("/lib/libwire.so.7"))
        );
        assert_eq!(rows[3]["capabilities"]["isolation"], "nic");
    }

    #[test]
    fn warnings_are_shown_for_a_backend_that_works() {
        let mut registry = Registry::new();
        registry.add(Stub("RADIO")).unwrap();
        let output = |json| {
            let mut out = Vec::new();
            run(&Arguments { json, ..Arguments::default() }, &registry, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        let caution = "everybody hears it; say nothing secret";
        let table = output(false);
        let row = table.lines().nth(1).unwrap();
        assert!(row.starts_with("RADIO    yes"), "{table}");
        assert!(table.lines().any(|line| line == format!("  note: {caution}")), "{table}");
        let rows: Value = serde_json::from_str(&output(true)).unwrap();
        assert_eq!((&rows[0]["available"], &rows[0]["next_step"]), (&json!(true), &json!(caution)));
    }

    #[test]
    fn long_texts_are_wrapped_between_words() {
        let wrapped = |text: &str| wrap(text.split_whitespace(), 5, "");
        assert_eq!(wrapped("a bc  def ghijkl m"), ["a bc", "def", "ghijkl", "m"]);
        assert_eq!(wrapped(""), [""]);
    }

    #[test]
    fn details_are_wrapped_and_the_default_choice_is_in_the_order_of_preference() {
        let wrapped = |text: &str| wrap(words(text), WIDTH, "  ");
        let lines = wrapped(&"word ".repeat(30));
        assert_eq!(lines.iter().map(String::len).collect::<Vec<_>>(), [99, 51]);
        assert_eq!(wrapped(&"x".repeat(200)), ["x".repeat(200)]);
        let command = format!("`run {}`", "word ".repeat(30).trim());
        assert_eq!(wrapped(&format!("do: {command} now")).len(), 3);
        let row = |name, default_order| BackendRow { name, default_order, ..BackendRow::default() };
        let rows = [row("TCP", Some(90)), row("UCX", None), row("SHM", Some(10))];
        assert_eq!(
            default_choice(&rows),
            "Without a list of backends, the first of SHM, TCP that serves a peer moves the blocks."
        );
    }

    #[test]
    fn a_required_backend_that_works_is_listed_alone() {
        let text =
            output(&Arguments { require: Some("wire".into()), ..Arguments::default() }).unwrap();
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(text.lines().nth(1).unwrap().starts_with("WIRE"), "{text}");
    }

    #[test]
    fn a_required_backend_that_does_not_work_fails_with_the_registrys_error() {
        let sentences = [
            (
                "UXC",
                "backend \"UXC\" is unknown; did you mean UCX? known: UCX, LIBFABRIC, RIXL, WIRE",
            ),
            ("libfabric", "backend LIBFABRIC is not in this build: enable feature \"libfabric\""),
            (
                "UCX",
                "backend UCX is unavailable: libucp.so.0 not found (KVX_UCX_LIB unset; tried libucp.so.0): \
                 apt install libucx0",
            ),
        ];
        for (name, sentence) in sentences {
            let error = output(&Arguments { require: Some(name.into()), ..Arguments::default() })
                .unwrap_err();
            assert_eq!(error.to_string(), sentence);
        }
    }

    #[test]
    fn a_found_library_is_the_next_step_of_its_backend() {
        let found = [("UCX", "KVX_UCX_LIB"), ("RIXL", "KVX_RIXL_LIB"), ("WIRE", "KVX_WIRE_LIB")]
            .map(|(backend, variable)| FoundLibrary {
                backend,
                variable,
                path: PathBuf::from(format!("/env/{backend}")),
            });
        let options = Options::new();
        let row = |name| BackendRow::of(name, &registry(), &options).unwrap().with(&found);
        assert_eq!(row("UCX").next_step.as_deref(), Some("set KVX_UCX_LIB=/env/UCX"));
        assert_eq!(
            row("RIXL").next_step.as_deref(),
            Some("in a release with this backend, set KVX_RIXL_LIB=/env/RIXL")
        );
        assert_eq!(row("WIRE").next_step, None);
        let mut out = Vec::new();
        tell_found(&found, &["UCX", "RIXL", "WIRE"].map(row), &mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "\nNative libraries in Python environments:\n\
             export KVX_UCX_LIB=/env/UCX\n\
             export KVX_RIXL_LIB=/env/RIXL  # unused: the backend is not in this build\n\
             export KVX_WIRE_LIB=/env/WIRE  # not needed: the backend works without it\n"
        );
    }
}
