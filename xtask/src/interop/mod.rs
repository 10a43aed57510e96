//! `cargo xtask interop`: kvx beside engines of others. None of it is a part of the tests: it downloads and builds what
//! is large.

mod mistralrs;
mod transformers;
mod vllm;
mod workspaces;

use crate::Result;

/// What is joined with what.
#[derive(Debug, PartialEq)]
pub(crate) enum Interop {
    /// The programs of `interop/` with these names; none means all.
    Workspaces(Vec<String>),
    /// A vLLM beside `kvx serve`, or a vLLM pair with kvx inside its NIXL.
    Vllm(vllm::Options),
    /// Engines on mistral.rs, all of these parts or all there are.
    Mistralrs(Vec<String>),
    /// The example server beside Hugging Face's transformers.
    Transformers {
        /// Write down what the other software answers.
        record: bool,
    },
}

/// What these arguments ask for.
pub(crate) fn parse(arguments: impl Iterator<Item = String>) -> std::result::Result<Interop, String> {
    let mut arguments = arguments.peekable();
    match arguments.peek().map(String::as_str) {
        Some("transformers") => match arguments.nth(1).as_deref() {
            None => Ok(Interop::Transformers { record: false }),
            Some("--record") => Ok(Interop::Transformers { record: true }),
            Some(other) => Err(format!("`interop transformers` takes `--record`, but got `{other}`")),
        },
        Some("vllm") => parse_vllm(arguments.skip(1)),
        Some("mistralrs") => parse_mistralrs(arguments.skip(1).collect()),
        _ => {
            let (names, known) = (arguments.collect::<Vec<_>>(), workspaces::names());
            match names.iter().find(|name| !known.contains(name)) {
                None => Ok(Interop::Workspaces(names)),
                Some(other) => Err(format!(
                    "`interop` takes vllm, mistralrs, transformers or {}, but got `{other}`",
                    known.join(", ")
                )),
            }
        }
    }
}

fn parse_mistralrs(parts: Vec<String>) -> std::result::Result<Interop, String> {
    match parts.iter().find(|part| !mistralrs::PARTS.contains(&part.as_str())) {
        None => Ok(Interop::Mistralrs(parts)),
        Some(other) => {
            Err(format!("`interop mistralrs` takes {}, but got `{other}`", mistralrs::PARTS.join(", ")))
        }
    }
}

fn parse_vllm(mut arguments: impl Iterator<Item = String>) -> std::result::Result<Interop, String> {
    let mut options = vllm::Options::default();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--kvx" => options.kvx = true,
            "--connector" => {
                options.mooncake = match arguments.next().as_deref() {
                    Some("nixl") => false,
                    Some("mooncake") => true,
                    _ => return Err("`--connector` takes nixl or mooncake".to_owned()),
                }
            }
            "--set-up" => options.set_up = true,
            "--only" => options.only.push(arguments.next().ok_or("`--only` takes the name of a part")?),
            "--model-config" => {
                let file = arguments.next().ok_or("`--model-config` takes a JSON file")?;
                // The runner goes elsewhere.
                let path = std::path::absolute(&file).map_err(|error| format!("{file}: {error}"))?;
                options.model_config = Some(path);
            }
            other => return Err(format!("unknown argument `{other}` of `interop vllm`")),
        }
    }
    if options.kvx && options.model_config.is_some() {
        return Err("`--model-config` is for mixed fleets: leave `--kvx` out".to_owned());
    }
    if options.kvx && options.mooncake {
        return Err("`--kvx` puts kvx into vLLM's NIXL: leave `--connector mooncake` out".to_owned());
    }
    Ok(Interop::Vllm(options))
}

/// Does it; false if something was not as it must be.
pub(crate) fn run(chosen: &Interop) -> Result<bool> {
    match chosen {
        Interop::Workspaces(names) => workspaces::run(names),
        Interop::Vllm(options) => vllm::run(options),
        Interop::Mistralrs(parts) => mistralrs::run(parts),
        Interop::Transformers { record } => transformers::run(*record),
    }
}

/// How it is called, for the usage text.
pub(crate) fn usage() -> String {
    format!(
        "  interop [NAME]...
      build and run the programs of interop/, which join kvx to engines of others in workspaces of their own: {}
  interop vllm [--connector mooncake] [--set-up] [--model-config FILE] [--only PART]...
      run a real vLLM and `kvx serve` in one fleet, both ways, and print a table of what was right; downloads 3 GB the
      first time, then an hour on a machine that is quiet meanwhile
        --connector mooncake by vLLM's MooncakeConnector, not NixlConnector; the parts have `bare` too
        --set-up             install and build what it needs, and run nothing
        --model-config FILE  models and block sizes as in xtask/src/interop/vllm/{{mixed,mooncake}}.json
        --only PART          pairs, the name of one model, faults, aborts, fleet; may be repeated
  interop vllm --kvx [--set-up] [--only PART]...
      run a real vLLM pair with the backend KVX in its NIXL; half an hour
        --only PART    SHM, TCP, UCX, `faults SHM`, `faults TCP`, aborts, hosts; may be repeated
  interop mistralrs [PART]...
      run engines on mistral.rs that prefill for each other and for `kvx serve`, and print a table of what was right;
      the first time it builds for up to an hour, with 3 GB of memory. Parts: {}
  interop transformers [--record]
      ask Hugging Face's transformers for logits and tokens that the example server's must equal; installs it and
      torch into target/peers first, 3 GB to download
        --record       write down what it answers, for tests without it",
        workspaces::names().join(", "),
        mistralrs::PARTS.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> std::result::Result<Interop, String> {
        parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn each_has_its_words() {
        assert_eq!(words("candle"), Ok(Interop::Workspaces(vec!["candle".to_owned()])));
        assert_eq!(words(""), Ok(Interop::Workspaces(Vec::new())));
        let options = vllm::Options { kvx: true, only: vec!["hosts".to_owned()], ..Default::default() };
        assert_eq!(words("vllm --kvx --only hosts"), Ok(Interop::Vllm(options)));
        assert_eq!(words("vllm"), Ok(Interop::Vllm(vllm::Options::default())));
        let options = vllm::Options { model_config: Some("/tmp/models.json".into()), ..Default::default() };
        assert_eq!(words("vllm --model-config /tmp/models.json"), Ok(Interop::Vllm(options)));
        let options = vllm::Options { mooncake: true, ..Default::default() };
        assert_eq!(words("vllm --connector mooncake"), Ok(Interop::Vllm(options)));
        assert_eq!(words("transformers"), Ok(Interop::Transformers { record: false }));
        assert_eq!(words("transformers --record"), Ok(Interop::Transformers { record: true }));
        assert_eq!(words("mistralrs"), Ok(Interop::Mistralrs(Vec::new())));
        assert_eq!(words("mistralrs llama kvx"), Ok(Interop::Mistralrs(vec!["llama".into(), "kvx".into()])));
        for (line, name) in [
            ("mistralrs now", "now"),
            ("vllm --kvx now", "now"),
            ("vllm --kvx --model-config a.json", "mixed fleets"),
            ("vllm --model-config", "JSON file"),
            ("vllm --connector wax", "mooncake"),
            ("vllm --kvx --connector mooncake", "leave"),
            ("mistral", "mistral"),
            ("candle mistral", "mistral"),
            ("transformers now", "now"),
        ] {
            let complaint = words(line).expect_err(line);
            assert!(complaint.contains(name), "{line}: {complaint}");
        }
    }
}
