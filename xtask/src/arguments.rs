//! The command line: the commands and their options, with the texts of `--help`.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, Parser, Subcommand};

use crate::fuzz::FuzzOptions;
use crate::interop::Interop;
use crate::peers;
use crate::rdma::RdmaOptions;
use crate::release;
use crate::test::steps;
use crate::test::tier::Tier;

/// Tests, measures and packages kvx
#[derive(Debug, Parser, PartialEq)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) request: Request,
}

/// A command with its options.
#[derive(Debug, PartialEq, Subcommand)]
pub(crate) enum Request {
    /// Run every check of the repository: lints, tests, documentation, features
    Test(TestOptions),
    /// Check that features build alone, and what the crates depend on
    Features,
    /// Build each crate from its tarball, as users do, and run README's program; check deny.toml;
    /// list the crates in the published files (SBOM)
    Package,
    /// Run kvx together with other inference engines; downloads and builds a lot
    Interop(Interop),
    /// List the public names of kvx, kvx-connector and kvx-core; needs a nightly toolchain
    Api(CheckOption),
    /// Generate the bindings to native libraries from the installed headers
    Bindings(CheckOption),
    /// Render the documents for a browser and check their links; needs mdBook
    Book,
    /// Compile the GPU kernels: the committed PTX, and once for AMD devices
    Kernels(CheckOption),
    /// Install and build other software that tests and measurements use
    Peers {
        /// Only these; without a name all of them
        #[arg(value_name = "NAME", value_parser = PossibleValuesParser::new(peers::names()))]
        names: Vec<String>,
    },
    /// Run fuzz targets under libFuzzer and AddressSanitizer; needs a C++ compiler
    Fuzz(FuzzOptions),
    /// Run models of threads in every possible order; two minutes
    Loom,
    /// Run tests of kvx-core and kvx-native under ThreadSanitizer; ten minutes
    ThreadSanitizer,
    /// Measure how close kvx gets to what this host can do; a quarter of an hour on an idle machine
    Limits(LimitsOptions),
    /// Make the Python wheel kvx: the connector for vLLM, the NIXL backend KVX and the program `kvx`
    Wheel {
        /// Also install and use it in a new environment together with NIXL
        #[arg(long)]
        check: bool,
    },
    /// Build the router as a static program for containers, and run it in an empty folder (as root)
    Router {
        /// Check this program, and build none
        #[arg(long, value_name = "FILE")]
        program: Option<PathBuf>,
    },
    /// Build the published files from the committed sources in two folders, and compare their
    /// checksums; needs half an hour or more on an idle machine
    Reproduce {
        /// Only this file
        #[arg(long, value_name = "FILE")]
        #[arg(value_parser = PossibleValuesParser::new(release::names()))]
        only: Option<String>,
    },
    /// Test and measure on this machine's NVIDIA GPU (docs/library/gpu.md)
    Gpu(GpuOptions),
    /// Run the contract over RDMA verbs, with a card in software in a virtual machine (Debian 12,
    /// as root)
    Rdma(RdmaOptions),
    /// Run random work for hours while peers are killed, restarted and revoked
    /// (docs/project/reliability.md)
    Soak(SoakOptions),
    /// Print tables of how transfers end when something fails (docs/project/reliability.md); twenty
    /// minutes
    Faults(FaultsOptions),
}

/// The option of a command that writes committed files.
#[derive(Args, Debug, PartialEq)]
pub(crate) struct CheckOption {
    /// Only compare with the committed files
    #[arg(long)]
    pub(crate) check: bool,
}

/// The options of `cargo xtask test`.
#[derive(Args, Debug, Default, PartialEq)]
pub(crate) struct TestOptions {
    /// First install what the tests need: Debian packages (as root) and Python wheels
    #[arg(long)]
    pub(crate) install: bool,
    /// Fail if a test that could run on this machine is skipped
    #[arg(long, value_name = "all", value_parser = ["all"], hide_possible_values = true)]
    pub(crate) require: Option<String>,
    /// Fail if a test fails once, even if it passes alone (otherwise it is excused, see
    /// xtask/flaky.txt)
    #[arg(long)]
    pub(crate) strict: bool,
    /// Only format, lints, unit tests and the contract in one process; minutes
    #[arg(long, conflicts_with = "whole")]
    pub(crate) fast: bool,
    /// Also further versions of libraries, variants of suites, packages and the wheel
    #[arg(long)]
    pub(crate) whole: bool,
    /// Run only what concerns this crate
    #[arg(long = "crate", value_name = "NAME")]
    pub(crate) package: Option<String>,
    /// Run only this step; may be repeated
    #[arg(long, value_name = "STEP")]
    #[arg(value_parser = PossibleValuesParser::new(steps::STEPS.iter().map(|step| &*step.name)))]
    pub(crate) only: Vec<String>,
}

impl TestOptions {
    /// Returns the tier.
    pub(crate) fn tier(&self) -> Tier {
        match (self.fast, self.whole) {
            (true, _) => Tier::Fast,
            (_, true) => Tier::Whole,
            (false, false) => Tier::Usual,
        }
    }
}

/// The options of `cargo xtask gpu`.
#[derive(Args, Debug, PartialEq)]
pub(crate) struct GpuOptions {
    /// Make a folder that runs on a machine with neither cargo nor a network: FOLDER/run
    #[arg(long, value_name = "FOLDER", exclusive = true)]
    pub(crate) kit: Option<PathBuf>,
    /// Make such a folder of what the tests have built, and run it over the stand-in
    #[arg(long, exclusive = true)]
    pub(crate) rehearse: bool,
    /// Run the unpacked archive in this folder
    #[arg(long, value_name = "FOLDER", hide = true)]
    pub(crate) from: Option<PathBuf>,
    /// Run over a stand-in GPU made of host memory, with few bytes, and do not judge the figures
    #[arg(long)]
    pub(crate) stand_in: bool,
    /// Leave out parts that would end after N minutes, the least valuable first
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1440))]
    pub(crate) minutes: Option<u64>,
    /// The folder for the results
    #[arg(long, value_name = "FOLDER", default_value = "kvx-gpu-results")]
    pub(crate) results: PathBuf,
    /// A Python with NumPy and PyTorch
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    pub(crate) python: PathBuf,
    /// Only parts with this in their names (`contract`, `IPC 64K`); may be repeated
    #[arg(long, value_name = "PART")]
    pub(crate) only: Vec<String>,
}

/// The options of `cargo xtask soak`.
#[derive(Args, Debug, PartialEq)]
pub(crate) struct SoakOptions {
    /// Instead of agents run engines, two prefills and two decodes, and give up their loads
    #[arg(value_name = "connector", value_parser = ["connector"], hide_possible_values = true)]
    pub(crate) connector: Option<String>,
    /// Run for this long over each backend
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=10_080))]
    pub(crate) minutes: u64,
    /// Only over this backend; may be repeated
    #[arg(long, value_name = "BACKEND")]
    pub(crate) only: Vec<String>,
}

/// The options of `cargo xtask faults`.
#[derive(Args, Debug, PartialEq)]
pub(crate) struct FaultsOptions {
    /// Instead of agents let engines and their ranks fail (docs/project/reliability.md); half an
    /// hour
    #[arg(value_name = "connector", value_parser = ["connector"], hide_possible_values = true)]
    pub(crate) connector: Option<String>,
    /// Only this backend, fault or connector (`TCP`, `MooncakeConnector`)
    #[arg(long, value_name = "PART")]
    pub(crate) only: Option<String>,
}

/// The options of `cargo xtask limits`.
#[derive(Args, Debug, PartialEq)]
pub(crate) struct LimitsOptions {
    /// Run everything this often and take medians
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) times: u64,
    /// Only runs with this in their names (`SHM 4K`, `TCP`, `costs`); may be repeated
    #[arg(long, value_name = "PART")]
    pub(crate) only: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    fn parse(line: &str) -> Result<Request, String> {
        let words = ["xtask"].into_iter().chain(line.split_whitespace());
        Arguments::try_parse_from(words).map(|it| it.request).map_err(|error| error.to_string())
    }

    #[test]
    fn options_come_in_any_order_and_do_not_contradict_each_other() {
        Arguments::command().debug_assert();
        let line = "test --only docs --require all --only demo --strict --crate kvx-core --whole --install";
        let options = TestOptions {
            install: true,
            require: Some("all".to_owned()),
            strict: true,
            fast: false,
            whole: true,
            package: Some("kvx-core".to_owned()),
            only: vec!["docs".to_owned(), "demo".to_owned()],
        };
        assert_eq!(options.tier(), Tier::Whole);
        assert_eq!(parse(line), Ok(Request::Test(options)));
        assert_eq!(parse("test"), Ok(Request::Test(TestOptions::default())));
        assert_eq!(TestOptions::default().tier(), Tier::Usual);
    }

    #[test]
    fn commands_of_documents_are_accepted() {
        let mut pages =
            vec![crate::root().join("README.md"), crate::root().join("CONTRIBUTING.md")];
        let mut folders = vec![crate::root().join("docs")];
        while let Some(folder) = folders.pop() {
            for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
                match path.is_dir() {
                    true => folders.push(path),
                    false if path.extension().is_some_and(|end| end == "md") => pages.push(path),
                    false => {}
                }
            }
        }
        let text: String =
            pages.iter().map(|page| std::fs::read_to_string(page).unwrap()).collect();
        let commands: Vec<_> =
            text.lines().filter_map(|line| line.strip_prefix("cargo xtask ")).collect();
        assert!(commands.len() > 5, "{commands:?}");
        let more = [
            "interop vllm --kvx --only hosts --set-up",
            "interop transformers --record",
            "limits --times 1",
        ];
        for command in commands.into_iter().chain(more) {
            let line = command.split(" #").next().unwrap_or_default();
            parse(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }

    #[test]
    fn errors_name_the_wrong_argument() {
        for (line, name) in [
            ("test --require some", "some"),
            ("test --fast --whole", "--whole"),
            ("test --only nothing", "nothing"),
            ("peers melon", "melon"),
            ("interop wax", "wax"),
            ("interop vllm --kvx --model-config a.json", "--model-config"),
            ("limits --times 0", "--times"),
            ("fuzz wire", "wire"),
            ("faults --only TCP --only SHM", "--only"),
            ("reproduce --only kvx.exe", "kvx.exe"),
            ("gpu --kit folder --stand-in", "--kit"),
        ] {
            let error = parse(line).expect_err(line);
            assert!(error.contains(name), "{line}: {error}");
        }
    }
}
