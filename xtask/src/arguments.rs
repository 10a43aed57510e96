//! The command line: which commands exist and what they take.

use std::path::PathBuf;

use crate::fuzz;
use crate::interop::{self, Interop};
use crate::peers;
use crate::test::tier::Tier;
use crate::test::{self, steps};

/// What the developer asked for.
#[derive(Debug, PartialEq)]
pub(crate) enum Request {
    /// Print the usage text.
    Help,
    /// `cargo xtask test`
    Test(TestOptions),
    /// `cargo xtask features`
    Features,
    /// `cargo xtask package`
    Package {
        /// Ask the registry whether the crates' names are free.
        names: bool,
    },
    /// `cargo xtask semver`, with the revision of the release before
    Semver(String),
    /// `cargo xtask interop`
    Interop(Interop),
    /// `cargo xtask bindings`
    Bindings {
        /// Compare only.
        check: bool,
    },
    /// `cargo xtask kernels`
    Kernels {
        /// Compare only.
        check: bool,
    },
    /// `cargo xtask peers`, with their names; none means all
    Peers(Vec<String>),
    /// `cargo xtask fuzz`
    Fuzz(FuzzOptions),
    /// `cargo xtask loom`
    Loom,
    /// `cargo xtask thread-sanitizer`
    ThreadSanitizer,
    /// `cargo xtask limits`
    Limits(LimitsOptions),
    /// `cargo xtask wheel`
    Wheel {
        /// Install and use it in a new environment.
        check: bool,
    },
    /// `cargo xtask gpu`
    Gpu(GpuOptions),
    /// `cargo xtask soak`
    Soak(SoakOptions),
    /// `cargo xtask faults`
    Faults {
        /// What engines suffer, not agents.
        connector: bool,
        /// Only what has this in its name.
        only: Option<String>,
    },
}

/// The options of `cargo xtask gpu`: what it does.
#[derive(Debug, PartialEq)]
pub(crate) enum GpuOptions {
    /// Shows this machine's GPU.
    Run {
        /// A folder with a kit; none: what cargo builds.
        from: Option<PathBuf>,
        /// A bench of a few bytes.
        quick: bool,
        /// Only tests and runs whose names contain one of these; empty means all.
        only: Vec<String>,
    },
    /// Makes the archive with a kit.
    Pack,
    /// Makes it of what the tests have built, and runs it elsewhere over the stand-in.
    Rehearse,
}

/// The options of `cargo xtask soak`.
#[derive(Debug, PartialEq)]
pub(crate) struct SoakOptions {
    /// Engines and their loads, not agents.
    pub(crate) connector: bool,
    /// For how long over each backend.
    pub(crate) minutes: u64,
    /// Only over backends whose names contain one of these; empty means all.
    pub(crate) only: Vec<String>,
}

impl Default for SoakOptions {
    fn default() -> Self {
        SoakOptions { connector: false, minutes: 60, only: Vec::new() }
    }
}

/// The options of `cargo xtask fuzz`.
#[derive(Debug, PartialEq)]
pub(crate) struct FuzzOptions {
    /// For how long each target runs.
    pub(crate) seconds: u64,
    /// Add what was found to the committed corpora.
    pub(crate) keep: bool,
    /// Only these targets; empty means all.
    pub(crate) only: Vec<String>,
}

impl Default for FuzzOptions {
    fn default() -> Self {
        FuzzOptions { seconds: 600, keep: false, only: Vec::new() }
    }
}

/// The options of `cargo xtask limits`.
#[derive(Debug, PartialEq)]
pub(crate) struct LimitsOptions {
    /// How often everything runs; medians are of as many figures.
    pub(crate) times: usize,
    /// Only runs whose names contain one of these; empty means every run.
    pub(crate) only: Vec<String>,
}

impl Default for LimitsOptions {
    fn default() -> Self {
        LimitsOptions { times: 5, only: Vec::new() }
    }
}

/// The options of `cargo xtask test`.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct TestOptions {
    /// Install what the tests need before they run.
    pub(crate) install: bool,
    /// Count a skip of what can run here as a failure.
    pub(crate) require_all: bool,
    /// A test that fails once has failed, also if it passes alone.
    pub(crate) strict: bool,
    /// How much runs.
    pub(crate) tier: Tier,
    /// Run this crate's part only.
    pub(crate) package: Option<String>,
    /// Run these steps only; empty means every step of the tier.
    pub(crate) only: Vec<String>,
}

/// Reads the arguments that follow `cargo xtask`; an error is a sentence to print above the usage text.
pub(crate) fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Request, String> {
    let mut arguments = arguments.into_iter();
    match arguments.next().as_deref() {
        None => Err("a command is missing".to_owned()),
        Some("help" | "--help" | "-h") => Ok(Request::Help),
        Some("test") => parse_test(arguments),
        Some("features") => match arguments.next().as_deref() {
            None => Ok(Request::Features),
            Some("--help" | "-h") => Ok(Request::Help),
            Some(other) => Err(format!("`features` takes no argument, but got `{other}`")),
        },
        Some("package") => match arguments.next().as_deref() {
            None => Ok(Request::Package { names: false }),
            Some("--names") => Ok(Request::Package { names: true }),
            Some("--help" | "-h") => Ok(Request::Help),
            Some(other) => Err(format!("`package` takes `--names`, but got `{other}`")),
        },
        Some("semver") => match arguments.next().as_deref() {
            Some("--help" | "-h") => Ok(Request::Help),
            Some(revision) => Ok(Request::Semver(revision.to_owned())),
            None => Err("`semver` takes the revision of the release before, such as a tag".to_owned()),
        },
        Some("bindings") => parse_check("bindings", arguments, |check| Request::Bindings { check }),
        Some("kernels") => parse_check("kernels", arguments, |check| Request::Kernels { check }),
        Some("peers") => parse_peers(arguments),
        Some("limits") => parse_limits(arguments),
        Some("fuzz") => parse_fuzz(arguments),
        Some("soak") => parse_soak(arguments),
        Some("faults") => parse_faults(arguments),
        Some("gpu") => parse_gpu(arguments),
        Some("loom") => parse_nothing("loom", arguments, Request::Loom),
        Some("thread-sanitizer") => parse_nothing("thread-sanitizer", arguments, Request::ThreadSanitizer),
        Some("wheel") => parse_check("wheel", arguments, |check| Request::Wheel { check }),
        Some("interop") => parse_interop(arguments),
        Some(other) => Err(format!("unknown command `{other}`")),
    }
}

fn parse_nothing(
    command: &str,
    mut arguments: impl Iterator<Item = String>,
    request: Request,
) -> Result<Request, String> {
    match arguments.next().as_deref() {
        None => Ok(request),
        Some("--help" | "-h") => Ok(Request::Help),
        Some(other) => Err(format!("`{command}` takes no arguments, but got `{other}`")),
    }
}

fn parse_test(mut arguments: impl Iterator<Item = String>) -> Result<Request, String> {
    let mut options = TestOptions::default();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--help" | "-h" => return Ok(Request::Help),
            "--install" => options.install = true,
            "--require" => match arguments.next().as_deref() {
                Some("all") => options.require_all = true,
                Some(other) => return Err(format!("`--require` takes `all`, but got `{other}`")),
                None => return Err("`--require` takes `all`".to_owned()),
            },
            "--strict" => options.strict = true,
            "--fast" | "--whole" if options.tier != Tier::default() => {
                return Err("`test` takes one of `--fast` and `--whole`".to_owned());
            }
            "--fast" => options.tier = Tier::Fast,
            "--whole" => options.tier = Tier::Whole,
            "--crate" => options.package = Some(arguments.next().ok_or("`--crate` takes a crate's name")?),
            "--only" => {
                let name = arguments.next().ok_or("`--only` takes the name of a step")?;
                if !steps::names().any(|known| known == name) {
                    let known: Vec<_> = steps::names().collect();
                    return Err(format!("unknown step `{name}`; the steps are: {}", known.join(", ")));
                }
                options.only.push(name);
            }
            other => return Err(format!("unknown argument `{other}` of `test`")),
        }
    }
    Ok(Request::Test(options))
}

/// Of a command that generates what is committed, or only compares.
fn parse_check(
    command: &str,
    mut arguments: impl Iterator<Item = String>,
    request: fn(bool) -> Request,
) -> Result<Request, String> {
    match arguments.next().as_deref() {
        None => Ok(request(false)),
        Some("--check") => Ok(request(true)),
        Some("--help" | "-h") => Ok(Request::Help),
        Some(other) => Err(format!("`{command}` takes `--check`, but got `{other}`")),
    }
}

fn parse_peers(arguments: impl Iterator<Item = String>) -> Result<Request, String> {
    let mut names = Vec::new();
    for argument in arguments {
        match argument.as_str() {
            "--help" | "-h" => return Ok(Request::Help),
            name if peers::names().any(|known| known == name) => names.push(argument),
            other => {
                let known: Vec<_> = peers::names().collect();
                return Err(format!("unknown peer `{other}`; the peers are: {}", known.join(", ")));
            }
        }
    }
    Ok(Request::Peers(names))
}

fn parse_interop(arguments: impl Iterator<Item = String>) -> Result<Request, String> {
    let arguments: Vec<_> = arguments.collect();
    if arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
        return Ok(Request::Help);
    }
    interop::parse(arguments.into_iter()).map(Request::Interop)
}

fn parse_limits(mut arguments: impl Iterator<Item = String>) -> Result<Request, String> {
    let mut options = LimitsOptions::default();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--help" | "-h" => return Ok(Request::Help),
            "--times" => {
                let times = arguments.next().and_then(|times| times.parse().ok()).filter(|times| *times > 0);
                options.times = times.ok_or("`--times` takes a number")?;
            }
            "--only" => options.only.push(arguments.next().ok_or("`--only` takes a part of a run's name")?),
            other => return Err(format!("unknown argument `{other}` of `limits`")),
        }
    }
    Ok(Request::Limits(options))
}

fn parse_soak(mut arguments: impl Iterator<Item = String>) -> Result<Request, String> {
    let mut options = SoakOptions::default();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--help" | "-h" => return Ok(Request::Help),
            "connector" => options.connector = true,
            "--minutes" => {
                let minutes = arguments.next().and_then(|minutes| minutes.parse().ok());
                let sensible = minutes.filter(|minutes| (1..=10_080).contains(minutes));
                options.minutes = sensible.ok_or("`--minutes` takes a number, a week's at most")?;
            }
            "--only" => {
                options.only.push(arguments.next().ok_or("`--only` takes a part of a backend's name")?)
            }
            other => return Err(format!("unknown argument `{other}` of `soak`")),
        }
    }
    Ok(Request::Soak(options))
}

fn parse_faults(mut arguments: impl Iterator<Item = String>) -> Result<Request, String> {
    let (mut connector, mut only) = (false, None);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--help" | "-h" => return Ok(Request::Help),
            "connector" => connector = true,
            "--only" if only.is_none() => {
                only = Some(arguments.next().ok_or("`--only` takes a part of a name")?)
            }
            other => return Err(format!("unknown argument `{other}` of `faults`")),
        }
    }
    Ok(Request::Faults { connector, only })
}

fn parse_fuzz(mut arguments: impl Iterator<Item = String>) -> Result<Request, String> {
    let (mut options, known) = (FuzzOptions::default(), fuzz::targets());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--help" | "-h" => return Ok(Request::Help),
            "--seconds" => {
                let seconds = arguments.next().and_then(|seconds| seconds.parse().ok());
                let sensible = seconds.filter(|seconds| (1..=86_400).contains(seconds));
                options.seconds = sensible.ok_or("`--seconds` takes a number, a day's at most")?;
            }
            "--keep" => options.keep = true,
            _ if known.contains(&argument) => options.only.push(argument),
            other => return Err(format!("unknown target `{other}`; the targets are: {}", known.join(", "))),
        }
    }
    Ok(Request::Fuzz(options))
}

fn parse_gpu(mut arguments: impl Iterator<Item = String>) -> Result<Request, String> {
    let (mut from, mut quick, mut only) = (None, false, Vec::new());
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--help" | "-h" => return Ok(Request::Help),
            "--pack" | "--rehearse" => {
                if let Some(other) = arguments.next() {
                    return Err(format!("`{argument}` of `gpu` stands alone, but got `{other}`"));
                }
                let pack = argument == "--pack";
                return Ok(Request::Gpu(if pack { GpuOptions::Pack } else { GpuOptions::Rehearse }));
            }
            "--from" => from = Some(arguments.next().ok_or("`--from` takes a folder")?.into()),
            "--quick" => quick = true,
            "--only" => only.push(arguments.next().ok_or("`--only` takes a part of a name")?),
            other => return Err(format!("unknown argument `{other}` of `gpu`")),
        }
    }
    Ok(Request::Gpu(GpuOptions::Run { from, quick, only }))
}

/// The usage text: every command that exists, and no other.
pub(crate) fn usage() -> String {
    let steps: Vec<_> = steps::names().collect();
    format!(
        "\
usage: cargo xtask <command>

commands:
  test [--fast | --whole] [--crate NAME] [--install] [--require all] [--strict] [--only STEP]...
      run every test of the repository once, with what is installed, on one version of each library
        --fast         format, lints, unit tests, and the contract in one process on what needs nothing installed
        --whole        also further versions of libraries, variants of suites, packages, the wheel and benches
        --crate NAME   that crate's part only, may stand beside the others
        --install      first install what the tests need: Debian packages (as root) and Python wheels
        --require all  a skip of what can run on this machine is a failure
        --strict       a test that fails once has failed; else up to {} that failed beside others are run {} times
                       more, alone, and if they pass each time they are written into xtask/unsteady.txt and do not
                       count as failed; those of memory (O2 to O8), N3 and safety count in any case
        --only STEP    only this step, may be repeated: {}
  features
      check that each feature of the facade builds alone, and what the crates depend on
  package [--names]
      make each crate's tarball, build it alone without native libraries, and run README's program on them
        --names        instead only ask the registry whether the crates' names are free
  semver REVISION
      compare the public interface of each crate with that of a release, by cargo-semver-checks, which it needs
{}
  bindings [--check]
      generate the bindings to native libraries again, from the headers that are installed here
        --check        only compare them with the committed ones
  kernels [--check]
      compile the kernels for GPUs again: the PTX that is committed, and once for AMD devices
        --check        only compare the PTX with the committed one
  peers [NAME]...
      install and build what tests and measurements beside other software need: {}
  limits [--times N] [--only PART]...
      measure whether kvx is as near to what this host can do as it shall be, and print a table; about a quarter
      of an hour, 5 GiB of memory, on a machine that is quiet meanwhile
        --times N      how often everything runs, instead of 5 times
        --only PART    only runs with this in their names (`SHM 4K`, `TCP`, `costs`), may be repeated
  soak [connector] [--minutes N] [--only BACKEND]...
      random work with 200 peers that are killed, restarted and revoked, over each backend in turn: what is wrong,
      or grows (descriptors, threads, memory, quarantine), fails; docs/reliability.md has the last result
        connector      two prefills and two decodes, whose loads are given up by the thousand, over TCP and SHM
        --minutes N    for so long over each, instead of an hour
        --only BACKEND only over this one, may be repeated
  faults [connector] [--only PART]
      peers that are killed, stopped, cut off, out of descriptors or threads and more, before a link, while idle, amid
      reads and writes: how transfers end and when, when their memory is free, when work goes on, as the table that
      docs/reliability.md has; twenty minutes
        connector      engines and their ranks, and the loads between them: docs/reliability-of-loads.md and
                       docs/reliability-of-mooncake-loads.md; half an hour
        --only PART    only over this backend, with this trouble, or with this connector (`MooncakeConnector`); once
  fuzz [--seconds N] [--keep] [TARGET]...
      try what kvx reads from others with inputs that libFuzzer makes, under AddressSanitizer, and print a table; needs
      a C++ compiler and, the first time, the registry; tests replay what it found (fuzz/corpus)
        --seconds N    for so long each target, instead of 600 s
        --keep         add what was found to the committed corpora, as few and short inputs as do
  loom
      try models of threads of core and of the kit in every order that there can be; two minutes, most of it a build
  thread-sanitizer
      run tests of core and native under ThreadSanitizer; ten minutes, most of it a build
  wheel [--check]
      make the Python wheel kvx-nixl: the backend KVX for NIXL, and the program `kvx`
        --check        also install and use it in a new environment beside a NIXL
  gpu [--pack | --rehearse | [--from FOLDER] [--quick] [--only PART]...]
      test and measure on this machine's NVIDIA GPU; docs/gpu.md says more
        --pack         instead make an archive with all that a machine needs for it, which has neither cargo nor network
        --rehearse     instead pack what the tests have built, and run that elsewhere over a GPU made of host memory
        --from FOLDER  run what was unpacked there
        --quick        a bench of a few bytes, whose bars are not judged
        --only PART    only tests and runs with this in their names (`contract`, `IPC 64K`), may be repeated",
        test::MOST,
        test::TIMES,
        steps.join(", "),
        interop::usage(),
        peers::names().collect::<Vec<_>>().join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Result<Request, String> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn test_takes_its_options_in_any_order() {
        let only = vec!["docs".to_owned(), "demo".to_owned()];
        assert_eq!(
            words("test --only docs --require all --only demo --strict --crate kvx-core --whole --install"),
            Ok(Request::Test(TestOptions {
                install: true,
                require_all: true,
                strict: true,
                tier: Tier::Whole,
                package: Some("kvx-core".to_owned()),
                only
            }))
        );
        assert_eq!(words("test"), Ok(Request::Test(TestOptions::default())));
        assert_eq!(words("features"), Ok(Request::Features));
        assert_eq!(words("peers mooncake"), Ok(Request::Peers(vec!["mooncake".to_owned()])));
        assert_eq!(words("peers"), Ok(Request::Peers(Vec::new())));
        assert_eq!(words("package --names"), Ok(Request::Package { names: true }));
        assert_eq!(words("semver v0.1.0"), Ok(Request::Semver("v0.1.0".to_owned())));
        assert_eq!(
            words("interop candle"),
            Ok(Request::Interop(interop::parse(["candle".to_owned()].into_iter()).unwrap()))
        );
        assert_eq!(words("bindings"), Ok(Request::Bindings { check: false }));
        assert_eq!(words("bindings --check"), Ok(Request::Bindings { check: true }));
        assert_eq!(words("kernels"), Ok(Request::Kernels { check: false }));
        assert_eq!(words("kernels --check"), Ok(Request::Kernels { check: true }));
        let only = vec!["TCP".to_owned()];
        assert_eq!(
            words("limits --times 1 --only TCP"),
            Ok(Request::Limits(LimitsOptions { times: 1, only }))
        );
        assert_eq!(words("limits"), Ok(Request::Limits(LimitsOptions::default())));
        assert_eq!(words("soak"), Ok(Request::Soak(SoakOptions::default())));
        assert_eq!(
            words("soak --minutes 5 --only TCP"),
            Ok(Request::Soak(SoakOptions { minutes: 5, only: vec!["TCP".into()], connector: false }))
        );
        let connector = SoakOptions { connector: true, ..SoakOptions::default() };
        assert_eq!(words("soak connector"), Ok(Request::Soak(connector)));
        let only = || Some("TCP".into());
        assert_eq!(words("faults --only TCP"), Ok(Request::Faults { connector: false, only: only() }));
        let connector = Ok(Request::Faults { connector: true, only: only() });
        assert_eq!(words("faults connector --only TCP"), connector);
        assert!(words("faults TCP").is_err() && words("faults --only TCP --only SHM").is_err());
        assert!(words("soak --minutes 0").is_err() && words("soak TCP").is_err());
        let only = vec!["tcp_owner".to_owned()];
        assert_eq!(
            words("fuzz --seconds 5 tcp_owner --keep"),
            Ok(Request::Fuzz(FuzzOptions { seconds: 5, keep: true, only }))
        );
        assert_eq!(words("loom"), Ok(Request::Loom));
        assert_eq!(words("thread-sanitizer"), Ok(Request::ThreadSanitizer));
        assert!(words("loom x").is_err() && words("thread-sanitizer x").is_err());
        assert_eq!(words("fuzz"), Ok(Request::Fuzz(FuzzOptions::default())));
        assert_eq!(words("wheel --check"), Ok(Request::Wheel { check: true }));
        assert_eq!(words("gpu --pack"), Ok(Request::Gpu(GpuOptions::Pack)));
        assert_eq!(words("gpu --rehearse"), Ok(Request::Gpu(GpuOptions::Rehearse)));
        let (from, only) = (Some(PathBuf::from("x")), vec!["IPC".to_owned()]);
        assert_eq!(
            words("gpu --from x --only IPC --quick"),
            Ok(Request::Gpu(GpuOptions::Run { from, quick: true, only }))
        );
    }

    #[test]
    fn wrong_arguments_are_named() {
        for (line, name) in [
            ("", "missing"),
            ("tset", "tset"),
            ("test --requires all", "--requires"),
            ("test --require some", "some"),
            ("test --require", "--require"),
            ("test --fast --whole", "--fast"),
            ("test --crate", "--crate"),
            ("test --only nothing", "nothing"),
            ("peers melon", "melon"),
            ("test --only", "--only"),
            ("features tcp", "tcp"),
            ("package now", "now"),
            ("semver", "revision"),
            ("interop wax", "wax"),
            ("bindings now", "now"),
            ("kernels now", "now"),
            ("limits --times 0", "--times"),
            ("limits fast", "fast"),
            ("fuzz --seconds 0", "--seconds"),
            ("fuzz wire", "wire"),
            ("wheel now", "now"),
            ("gpu --from", "--from"),
            ("gpu --pack now", "now"),
            ("gpu fast", "fast"),
        ] {
            let complaint = words(line).expect_err(line);
            assert!(complaint.contains(name), "{line}: {complaint}");
        }
    }

    #[test]
    fn usage_names_the_commands_and_the_steps() {
        let usage = usage();
        for name in [
            "\n  test ",
            "\n  features\n",
            "\n  wheel ",
            "\n  interop ",
            "\n  bindings ",
            "\n  kernels ",
            "\n  limits ",
            "\n  fuzz ",
            "\n  gpu ",
        ]
        .into_iter()
        .chain(steps::names())
        {
            assert!(usage.contains(name), "{name} is not in the usage text:\n{usage}");
        }
    }
}
