//! `kvx mooncake-adapter`: builds or finds the library that connects kvx to the engine in
//! Mooncake's wheel, and checks it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use kvx::Mooncake;

use crate::Result;
use crate::wheels::{self, Environments, MOONCAKE_ENGINE};

const LIBRARY: &str = "KVX_MOONCAKE_LIB";
/// The time limit of a compiler, and of an engine's start.
const LIMIT: Duration = Duration::from_secs(120);
const OPTIONS: [&str; 7] =
    ["-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-xc++", "-"];

#[derive(Args)]
pub(crate) struct Arguments {
    /// The folder to build it in, with `CXX` or else c++. Without it, the library that came with
    /// this program is used.
    folder: Option<PathBuf>,
    /// The wheel's mooncake/engine.so, if it is not the first that `kvx backends --find` shows.
    #[arg(long, value_name = "FILE")]
    engine: Option<PathBuf>,
}

/// Prints the variables to set in a form that a shell can evaluate; all other output goes to
/// standard error.
pub(crate) fn run(arguments: &Arguments, out: &mut impl Write) -> Result<()> {
    let engine = match &arguments.engine {
        Some(file) if file.is_file() => std::path::absolute(file)?,
        Some(file) => return Err(format!("{} is not a file", file.display()).into()),
        None => first_engine()?,
    };
    let libraries = Mooncake::adapter_sources();
    let folder = match &arguments.folder {
        Some(folder) => make(&libraries, folder)?,
        None => beside_this_program(&libraries)?,
    };
    let adapter = folder.join(libraries[0].0);
    let variables = [(LIBRARY, &adapter), (MOONCAKE_ENGINE, &engine)];
    let mut backends = Command::new(std::env::current_exe()?);
    backends.args(["backends", "--require", "MOONCAKE"]).envs(variables);
    if !run_within_limit(backends, &[], "kvx backends")?.success() {
        return Err(format!("{} does not work with {}", adapter.display(), engine.display()).into());
    }
    for (variable, file) in variables {
        writeln!(out, "export {variable}={}", file.display())?;
    }
    Ok(())
}

/// Returns the engine of the first wheel that is found.
fn first_engine() -> Result<PathBuf> {
    let found = wheels::find(&Environments::of_process());
    let engine =
        found.into_iter().find(|found| found.variable == MOONCAKE_ENGINE).map(|found| found.path);
    let cure = "pip install mooncake-transfer-engine-non-cuda, or name its engine.so with --engine";
    engine.ok_or_else(|| {
        format!("no wheel of Mooncake was found in {}: {cure}", wheels::PLACES).into()
    })
}

/// The name of a library and its source.
type Library = (&'static str, String);

/// Returns the folder of this program, which also has the libraries if the program came in a wheel.
fn beside_this_program(libraries: &[Library]) -> Result<PathBuf> {
    let program = std::env::current_exe()?.canonicalize()?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    match libraries.iter().find(|(name, _)| !folder.join(name).is_file()) {
        None => Ok(folder.to_owned()),
        Some((name, _)) => {
            let cure = "name a folder to build it in, which needs a C++ compiler";
            Err(format!("there is no {name} next to this program: {cure}").into())
        }
    }
}

/// Compiles the libraries into a folder, and returns its absolute path.
fn make(libraries: &[Library], folder: &Path) -> Result<PathBuf> {
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let folder = std::path::absolute(folder)?;
    let compiler =
        std::env::var_os("CXX").filter(|name| !name.is_empty()).unwrap_or_else(|| "c++".into());
    let shown = compiler.display().to_string();
    for (name, source) in libraries {
        // Build under another name: a process that has the old file open keeps it.
        let new = folder.join(format!(".{name}.{}", std::process::id()));
        let mut compile = Command::new(&compiler);
        compile.args(OPTIONS).arg("-o").arg(&new).arg(format!("-Wl,-soname,{name}")).arg("-ldl");
        let done = run_within_limit(compile, source.as_bytes(), &shown).and_then(|status| {
            if !status.success() {
                return Err(format!("{shown} could not build {name}: {status}").into());
            }
            Ok(std::fs::rename(&new, folder.join(name))?)
        });
        if done.is_err() {
            std::fs::remove_file(&new).ok(); // it may not be there
        }
        done?;
    }
    Ok(folder)
}

/// Runs a command with these bytes as its input, which fit into a pipe. Its output goes to standard
/// error.
fn run_within_limit(mut command: Command, input: &[u8], name: &str) -> Result<ExitStatus> {
    command.stdin(if input.is_empty() { Stdio::null() } else { Stdio::piped() });
    let not_started = |error| match name {
        "c++" => format!(
            "{name} could not be started: {error}: apt install g++, or name a compiler in CXX"
        ),
        _ => format!("{name} could not be started: {error}"),
    };
    let mut process = command.spawn().map_err(not_started)?;
    if let Some(mut stdin) = process.stdin.take() {
        stdin.write_all(input).ok(); // one that does not read it fails, and says why
    }
    let until = Instant::now() + LIMIT;
    loop {
        if let Some(status) = process.try_wait()? {
            return Ok(status);
        }
        if Instant::now() >= until {
            process.kill()?;
            process.wait()?;
            return Err(format!("{name} did not end within {LIMIT:?}").into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
